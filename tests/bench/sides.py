"""Drives sides that answer, fail and cannot be opened; prints what came. A process of its own, as `multiprocessing` leaves its tracker."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from bench.peers.driven import Driven, SideFailed


class Quick:
    def ask_p50(self, count: int) -> float:
        return 1 / count


@contextlib.contextmanager
def quick() -> Iterator[Quick]:
    yield Quick()


@contextlib.contextmanager
def missing() -> Iterator[Quick]:
    raise LookupError("no cluster anywhere")
    yield


def main() -> None:
    with Driven("quick", quick) as side:  # type: ignore[arg-type]
        for count in (4, 0, 4):
            try:
                print(side.call("ask_p50", count))
            except SideFailed as error:
                print(str(error).splitlines()[-1])
    try:
        with Driven("missing", missing):  # type: ignore[arg-type]
            print("opened")
    except SideFailed as error:
        print(str(error).splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
