"""What a role says about itself: one line of what it does and one of what it waits for, told to the controller for the live view, and the
spans of its time, told for the trace. Nothing depends on a report: what cannot be told is counted and the role works on.
"""

from __future__ import annotations

import asyncio
import logging

from dockyard_actors.observe.trace import Tracer
from dockyard_actors.roles.messages import ReportRole, ReportSpans
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.errors import ActorError

log = logging.getLogger(__name__)
EVERY_S = 1.0  # a person reads this; faster would only cost
PATIENCE_S = 60.0  # a controller that starts or restarts; nothing depends on a report
FLUSH_S = 5.0  # a process that ends waits no longer for its last spans to arrive
REPORTS = frozenset({"ReportRole", "ReportSpans"})


class Reporter:
    """Call it with what the role does now; the newest line is told once a second. Counters add up over the process's life.

    `trace` takes spans from any thread; they are told in the same rhythm.
    """

    def __init__(self, actor: Actor, doing: str = "starting"):
        self.doing = doing
        self.counters: dict[str, float] = {}
        self.facts: dict[str, str] = {}
        self.trace = Tracer()
        self._actor = actor
        self._untold = 0  # spans whose report failed
        self._telling = asyncio.Lock()
        actor.ctx.spawn(self._tell(), name="report")

    def __call__(self, doing: str) -> None:
        self.doing = doing

    def count(self, name: str, amount: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount

    def message(self) -> ReportRole:
        waits = sorted(self._actor.ctx.system.waits(), key=lambda wait: -wait.age_s)
        longest = next((wait for wait in waits if wait.message not in REPORTS), None)
        lost = self.trace.lost + self._untold
        return ReportRole(
            role=self._actor.ctx.name,
            doing=self.doing,
            waits_for=f"{longest.peer} ({longest.message})" if longest else "",
            wait_s=longest.age_s if longest else 0.0,
            incarnation=self._actor.ctx.incarnation,
            counters={**self.counters, "spans_lost": float(lost)} if lost else dict(self.counters),
            facts=dict(self.facts),
        )

    async def flush(self, deadline_s: float = FLUSH_S) -> None:
        """Tells every span that there is, in at most `deadline_s` seconds. For a role that is about to end."""
        try:
            async with asyncio.timeout(deadline_s):
                while len(self.trace):
                    await self._tell_spans(deadline_s)
                async with self._telling:
                    pass  # what the loop was telling has arrived
        except TimeoutError:
            log.debug("the last spans could not be told in %.0f s", deadline_s)

    async def _tell(self) -> None:
        controller = self._actor.ctx.ref("controller")
        while True:
            try:
                # An ask, so that the first one waits for the controller to come up and none goes to a dead one.
                await controller.ask(self.message(), deadline_s=PATIENCE_S, retry=True)
            except ActorError as error:
                log.debug("nobody to report to: %s", error)
            await self._tell_spans(PATIENCE_S)
            await asyncio.sleep(EVERY_S)

    async def _tell_spans(self, deadline_s: float) -> None:
        async with self._telling:
            spans = self.trace.drain()
            if not spans:
                return
            ctx = self._actor.ctx
            message = ReportSpans(role=ctx.name, incarnation=ctx.incarnation, spans=spans)
            told = False
            try:
                await ctx.ref("controller").ask(message, deadline_s=deadline_s, retry=True)
                told = True
            except ActorError as error:
                log.debug("%d spans are lost: %s", len(spans), error)
            finally:  # a flush that is out of time cancels the ask
                self._untold += 0 if told else len(spans)
