"""`python -m bench NAME [--json] [--rounds N] [--threads N] [--size tiny] [--peers none]`: runs one benchmark and prints its figures."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys

import bench
from bench.harness import Figures, Options

SHARED = {"harness", "peers", "__main__"}


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(bench.__path__) if module.name not in SHARED)


def table(figures: Figures) -> str:
    lines = []
    for key, figure in figures.items():
        value, detail = figure["value"], dict(figure["detail"])
        shown = (
            f"{value:g} {figure['unit']}" if value is not None else f"not measured: {detail.pop('reason', 'unknown')}"
        )
        lines.append(f"{key:<36} {shown}")
        lines += [f"    {name:<32} {part}" for name, part in detail.items()]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(prog="python -m bench", description="Runs one benchmark and prints its figures.")
    parser.add_argument("name", help=", ".join(names()))
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=Options.rounds)
    parser.add_argument("--threads", type=int, default=Options.threads, help="torch threads of both sides")
    parser.add_argument("--size", choices=("full", "tiny"), default=Options.size)
    parser.add_argument("--peers", choices=("all", "none"), default=Options.peers, help="none: without other software")
    args = parser.parse_args(argv)
    if args.name not in names():
        parser.error(f"no benchmark {args.name!r}; there are: {', '.join(names())}")
    try:
        options = Options(rounds=args.rounds, size=args.size, threads=args.threads, peers=args.peers)
    except ValueError as error:
        parser.error(str(error))
    figures = importlib.import_module(f"bench.{args.name}").run(options)
    print(json.dumps(figures) if args.json else table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
