"""An event loop whose time is simulated: when nothing is ready, it jumps to the next timer.

Minutes take milliseconds, and one seed gives one order of events. What would run in a thread runs at once, and takes no time; whoever
waits for a socket is told that there is none.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is left: the tasks named in the text wait forever."""


class _Timers(selectors.BaseSelector):
    """Stands where the loop waits for sockets: lets simulated time pass instead."""

    def __init__(self) -> None:
        self.loop: VirtualLoop | None = None
        self._own: dict[Any, selectors.SelectorKey] = {}  # the loop's pipe to itself, which nothing is ever read from

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self.loop is not None:
            raise RuntimeError(f"simulated time serves no sockets or pipes, and something waits for {fileobj!r}")
        key = self._own[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._own.pop(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._own

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert self.loop is not None
        if timeout is None:
            self.loop.deadlock()
        self.loop.pass_time(max(0.0, timeout))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        timers = _Timers()
        super().__init__(timers)
        timers.loop = self
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds

    def deadlock(self) -> NoReturn:
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
        raise Deadlock(f"at {self._now:.3f} s nothing can happen any more; tasks that wait: {', '.join(waiting)}")

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # the caller's, as it would be from a thread
            future.set_exception(error)
        return future

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)  # only ever called from this thread


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs ``main`` in simulated time, and cancels what it left. Raises what it raised, and Deadlock."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
