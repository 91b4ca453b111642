"""The registry: gives names their incarnations and tells every process who was born and who died.

The primary node agent hosts it. It believes node agents about their children, watches by itself (pidfd) the processes on its own
host that have no agent, and leases everybody else. After a restart it is rebuilt from what the living claim. It knows nothing of
what names mean.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable

import msgspec

from dockyard_actors.runtime.actor import Actor, control, handlers_of
from dockyard_actors.runtime.deliveries import Delivery
from dockyard_actors.runtime.directory import CAUSE_MAX, Entry, Gone, Names, ProcessRecord, died
from dockyard_actors.runtime.directory import REGISTRY as REGISTRY
from dockyard_actors.runtime.leases import Leases
from dockyard_actors.runtime.message import Message, encoder
from dockyard_actors.runtime.parts import PART_BYTES, news_of, news_parts, parts
from dockyard_actors.runtime.pidwatch import PidWatch
from dockyard_actors.runtime.reconciliation import Reconciliation
from dockyard_actors.runtime.scope import handled
from dockyard_actors.transport.base import Lane, TransportError

log = logging.getLogger("dockyard.runtime.registry")


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The registry's own process and everything it knows."""

    registry: ProcessRecord
    entries: tuple[Entry, ...]
    epoch: int = 0  # of this start of the registry: its identity
    lease_s: float = 0.0  # > 0: nobody sees this process end, so it must be heard of (`Renew`) within any such time
    number: int = 0  # of the last `DirectoryUpdate` that this holds already
    more: str = ""  # there are more names: `Resync` reads on from here
    ended: dict[str, str] = msgspec.field(default_factory=dict)  # as of `DirectoryUpdate`


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str
    fenced: bool = False  # this process was declared dead: it must end
    later: bool = False  # who has the name is only known from others: soon it is back, or dead


class Join(Message[Joined | Refused], frozen=True):
    """A process presents itself; repeated joins of one uid are the same join."""

    process: ProcessRecord


class Claimed(msgspec.Struct, frozen=True, tag=True):
    """The claims were taken."""


class Claim(Message[Claimed | Refused], frozen=True):
    """A process that came back tells the registry what it holds and what it knew: sent after every join but the first."""

    uid: str
    entries: tuple[Entry, ...]  # its own names with their incarnations, and all others as it knew them last
    gone: dict[str, str] = msgspec.field(default_factory=dict)  # uid → cause, of processes that it knows to be dead
    children: tuple[str, ...] = ()  # uids of processes that live, of a node agent
    last: bool = True  # there is no further part
    forgotten: int = 0  # no name that it does not know any more was at a higher incarnation


class Renewed(msgspec.Struct, frozen=True, tag=True):
    epoch: int
    number: int = 0  # of the last `DirectoryUpdate`


class Renew(Message[Renewed | Refused], frozen=True):
    """A process is there, and wants to know whether the registry is."""

    uid: str


class Known(msgspec.Struct, frozen=True, tag=True):
    """What the updates up to ``number`` have said, or a part of it."""

    entries: tuple[Entry, ...]
    gone: dict[str, str]
    epoch: int
    number: int
    more: str = ""  # where the next part begins; empty: there is none
    ended: dict[str, str] = msgspec.field(default_factory=dict)


class Resync(Message[Known | Refused], frozen=True):
    """A process has missed an update: a connection was lost, and something with it. Read part after part."""

    uid: str
    after: str = ""  # `Known.more` of the part before


class Registered(msgspec.Struct, frozen=True, tag=True):
    incarnation: int


class Register(Message[Registered | Refused], frozen=True):
    """An actor takes a name. Refused while a living process has it."""

    name: str
    uid: str
    window: int
    control: tuple[str, ...]
    meta: dict[str, str]
    window_bytes: int = 4 << 20


