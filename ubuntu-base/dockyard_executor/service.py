"""Accepted tasks from submission to verdict: a bounded queue, one asyncio task per fork server, results kept for a while.

Promises that a request id is graded once however often it is submitted (unless the verdict was `infra`) and that every
accepted task ends in a result. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Literal

from dockyard_executor import judge, verdict
from dockyard_executor.config import ExecutorConfig
from dockyard_executor.verdict import Reading, Run, Test
from dockyard_executor.worker import Worker, WorkerDied

log = logging.getLogger("dockyard_executor")


class QueueFull(Exception):
    """More tasks wait than `queue_limit`."""


class Draining(Exception):
    """The executor is ending and takes no more tasks."""


class DifferentRequest(ValueError):
    """The request id was used before for another program or other tests."""


class CannotIsolate(RuntimeError):
    """This host cannot confine programs and --allow-weak was not given; the message has the remedy."""


@dataclass(frozen=True)
class Request:
    """A validated submission. `timeout_s` is the wall time of one run of program and tests."""

    request_id: str
    program: str
    tests: tuple[Test, ...]
    timeout_s: float

    @property
    def digest(self) -> str:
        parts = [self.program, self.timeout_s, [(t.source, t.hidden) for t in self.tests]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass
class Task:
    """One request on its way; `done` is set when `result` is there."""

    task_id: str
    request: Request
    digest: str
    status: Literal["pending", "running", "completed", "failed", "cancelled"] = "pending"
    result: dict[str, Any] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    finished_at: float = 0.0
    worker: Worker | None = None
    cancelled: bool = False


class Service:
    """`start` brings the fork servers up and proves the isolation; `stop` drains.

    Needs a process of its own: children that are not its fork servers are taken for orphans of a lost one and ended.
    """

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config
        fork_servers: set[int] = set()
        self.workers = [Worker(config, slot, fork_servers) for slot in range(config.workers)]
        self.counts: Counter[str] = Counter()
        self._tasks: dict[str, Task] = {}
        self._by_request: dict[str, Task] = {}
        self._finished: deque[Task] = deque()
        self._waiting: deque[Task] = deque()
        self._wake = asyncio.Condition()
        self._loops: list[asyncio.Task[None]] = []
        self._draining = False

    @property
    def isolation(self) -> str:
        return self.workers[0].level

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(task.status == "running" for task in self._by_request.values() if task.result is None)

    async def start(self) -> None:
        """Raises WorkerDied when a fork server does not come up, CannotIsolate when this host cannot isolate."""
        try:
            await asyncio.gather(*(worker.start() for worker in self.workers))
            first = self.workers[0]
            if first.isolated:
                await self._prove(first)
            elif not self.config.allow_weak:
                raise CannotIsolate(
                    f"this host cannot isolate programs. {first.remedy}. Or start with --allow-weak: every result then says so."
                )
            else:
                log.warning("isolation is WEAK (%s): programs can reach this host", first.remedy)
        except BaseException:
            await asyncio.gather(*(worker.close(self.config.worker_grace_s) for worker in self.workers))
            raise
        self._loops = [
            asyncio.create_task(self._serve(worker), name=f"worker-{worker.slot}") for worker in self.workers
        ]

    async def _prove(self, worker: Worker) -> None:
        """Runs forbidden acts through the ordinary path; each must be refused."""
        acts = {
            "read /etc/passwd": "open('/etc/passwd').read(1)",
            "write a file": "open('/tmp/dockyard-executor-probe', 'w')",
            "open a socket": "__import__('socket').socket()",
            "start a process": "__import__('os').fork()",
            "signal the fork server": "__import__('os').kill(__import__('os').getppid(), 0)",
        }
        guard = "try:\n    {act}\nexcept PermissionError:\n    pass\nelse:\n    raise AssertionError('not refused')"
        tests = tuple(Test(name, guard.format(act=act), hidden=False) for name, act in acts.items())
        outcome = await Grading(Request("probe", "", tests, self.config.worker_start_s), self.config).grade(worker)
        failed = [
            f"{t['name']}: {t['outcome']} {t['message']}".rstrip() for t in outcome["tests"] if t["outcome"] != "passed"
        ]
        if failed or not outcome["resolved"]:
            error = f"{outcome['error']} {outcome['stderr']}".strip()
            raise CannotIsolate(f"the isolation of this host does not hold: {'; '.join([*failed, error])}")

    async def stop(self) -> None:
        """Takes no more tasks, finishes what was accepted within `drain_s`, fails the rest as `infra`, ends the workers."""
        self._draining = True
        with contextlib.suppress(TimeoutError):  # what is left is failed below
            async with asyncio.timeout(self.config.drain_s):
                for task in [task for task in self._tasks.values() if task.result is None]:
                    await task.done.wait()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for task in [task for task in self._tasks.values() if task.result is None]:
            self._finish(task, self._infra(task, "the executor ended before the task was done"))
        await asyncio.gather(*(worker.close(self.config.worker_grace_s) for worker in self.workers))

    async def submit(self, request: Request) -> Task:
        """The task of this request: a new one, or the one it has already.

        A result that says nothing lasting about the program (infra; a timeout, which a busy host can cause) is not kept to. Raises QueueFull, Draining, DifferentRequest."""
        self._forget_old()
        known = self._by_request.get(request.request_id)
        digest = request.digest
        if known is not None and not (
            known.result is not None and (known.result["state"] in ("infra", "timeout") or known.cancelled)
        ):
            if known.digest != digest:
                raise DifferentRequest(
                    f"request_id {request.request_id!r} was used before for another program, tests or timeout"
                )
            return known
        if self._draining:
            raise Draining
        if len(self._waiting) >= self.config.queue_limit:
            self.counts["refused"] += 1
            raise QueueFull
        task = Task(secrets.token_hex(12), request, digest)
        self._tasks[task.task_id] = self._by_request[request.request_id] = task
        self._waiting.append(task)
        self.counts["accepted"] += 1
        async with self._wake:
            self._wake.notify()
        return task

    def find(self, task_id: str) -> Task | None:
        self._forget_old()
        return self._tasks.get(task_id)

    async def cancel(self, task: Task) -> None:
        """Ends the task wherever it is and waits until nothing of it runs."""
        if task.result is not None:
            return
        task.cancelled = True
        if task in self._waiting:
            self._waiting.remove(task)
            self._finish(task, self._infra(task, "the task was cancelled"))
        elif task.worker is not None:
            task.worker.cancel()
        await task.done.wait()

    async def _serve(self, worker: Worker) -> None:
        while True:
            while not worker.alive:
                try:
                    await worker.kill()  # it may have ended by itself: reap it and what it left
                    await worker.start()
                except (WorkerDied, OSError) as error:  # OSError: out of processes or descriptors for the moment
                    log.error("%s; trying again in %g s", error, self.config.worker_backoff_s)
                    await asyncio.sleep(self.config.worker_backoff_s)
            async with self._wake:
                await self._wake.wait_for(lambda: bool(self._waiting))
                task = self._waiting.popleft()
            task.status, task.worker = "running", worker
            try:
                result = await Grading(task.request, self.config).grade(worker, task)
            except WorkerDied as error:
                self.counts["workers_lost"] += 1
                log.warning("%s; it is replaced", error)
                result = self._infra(task, str(error))
            except Exception as error:  # a fault of ours must not end the worker's loop nor count against the program
                log.exception("task %s could not be judged", task.task_id)
                result = self._infra(task, f"the executor failed to judge: {type(error).__name__}: {error}")
            finally:
                task.worker = None
            self._finish(task, result)

    def _infra(self, task: Task, error: str) -> dict[str, Any]:
        reading = Reading("infra", error, (verdict.Outcome("not_run"),) * len(task.request.tests))
        return verdict.result(reading, task.request.tests, (), self.isolation, task.request.program, 0, 0, 0.0)

    def _finish(self, task: Task, result: dict[str, Any]) -> None:
        task.result = result
        task.status = "cancelled" if task.cancelled else result["status"]
        task.finished_at = time.monotonic()
        task.done.set()
        self._finished.append(task)
        self.counts[f"state_{result['state']}"] += 1
        if log.isEnabledFor(logging.DEBUG):
            line = {
                k: result[k]
                for k in ("state", "passed", "total", "resolved", "error", "execution_time", "evidence_hash")
            }
            log.debug(
                "%s",
                json.dumps({"task": task.task_id, "request": task.request.request_id, "status": task.status, **line}),
            )

    def _forget_old(self) -> None:
        oldest = time.monotonic() - self.config.task_max_age_s
        while self._finished and (
            self._finished[0].finished_at < oldest or len(self._finished) > self.config.keep_results
        ):
            task = self._finished.popleft()
            self._tasks.pop(task.task_id, None)
            if self._by_request.get(task.request.request_id) is task:
                del self._by_request[task.request.request_id]


class Grading:
    """One request through its runs: values outside, what must be inside again inside, then the must-fail twin."""

    def __init__(self, request: Request, config: ExecutorConfig) -> None:
        self._request = request
        self._config = config
        self._program = request.program.encode("utf-8", "surrogatepass")
        shadowed = judge.shadowed_names(request.program, [test.source for test in request.tests])
        self._plans: list[judge.Plan] = [judge.plan(test.source, shadowed) for test in request.tests]
        self._runs: list[Run] = []

    async def grade(self, worker: Worker, task: Task | None = None) -> dict[str, Any]:
        """The verdict. Raises WorkerDied."""
        started = time.monotonic()
        tests = self._request.tests
        reading = await self._run(worker, self._plans)
        if reading.state == "ok" and reading.opaque and not (task and task.cancelled):
            for index in reading.opaque:
                self._plans[index] = judge.Inside(tests[index].source)
            reading = await self._run(worker, self._plans)
        inside = [
            i
            for i, plan in enumerate(self._plans)
            if isinstance(plan, judge.Inside) and reading.outcomes[i].outcome == "passed"
        ]
        twins = {i: source for i in inside if (source := judge.twin(tests[i].source)) is not None}
        if twins and reading.state == "ok" and not (task and task.cancelled):
            plans = [judge.Inside(twins[i]) if i in twins else plan for i, plan in enumerate(self._plans)]
            reading = verdict.apply_twin(reading, await self._run(worker, plans), tests, list(twins))
        seconds = time.monotonic() - started
        return verdict.result(
            reading,
            tests,
            self._runs,
            worker.level,
            self._request.program,
            len(twins),
            len(inside) - len(twins),
            seconds,
        )

    async def _run(self, worker: Worker, plans: list[judge.Plan]) -> Reading:
        delivered = [
            {"leaves": p.leaves} if isinstance(p, judge.Outside) else {"statement": p.statement} for p in plans
        ]
        run = await worker.run(self._program, delivered, self._request.timeout_s)
        self._runs.append(run)
        return verdict.read(run, self._request.tests, plans, self._config.limits)
