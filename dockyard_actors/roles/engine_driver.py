"""One engine, one thread: decode steps while there is work, and everything else between two of them.

The actor loop stays free while the engine computes. Groups join a running batch as they come; a weight update waits for one decode step.
Knows no leases and no messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar

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
SLICE_S = 1.0  # a busy engine says so at least this often: the timeline shows it while it runs


class SuspectWeights(EngineError):
    """New weights reached the engine and did not prove right: it generates nothing until later ones do."""


class EngineStopped(EngineError):
    """The driver was closed, or its engine failed."""


@dataclasses.dataclass
class _Job:
    request: GroupRequest
    output: GroupOutput
    sampling: SamplingConfig
    future: asyncio.Future[GroupResult]
    resume: GroupResult | None = None
    submitted: bool = False


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
        self._calls: deque[tuple[asyncio.Future[Any], Callable[[], None]]] = deque()
        self._updating = asyncio.Lock()
        self._closed = False
        # Below: the engine's thread only.
        self._jobs: dict[int, _Job] = {}  # by the key that the engine knows
        self._keys = itertools.count()
        self._suspect = False
        self._draining: Callable[[], None] | None = None  # an update that waits for what runs; new groups wait for it
        self._busy: tuple[float, int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- in the event loop

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Runs `function` in the engine's thread, between two decode steps."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._post(future, lambda: self._settle(future, function, *args))
        return await future

    async def generate(self, request: GroupRequest, output: GroupOutput, sampling: SamplingConfig) -> GroupResult:
        """Completes one group, whose output is written while it runs. Cancelled, it returns only when nothing writes any more.
        Raises what `Engine.submit` does; EngineStopped."""
        job = _Job(request, output, sampling, self._loop.create_future())
        self._post(job.future, lambda: self._join(job))
        try:
            return await asyncio.shield(job.future)
        except asyncio.CancelledError:
            await asyncio.shield(self.cut(job.request.key))
            raise

    async def cut(self, key: int) -> None:
        """Ends the group of this request key now; its `generate` returns what there is, the rest CUT."""
        try:
            await self.call(self._cut, key)
        except EngineStopped:
            return  # nothing runs any more

    async def update(self, function: Callable[[], T], mode: PauseMode) -> T:
        """Runs `function`, which changes the weights, with decoding paused: at once and running groups go on under the new
        weights (keep), after they ended (wait), or with them aborted and resumed behind the tokens they have (abort).
        When it raises SuspectWeights, decoding stays paused until a later update succeeds."""
        async with self._updating:
            future: asyncio.Future[T] = self._loop.create_future()
            self._post(future, lambda: self._pause(future, function, mode))
            return await future

    def close(self) -> None:
        """The thread ends after its present step. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    async def closed(self, timeout_s: float) -> None:
        """Waits for the thread to be gone, so that nothing writes into shared memory any more."""
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _post(self, future: asyncio.Future[Any], call: Callable[[], None]) -> None:
        with self._wake:
            if self._closed:
                raise EngineStopped("the engine's driver is closed")
            self._calls.append((future, call))
            self._wake.notify()

    # ---- in the engine's thread

    def _run(self) -> None:
        try:
            while (calls := self._next()) is not None:
                for call in calls:
                    call()
                if self._draining is not None and not self.engine.unfinished:
                    update, self._draining = self._draining, None
                    update()
                if self._jobs and self.engine.unfinished and not self._suspect:
                    self._step()
                else:
                    self._end_slice()
        except BaseException as error:
            self._fail(error)
        else:
            self._abandon(EngineStopped("the engine's driver was closed"))
            self.engine.close()

    def _next(self) -> list[Callable[[], None]] | None:
        """What was asked since the last step; waits for something when there is nothing to decode. None: closed."""
        with self._wake:
            while not self._calls and not self._closed and self._draining is None and (not self._jobs or self._suspect):
                self._end_slice()
                self._wake.wait()
            if self._closed:
                return None
            calls = [call for _, call in self._calls]
            self._calls.clear()
            return calls

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

    def _join(self, job: _Job) -> None:
        key = next(self._keys)
        self._jobs[key] = job
        if self._draining is None:
            self._submit(key, job)

    def _submit(self, key: int, job: _Job) -> None:
        try:
            self.engine.submit(dataclasses.replace(job.request, key=key), job.output, job.sampling, job.resume)
        except ValueError as error:
            del self._jobs[key]
            self._tell(job.future, error=error)
        else:
            job.submitted = True

    def _finish(self, result: GroupResult) -> None:
        job = self._jobs.pop(result.key)
        self._tell(job.future, dataclasses.replace(result, key=job.request.key))

    def _cut(self, request_key: int) -> None:
        for key, job in list(self._jobs.items()):
            if job.request.key != request_key:
                continue
            if job.submitted:
                for result in self.engine.abort([key]):
                    self._finish(result)
            else:  # it waits behind an update: nothing was written yet
                job.output.clear()
                nothing = (FinishReason.CUT,) * job.request.n
                self._finish(GroupResult(key, nothing, int(job.request.prompt_ids.size), 0))

    def _pause(self, future: asyncio.Future[T], function: Callable[[], T], mode: PauseMode) -> None:
        self._end_slice()
        if mode == "wait" and self.engine.unfinished and not self._suspect:
            self._draining = lambda: self._update(future, function)
            return
        aborted = self.engine.abort() if mode == "abort" else []
        self._update(future, function)
        for result in aborted:
            job = self._jobs[result.key]
            job.resume = result
            self._submit(result.key, job)

    def _update(self, future: asyncio.Future[T], function: Callable[[], T]) -> None:
        try:
            applied = function()
        except SuspectWeights as error:
            self._suspect = True
            log.error("decoding stays paused: %s", error)
            self._tell(future, error=error)
        except Exception as error:  # nothing reached the engine: it goes on with what it has
            self._tell(future, error=error)
        else:
            self._suspect = False
            self._tell(future, applied)
        for key, job in list(self._jobs.items()):
            if not job.submitted:
                self._submit(key, job)

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
        self._abandon(EngineStopped(f"the engine failed: {type(error).__name__}: {error}"))
        self._soon(self._on_failure, error)

    def _abandon(self, error: EngineStopped) -> None:
        with self._wake:
            futures = [job.future for job in self._jobs.values()] + [future for future, _ in self._calls]
            self._calls.clear()
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