class Unregister(Message[Refused | None], frozen=True):
    """An actor stopped in order. Refused from who does not have the name (any more)."""

    name: str
    incarnation: int  # 0: whichever process ``uid`` has
    cause: str
    uid: str = ""


class Leave(Message[None], frozen=True):
    """A process ends in order; names it still has die cleanly."""

    uid: str


class ProcessDied(Message[None], frozen=True):
    """A node agent reports the death of a child."""

    uid: str
    cause: str
    clean: bool = False


class ProcessEnded(Message[None], frozen=True):
    """A node agent reports that a child is not started again, and why; with an empty cause: that it is, after all."""

    process: str  # its `lineage`
    cause: str


class ProcessSuspect(Message[None], frozen=True):
    """A node agent reports that a child's loop has not answered for so long (seconds); 0: it answers again."""

    uid: str
    silent_s: float


class Lookup(Message[Entry | Refused], frozen=True):
    name: str


class Processes(msgspec.Struct, frozen=True, tag=True):
    processes: tuple[ProcessRecord, ...]
    entries: tuple[Entry, ...]


class ListAll(Message[Processes], frozen=True):
    """Every process and every name, for views."""


class DirectoryUpdate(Message[None], frozen=True):
    """Pushed by the registry to every process: names that were born or died, and processes that are gone (uid → cause)."""

    entries: tuple[Entry, ...]
    gone: dict[str, str] = msgspec.field(default_factory=dict)
    epoch: int = 0  # of the registry; 0: said by nobody but this process or its node agent
    suspects: dict[str, float] = msgspec.field(
        default_factory=dict
    )  # uid → seconds without an answer; 0: it answers again
    number: int = 0  # counts the registry's updates: who finds one missing asks for everything
    ended: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # `lineage` → why the process is not started again; empty: it is, after all


Push = Callable[[ProcessRecord, DirectoryUpdate | None, bool], None]  # None: say nothing; True: it is the last word


