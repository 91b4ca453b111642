"""A running actor: its two mailboxes, the tasks that serve them, its remembered replies and the tasks it owns.

It answers every ask that reaches it with a reply or a typed failure. It knows peers only as something to send to.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime.actor import Actor, ActorContext, Death, Handler
from dockyard_actors.runtime.mailbox import Mailbox, Remembered
from dockyard_actors.runtime.message import encoder
from dockyard_actors.transport.base import Lane, Peer, TransportError

if TYPE_CHECKING:
    from dockyard_actors.runtime.system import ActorSystem

log = logging.getLogger("dockyard.runtime.actor")


class Delivery(NamedTuple):
    peer: Peer
    lane: Lane
    message: wire.Ask | wire.Tell
    handler: Handler
    deadline: float  # loop time; inf for a tell


class _Running:
    """A concurrent handler at work: cancelled at its asker's deadline."""

    __slots__ = ("done", "task", "why")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.done = False
        self.why = ""

    def expire(self) -> None:
        self.cancel("its asker's deadline passed")

    def cancel(self, why: str) -> None:
        self.done = True
        self.why = why
        if self.task is not None:
            self.task.cancel()


class Cell:
    def __init__(
        self, system: ActorSystem, actor: Actor, name: str, incarnation: int, table: dict[str, Handler]
    ) -> None:
        self.system, self.actor, self.name, self.incarnation, self.table = system, actor, name, incarnation, table
        config = system.config
        self.user: Mailbox[Delivery | None] = Mailbox(config.mailbox_capacity)
        self.control: Mailbox[Delivery | Death | None] = Mailbox(config.mailbox_capacity)
        self.busy: tuple[str, float] | None = None  # serial user handler at work, and since when (loop time)
        self._remembered = Remembered(config.dedup_capacity)
        self._consumed: dict[tuple[Peer, Lane], int] = {}
        self._credit_every = max(1, config.window // 2)
        self._running: dict[tuple[str, int] | int, _Running] = {}
        self._cancelled: set[tuple[str, int]] = set()
        self._slot_free = asyncio.Event()
        self._servers: list[asyncio.Task[None]] = []
        self._owned: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._tells = 0
        actor.ctx = ActorContext(system, name, incarnation, self)

    # ------------------------------------------------------------------ life

    def serve(self) -> None:
        for box, label in ((self.user, "user"), (self.control, "control")):
            task = self.system.loop.create_task(self._serve(box), name=f"{self.name}/{label}")
            task.add_done_callback(self._server_done)
            self._servers.append(task)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = self.system.loop.create_task(work, name=f"{self.name}/{name}")
        self._owned.add(task)
        task.add_done_callback(self._owned_done)
        return task

    def watch(self, name: str) -> None:
        self.system.watch(name, self)

    async def stop(self) -> None:
        """Refuses what is queued, lets the serial handler at work end (up to stop_s), runs on_stop, cancels the rest."""
        self._stopping = True
        for running in list(self._running.values()):
            running.cancel("the actor stopped")
        for box in (self.user, self.control):
            waiting = list(box.items)
            box.items.clear()
            for item in waiting:
                if isinstance(item, Delivery):
                    self._refuse(item.peer, item.lane, item.message, wire.STOPPED, f"{self.name} stopped")
            box.put(None)
        try:
            if self._servers:
                _, late = await asyncio.wait(self._servers, timeout=self.system.config.stop_s)
                for task in late:
                    log.warning(
                        "%s: handler %s did not end within stop_s=%s and is cancelled",
                        self.name,
                        self.busy,
                        self.system.config.stop_s,
                    )
                    task.cancel()
            await asyncio.gather(
                *(r.task for r in self._running.values() if r.task is not None), return_exceptions=True
            )
            async with asyncio.timeout(self.system.config.stop_s):
                await self.actor.on_stop()
        finally:
            for task in self._owned:
                task.cancel()
            await asyncio.gather(*self._owned, *self._servers, return_exceptions=True)
            self.system.room_in(self)

    def abandon(self) -> None:
        """The process is crashing: stop everything at once, run nothing of the actor."""
        self._stopping = True
        for task in (*self._servers, *self._owned, *(r.task for r in self._running.values() if r.task is not None)):
            task.cancel()

    def _owned_done(self, task: asyncio.Task[Any]) -> None:
        self._owned.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.system.crash(task.exception(), f"task {task.get_name()} of actor {self.name}")

    def _server_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.system.crash(task.exception(), f"actor {self.name}")

    # ------------------------------------------------------------------ arrival

    def offer(self, peer: Peer, lane: Lane, message: wire.Ask | wire.Tell) -> None:
        handler = self.table.get(message.kind)
        if handler is None:
            self._consume(peer, lane)
            self._refuse(
                peer,
                lane,
                message,
                wire.NOT_UNDERSTOOD,
                f"{type(self.actor).__name__} has no handler for {message.kind}",
            )
            return
        if self._stopping:
            self._refuse(peer, lane, message, wire.STOPPED, f"{self.name} stopped")
            return
        deadline = float("inf")
        if type(message) is wire.Ask:
            deadline = self.system.loop.time() + message.ttl
            if message.keep and self._repeated(peer, lane, message):
                return
        item = Delivery(peer, lane, message, handler, deadline)
        if handler.control:
            if self.control.full:
                self._consume(peer, lane)
                self._refuse(
                    peer, lane, message, wire.FULL, f"{self.name}'s control mailbox holds {len(self.control)} messages"
                )
                return
            self.control.put(item)
        else:
            self.user.put(item)
            if self.user.full:
                self.system.no_room_in(self)

    def cancel(self, peer: Peer, request: int) -> None:
        running = self._running.get((peer.uid, request))
        if running is not None:
            running.cancel("its asker gave up")
        elif any(
            isinstance(i, Delivery) and i.peer is peer and getattr(i.message, "id", None) == request
            for i in self.user.items
        ):
            self._cancelled.add((peer.uid, request))

    def _repeated(self, peer: Peer, lane: Lane, ask: wire.Ask) -> bool:
        key = (peer.uid, ask.id)
        answer = self._remembered.seen(key)
        if answer is None:
            self._remembered.begin(key)
            return False
        self.system.counts.deduplicated += 1
        self._consume(peer, lane)
        if answer is not Remembered.RUNNING:
            peer.send(lane, answer)
        return True  # while it runs, the first one's reply answers both

    # ------------------------------------------------------------------ handling

    async def _serve(self, box: Mailbox[Any]) -> None:
        serial = box is self.user
        fairness = self.system.config.fairness
        left = fairness
        while True:
            item = await box.get()
            if item is None:
                return
            if serial and self.user.capacity // 2 >= len(self.user):
                self.system.room_in(self)
            if type(item) is Death:
                try:
                    await self.actor.on_death(item)
                except Exception:
                    self.system.counts.handler_errors += 1
                    log.exception("%s: on_death(%s) failed", self.name, item.name)
            else:
                await self._take(item, serial)
            left -= 1
            if not left:
                left = fairness
                await asyncio.sleep(0)

    async def _take(self, item: Delivery, serial: bool) -> None:
        peer, lane, message, handler, deadline = item
        self._consume(peer, lane)
        if type(message) is wire.Ask:
            key = (peer.uid, message.id)
            if deadline <= self.system.loop.time() or key in self._cancelled:
                self._cancelled.discard(key)
                self._remembered.drop(key)
                self.system.counts.expired += 1  # its asker has given up: doing it now would surprise everybody
                return
        try:
            decoded = handler.decode(message.body)
        except msgspec.MsgspecError as error:
            self._refuse(peer, lane, message, wire.NOT_UNDERSTOOD, f"{message.kind} does not decode: {error}")
            return
        if handler.concurrent:
            await self._start_concurrent(item, decoded)
            return
        if serial:
            self.busy = (message.kind, self.system.loop.time())
        try:
            await self._run(item, decoded)
        finally:
            if serial:
                self.busy = None

    async def _start_concurrent(self, item: Delivery, decoded: Any) -> None:
        while len(self._running) >= self.system.config.concurrency:
            self._slot_free.clear()
            await self._slot_free.wait()
        running = _Running()
        if type(item.message) is wire.Ask:
            key: tuple[str, int] | int = (item.peer.uid, item.message.id)
            self.system.deadlines.push(item.deadline, running)
        else:
            self._tells += 1
            key = self._tells
        self._running[key] = running
        running.task = self.system.loop.create_task(
            self._run_concurrent(item, decoded, key, running), name=f"{self.name}/{item.message.kind}"
        )

    async def _run_concurrent(
        self, item: Delivery, decoded: Any, key: tuple[str, int] | int, running: _Running
    ) -> None:
        try:
            await self._run(item, decoded)
        except asyncio.CancelledError:
            if not running.why:
                raise
            log.info("%s: %s was cancelled: %s", self.name, item.message.kind, running.why)
            if self._stopping and type(item.message) is wire.Ask:
                self._refuse(item.peer, item.lane, item.message, wire.ABANDONED, f"{self.name} stopped in mid-handler")
            else:
                self.system.counts.expired += 1
                if isinstance(key, tuple):
                    self._remembered.drop(key)
        finally:
            if not running.done:
                running.done = True
                if isinstance(key, tuple):
                    self.system.deadlines.finished()
            self._running.pop(key, None)
            self._slot_free.set()

    async def _run(self, item: Delivery, decoded: Any) -> None:
        message = item.message
        try:
            value = await getattr(self.actor, item.handler.method)(decoded)
            encoded = encoder.encode(wire.Reply(message.id, wire.raw(value))) if type(message) is wire.Ask else b""
        except Exception as error:  # the actor's boundary: the asker gets it, the log keeps it, the actor lives on
            self.system.counts.handler_errors += 1
            log.exception("%s: handling %s from %s failed", self.name, message.kind, message.src)
            if type(message) is wire.Ask:
                trace = "".join(traceback.format_exception(error))
                self._answer(
                    item, encoder.encode(wire.Fail(message.id, wire.RAISED, type(error).__name__, str(error), trace))
                )
            return
        if type(message) is wire.Ask:
            self._answer(item, encoded)

    def _answer(self, item: Delivery, encoded: bytes) -> None:
        message = item.message
        assert type(message) is wire.Ask
        try:
            item.peer.send(item.lane, encoded)
        except TransportError as error:
            encoded = encoder.encode(
                wire.Fail(message.id, wire.RAISED, "TransportError", f"the reply to {message.kind}: {error}")
            )
            item.peer.send(item.lane, encoded)
        if message.keep:
            self._remembered.answer((item.peer.uid, message.id), encoded)

    def _refuse(self, peer: Peer, lane: Lane, message: wire.Ask | wire.Tell, code: str, text: str) -> None:
        if type(message) is wire.Ask:
            if message.keep:
                self._remembered.drop((peer.uid, message.id))
            peer.send(lane, encoder.encode(wire.Fail(message.id, code, "", text)))
        else:
            log.warning("%s: a tell of %s from %s was not handled: %s", self.name, message.kind, message.src, text)
            peer.send(lane, encoder.encode(wire.Lost(self.name, message.incarnation, message.kind, text)))

    def _consume(self, peer: Peer, lane: Lane) -> None:
        """Gives the sender its credit back, half a window at a time."""
        key = (peer, lane)
        count = self._consumed.get(key, 0) + 1
        if count >= self._credit_every:
            peer.send(lane, encoder.encode(wire.Credit(self.name, self.incarnation, count)))
            count = 0
        self._consumed[key] = count
