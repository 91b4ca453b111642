"""Tests of faults leave nothing behind, each of them."""

from tests.leaks import nothing_is_left_by_a_test

__all__ = ["nothing_is_left_by_a_test"]
