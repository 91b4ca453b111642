"""A running actor: its place in the process, the tasks it owns, and the gate through which its messages come.

As long as no message has come it is a few hundred bytes and no task; what serves messages is `service.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime.actor import Actor, ActorContext, Handler
from dockyard_actors.runtime.deliveries import Delivery, Event
from dockyard_actors.runtime.directory import REGISTRY
from dockyard_actors.runtime.mailbox import Remembered
from dockyard_actors.runtime.message import encoder
from dockyard_actors.runtime.scope import fresh
from dockyard_actors.runtime.service import Service
from dockyard_actors.runtime.status import ActorStatus
from dockyard_actors.transport.base import Lane, Peer, TransportError

if TYPE_CHECKING:
    from dockyard_actors.runtime.system import ActorSystem


log = logging.getLogger("dockyard.runtime.actor")

NEVER = float("inf")
_NAMES_TOLD = 20  # to who sent something that is not understood
_new = tuple.__new__  # half the cost of a named tuple's own constructor


class Cell:
    __slots__ = (
        "__weakref__",
        "_owned",
        "actor",
        "incarnation",
        "name",
        "open",
        "service",
        "stopping",
        "system",
        "table",
    )

    def __init__(
        self, system: ActorSystem, actor: Actor, name: str, incarnation: int, table: dict[str, Handler]
    ) -> None:
        self.system, self.actor, self.name, self.incarnation, self.table = system, actor, name, incarnation, table
        self.open = False  # its `on_start` is done: messages are served
        self.stopping = False
        self.service: Service | None = None
        self._owned: dict[asyncio.Task[Any], None] | None = None  # in the order in which they are cancelled
        actor.ctx = ActorContext(system, name, incarnation, self)

    # ------------------------------------------------------------------ life

    def serve(self) -> None:
        self.open = True
        if self.service is not None:
            self.service.open()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = self.system.loop.create_task(work, name=f"{self.name}/{name}", context=fresh())
        if self._owned is None:
            self._owned = {}
        self._owned[task] = None
        task.add_done_callback(self._owned_done)
        return task

    def watch(self, name: str) -> None:
        self.system.watch(name, self)

    async def stop(self) -> None:
        """Refuses what is queued, lets the serial handler at work end (up to stop_s), runs on_stop, cancels the rest."""
        self.stopping = True
        try:
            if self.service is not None:
                await self.service.stop()
            async with asyncio.timeout(self.system.config.stop_s):
                await self.actor.on_stop()
        finally:
            if tasks := self._cancel_all():
                _, stuck = await asyncio.wait(tasks, timeout=self.system.config.stop_s)
                for task in stuck:
                    log.error("%s: %s did not end although it was cancelled", self.name, task.get_name())
            if self.service is not None:
                self.system.room_in(self.service)

    def runs(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task is one of this actor's: of a handler, or its own."""
        if self._owned is not None and task in self._owned:
            return True
        return self.service is not None and self.service.runs(task)

    def abandon(self) -> None:
        """The process is crashing: stop everything at once, run nothing of the actor."""
        self.stopping = True
        self._cancel_all()

    def _cancel_all(self) -> list[asyncio.Task[Any]]:
        tasks = list(self._owned or ())
        for task in tasks:
            task.cancel()
        return tasks + (self.service.abandon() if self.service is not None else [])

    def _owned_done(self, task: asyncio.Task[Any]) -> None:
        assert self._owned is not None
        self._owned.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self.system.crash(task.exception(), f"task {task.get_name()} of actor {self.name}")

    # ------------------------------------------------------------------ arrival

    def event(self, method: str, value: Any) -> None:
        """The actor's ``method`` is called with ``value``, on the control lane."""
        self.serving().put_control(Event(method, value))

    def offer(self, peer: Peer, lane: Lane, message: wire.Ask | wire.Tell, size: int) -> None:
        """A message for this incarnation. size: bytes of its envelope."""
        service = self.service or self.serving()
        accounts = service.accounts.get(peer)
        if accounts is None:
            if peer.uid in self.system.gone and self.name != REGISTRY:  # it lives all the same; the registry tells it
                self.system.counts.fenced += 1
                return
            accounts = service.account(peer)
        account = accounts[lane]
        if account[2] >= message.seq > 0:
            self.system.counts.repeated += 1  # the network brought it again, or behind a later one
            return
        account[2] = message.seq
        handler = self.table.get(message.kind)
        if handler is None or handler.control or self.stopping:
            self._offer_others(service, peer, lane, message, size)
        elif type(message) is wire.Ask:
            if not (message.keep and self._repeated(service, peer, lane, message, size)):
                deadline = self.system.loop.time() + message.ttl
                service.put(_new(Delivery, (peer, lane, message, handler, deadline, size)))
        else:
            service.put(_new(Delivery, (peer, lane, message, handler, NEVER, size)))

    def _offer_others(self, service: Service, peer: Peer, lane: Lane, message: wire.Ask | wire.Tell, size: int) -> None:
        """What goes over the control lane, and what cannot be handled."""
        handler = self.table.get(message.kind)
        if handler is None:
            service.consumed(peer, lane, size)
            if message.kind == "Inspect" and type(message) is wire.Ask:
                try:
                    peer.send(lane, encoder.encode(wire.Reply(message.id, wire.raw(self.system.status()))))
                except TransportError as error:
                    text = (
                        f"the status of {self.system.config.name}, which has {len(self.system.cells)} actors: {error}"
                    )
                    peer.send(lane, encoder.encode(wire.Fail(message.id, wire.RAISED, "TransportError", text)))
            else:
                known = sorted(self.table)
                known[_NAMES_TOLD:] = ["…"] if len(known) > _NAMES_TOLD else []
                text = f"{type(self.actor).__name__} has no handler for {message.kind}; it handles {', '.join(known) or 'nothing'}"
                service.refuse(peer, lane, message, wire.NOT_UNDERSTOOD, text)
        elif self.stopping:
            service.refuse(peer, lane, message, wire.STOPPED, f"{self.name} stopped")
        elif service.control.full:
            service.consumed(peer, lane, size)
            text = f"{self.name}'s control mailbox holds {len(service.control)} messages"
            service.refuse(peer, lane, message, wire.FULL, text)
        elif not isinstance(message, wire.Ask):
            service.put_control(Delivery(peer, lane, message, handler, NEVER, size))
        elif not (message.keep and self._repeated(service, peer, lane, message, size)):
            deadline = self.system.loop.time() + message.ttl
            service.put_control(Delivery(peer, lane, message, handler, deadline, size))

    def serving(self) -> Service:
        if self.service is None:
            self.service = Service(self)
        return self.service

    def _repeated(self, service: Service, peer: Peer, lane: Lane, ask: wire.Ask, size: int) -> bool:
        key = (peer.uid, ask.id)
        answer = service.remembered.seen(key)
        if answer is None:
            service.remembered.begin(key)
            return False
        self.system.counts.deduplicated += 1
        service.consumed(peer, lane, size)
        if answer is not Remembered.RUNNING:
            peer.send(lane, answer)
        return True  # while it runs, the first one's reply answers both

    # ------------------------------------------------------------------ views

    def status(self) -> ActorStatus:
        service = self.service
        if service is None:
            return ActorStatus()
        return ActorStatus(
            mailbox=len(service.user),
            mailbox_bytes=service.user.size,
            control=len(service.control),
            busy=service.busy,
            busy_s=service.busy_s,
            running=len(service.running),
            handlers={kind: times.value() for kind, times in service.times.items()},
        )
