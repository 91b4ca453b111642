"""The sandbox broker: gets verdicts from its child executor over HTTP, and restarts the executor when it dies.

Isolation, policy and grading live in the executor alone. A program gets one verdict however often it is asked for: request ids make a
retry harmless, and only infrastructure failures are retried. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time

from dockyard_actors.config import Config
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.reporting import Reporter
from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.sandbox.child import ExecutorProcess
from dockyard_actors.sandbox.client import ExecutorClient, ExecutorError
from dockyard_actors.sandbox.types import Verdict

log = logging.getLogger(__name__)

PROBE_S = 2.0  # between two looks at the executor; one costs it a fraction of a millisecond


class Broker(Actor):
    """One per host with sandboxes."""

    def __init__(self, config: Config, executor: ExecutorProcess, client: ExecutorClient):
        self.config = config
        self.executor = executor
        self.client = client
        self.open = 0  # programs under way
        self._open_since = 0.0  # wall clock; when `open` changed last

    async def on_start(self) -> None:
        self.report = Reporter(self)
        await self.executor.start()
        health = await self.client.health()
        log.info("executor pid %s: isolation %s, %d workers", self.executor.pid, health.isolation, health.workers)
        self.isolation = self.report.facts["isolation"] = health.isolation
        self._keeper = self.ctx.spawn(self._keep_alive(), name="keep executor alive")
        self._prober = self.ctx.spawn(self._probe(), name="probe executor")
        self.report(f"executor pid {self.executor.pid}, isolation {self.isolation}")

    async def on_stop(self) -> None:
        self._prober.cancel()
        self._keeper.cancel()
        await self.client.close()
        await self.executor.stop()

    async def _keep_alive(self) -> None:
        """A dead executor is started again; too many deaths within the window end the broker with the cause."""
        policy = self.config.supervision
        loop = asyncio.get_running_loop()
        deaths: list[float] = []
        while True:
            cause = await self.executor.wait_dead()
            now = loop.time()
            deaths = [at for at in deaths if now - at < policy.window_s] + [now]
            self.report.count("executor_restarts", 1)
            log.warning("executor died (%s); start %d within %.0f s", cause, len(deaths), policy.window_s)
            if len(deaths) > policy.max_restarts:
                raise RuntimeError(
                    f"the executor died {len(deaths)} times within {policy.window_s:.0f} s, last: {cause}"
                )
            await asyncio.sleep(min(policy.backoff_s * 2 ** (len(deaths) - 1), policy.backoff_max_s))
            await self.executor.start()
            self.report(f"executor pid {self.executor.pid}, isolation {self.isolation}")

    async def _probe(self) -> None:
        """An executor that lives but does not answer for supervision.hang_s is killed; `_keep_alive` starts another."""
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while True:
            await asyncio.sleep(PROBE_S)
            pid = self.executor.pid
            try:
                await self.client.health()
                answered = loop.time()
            except ExecutorError as error:
                silent = loop.time() - answered
                if not self.executor.is_alive or self.executor.pid != pid:
                    answered = loop.time()  # dead or just replaced: that is the keeper's business
                elif silent > self.config.supervision.hang_s:
                    log.warning("executor pid %s did not answer for %.0f s and is killed: %s", pid, silent, error)
                    await self.executor.stop(grace_s=0)
                    answered = loop.time()

    @concurrent
    async def score(self, msg: m.ScorePrograms) -> m.Scored:
        self._scoring(len(msg.programs))
        try:
            verdicts = await asyncio.gather(*(self._run(program, msg.deadline_s) for program in msg.programs))
        finally:
            self._scoring(-len(msg.programs))
        self.report.count("programs", len(msg.programs))
        return m.Scored(tuple(verdicts))

    def _scoring(self, change: int) -> None:
        """Programs came or went. A span ends with every change, so that a trace knows the load and a crash costs little of it."""
        now = time.time()
        if self.open:
            self.report.trace.add("score", self._open_since, now, programs=self.open)
        self.open += change
        self._open_since = now
        self.report(f"scoring {self.open} programs, isolation {self.isolation}")

    async def _run(self, program: m.Program, deadline_s: float) -> Verdict:
        """A program that got no verdict in time is `infra`: its sample is masked, the rest of its group is kept."""
        try:
            return await self.client.run_program(
                program.request_id,
                program.source,
                list(program.tests),
                list(program.hidden_tests),
                timeout_s=self.config.sandbox.timeout_s,
                deadline_s=deadline_s,
            )
        except ExecutorError as error:
            log.warning("no verdict: %s", error)
            self.report.count("unjudged", 1)
            return no_verdict(program, str(error), self.isolation)


def no_verdict(program: m.Program, error: str, isolation: str) -> Verdict:
    return Verdict(
        state="infra",
        passed=0,
        total=len(program.tests) + len(program.hidden_tests),
        resolved=False,
        tests=(),
        stdout="",
        stderr="",
        error=error,
        isolation=isolation,
        seconds=0.0,
        evidence_hash="",
    )
