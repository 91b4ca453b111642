"""A side of a comparison in a process of its own: it measures when it is told to and sleeps in between.
Promises that a side which fails says why, and that its process is gone at the end. Knows no side.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

SPAWN = multiprocessing.get_context("spawn")
PAYLOAD = b"x" * 64  # what peers send: plain bytes cost them least
IN_FLIGHT = 64
WARM = 100  # calls before each measurement: caches and clocks of the cores are warm again
START_S = 120.0  # a cluster of ours or of a peer is up by then, or it never will be
ANSWER_S = 300.0  # one measurement takes seconds; a side that hangs is an error
END_S = 20.0  # a side that does not end after this is killed


class Side(Protocol):
    """One way to call an actor in another process. Counts are calls."""

    def ask_p50(self, count: int) -> float:
        """Seconds from the call to its answer, one call at a time."""
        ...

    def asks_per_s(self, count: int) -> float:
        """With `IN_FLIGHT` calls on their way."""
        ...

    def tells_per_s(self, count: int) -> float:
        """Calls whose answers nobody waits for, until the actor has handled all of them."""
        ...

    def notes(self, count: int) -> dict[str, Any]:
        """What a reader of the figures should know of how this side ran."""
        ...


class SideFailed(Exception):
    """A side could not be opened or measured; the text has its traceback."""


class Driven:
    """``with Driven("ray", ray.opened, path) as side: side.call("ask_p50", 100)``."""

    def __init__(self, name: str, opened: Callable[..., AbstractContextManager[Side]], *args: Any) -> None:
        self.name = name
        self._pipe, end = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_drive, args=(end, opened, args), name=name)
        self._process.start()
        end.close()  # so that a dead process is an end of file

    def __enter__(self) -> Driven:
        try:
            self._answer(START_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._end()

    def call(self, what: str, count: int = 0) -> Any:
        try:
            self._pipe.send((what, count))
        except OSError:
            raise SideFailed(f"{self.name}: its process died") from None
        return self._answer(ANSWER_S)

    def _answer(self, wait_s: float) -> Any:
        if not self._pipe.poll(wait_s):
            raise SideFailed(f"{self.name}: no answer within {wait_s:.0f} s")
        try:
            good, value = self._pipe.recv()
        except (EOFError, OSError):
            raise SideFailed(f"{self.name}: its process died") from None
        if not good:
            raise SideFailed(f"{self.name}: {value}")
        return value

    def _end(self) -> None:
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def _drive(pipe: Connection, opened: Callable[..., AbstractContextManager[Side]], args: tuple[Any, ...]) -> None:
    try:
        with opened(*args) as side:
            pipe.send((True, None))
            while (order := pipe.recv()) is not None:
                what, count = order
                gc.collect()
                pipe.send((True, getattr(side, what)(count)))
    except EOFError:
        return  # nobody wants to know any more
    except Exception:
        pipe.send((False, traceback.format_exc()))


def p50(exchange: Callable[[], object], count: int) -> float:
    """Seconds of one blocking exchange."""
    for _ in range(min(count, WARM)):
        exchange()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
