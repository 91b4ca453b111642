"""One engine, one thread: decode steps while there is work, and everything else between two of them.

The actor loop stays free while the engine computes. Groups join a running batch as they come, those submitted together at the same step; a
weight update waits for one decode step, and no token that weights made before they failed their proof survives. Knows no leases and no
messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from dockyard_actors.engines.base import (
    Engine,
    EngineError,
    FinishReason,
    GroupOutput,
    GroupRequest,
    GroupResult,
    SamplingConfig,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
PauseMode = Literal["keep", "wait", "abort"]
Span = Callable[[float, float, int, int], None]  # start and end (time.time()), groups and tokens that were generated
_Call = tuple[list[asyncio.Future[Any]], Callable[[], None]]  # who waits for it, and what to do
SLICE_S = 1.0  # a busy engine says so at least this often: the timeline shows it while it runs


class SuspectWeights(EngineError):
    """New weights reached the engine and did not prove right: it generates nothing until later ones do."""


class EngineStopped(EngineError):
    """The driver was closed, or its engine failed."""


@dataclasses.dataclass(eq=False)
class _Job:
    key: int  # what the engine knows it by
    request: GroupRequest
    output: GroupOutput
    sampling: SamplingConfig
    future: asyncio.Future[GroupResult]
    resume: GroupResult | None = None  # what it had when it was taken out of the engine
    submitted: bool = False  # the engine has it; else it waits behind an update


@dataclasses.dataclass(eq=False)
class _Update:
    future: asyncio.Future[Any]
    function: Callable[[], Any]
    holds: bool = False  # decoding stays paused after it


class Generation:
    """One group on its way through the engine."""

    def __init__(self, driver: EngineDriver, job: _Job):
        self._driver = driver
        self._job = job

    async def result(self) -> GroupResult:
        """Waits until the group ended. Cancelled, it cuts the group and ends only when nothing writes into its output any more, however
        often it is cancelled meanwhile. Raises what `Engine.submit` does; EngineStopped."""
        future, cancelled = self._job.future, None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                if cancelled is None:
                    self.cut()
                cancelled = error
        if cancelled is not None:
            future.exception()  # looked at: nobody else will
            raise cancelled
        return future.result()

    def cut(self) -> None:
        """Ends this group, and no other of the same key, before the next decode step: `result` gets what there is, the rest CUT."""
        try:
            self._driver._post([], lambda: self._driver._cut(self._job))
        except EngineStopped:
            log.debug("group %d ends with the engine's thread", self._job.request.key)


class EngineDriver:
    """Owns `engine` from `start` on; nobody else may call it.

    on_failure: called in the event loop when a decode step raised; the engine is done for. on_busy: called in the engine's
    thread for every stretch of uninterrupted decoding.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[BaseException], None], on_busy: Span | None = None):
        self.engine = engine
        self._on_failure = on_failure
        self._on_busy = on_busy
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._updating = asyncio.Lock()
        self._keys = itertools.count()
        self._closed = False
        # Below: the engine's thread only.
        self._taken: deque[_Call] = deque()  # calls that run before the next step, the first of them now
        self._jobs: dict[int, _Job] = {}
        self._held = False  # until an update succeeds nothing is generated: suspect weights, or a sleeping engine
        self._draining: _Update | None = None  # waits for what runs; new groups wait for it
        self._busy: tuple[float, int, int] | None = None
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- in the event loop

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Runs `function` in the engine's thread, between two decode steps."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._post([future], lambda: self._settle(future, function, *args))
        return await future

    def submit(self, groups: Sequence[tuple[GroupRequest, GroupOutput]], sampling: SamplingConfig) -> list[Generation]:
        """Has these groups join the running ones together: in this order, at one decode step. Their outputs are written while they run.
        A group that does not fit fails alone, in its `Generation.result`. Raises EngineStopped, and then none joins."""
        jobs = [
            _Job(next(self._keys), request, output, sampling, self._loop.create_future()) for request, output in groups
        ]
        self._post([job.future for job in jobs], lambda: self._join(jobs))
        return [Generation(self, job) for job in jobs]

    async def generate(self, request: GroupRequest, output: GroupOutput, sampling: SamplingConfig) -> GroupResult:
        """Completes one group; see `Generation.result`."""
        return await self.submit([(request, output)], sampling)[0].result()

    async def update(self, function: Callable[[], T], mode: PauseMode) -> T:
        """Runs `function`, which changes the weights, with decoding paused: at once and running groups go on under the new
        weights (keep), after they ended (wait), or with them aborted and resumed behind the tokens they have (abort).
        Cancelled before it ran, it never runs.

        When it raises SuspectWeights, decoding stays paused until a later update succeeds. Whatever `function` did to prove the
        weights may have cost decode steps: tokens that running groups got since it began are taken back, and the groups go on
        behind those they had before."""
        async with self._updating:
            update = _Update(self._loop.create_future(), function)
            self._post([update.future], lambda: self._pause(update, mode))
            return await update.future

    async def sleep(self, function: Callable[[], T]) -> T:
        """Runs `function`, which takes memory from the engine, with running groups aborted: they, and those that join, wait until a later
        update succeeds."""
        async with self._updating:
            update = _Update(self._loop.create_future(), function, holds=True)
            self._post([update.future], lambda: self._pause(update, "abort"))
            return await update.future

    def close(self) -> None:
        """The thread ends after its present step. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    async def closed(self, timeout_s: float) -> bool:
        """Waits for the thread to be gone, so that nothing writes into shared memory any more, and returns whether it is."""
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            log.error("the engine's thread still runs %g s after it was told to end", timeout_s)
        return not self._thread.is_alive()

    def _post(self, futures: list[asyncio.Future[Any]], call: Callable[[], None]) -> None:
        with self._wake:
            if self._closed:
                raise EngineStopped("the engine's driver is closed")
            self._calls.append((futures, call))
            self._wake.notify()

    # ---- in the engine's thread

    def _run(self) -> None:
        try:
            while self._next():
                self._turn()
        except BaseException as error:
            self._fail(error)
        else:
            self._end()

    def _turn(self) -> None:
        while self._taken:
            self._taken[0][1]()
            self._taken.popleft()  # not before: who waits for it hears of a failure
        self._end_drain()
        if self._jobs and self.engine.unfinished and not self._held:
            self._step()
        else:
            self._end_slice()

    def _end(self) -> None:
        self._abandon(EngineStopped("the engine's driver was closed"))
        self.engine.close()

    def _idle(self) -> bool:
        return not self._calls and not self._closed and self._draining is None and (not self._jobs or self._held)

    def _next(self) -> bool:
        """Takes what was asked since the last step; waits for something when there is nothing to decode. False: closed."""
        with self._wake:
            while self._idle():
                self._end_slice()
                self._wake.wait()
            if not self._closed:
                self._taken, self._calls = self._calls, self._taken
            return not self._closed

    def _step(self) -> None:
        before = time.time()
        results = self.engine.step()
        tokens = sum(result.new_tokens for result in results)
        start, groups, so_far = self._busy or (before, 0, 0)
        self._busy = (start, groups + len(results), so_far + tokens)
        if time.time() - start > SLICE_S:
            self._end_slice()
        for result in results:
            self._finish(result)

    def _end_slice(self) -> None:
        if self._busy is not None and self._on_busy is not None:
            start, groups, tokens = self._busy
            self._on_busy(start, time.time(), groups, tokens)
        self._busy = None

    def _join(self, jobs: list[_Job]) -> None:
        self._jobs |= {job.key: job for job in jobs}
        if self._draining is None:
            self._submit_waiting()

    def _submit_waiting(self) -> None:
        """Everything that waits goes into the engine, unless decoding is paused."""
        if self._held:
            return
        for job in [job for job in self._jobs.values() if not job.submitted]:
            try:
                request = dataclasses.replace(job.request, key=job.key)
                self.engine.submit(request, job.output, job.sampling, job.resume)
            except (ValueError, EngineError) as error:  # an engine that is done for says so again at the next step
                del self._jobs[job.key]
                self._tell(job.future, error=error)
            else:
                job.submitted, job.resume = True, None

    def _finish(self, result: GroupResult) -> None:
        job = self._jobs.pop(result.key)
        self._tell(job.future, dataclasses.replace(result, key=job.request.key))

    def _cut(self, job: _Job) -> None:
        if job.key not in self._jobs:
            return  # it has ended
        if job.submitted:
            for result in self.engine.abort([job.key]):
                self._finish(result)
        elif job.resume is not None:
            self._finish(job.resume)
        else:  # nothing was written yet
            job.output.clear()
            nothing = (FinishReason.CUT,) * job.request.n
            self._finish(GroupResult(job.key, nothing, int(job.request.prompt_ids.size), 0))

    def _pause(self, update: _Update, mode: PauseMode) -> None:
        """Updates come one at a time: one that still drains was given up by whoever asked for it, else this one had not come."""
        self._end_slice()
        if self._draining is not None:
            self._draining = None
            log.info("a weight update is dropped: its asker gave up before running groups had ended")
        if mode == "wait" and self.engine.unfinished and not self._held:
            self._draining = update
            return
        if mode == "abort":
            for result in self.engine.abort():
                self._take_out(result)
        self._update(update)

    def _end_drain(self) -> None:
        if (update := self._draining) is not None and (update.future.done() or not self.engine.unfinished):
            self._update(update)
            self._draining = None

    def _update(self, update: _Update) -> None:
        had = {job.key: job.output.lengths.copy() for job in self._jobs.values() if job.submitted}
        try:
            if update.future.done():
                log.info("a weight update is dropped: its asker gave up before it ran")
            else:
                applied = update.function()
                self._held = update.holds
                self._tell(update.future, applied)
        except SuspectWeights as error:
            self._held = True
            log.error("decoding stays paused: %s", error)
            self._tell(update.future, error=error)
            if had:  # an engine that is done for says so here, which ends the thread
                for result in self.engine.abort():
                    self._take_out(_back_to(had[result.key], result, self._jobs[result.key].output))
        except Exception as error:  # nothing reached the engine: it goes on with what it has
            self._tell(update.future, error=error)
        self._submit_waiting()

    def _take_out(self, result: GroupResult) -> None:
        job = self._jobs[result.key]
        job.submitted, job.resume = False, result

    def _settle(self, future: asyncio.Future[T], function: Callable[..., T], *args: object) -> None:
        self._end_slice()
        try:
            result = function(*args)
        except Exception as error:
            self._tell(future, error=error)
        else:
            self._tell(future, result)

    def _fail(self, error: BaseException) -> None:
        log.error("the engine failed", exc_info=error)
        with self._wake:
            self._closed = True
        self._soon(self._on_failure, error)  # first: who waits hears of it after whoever knows the cause
        self._abandon(EngineStopped(f"the engine failed: {type(error).__name__}: {error}"))

    def _abandon(self, error: EngineStopped) -> None:
        with self._wake:
            futures = [future for waiting, _ in (*self._taken, *self._calls) for future in waiting]
            self._calls.clear()
        futures += [job.future for job in self._jobs.values()]
        if self._draining is not None:
            futures.append(self._draining.future)
        self._jobs.clear()
        for future in futures:
            self._tell(future, error=error)

    def _tell(self, future: asyncio.Future[Any], result: Any = None, error: BaseException | None = None) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._soon(settle)

    def _soon(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("the loop ended before the engine's thread")


def _back_to(lengths: np.ndarray, result: GroupResult, output: GroupOutput) -> GroupResult:
    """Takes back every token beyond `lengths` (n,). A completion that got some had not ended before: it is CUT."""
    reasons = list(result.finish_reasons)
    for row in np.flatnonzero(output.lengths > lengths):
        reasons[row] = FinishReason.CUT
        output.tokens[row, lengths[row] :] = 0
        output.logprobs[row, lengths[row] :] = 0.0
        output.versions[row, lengths[row] :] = -1
    output.lengths[:] = lengths
    return dataclasses.replace(result, finish_reasons=tuple(reasons), new_tokens=int(lengths.sum()))
