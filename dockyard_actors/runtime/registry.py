"""The registry: gives names their incarnations and tells every process who was born and who died.

The primary node agent hosts it. It believes node agents about their children, and watches by itself (pidfd) the processes
on its own host that have no agent. It knows nothing of what names mean.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import msgspec

from dockyard_actors.runtime.actor import Actor, control
from dockyard_actors.runtime.directory import Entry, ProcessRecord
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.pidwatch import PidWatch

log = logging.getLogger("dockyard.runtime.registry")

REGISTRY = "registry"


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The registry's own process and everything it knows."""

    registry: ProcessRecord
    entries: tuple[Entry, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Join(Message[Joined | Refused], frozen=True):
    """A process presents itself; repeated joins of one uid are the same join."""

    process: ProcessRecord


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


class Unregister(Message[None], frozen=True):
    """An actor stopped in order."""

    name: str
    incarnation: int
    cause: str


class Leave(Message[None], frozen=True):
    """A process ends in order; names it still has die cleanly."""

    uid: str


class ProcessDied(Message[None], frozen=True):
    """A node agent reports the death of a child."""

    uid: str
    cause: str
    clean: bool = False


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


Push = Callable[[ProcessRecord, DirectoryUpdate | None, bool], None]  # None: say nothing; True: it is the last word


class Registry(Actor):
    """Names, incarnations, processes."""

    def __init__(self, own: ProcessRecord, push: Push) -> None:
        self.own = own
        self.processes: dict[str, ProcessRecord] = {own.uid: own}
        self.entries: dict[str, Entry] = {}
        self.gone: dict[str, str] = {}  # uid → cause, of processes that must not come back under the same uid
        self.on_join: Callable[[ProcessRecord], None] | None = None  # the primary agent listens here
        self.on_gone: Callable[[ProcessRecord, str], None] | None = None
        self._push = push
        self._watches: dict[str, PidWatch] = {}
        self._changed = asyncio.Event()

    async def on_stop(self) -> None:
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

    @control
    async def join(self, msg: Join) -> Joined | Refused:
        process = msg.process
        if process.uid in self.gone:
            return Refused(f"process {process.name} was declared dead: {self.gone[process.uid]}")
        if process.uid not in self.processes:
            self.processes[process.uid] = process
            log.info("process %s joined (pid %d, uid %s)", process.name, process.pid, process.uid)
            unwatched = not process.agent or process.is_agent
            if unwatched and process.host == self.own.host and process.pid != os.getpid():
                self._watches[process.uid] = PidWatch(
                    process.pid,
                    lambda: self.declare_dead(process.uid, f"process {process.name} (pid {process.pid}) ended"),
                )
            if self.on_join is not None:
                self.on_join(process)
        return Joined(self.own, tuple(self.entries.values()))

    @control
    async def register(self, msg: Register) -> Registered | Refused:
        process = self.processes.get(msg.uid)
        if process is None:
            return Refused(self.gone.get(msg.uid, "the process has not joined"))
        known = self.entries.get(msg.name)
        if known is not None and known.alive:
            if known.uid == msg.uid and known.meta == msg.meta and known.control == msg.control:
                pass  # an actor stopped and started again in one process without the registry hearing of the stop
            else:
                owner = self.processes.get(known.uid)
                where = f"process {owner.name} (pid {owner.pid})" if owner else known.uid
                return Refused(f"name {msg.name!r} belongs to incarnation {known.incarnation} in {where}")
        incarnation = known.incarnation + 1 if known else 1
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
        self._publish([entry])
        return Registered(incarnation)

    @control
    async def unregister(self, msg: Unregister) -> None:
        known = self.entries.get(msg.name)
        if known is not None and known.alive and known.incarnation == msg.incarnation:
            self._publish([msgspec.structs.replace(known, alive=False, cause=msg.cause, clean=True)])

    @control
    async def leave(self, msg: Leave) -> None:
        self.declare_dead(msg.uid, "left", clean=True)

    @control
    async def process_died(self, msg: ProcessDied) -> None:
        self.declare_dead(msg.uid, msg.cause, msg.clean)

    @control
    async def lookup(self, msg: Lookup) -> Entry | Refused:
        return self.entries.get(msg.name) or Refused(f"no actor was ever called {msg.name!r}")

    @control
    async def list_all(self, msg: ListAll) -> Processes:
        return Processes(tuple(self.processes.values()), tuple(self.entries.values()))

    def declare_dead(self, uid: str, cause: str, clean: bool = False) -> None:
        """The process, its names and (of an agent) all its children are gone; tells everybody. Repeating it changes nothing."""
        process = self.processes.pop(uid, None)
        if process is None:
            if uid not in self.gone:
                self.gone[uid] = cause  # it died before it joined
            return
        doomed = {uid: cause}
        victims = [process]
        if process.is_agent:
            for child in [p for p in self.processes.values() if p.agent == uid]:
                del self.processes[child.uid]
                doomed[child.uid] = f"its node agent {process.name} is gone: {cause}"
                victims.append(child)
        self.gone.update(doomed)
        for victim in victims:
            watch = self._watches.pop(victim.uid, None)
            if watch is not None:
                watch.close()
        log.log(logging.INFO if clean else logging.WARNING, "process %s is gone: %s", process.name, cause)
        dead = [
            msgspec.structs.replace(entry, alive=False, cause=doomed[entry.uid], clean=clean)
            for entry in self.entries.values()
            if entry.alive and entry.uid in doomed
        ]
        update = self._publish(dead, doomed)
        for victim in victims:  # one that was declared dead and lives all the same must hear it
            self._push(victim, None if clean else update, True)
            if self.on_gone is not None:
                self.on_gone(victim, doomed[victim.uid])

    async def next_change(self) -> None:
        """Resolves when a name or a process came or went."""
        await self._changed.wait()

    def _publish(self, entries: list[Entry], gone: dict[str, str] | None = None) -> DirectoryUpdate:
        for entry in entries:
            self.entries[entry.name] = entry
        update = DirectoryUpdate(entries=tuple(entries), gone=gone or {})
        self._changed.set()
        self._changed = asyncio.Event()
        for process in self.processes.values():
            self._push(process, update, False)
        return update
