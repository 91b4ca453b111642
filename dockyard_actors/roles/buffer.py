"""The buffer: holds finished groups between rollouts and trainer and enforces their age when a batch is taken.

It holds references, never tensors: the payload lies in slabs that the node agent keeps. Acknowledged means owned: a push is answered
only after the controller journalled the group. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec

from dockyard_actors.config import Config
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.ledger import GroupMeta
from dockyard_actors.roles.reporting import Reporter
from dockyard_actors.runtime.actor import Actor, Death, concurrent
from dockyard_actors.runtime.errors import ActorError, RemoteError
from dockyard_actors.runtime.scope import fresh
from dockyard_actors.transport.plane import DataPlane, TensorRef

log = logging.getLogger(__name__)


class Held(msgspec.Struct):
    meta: GroupMeta
    ref: TensorRef
    taken: bool = False
    since: float = msgspec.field(default_factory=time.time)  # here, and ready to be taken


def choose(held: list[Held], count: int) -> list[Held]:
    """The `count` groups with the oldest tokens, in the order of their leases, so that a batch is the same whatever order they came in."""
    oldest = sorted(held, key=lambda h: (h.meta.oldest_version, h.meta.lease))[:count]
    return sorted(oldest, key=lambda h: h.meta.lease)


class Buffer(Actor):
    """One per run. Restarted empty, it takes back every open group from the journal: the slabs outlive it."""

    def __init__(self, config: Config, plane: DataPlane):
        self.config = config
        self.plane = plane
        self.groups: dict[int, Held] = {}
        self._changed = asyncio.Event()
        self._accepting: set[asyncio.Task[m.Pushed]] = set()
        self._dead_trainer = 0  # newest incarnation of the trainer that is known to be dead

    async def on_start(self) -> None:
        self.report = Reporter(self, doing="holding groups")
        self.ctx.watch("trainer")
        await self._reconcile()

    async def on_stop(self) -> None:
        for task in self._accepting:
            task.cancel()

    async def on_death(self, death: Death) -> None:
        self._dead_trainer = max(self._dead_trainer, death.incarnation)
        self._wake()  # a question that outlived its trainer ends
        log.log(
            logging.INFO if death.clean else logging.WARNING,
            "trainer died (%s); groups it had taken are ready again unless the journal closed them",
            death.cause,
        )
        await self._reconcile(returned=[lease for lease, held in self.groups.items() if held.taken])

    async def _reconcile(self, returned: Sequence[int] = ()) -> None:
        """Three-way: what is held here, what the journal has open, what a dead trainer had taken (`returned`)."""
        # What is pushed or taken while the controller is asked is the business of the living.
        before = tuple(self.groups)
        reply = await self.ctx.ref("controller").ask(
            m.ReconcileBuffer(before), deadline_s=self.config.supervision.start_timeout_s, retry=True
        )
        wanted = {group.meta.lease: group for group in reply.groups}
        gone = [lease for lease in before if lease not in wanted and lease in self.groups]
        new = [lease for lease in wanted if lease not in self.groups]
        returned = [lease for lease in returned if lease in wanted and lease in self.groups]
        for lease in gone:
            self.plane.release(self.groups.pop(lease).ref)
        for lease in returned:
            self.groups[lease].taken, self.groups[lease].since = False, time.time()
        for lease in new:
            self.groups[lease] = Held(wanted[lease].meta, wanted[lease].ref)
        if gone or new or returned:
            log.info(
                "reconciled: %d adopted, %d dropped, %d returned from the trainer", len(new), len(gone), len(returned)
            )
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        ready = sum(not held.taken for held in self.groups.values())
        self.report(f"{ready} ready, {len(self.groups) - ready} taken")

    def _left(self, held: Held, outcome: str) -> None:
        self.report.trace.add("buffered", held.since, time.time(), lease=held.meta.lease, outcome=outcome)

    @concurrent
    async def push(self, msg: m.PushGroup) -> m.Pushed:
        if (held := self.groups.get(msg.meta.lease)) is not None:
            same = held.ref == msg.ref
            return m.Pushed(same, "" if same else f"lease {msg.meta.lease} was filled by another push")
        # In a task of its own, not bound by the pusher's deadline: what the journal owns is held here, even when the pusher gives up.
        accepting = asyncio.create_task(self._accept(msg.meta, msg.ref), context=fresh())
        self._accepting.add(accepting)
        accepting.add_done_callback(self._accepting.discard)
        return await asyncio.shield(accepting)

    async def _accept(self, meta: GroupMeta, ref: TensorRef) -> m.Pushed:
        try:
            reply = await self.ctx.ref("controller").ask(
                m.AcceptGroup(meta=meta, ref=ref), deadline_s=self.config.supervision.start_timeout_s, retry=True
            )
        except RemoteError:
            raise  # the journal refused it; what its process says it holds is not on disk
        except ActorError:
            await self._reconcile()  # the journal may own it although the answer was lost: then it is held here
            if meta.lease in self.groups:
                return m.Pushed(True)
            raise
        if reply.owned and meta.lease not in self.groups:
            self.groups[meta.lease] = Held(meta, ref)
            self._wake()
        return m.Pushed(reply.owned, reply.why)

    @concurrent
    async def take(self, msg: m.TakeGroups) -> m.Batch:
        loop = asyncio.get_running_loop()
        until = loop.time() + msg.wait_s
        if msg.incarnation <= self._dead_trainer:
            return m.Batch((), 0)  # whoever asked is dead and would take the groups with it
        for lease in msg.holding:
            if (held := self.groups.get(lease)) is not None:
                held.taken = True
        while True:
            await self._expire(msg.version, msg.max_age)
            if msg.incarnation <= self._dead_trainer:
                return m.Batch((), 0)
            ready = [  # some may have come, and be too old, while older ones were being closed
                held
                for held in self.groups.values()
                if not held.taken and msg.version - held.meta.oldest_version <= msg.max_age
            ]
            if len(ready) >= msg.count:
                chosen = choose(ready, msg.count)
                for held in chosen:
                    held.taken = True
                    self._left(held, "taken")
                self._wake()
                return m.Batch(tuple(m.OpenGroup(held.meta, held.ref) for held in chosen), len(ready))
            left = until - loop.time()
            if left <= 0:
                return m.Batch((), len(ready))
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                continue

    async def _expire(self, version: int, max_age: int) -> None:
        """Age at consumption: a group that waited too long is dropped, counted, and its prompt drawn anew by the budget it frees."""
        old = [held for held in self.groups.values() if not held.taken and version - held.meta.oldest_version > max_age]
        for held in old:
            held.taken = True  # nobody else expires or takes it while the controller is asked
        try:
            for held in list(old):
                await self.ctx.ref("controller").ask(
                    m.CloseLease(lease=held.meta.lease, outcome="expired", cause="too_old"),
                    deadline_s=self.config.supervision.start_timeout_s,
                    retry=True,
                )
                age = version - held.meta.oldest_version
                log.info("expired lease %d: age %d is over %d", held.meta.lease, age, max_age)
                old.remove(held)
                self.groups.pop(held.meta.lease, None)
                self.plane.release(held.ref)
                self._left(held, "expired")
        finally:
            for held in old:  # the asker gave up before the journal had them: the next take tries again
                held.taken = False

    @concurrent
    async def release(self, msg: m.ReleaseGroups) -> m.Done:
        """Says that the journal has closed these. It may come late: a rollback opened them again, and they were pushed anew."""
        if any(lease in self.groups for lease in msg.leases):
            await self._reconcile()
        return m.Done()
