"""The asking side of an actor system: pending asks, each sender's windows, retries across incarnations, and who waits for whom.

Every wait here has a deadline and shows up in `waits()`. What a handler asks of others inherits its
deadline and its trace id. It sends through peers and knows no sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime import routes
from dockyard_actors.runtime.directory import Entry
from dockyard_actors.runtime.errors import (
    AskTimeout,
    BadReply,
    MailboxFull,
    OutcomeUnknown,
    PeerDied,
    ProtocolRefused,
    SystemClosed,
    TooLarge,
    UnknownName,
)
from dockyard_actors.runtime.failures import failure
from dockyard_actors.runtime.message import Message, R, Stream, Undecodable, encoder, not_asked, reply_decoder
from dockyard_actors.runtime.scope import handled
from dockyard_actors.runtime.streams import Streaming
from dockyard_actors.runtime.waits import LONGEST_S, PendingReply, PendingRoom, Wait, Waiting, endless, no_room
from dockyard_actors.runtime.windows import Outlet, Window
from dockyard_actors.transport.base import Lane, Peer

if TYPE_CHECKING:
    from dockyard_actors.runtime.ref import Ref
    from dockyard_actors.runtime.system import ActorSystem

log = logging.getLogger("dockyard.runtime.caller")

_FRAME_ROOM = (
    80  # bytes of a frame that are not the envelope's, and what its number may grow by while it waits for room
)
_USER, _CONTROL = Lane.USER, Lane.CONTROL  # a member of an enum is a slow attribute


class Caller:
    def __init__(self, system: ActorSystem) -> None:
        self.system = system
        self.loop = system.loop
        self.pending: dict[int, PendingReply] = {}
        self.feeds: dict[int, Streaming[Any]] = {}
        self.closed = False
        self.most = system.config.max_frame_bytes - _FRAME_ROOM  # bytes of an envelope
        self._outlets: dict[str, Outlet] = {}
        self._by_peer: dict[Peer, Outlet] = {}
        self._waiting: dict[int, Waiting] = {}  # waits other than pending replies, by id()
        self._extra: list[tuple[str, str, str, str, float, float]] = []
        self._last_id = self._last_trace = 0
        self._traces = zlib.crc32(system.config.uid.encode()) << 31  # traces of one process begin alike

    # ------------------------------------------------------------------ ask and tell

    async def ask(self, ref: Ref, msg: Message[R], deadline_s: float | None, retry: bool, wait: bool) -> R:
        kind = type(msg)
        decode = reply_decoder(kind)
        self.system.counts.asks += 1
        if deadline_s is not None and not deadline_s < LONGEST_S:
            raise endless(deadline_s)
        now, scope = self.loop.time(), handled.get()
        deadline = now + (self.system.config.ask_s if deadline_s is None else deadline_s)
        if scope is None:
            trace = self._trace()
        else:
            deadline, trace = min(deadline, scope.deadline), scope.trace
        if deadline <= now:
            raise AskTimeout(
                f"{ref.owner} had no time left to ask {ref.name} for {kind.__name__}: its own deadline has passed; nothing was sent"
            )
        if retry:
            body = await routes.persist(self, ref, msg, deadline, trace)
        else:
            entry = self.system.directory.alive(ref.name)
            if entry is None or (ref.incarnation is not None and ref.incarnation != entry.incarnation):
                entry = await routes.resolve(self, ref, deadline)
            body = await self.ask_entry(entry, ref.owner, msg, deadline, trace=trace, wait=wait)
        try:
            return decode(body)
        except Undecodable as error:
            raise BadReply(
                f"{ref.name} answered {kind.__name__} with something else than its reply type: {error}"
            ) from error

    async def tell(self, ref: Ref, msg: Message[Any], deadline_s: float | None, wait: bool) -> None:
        self.system.counts.tells += 1
        kind = type(msg).__name__
        if isinstance(msg, Stream):
            raise not_asked(type(msg))
        if deadline_s is not None and not deadline_s < LONGEST_S:
            raise endless(deadline_s)
        scope = handled.get()
        trace = self._trace() if scope is None else scope.trace
        try:
            entry = self.system.directory.alive(ref.name)
            if entry is None or (ref.incarnation is not None and ref.incarnation != entry.incarnation):
                seconds = self.system.config.tell_s if deadline_s is None else deadline_s
                entry = await routes.resolve(self, ref, self.scoped(seconds)[0])
            lane = _CONTROL if kind in entry.control else _USER
            outlet = self._outlets.get(entry.uid) or self.outlet(entry)
            window = outlet.window(entry, lane)
            message = wire.Tell(entry.name, entry.incarnation, ref.owner, kind, wire.raw(msg), trace, window.sent + 1)
            envelope = encoder.encode(message)
            if len(envelope) > self.most:
                raise self.too_large(envelope, ref, kind)
            if window.take(len(envelope)):
                outlet.peer.send(lane, envelope)
                return
            deadline = self.scoped(self.system.config.tell_s if deadline_s is None else deadline_s)[0]
            await self._tell_later(outlet, lane, window, entry, message, deadline, wait)
        except MailboxFull:
            self.system.dead_letter(f"{ref.owner} told {ref} {kind}: no room")
            raise
        except (UnknownName, PeerDied, AskTimeout) as error:  # the last one of the registry
            if self.closed:
                raise SystemClosed(f"{self.system.config.name}: the actor system is closed") from error
            self.system.dead_letter(f"{ref.owner} told {ref} {kind}: {error}")

    async def ask_entry(
        self,
        entry: Entry,
        owner: str,
        msg: Message[Any],
        deadline: float,
        *,
        trace: int = 0,
        wait: bool = True,
        repeat: tuple[int, float] | None = None,
    ) -> msgspec.Raw:
        """One ask of one incarnation. ``repeat``: (request id, deadline of the whole) of an ask that may be sent again."""
        kind = type(msg).__name__
        lane = _CONTROL if kind in entry.control else _USER
        outlet = self._outlets.get(entry.uid) or self.outlet(entry)
        window = outlet.window(entry, lane)
        request, until = repeat or (self.next_id(), deadline)
        pending = PendingReply(self.loop, owner, entry, kind, deadline, trace)
        pending.peer = outlet.peer
        ask = wire.Ask(
            request,
            entry.name,
            entry.incarnation,
            owner,
            kind,
            until - pending.started,
            repeat is not None,
            wire.raw(msg),
            trace,
            0,
            window.sent + 1,
        )
        envelope = encoder.encode(ask)
        if len(envelope) > self.most:
            raise self.too_large(envelope, entry, kind)
        try:
            if window.take(len(envelope)):
                self.pending[request] = pending
                self.system.deadlines.push(deadline, pending)
                outlet.peer.send(lane, envelope)
            else:
                await self._ask_later(outlet, lane, window, ask, pending, until, wait)
            return await pending.future
        except asyncio.CancelledError:
            if request in self.pending:  # it was sent
                outlet.peer.send(lane, encoder.encode(wire.Cancel(request, entry.name)))
            raise
        finally:
            if self.pending.get(request) is pending:
                del self.pending[request]
            self.system.deadlines.drop(pending)

    # Apart from ask and tell, whose variables stay plain ones that way: a closure makes each use of them dearer.

    async def _tell_later(
        self, outlet: Outlet, lane: Lane, window: Window, entry: Entry, tell: wire.Tell, deadline: float, wait: bool
    ) -> None:
        def transmit(number: int) -> int:
            tell.seq = number
            envelope = encoder.encode(tell)
            outlet.peer.send(lane, envelope)
            return len(envelope)

        room = PendingRoom(self.loop, tell.src, entry, tell.kind, deadline, tell.trace)
        await self.room(outlet, lane, window, room, transmit, wait)

    async def _ask_later(
        self, outlet: Outlet, lane: Lane, window: Window, ask: wire.Ask, pending: PendingReply, until: float, wait: bool
    ) -> None:
        def transmit(number: int) -> int:
            ask.seq, ask.ttl = number, until - self.loop.time()
            envelope = encoder.encode(ask)
            self.pending[ask.id] = pending
            self.system.deadlines.push(pending.deadline, pending)
            outlet.peer.send(lane, envelope)
            return len(envelope)

        room = PendingRoom(self.loop, ask.src, pending.entry, ask.kind, pending.deadline, ask.trace)
        await self.room(outlet, lane, window, room, transmit, wait)

    def scoped(self, seconds: float) -> tuple[float, int]:
        """(deadline, trace) of something that may take ``seconds``, within what the running handler has left."""
        if not seconds < LONGEST_S:
            raise endless(seconds)
        deadline = self.loop.time() + seconds
        scope = handled.get()
        if scope is None:
            return deadline, self._trace()
        return min(deadline, scope.deadline), scope.trace

    def _trace(self) -> int:
        self._last_trace = (self._last_trace + 1) & 0x7FFFFFFF
        return self._traces | self._last_trace

    # ------------------------------------------------------------------ room

    def outlet(self, entry: Entry) -> Outlet:
        if self.closed:
            raise SystemClosed(f"{self.system.config.name}: the actor system is closed")
        outlet = self._outlets.get(entry.uid)
        if outlet is None:
            cause = self.system.gone.get(entry.uid)
            if cause is not None:
                raise PeerDied(f"{entry.name}#{entry.incarnation} is dead: {cause}")
            outlet = self._outlets[entry.uid] = Outlet(self.system.transport.connect(entry.address))
            self._by_peer[outlet.peer] = outlet
        return outlet

    def too_large(self, envelope: bytes, to: Ref | Entry, kind: str) -> TooLarge:
        return TooLarge(
            f"{kind} for {to.name} takes {len(envelope)} bytes and an envelope at most {self.most} (max_frame_bytes): "
            "tensors and other bulk go over the data plane"
        )

    async def room(
        self, outlet: Outlet, lane: Lane, window: Window, room: PendingRoom, transmit: Callable[[int], int], wait: bool
    ) -> None:
        """Waits in line for a place in the actor's mailbox, where it is sent; without ``wait`` says at once that there is none."""
        if not wait:
            raise no_room(room.describe(), 0.0)
        room.transmit = transmit
        window.waiters.append(room)
        if not window.probing:
            window.probing = True
            self.loop.call_later(self.system.config.probe_s, self._probe, outlet, lane, window, room.entry)
        try:
            await self.bounded(room)
        except BaseException:
            with contextlib.suppress(ValueError):  # it was sent all the same
                window.waiters.remove(room)
            raise

    def _probe(self, outlet: Outlet, lane: Lane, window: Window, entry: Entry) -> None:
        """Somebody still waits: asks what the receiver has, because what a lost connection took with it gives no credit back."""
        window.probing = any(not room.future.done() for room in window.waiters) and not self.closed
        if window.probing and self._by_peer.get(outlet.peer) is outlet:
            probe = wire.Probe(entry.name, entry.incarnation, window.probe())
            outlet.peer.send(lane, encoder.encode(probe))
            self.loop.call_later(self.system.config.probe_s, self._probe, outlet, lane, window, entry)

    async def bounded(self, wait: Waiting) -> None:
        """Waits until ``wait`` is settled, failed or past its deadline, and shows it meanwhile."""
        self._waiting[id(wait)] = wait
        self.system.deadlines.push(wait.deadline, wait)
        try:
            await wait.future
        finally:
            del self._waiting[id(wait)]
            self.system.deadlines.drop(wait)

    # ------------------------------------------------------------------ answers

    # Request ids are easily guessed: only whom the ask was sent to answers it.

    def on_reply(self, peer: Peer, reply: wire.Reply) -> None:
        pending = self.pending.get(reply.id) or self.feeds.get(reply.id)
        if pending is None or pending.peer is not peer:
            self.system.counts.late_replies += 1
        else:
            pending.settle(reply.body)

    def on_item(self, peer: Peer, lane: Lane, item: wire.Item) -> None:
        feed = self.feeds.get(item.id)
        if feed is None or feed.peer is not peer:
            self.system.counts.late_replies += 1
            if item.dst:
                peer.send(lane, encoder.encode(wire.Cancel(item.id, item.dst)))
        else:
            feed.item(item)

    def on_fail(self, peer: Peer, fail: wire.Fail) -> None:
        pending = self.pending.get(fail.id) or self.feeds.get(fail.id)
        if pending is None or pending.peer is not peer:
            self.system.counts.late_replies += 1
        else:
            pending.fail(failure(fail, pending.describe()))

    def on_credit(self, peer: Peer, lane: Lane, credit: wire.Credit) -> None:
        outlet = self._by_peer.get(peer)
        if outlet is not None:
            windows = outlet.windows.get((credit.dst, credit.incarnation))
            if windows is not None:
                windows[lane].credit(credit.count, credit.size)

    def on_level(self, peer: Peer, lane: Lane, level: wire.Level) -> None:
        outlet = self._by_peer.get(peer)
        if outlet is not None:
            windows = outlet.windows.get((level.dst, level.incarnation))
            if windows is not None:
                windows[lane].level(level)

    def on_gone(self, uid: str, cause: str) -> None:
        """A process is dead: everything that waits for it fails now."""
        for pending in list(self.pending.values()):
            if pending.entry.uid == uid:
                pending.fail(OutcomeUnknown(f"{pending.describe()}, which died before it replied: {cause}"))
        for feed in list(self.feeds.values()):
            feed.gone(uid, cause)
        for wait in list(self._waiting.values()):
            if wait.entry.uid == uid and isinstance(wait, PendingRoom):
                wait.fail(PeerDied(f"{wait.describe()}, which died ({cause}) before there was room; nothing was sent"))
        outlet = self._outlets.pop(uid, None)
        if outlet is not None:
            self._by_peer.pop(outlet.peer, None)
            self.system.transport.disconnect(outlet.peer)

    def on_entry_dead(self, entry: Entry) -> None:
        """One actor of a living process stopped: room for it will never come; its pending asks are answered by its cell."""
        for wait in list(self._waiting.values()):
            if (
                isinstance(wait, PendingRoom)
                and wait.entry.uid == entry.uid
                and wait.entry.name == entry.name
                and wait.entry.incarnation <= entry.incarnation
            ):
                wait.fail(
                    PeerDied(
                        f"{wait.describe()}, which is gone ({entry.cause}) before there was room; nothing was sent"
                    )
                )
        outlet = self._outlets.get(entry.uid)
        if outlet is not None:
            outlet.forget(entry)

    def on_renumbered(self, before: Entry, entry: Entry) -> None:
        """The same actor goes on under another incarnation: what was sent counts, and so does the room that it takes."""
        outlet = self._outlets.get(entry.uid)
        if outlet is not None:
            outlet.rename(before, entry)

    def on_refused(self, peer: Peer, reason: str) -> None:
        outlet = self._by_peer.get(peer)
        uids = [uid for uid, known in self._outlets.items() if known is outlet]
        for wait in [*self.pending.values(), *self._waiting.values()]:
            if wait.entry.uid in uids:
                wait.fail(ProtocolRefused(f"{wait.describe()}, which refused to talk: {reason}"))

    # ------------------------------------------------------------------ the rest

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    @contextlib.contextmanager
    def waiting(self, owner: str, peer: str, message: str, what: str, deadline: float) -> Iterator[None]:
        """Lists a wait that something else bounds."""
        started = self.loop.time()
        record = (owner, peer, message, what, started, deadline)
        self._extra.append(record)
        try:
            yield
        finally:
            self._extra.remove(record)

    def waits(self) -> list[Wait]:
        now = self.loop.time()
        listed = [wait.seen(now) for wait in (*self.pending.values(), *self._waiting.values())]
        listed += [Wait(o, p, m, what, now - s, d - s) for o, p, m, what, s, d in self._extra]
        return sorted(listed, key=lambda wait: -wait.age_s)

    def close(self) -> None:
        self.closed = True
        for wait in [*self.pending.values(), *self._waiting.values()]:
            wait.fail(SystemClosed(f"{wait.describe()}, but this process's actor system closes"))
        for feed in list(self.feeds.values()):
            feed.close()
        self._outlets.clear()  # whoever sends from now on is told
        self._by_peer.clear()
