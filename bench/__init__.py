"""Benchmarks: `python -m bench NAME`. One module per name; none of them is a timed test."""
