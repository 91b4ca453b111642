"""An event loop whose time is simulated: when nothing is ready, it jumps to the next timer.

Minutes take milliseconds, and one seed gives one order of events. What runs for a simulated process (see `here`) can be stopped as by
SIGSTOP, or for good as by SIGKILL. What would run in a thread runs in the loop; whoever waits for a socket, or calls from another thread,
is told that there is none.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
LIMIT_S = 24 * 3600.0  # simulated: no test is about so long a time
_TEARDOWN_S = 60.0  # simulated, for what is cancelled at the end

here: ContextVar[object | None] = ContextVar("dockyard_simulated_process", default=None)  # which one is running


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is left, or nothing but timers happens for ever: the text names the tasks and where they wait."""


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
            self.loop.deadlock("nothing can happen any more")
        self.loop.pass_time(max(0.0, timeout))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, limit_s: float = LIMIT_S, thread_s: Callable[[], float] | None = None) -> None:
        self._now, self._limit_s, self._thread_s = 0.0, limit_s, thread_s
        timers = _Timers()
        super().__init__(timers)
        timers.loop = self
        self._clock_resolution = 1e-9
        self._thread = threading.get_ident()
        self._held: dict[object, list[asyncio.Handle]] = {}  # of processes that stand still

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        if self._now > self._limit_s:
            self._limit_s = float("inf")  # said once: what is cancelled because of it may take its time
            self.deadlock("the simulation has not ended")

    def deadlock(self, what: str) -> NoReturn:
        waiting = sorted(f"{task.get_name()} ({_where(task)})" for task in asyncio.all_tasks(self))
        raise Deadlock(f"at {self._now:.3f} s {what}; tasks that wait: {', '.join(waiting)}")

    # ------------------------------------------------------------------ processes that stand still

    def hold(self, process: object) -> None:
        """Nothing that runs for ``process`` runs any more, until `release`. Its timers run out meanwhile."""
        if process in self._held:
            return
        nothing = asyncio.Handle(lambda: None, (), self)
        nothing.cancel()
        held: list[asyncio.Handle] = []
        for at, handle in enumerate(self._ready):
            if _runs_for(handle, process):
                held.append(handle)
                self._ready[at] = nothing  # not taken out: the loop has counted them
        timers = [timer for timer in self._scheduled if _runs_for(timer, process)]
        for timer in timers:
            timer._scheduled = False  # type: ignore[attr-defined]  # else its cancelling would be counted
        if timers:
            self._scheduled = [timer for timer in self._scheduled if not _runs_for(timer, process)]
            heapq.heapify(self._scheduled)
        self._held[process] = held + sorted(timers, key=asyncio.TimerHandle.when)

    def release(self, process: object) -> None:
        """It goes on where it was. Timers that ran out meanwhile are due at once, in their order."""
        for handle in self._held.pop(process, ()):
            if handle.cancelled():
                continue
            if isinstance(handle, asyncio.TimerHandle):
                handle._scheduled = True  # type: ignore[attr-defined]
                heapq.heappush(self._scheduled, handle)
            else:
                self._ready.append(handle)

    def release_all(self) -> None:
        for process in list(self._held):
            self.release(process)

    # ------------------------------------------------------------------ threads

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def work() -> None:
            if not future.done():
                try:
                    future.set_result(func(*args))
                except Exception as error:  # the caller's, as it would be from a thread
                    future.set_exception(error)

        if self._thread_s is None:
            work()
        else:
            self.call_later(self._thread_s(), work)
        return future

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"simulated time has one thread, and {threading.current_thread().name!r} calls {callback!r}: run it in the loop"
            )
        return self.call_soon(callback, *args, context=context)


def _runs_for(handle: asyncio.Handle, process: object) -> bool:
    return handle._context.get(here) is process  # type: ignore[attr-defined]


def _where(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    return f"{frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else "not begun"


def run(main: Coroutine[Any, Any, T], limit_s: float = LIMIT_S, thread_s: Callable[[], float] | None = None) -> T:
    """Runs ``main`` in simulated time, and cancels what it left. Raises what it raised, and Deadlock; so does a simulation of more than
    ``limit_s`` simulated seconds. ``thread_s``: says how long a call takes that would run in a thread (None: it is done at once); it is
    carried out at the end of that time."""
    loop = VirtualLoop(limit_s, thread_s)
    try:
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.release_all()
        if left:
            _, stuck = loop.run_until_complete(asyncio.wait(left, timeout=_TEARDOWN_S))
            for task in stuck:  # its process is dead, and what it waits for with it
                task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
