"""What a role says about itself: one line of what it does and one of what it waits for, told to the controller for the live view."""

from __future__ import annotations

import asyncio
import logging

from dockyard_actors.roles.messages import ReportRole
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.errors import ActorError

log = logging.getLogger(__name__)
EVERY_S = 1.0  # a person reads this; faster would only cost
PATIENCE_S = 60.0  # a controller that starts or restarts; nothing depends on a report


class Reporter:
    """Call it with what the role does now; the newest line is told once a second. Counters add up over the process's life."""

    def __init__(self, actor: Actor, doing: str = "starting"):
        self.doing = doing
        self.counters: dict[str, float] = {}
        self.facts: dict[str, str] = {}
        self._actor = actor
        actor.ctx.spawn(self._tell(), name="report")

    def __call__(self, doing: str) -> None:
        self.doing = doing

    def count(self, name: str, amount: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount

    def message(self) -> ReportRole:
        waits = sorted(self._actor.ctx.system.waits(), key=lambda wait: -wait.age_s)
        longest = next((wait for wait in waits if wait.message != "ReportRole"), None)
        return ReportRole(
            role=self._actor.ctx.name,
            doing=self.doing,
            waits_for=f"{longest.peer} ({longest.message})" if longest else "",
            wait_s=longest.age_s if longest else 0.0,
            incarnation=self._actor.ctx.incarnation,
            counters=dict(self.counters),
            facts=dict(self.facts),
        )

    async def _tell(self) -> None:
        controller = self._actor.ctx.ref("controller")
        while True:
            try:
                # An ask, so that the first one waits for the controller to come up and none goes to a dead one.
                await controller.ask(self.message(), deadline_s=PATIENCE_S, retry=True)
            except ActorError as error:
                log.debug("nobody to report to: %s", error)
            await asyncio.sleep(EVERY_S)
