"""The asking side of an actor system: pending asks, each sender's windows, retries across incarnations, and who waits for whom.

Every wait here has a deadline in the process's one heap and shows up in `waits()`. It sends through peers and knows no sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime.directory import Entry
from dockyard_actors.runtime.errors import (
    ActorError,
    AskTimeout,
    BadReply,
    MailboxFull,
    NotUnderstood,
    OutcomeUnknown,
    PeerDied,
    ProtocolRefused,
    RemoteError,
    StaleIncarnation,
    SystemClosed,
    UnknownName,
)
from dockyard_actors.runtime.message import Message, R, encoder, reply_decoder
from dockyard_actors.transport.base import Lane, Peer

if TYPE_CHECKING:
    from dockyard_actors.runtime.ref import Ref
    from dockyard_actors.runtime.system import ActorSystem

log = logging.getLogger("dockyard.runtime.caller")


class Wait(msgspec.Struct, frozen=True):
    """Somebody waits for somebody: who, for whom, for what, how long already, and how long at most from its start (seconds)."""

    owner: str
    peer: str
    message: str
    what: str  # "reply" | "room" | "start" | a role's own words
    age_s: float
    deadline_s: float


class _Waiting:
    """One wait with a deadline. Subclasses say with which error it ends when the deadline passes."""

    __slots__ = ("deadline", "done", "future", "incarnation", "kind", "loop", "owner", "peer", "started", "uid")
    what = ""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: str, entry: Entry, kind: str, deadline: float) -> None:
        self.loop, self.owner, self.peer, self.kind, self.deadline = loop, owner, entry.name, kind, deadline
        self.uid, self.incarnation = entry.uid, entry.incarnation
        self.future: asyncio.Future[Any] = loop.create_future()
        self.started = loop.time()
        self.done = False

    def expire(self) -> None:
        self.done = True
        if not self.future.done():
            self.future.set_exception(self.timeout())

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def timeout(self) -> ActorError:
        raise NotImplementedError

    def describe(self) -> str:
        return f"{self.owner} asked {self.peer}#{self.incarnation} for {self.kind}"


class _Pending(_Waiting):
    __slots__ = ()
    what = "reply"

    def timeout(self) -> ActorError:
        return AskTimeout(f"{self.describe()} and had no reply after {self.deadline - self.started:.3g} s")


class _Room(_Waiting):
    __slots__ = ()
    what = "room"

    def timeout(self) -> ActorError:
        return MailboxFull(
            f"{self.describe()} and found no room in its mailbox for {self.deadline - self.started:.3g} s; nothing was sent"
        )


class _Window:
    """How many more messages an actor accepts from this process on one lane. Waiters are served in order."""

    __slots__ = ("free", "waiters")

    def __init__(self, size: int) -> None:
        self.free = size
        self.waiters: deque[_Room] = deque()

    def take(self) -> bool:
        """Takes a place if there is one and nobody waits for it."""
        if self.free > 0 and not self.waiters:
            self.free -= 1
            return True
        return False

    def add(self, count: int) -> None:
        self.free += count
        while self.free > 0 and self.waiters:
            room = self.waiters.popleft()
            if not room.future.done():
                self.free -= 1
                room.future.set_result(None)


class _Outlet:
    """The way to one process: a connection and the windows of its actors."""

    __slots__ = ("peer", "windows")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.windows: dict[tuple[str, int, Lane], _Window] = {}

    def window(self, entry: Entry, lane: Lane) -> _Window:
        key = (entry.name, entry.incarnation, lane)
        window = self.windows.get(key)
        if window is None:
            window = self.windows[key] = _Window(entry.window)
        return window


class Caller:
    def __init__(self, system: ActorSystem) -> None:
        self.system = system
        self.loop = system.loop
        self.pending: dict[int, _Waiting] = {}
        self._outlets: dict[str, _Outlet] = {}
        self._waiting: dict[int, _Waiting] = {}  # waits other than pending replies, by id()
        self._extra: list[tuple[str, str, str, str, float, float]] = []
        self._last_id = 0
        self._closed = False

    # ------------------------------------------------------------------ ask and tell

    async def ask(self, ref: Ref, msg: Message[R], deadline_s: float | None, retry: bool) -> R:
        kind = type(msg)
        decode = reply_decoder(kind)
        deadline = self.loop.time() + (self.system.config.ask_s if deadline_s is None else deadline_s)
        self.system.counts.asks += 1
        if retry:
            body = await self._persist(ref, msg, deadline)
        else:
            entry = self.system.directory.alive(ref.name) or await self._resolve(ref, deadline)
            if ref.incarnation is not None and ref.incarnation != entry.incarnation:
                raise StaleIncarnation(f"{ref.owner} asked {ref}, but {ref.name} is at incarnation {entry.incarnation}")
            body = await self.ask_entry(entry, ref.owner, msg, deadline)
        try:
            return decode(body)
        except msgspec.MsgspecError as error:
            raise BadReply(
                f"{ref.name} answered {kind.__name__} with something else than its reply type: {error}"
            ) from error

    async def tell(self, ref: Ref, msg: Message[Any], deadline_s: float | None) -> None:
        self.system.counts.tells += 1
        deadline = self.loop.time() + (self.system.config.tell_s if deadline_s is None else deadline_s)
        kind = type(msg).__name__
        try:
            entry = self.system.directory.alive(ref.name) or await self._resolve(ref, deadline)
            if ref.incarnation is not None and ref.incarnation != entry.incarnation:
                raise StaleIncarnation(f"{ref.name} is at incarnation {entry.incarnation}")
            lane = Lane.CONTROL if kind in entry.control else Lane.USER
            outlet = self.outlet(entry)
            window = outlet.window(entry, lane)
            if not window.take():
                await self._room(window, entry, ref.owner, kind, deadline)
        except MailboxFull:
            self.system.dead_letter(f"{ref.owner} told {ref} {kind}: no room")
            raise
        except (UnknownName, PeerDied) as error:
            self.system.dead_letter(f"{ref.owner} told {ref} {kind}: {error}")
            return
        outlet.peer.send(lane, encoder.encode(wire.Tell(entry.name, entry.incarnation, ref.owner, kind, wire.raw(msg))))

    async def ask_entry(
        self, entry: Entry, owner: str, msg: Message[Any], deadline: float, *, repeat: tuple[int, float] | None = None
    ) -> msgspec.Raw:
        """One ask of one incarnation. ``repeat``: (request id, deadline of the whole) of an ask that may be sent again."""
        kind = type(msg).__name__
        lane = Lane.CONTROL if kind in entry.control else Lane.USER
        outlet = self.outlet(entry)
        window = outlet.window(entry, lane)
        if not window.take():
            await self._room(window, entry, owner, kind, deadline)
        request, until = repeat or (self.next_id(), deadline)
        pending = _Pending(self.loop, owner, entry, kind, deadline)
        self.pending[request] = pending
        self.system.deadlines.push(deadline, pending)
        ttl = until - pending.started
        try:
            outlet.peer.send(
                lane,
                encoder.encode(
                    wire.Ask(
                        request, entry.name, entry.incarnation, owner, kind, ttl, repeat is not None, wire.raw(msg)
                    )
                ),
            )
            return await pending.future
        except asyncio.CancelledError:
            outlet.peer.send(lane, encoder.encode(wire.Cancel(request, entry.name)))
            raise
        finally:
            if self.pending.get(request) is pending:
                del self.pending[request]
            if not pending.done:
                pending.done = True
                self.system.deadlines.finished()

    async def _persist(self, ref: Ref, msg: Message[Any], deadline: float) -> msgspec.Raw:
        """Asks until the deadline, over any number of incarnations, always under one request id."""
        request = self.next_id()
        kind = type(msg).__name__
        after = 0
        last: ActorError | None = None
        while True:
            entry = self.system.directory.alive(ref.name)
            if entry is None or entry.incarnation <= after:
                with self.waiting(ref.owner, ref.name, kind, "start", deadline):
                    try:
                        entry = await self.system.directory.wait_alive(ref.name, after, deadline)
                    except TimeoutError:
                        state = f"its next incarnation (after #{after})" if after else "it to be registered"
                        raise AskTimeout(
                            f"{ref.owner} asked {ref.name} for {kind} and waited for {state} in vain"
                        ) from last
            if ref.incarnation is not None and ref.incarnation != entry.incarnation:
                raise StaleIncarnation(f"{ref.owner} asked {ref}, but {ref.name} is at incarnation {entry.incarnation}")
            attempt = min(deadline, self.loop.time() + self.system.config.retry_every_s)
            try:
                return await self.ask_entry(entry, ref.owner, msg, attempt, repeat=(request, deadline))
            except PeerDied as error:
                last, after = error, entry.incarnation
                log.info("%s: %s; asking the next incarnation", kind, error)
            except (AskTimeout, MailboxFull) as error:
                if self.loop.time() >= deadline:
                    raise AskTimeout(f"{ref.owner} asked {ref.name} for {kind} again and again in vain: {error}") from (
                        last or error
                    )

    async def _resolve(self, ref: Ref, deadline: float) -> Entry:
        """Asks the registry: this process's replica may be a moment behind."""
        known = self.system.directory.entries.get(ref.name)
        if known is None:
            known = await self.system.lookup(ref.name, deadline)
        if known is None:
            raise UnknownName(
                f"{ref.owner} asked for {ref.name!r}, which is not registered; ask(retry=True) waits for it"
            )
        if not known.alive:
            raise PeerDied(f"{ref.name}#{known.incarnation} is dead ({known.cause}) and has not been restarted yet")
        return known

    # ------------------------------------------------------------------ room

    def outlet(self, entry: Entry) -> _Outlet:
        if self._closed:
            raise SystemClosed(f"{self.system.config.name}: the actor system is closed")
        outlet = self._outlets.get(entry.uid)
        if outlet is None:
            cause = self.system.gone.get(entry.uid)
            if cause is not None:
                raise PeerDied(f"{entry.name}#{entry.incarnation} is dead: {cause}")
            outlet = self._outlets[entry.uid] = _Outlet(self.system.transport.connect(entry.address))
        return outlet

    async def _room(self, window: _Window, entry: Entry, owner: str, kind: str, deadline: float) -> None:
        """Waits in line for a place in the actor's mailbox."""
        room = _Room(self.loop, owner, entry, kind, deadline)
        window.waiters.append(room)
        self._waiting[id(room)] = room
        self.system.deadlines.push(deadline, room)
        try:
            await room.future
        except asyncio.CancelledError:
            if room.future.done() and not room.future.cancelled() and room.future.exception() is None:
                window.add(1)  # the place was given to us in the very moment we gave up
            raise
        finally:
            del self._waiting[id(room)]
            if not room.done:
                room.done = True
                self.system.deadlines.finished()

    # ------------------------------------------------------------------ answers

    def on_reply(self, reply: wire.Reply) -> None:
        pending = self.pending.get(reply.id)
        if pending is not None and not pending.future.done():
            pending.future.set_result(reply.body)
        else:
            self.system.counts.late_replies += 1

    def on_fail(self, fail: wire.Fail) -> None:
        pending = self.pending.get(fail.id)
        if pending is None:
            self.system.counts.late_replies += 1
            return
        told = f"{pending.describe()}"
        errors: dict[str, ActorError] = {
            wire.STALE: StaleIncarnation(f"{told}: refused, {fail.text}"),
            wire.UNKNOWN: PeerDied(f"{told}: {fail.text}"),
            wire.STOPPED: PeerDied(f"{told}: {fail.text}"),
            wire.ABANDONED: OutcomeUnknown(f"{told}: {fail.text}"),
            wire.FULL: MailboxFull(f"{told}: {fail.text}"),
            wire.NOT_UNDERSTOOD: NotUnderstood(f"{told}: {fail.text}"),
        }
        pending.fail(
            errors.get(fail.code) or RemoteError(f"{told}, whose handler raised", fail.error, fail.text, fail.trace)
        )

    def on_credit(self, peer: Peer, lane: Lane, credit: wire.Credit) -> None:
        for outlet in self._outlets.values():
            if outlet.peer is peer:
                window = outlet.windows.get((credit.dst, credit.incarnation, lane))
                if window is not None:
                    window.add(credit.count)

    def on_gone(self, uid: str, cause: str) -> None:
        """A process is dead: everything that waits for it fails now."""
        for pending in list(self.pending.values()):
            if pending.uid == uid:
                pending.fail(OutcomeUnknown(f"{pending.describe()}, which died before it replied: {cause}"))
        for room in list(self._waiting.values()):
            if room.uid == uid:
                room.fail(PeerDied(f"{room.describe()}, which died ({cause}) before there was room; nothing was sent"))
        outlet = self._outlets.pop(uid, None)
        if outlet is not None:
            self.system.transport.disconnect(outlet.peer)

    def on_entry_dead(self, entry: Entry) -> None:
        """One actor of a living process stopped: room for it will never come; its pending asks are answered by its cell."""
        for room in list(self._waiting.values()):
            if room.uid == entry.uid and room.peer == entry.name and room.incarnation <= entry.incarnation:
                room.fail(
                    PeerDied(
                        f"{room.describe()}, which is gone ({entry.cause}) before there was room; nothing was sent"
                    )
                )

    def on_refused(self, peer: Peer, reason: str) -> None:
        for uid, outlet in self._outlets.items():
            if outlet.peer is peer:
                for wait in [*self.pending.values(), *self._waiting.values()]:
                    if wait.uid == uid:
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
        listed = [
            Wait(w.owner, w.peer, w.kind, w.what, now - w.started, w.deadline - w.started)
            for w in [*self.pending.values(), *self._waiting.values()]
        ]
        listed += [Wait(o, p, m, what, now - s, d - s) for o, p, m, what, s, d in self._extra]
        return sorted(listed, key=lambda wait: -wait.age_s)

    def close(self) -> None:
        self._closed = True
        for wait in [*self.pending.values(), *self._waiting.values()]:
            wait.fail(SystemClosed(f"{wait.describe()}, but this process's actor system closes"))