class Registry(Actor):
    """Names, incarnations, processes. ``epoch``: identity of this start, taken from the clock unless given."""

    def __init__(
        self,
        own: ProcessRecord,
        push: Push,
        *,
        lease_s: float = 15.0,
        settle_s: float = 10.0,
        epoch: int = 0,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """part_bytes: of names and deaths that are told in one message."""
        self.own = own
        self.epoch = epoch or time.time_ns()
        self.processes: dict[str, ProcessRecord] = {own.uid: own}
        self.entries = Names()
        self.part_bytes = part_bytes
        self.gone = Gone()  # of processes that must not come back under the same uid
        self.ended: dict[str, str] = {}  # as of `DirectoryUpdate`
        self.number = 0  # of the last update
        self.given: set[str] = set()  # names whose incarnation was given in this epoch
        self.on_join: Callable[[ProcessRecord], None] | None = None  # the primary agent listens here
        self.on_gone: Callable[[ProcessRecord, str], None] | None = None
        self._push = push
        self._watches: dict[str, PidWatch] = {}
        self._leases = Leases(lease_s, self._lease_expired)
        self._reconciliation = Reconciliation(self, settle_s)
        self._changed = asyncio.Event()

    async def on_stop(self) -> None:
        self.close()

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        self._leases.close()
        self._reconciliation.close()

    # ------------------------------------------------------------------ processes

    @control
    async def join(self, msg: Join) -> Joined | Refused:
        process, sender = msg.process, _sender()
        if sender not in (None, process.uid):
            return Refused(f"process {sender} may not speak for process {process.uid}")
        if process.uid in self.gone:
            return Refused(f"process {process.name} was declared dead: {self.gone[process.uid]}", fenced=True)
        if process.agent in self.gone:
            return Refused(f"the node agent of process {process.name} is gone: {self.gone[process.agent]}", fenced=True)
        known = self.processes.get(process.uid)
        if (
            known is None and process.agent
        ):  # it runs one of a name at a time, and its report of the other's death is on its way
            for other in [p for p in self.processes.values() if (p.agent, p.name) == (process.agent, process.name)]:
                self.declare_dead(other.uid, f"its node agent has started {process.name} anew")
        if known is not None and known != process:
            return Refused(
                f"process {known.name} (pid {known.pid} on {known.host}) has joined under the uid {process.uid} already: "
                "every start of a process needs one of its own"
            )
        if known is None:
            try:
                for lane in Lane:
                    process.address.endpoint(lane, self.own.host)
            except TransportError as error:  # it could ask and never be told anything, and nobody could answer for it
                return Refused(f"process {process.name} could not be reached: {error}, or a tcp_bind of its own")
            self._look_after(process)
            self.processes[process.uid] = process
            log.info("process %s joined (pid %d, uid %s)", process.name, process.pid, process.uid)
            if self.on_join is not None:
                self.on_join(process)
        self._leases.heard(process.uid)
        lease_s = self._leases.lease_s if process.uid in self._leases else 0.0
        first = self.entries.get(REGISTRY)
        names, _, more = self._part(_NAMES)
        entries = (*([first] if first is not None else ()), *(entry for entry in names if entry is not first))
        return Joined(self.own, entries, self.epoch, lease_s, self.number, more, self.ended)

    def _look_after(self, process: ProcessRecord) -> None:
        """Finds who will see this process end: its agent, the primary agent's pings, a pidfd, or a lease."""
        if process.agent and not process.is_agent:
            if process.agent not in self.processes:  # it may come later: both come back after a restart of the registry
                self._reconciliation.expect(process.agent, f"the node agent of process {process.name}")
        elif process.host == self.own.host:
            if process.pid != os.getpid():
                end = f"process {process.name} (pid {process.pid}) ended"
                self._watches[process.uid] = PidWatch(process.pid, lambda: self.declare_dead(process.uid, end))
        elif not (process.is_agent and self.own.is_agent):
            self._leases.grant(process.uid)

    @control
    async def renew(self, msg: Renew) -> Renewed | Refused:
        refused = self._refused(msg.uid)
        if refused is not None:
            return refused
        self._leases.heard(msg.uid)
        return Renewed(self.epoch, self.number)

    @control
    async def resync(self, msg: Resync) -> Known | Refused:
        entries, gone, more = self._part(msg.after)
        return self._refused(msg.uid) or Known(entries, gone, self.epoch, self.number, more, self.ended)

    def _part(self, after: str) -> tuple[tuple[Entry, ...], dict[str, str], str]:
        """Names and dead processes behind this place in an order that stays, and the place where the next part begins. What changes
        between two parts is told by updates."""
        places = [f"{_GONE}{uid}" for uid in self.gone] + [f"{_NAMES}{name}" for name in self.entries]
        places = sorted(place for place in places if place > after)
        items = (
            self.entries[place[1:]] if place[0] == _NAMES else (place[1:], self.gone[place[1:]]) for place in places
        )
        part = next(parts(items, self.part_bytes), ())
        return *news_of(part), places[len(part) - 1] if len(part) < len(places) else ""

    @control
    async def claim(self, msg: Claim) -> Claimed | Refused:
        refused = self._refused(msg.uid)
        if refused is not None:
            return refused
        self._leases.heard(msg.uid)
        self.entries.forgotten = max(self.entries.forgotten, msg.forgotten)
        self._reconciliation.claim(msg.uid, msg.entries, msg.gone, msg.children, msg.last)
        return self._refused(msg.uid) or Claimed()

    @control
    async def leave(self, msg: Leave) -> None:
        sender = _sender()
        if sender not in (None, msg.uid):
            raise PermissionError(f"process {sender} may not say that process {msg.uid} leaves")
        self.declare_dead(msg.uid, "left", clean=True)

    @control
    async def process_died(self, msg: ProcessDied) -> None:
        self._check_parent(msg.uid)
        self.declare_dead(msg.uid, msg.cause, msg.clean)

    @control
    async def process_ended(self, msg: ProcessEnded) -> None:
        self.end(msg.process, msg.cause)

    def end(self, process: str, cause: str) -> None:
        """Tells everybody that a process (its `lineage`) is not started again; without a cause: that it is, after all."""
        self.ended[process] = cause
        self.publish([], ended={process: cause})

    @control
    async def process_suspect(self, msg: ProcessSuspect) -> None:
        self._check_parent(msg.uid)
        self.suspect(msg.uid, msg.silent_s)

    def _check_parent(self, uid: str) -> None:
        """Only its node agent speaks for a process; for one that has not joined any agent may, because nobody knows whose it is."""
        sender, process = _sender(), self.processes.get(uid)
        if sender is None or sender == uid:
            return
        agent = self.processes.get(sender)
        if agent is None or not agent.is_agent or (process is not None and process.agent != sender):
            raise PermissionError(f"process {sender} may not speak for process {uid}: it is not its node agent")

    def suspect(self, uid: str, silent_s: float) -> None:
        """Tells everybody that a living process does not answer (0: answers again)."""
        if uid in self.processes:
            self.publish([], suspects={uid: silent_s})

    def _lease_expired(self, uid: str, silent_s: float) -> None:
        process = self.processes[uid]
        who = f"process {process.name} (pid {process.pid} on another host)"
        self.declare_dead(uid, f"nothing was heard of {who} for {silent_s:.1f} s (lease_s={self._leases.lease_s:g})")

    def _refused(self, uid: str) -> Refused | None:
        sender = _sender()
        if sender not in (None, uid):
            return Refused(f"process {sender} may not speak for process {uid}")
        if uid in self.processes:
            return None
        cause = self.gone.get(uid)
        if cause is None:
            return Refused("the process has not joined")
        return Refused(f"the process was declared dead: {cause}", fenced=True)

    # ------------------------------------------------------------------ names

    @control
    async def register(self, msg: Register) -> Registered | Refused:
        refused = self._refused(msg.uid)
        if refused is not None:
            return refused
        process = self.processes[msg.uid]
        self._leases.heard(msg.uid)
        known = self.entries.get(msg.name)
        if known is not None and known.alive:
            if known.uid == msg.uid and known.meta == msg.meta and known.control == msg.control:
                pass  # an actor stopped and started again in one process without the registry hearing of the stop
            else:
                owner = self.processes.get(known.uid)
                where = f"process {owner.name} (pid {owner.pid})" if owner else known.uid
                reason = f"name {msg.name!r} belongs to incarnation {known.incarnation} in {where}"
                return Refused(reason, later=owner is None)
        before = known.incarnation if known else self.entries.forgotten
        incarnation = max(before, self._reconciliation.highest(msg.name)) + 1
        entry = Entry(
            msg.name,
            incarnation,
            msg.uid,
            process.address,
            msg.window,
            msg.control,
            msg.meta,
            window_bytes=msg.window_bytes,
        )
        size = len(encoder.encode(entry))
        if size > self.part_bytes:
            return Refused(
                f"every process is told of {msg.name!r}, and its entry takes {size} bytes: give it less meta"
            )
        self.given.add(msg.name)
        self.publish([entry])
        return Registered(incarnation)

    @control
    async def unregister(self, msg: Unregister) -> Refused | None:
        uid = msg.uid or _sender() or ""
        if uid:
            refused = self._refused(uid)
            if refused is not None:
                return refused
        known = self.entries.get(msg.name)
        of_it = known is not None and msg.incarnation in (known.incarnation, 0 if uid else known.incarnation)
        if known is None or not of_it or (uid and known.uid != uid):
            now = "was never registered" if known is None else f"is at incarnation {known.incarnation}"
            return Refused(f"{msg.name}#{msg.incarnation} cannot be unregistered: the name {now}")
        if known.alive:
            self.publish([died(known, msg.cause, clean=True)])
        return None

    @control
    async def lookup(self, msg: Lookup) -> Entry | Refused:
        return self.entries.get(msg.name) or Refused(f"no actor was ever called {msg.name!r}")

    @control
    async def list_all(self, msg: ListAll) -> Processes:
        return Processes(tuple(self.processes.values()), tuple(self.entries.values()))

    # ------------------------------------------------------------------ deaths

    def declare_dead(self, uid: str, cause: str, clean: bool = False) -> None:
        """The process, its names and (of an agent) all its children are gone; tells everybody. Repeating it changes nothing."""
        if uid in self.gone:
            return
        cause = cause[:CAUSE_MAX]
        process = self.processes.pop(uid, None)
        doomed = {uid: cause}
        victims = [] if process is None else [process]
        name = uid if process is None else process.name
        children = f"its node agent {name} is gone: {cause}"
        for child in [p for p in self.processes.values() if p.agent == uid]:
            del self.processes[child.uid]
            doomed[child.uid] = children
            victims.append(child)
        for child in self._reconciliation.children_of(uid):
            doomed[child] = children
        for gone, why in doomed.items():
            self.gone.add(gone, why)
            self._leases.drop(gone)
            watch = self._watches.pop(gone, None)
            if watch is not None:
                watch.close()
        dead = [died(e, doomed[e.uid], clean) for e in self.entries.values() if e.alive and e.uid in doomed]
        if not victims and not dead:
            self._reconciliation.died(doomed)
            return  # it died before it joined
        log.log(logging.INFO if clean else logging.WARNING, "process %s is gone: %s", name, cause)
        self.publish(dead, doomed)
        for victim in victims:  # one that was declared dead and lives all the same must hear it
            update = DirectoryUpdate((), {victim.uid: doomed[victim.uid]}, self.epoch)
            self._say(victim, None if clean else update, True)
            if self.on_gone is not None:
                self.on_gone(victim, doomed[victim.uid])
        self._reconciliation.died(doomed)

    async def next_change(self) -> None:
        """Resolves when a name or a process came or went."""
        await self._changed.wait()

    def publish(
        self,
        entries: Iterable[Entry],
        gone: dict[str, str] | None = None,
        suspects: dict[str, float] | None = None,
        ended: dict[str, str] | None = None,
    ) -> None:
        """Takes these entries and tells every process of them."""
        entries = tuple(entries)
        for entry in entries:
            self.entries.put(entry)
        self._changed.set()
        self._changed = asyncio.Event()
        for names, dead in news_parts(gone or {}, entries, self.part_bytes):
            self.number += 1
            self._tell_all(DirectoryUpdate(names, dead, self.epoch, suspects or {}, self.number, ended or {}))
            suspects = ended = None

    def _tell_all(self, update: DirectoryUpdate) -> None:
        mute = {p.uid: why for p in list(self.processes.values()) if (why := self._say(p, update, False))}
        mute.pop(self.own.uid, None)
        for uid, why in mute.items():
            self.declare_dead(uid, f"it cannot be told anything: {why}")

    def _say(self, process: ProcessRecord, update: DirectoryUpdate | None, last: bool) -> str:
        """Tells one process; why that is not possible, which is nobody else's trouble."""
        try:
            self._push(process, update, last)
        except TransportError as error:
            log.warning("process %s (uid %s) cannot be told anything: %s", process.name, process.uid, error)
            return str(error)
        return ""


_GONE, _NAMES = "0", "1"  # how places of dead processes and of names begin


def _sender() -> str | None:
    """uid of the process whose message is being handled; None when this process itself calls."""
    message = handled.get()
    return message.peer.uid if isinstance(message, Delivery) else None


REGISTRY_CONTROL = tuple(
    sorted(handlers_of(Registry))
)  # the registry's messages are all control messages, known before any directory is
