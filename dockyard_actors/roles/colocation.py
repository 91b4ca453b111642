"""One device for the trainer and its engine, which have it in turn: who puts what away, and when.

The engine sleeps while the trainer steps, and the optimizer's moments are away while the engine generates. An engine that cannot be asked
is told about and trained beside: an engine that restarts meanwhile is awake, and takes the next weights like any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dockyard_actors.roles import messages as m
from dockyard_actors.runtime import memory
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.runtime.message import Message

if TYPE_CHECKING:
    from dockyard_actors.roles.trainer import Trainer

log = logging.getLogger(__name__)


class Colocation:
    """Part of the trainer actor, whose voice and engines it uses. Does nothing unless weight_sync.colocated is set."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.on = trainer.config.weight_sync.colocated
        self.training = False  # the trainer has the device
        self.memory: dict[str, str] = {}  # of each call, the newest change

    @asynccontextmanager
    async def device(self) -> AsyncIterator[None]:
        """Inside, the trainer has the device. Behind it the engine waits for weights."""
        if not self.on:
            yield
            return
        await self._engines("sleep", m.Sleep())
        self.training = True
        await self._optimizer("onload", self.trainer.learner.onload)
        yield
        await self.leave()
        await self._engines("wake up", m.PrepareForGeneration())

    async def leave(self) -> None:
        """The trainer, which did not ask anybody for it, has the device no more: after loading, and after a step."""
        if self.on:
            await self._optimizer("offload", self.trainer.learner.offload)
            self.training = False

    def restarted(self, name: str) -> None:
        """An engine asks for weights."""
        if self.training:
            log.warning(
                "%s was restarted while the trainer has the device: it is awake beside it until the next step", name
            )

    async def _engines(self, what: str, message: Message[m.Memory]) -> None:
        sync = self.trainer.sync
        members = sync.members if sync is not None else []
        with self.trainer.report.trace.waiting(f"sync.{what}", "engines"):
            await asyncio.gather(*(self._engine(what, name, message) for name in members))

    async def _engine(self, what: str, name: str, message: Message[m.Memory]) -> None:
        limit = self.trainer.config.weight_sync.timeout_s
        try:
            told = await self.trainer.ctx.ref(name).ask(message, deadline_s=limit, retry=True)
        except ActorError as error:
            log.warning("%s could not %s: %s", name, what, error)
            await self.trainer.tell(m.Warn(text=f"colocated: {name} could not {what} ({error})"))
        else:
            self._note(f"{name} {what}", memory.Change(told.before, told.after))

    async def _optimizer(self, what: str, function: Callable[[], memory.Change]) -> None:
        with self.trainer.report.trace.span(f"optimizer.{what}") as args:
            change = await self.trainer.compute(function)
            args |= {"bytes_before": change.before, "bytes_after": change.after}
        self._note(f"optimizer {what}", change)

    def _note(self, what: str, change: memory.Change) -> None:
        self.memory[what] = str(change)
        self.trainer.report.facts["memory"] = ", ".join(f"{what} {change}" for what, change in self.memory.items())
