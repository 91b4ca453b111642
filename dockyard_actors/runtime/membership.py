"""This process's place in the registry: joins it, renews, notices that it is gone, and comes back to the one that follows.

While no registry is there everything that needs none goes on; what needs it waits within its own deadline. It knows nothing of actors
but their names and incarnations.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dockyard_actors.runtime.directory import REGISTRY, Entry, ProcessRecord, died
from dockyard_actors.runtime.errors import ActorCrashed, ActorError, AskTimeout, PeerDied, ProtocolRefused, RegistryDown
from dockyard_actors.runtime.leases import LOOKS
from dockyard_actors.runtime.message import Message, R, reply_decoder
from dockyard_actors.runtime.parts import news_parts, part_bytes
from dockyard_actors.runtime.pidwatch import PidWatch
from dockyard_actors.runtime.registry import (
    REGISTRY_CONTROL,
    Claim,
    DirectoryUpdate,
    Join,
    Joined,
    Known,
    ProcessDied,
    ProcessEnded,
    Refused,
    Register,
    Registered,
    Renew,
    Resync,
)
from dockyard_actors.runtime.scope import fresh
from dockyard_actors.transport.base import parse_rendezvous

if TYPE_CHECKING:
    from dockyard_actors.runtime.system import ActorSystem

log = logging.getLogger("dockyard.runtime.membership")

_DOOR = "rendezvous"  # stands for the uid of whoever listens there
_EARLY = 1000  # updates kept while it is not known whose they are: one that is missing is asked for
_CHILD_PATIENCE = 2.0  # a child waits so many times as long as its node agent, which decides first


@dataclass(frozen=True)
class _Down:
    since: float  # loop time
    cause: str


async def enrol(system: ActorSystem, register: Register) -> Registered | Refused:
    """Registers a name here or there. While its holder is only believed to live this waits, up to `SystemConfig.join_s`: a process
    that is started again soon after the registry must not end because its dead predecessor has not been missed yet."""
    config, loop = system.config, system.loop
    until = loop.time() + config.join_s
    while True:
        if system.registry is not None:
            reply = await system.registry.register(register)
        else:
            assert system.membership is not None
            deadline = loop.time() + config.registry_s
            reply = await system.membership.ask(register, f"register {register.name!r}", deadline)
        if isinstance(reply, Registered) or not reply.later or loop.time() >= until:
            return reply
        with system.caller.waiting(config.name, REGISTRY, "Register", f"{register.name} to be free", until):
            await asyncio.sleep(config.rejoin_s / 8)


class Membership:
    """Of a system that has joined a registry in another process."""

    def __init__(self, system: ActorSystem) -> None:
        self.system = system
        self.registry: ProcessRecord | None = None
        self.epoch = 0
        self.children: Callable[[], Iterable[str]] = (
            tuple  # uids of the processes that this one, a node agent, vouches for
        )
        self.on_rejoin: Callable[[ProcessRecord, ProcessRecord], None] | None = (
            None  # the registry before, and this one
        )
        self._number = 0  # of the last update that is known here
        self._catching_up: asyncio.Task[None] | None = None
        self._lease_s = 0.0
        self._down: _Down | None = None
        self._up = asyncio.Event()
        self._early: deque[tuple[str, DirectoryUpdate]] = deque(maxlen=_EARLY)  # by uid of who says so
        self._watch: PidWatch | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._rejoining: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()  # of deaths
        self._closed = False

    @property
    def down(self) -> str:
        """Why and for how long there is no registry; empty when there is one."""
        if self._down is None:
            return ""
        return f"the registry is down since {self.system.loop.time() - self._down.since:.1f} s ({self._down.cause})"

    async def join(self) -> None:
        """Joins for the first time. Raises AskTimeout, or ProtocolRefused with the reason."""
        config = self.system.config
        try:
            reply = await self._present(config.join_s)
        except AskTimeout as error:
            keys = f"the key file {config.key_file} is another run's" if config.key_file else "it wants a key file"
            raise AskTimeout(
                f"{config.name} got no answer from a registry at {config.rendezvous} within join_s={config.join_s:g} s: either no "
                f"primary listens there (yet, or any more), or {keys} (then the primary's log says that it refused a connection)"
            ) from error
        if isinstance(reply, Refused):
            where = self.system.config.rendezvous
            raise ProtocolRefused(f"{self.system.config.name} may not join {where}: {reply.reason}")
        self._enter(reply)
        await self._read(reply.more)
        if self._down is None:
            self._up.set()

    async def close(self) -> None:
        self._closed = True
        tasks = [task for task in (self._renewing, self._rejoining, self._catching_up) if task is not None]
        tasks += self._reports
        self._unwatch()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ asking it

    async def ask(self, msg: Message[R], what: str, deadline: float) -> R:
        """Asks the registry, whichever is there by then. RegistryDown when there is none until the deadline (of `loop.time()`)."""
        system = self.system
        while True:
            if self._down is not None:
                await self._wait_up(what, deadline)
            try:
                return await system.ref(REGISTRY).ask(msg, deadline_s=max(0.0, deadline - system.loop.time()))
            except PeerDied:
                if self._down is None:
                    raise  # not because it is gone

    async def _wait_up(self, what: str, deadline: float) -> None:
        name = self.system.config.name
        try:
            with self.system.caller.waiting(name, REGISTRY, what, "start", deadline):
                async with asyncio.timeout_at(deadline):
                    await self._up.wait()
        except TimeoutError:
            raise RegistryDown(f"{name} needs the registry to {what}, and {self.down}") from None

    def report_death(self, uid: str, cause: str, clean: bool) -> list[DirectoryUpdate]:
        """A node agent's child is dead, which is known here at once, whatever the registry is doing; returned is what others can be
        told of it. When the registry cannot be told now, it is told when it is back."""
        entries, most = self._entries_of({uid}, cause, clean), part_bytes(self.system.config.max_frame_bytes)
        updates = [DirectoryUpdate(names, dead) for names, dead in news_parts({uid: cause}, entries, most)]
        for update in updates:
            self.system.take(update)
        if self._down is None:
            report = self._own(self._report(ProcessDied(uid=uid, cause=cause, clean=clean)), "report a death")
            self._reports.add(report)
            report.add_done_callback(self._reports.discard)
        return updates

    async def _report(self, death: ProcessDied) -> None:
        try:
            await self.system.ref(REGISTRY).ask(death)
        except ActorError as error:
            self.lost(f"it could not be told of a death: {error}")

    async def report_end(self, process: str, cause: str) -> None:
        """A node agent's child is not started again (no cause: it is). A registry that is gone is not told: its askers wait longer."""
        if self._down is None:
            try:
                await self.system.ref(REGISTRY).ask(
                    ProcessEnded(process=process, cause=cause), deadline_s=self.system.config.registry_s
                )
            except ActorError as error:
                log.info("could not report that %s is %s: %s", process, cause or "started again", error)

    # ------------------------------------------------------------------ what the registry says

    def hear(self, uid: str, update: DirectoryUpdate) -> bool:
        """Process ``uid`` says who lives and who is dead; false when it is not for it to say: only for the registry, and without an
        epoch for our node agent. What may have overtaken a registry's answer to our join is kept until that is here."""
        known = self.registry is not None and uid == self.registry.uid
        if not update.epoch:
            if not uid or uid != self.system.config.agent:
                return False
        elif not (known and update.epoch == self.epoch):
            if not self._up.is_set():
                self._early.append((uid, update))
                return True
            return known  # of another epoch
        self.system.take(update)
        return True

    def accepts(self, update: DirectoryUpdate) -> bool:
        """False for what another epoch's registry says."""
        if update.epoch in (0, self.epoch):
            if update.number > self._number:
                if update.number > self._number + 1:
                    self._catch_up()
                self._number = update.number
            return True
        return False

    def _catch_up(self) -> None:
        """An update is missing: asks for all that they said."""
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = self._own(self._resync(), "catch up with the registry")

    async def _resync(self) -> None:
        system = self.system
        while not self._closed:
            await self._up.wait()
            lived = [entry for entry in system.directory.entries.values() if entry.alive]
            try:
                reply, told = await self._read_part("")
                rest = await self._read(reply.more)
            except ActorError as error:
                log.info("could not catch up with the registry: %s", error)
                await asyncio.sleep(system.config.rejoin_s / 8)
                continue
            told |= rest
            lost = [e for e in lived if e.name not in told and system.directory.entries.get(e.name) is e]
            lost = tuple(died(e, "the registry does not know it any more") for e in lost if e.uid != system.config.uid)
            if lost:  # they died so long ago that the registry has forgotten them
                system.take(DirectoryUpdate(lost))
            log.info("caught up with the registry")
            self._number = max(self._number, reply.number)  # of the first part: updates since then told of the others
            return

    async def _read(self, after: str) -> set[str]:
        """Takes all that the registry knows behind this place; the names among it."""
        told: set[str] = set()
        while after:
            reply, names = await self._read_part(after)
            told |= names
            after = reply.more
        return told

    async def _read_part(self, after: str) -> tuple[Known, set[str]]:
        system, epoch = self.system, self.epoch
        message = Resync(uid=system.config.uid, after=after)
        reply = await system.ref(REGISTRY).ask(message, deadline_s=system.config.registry_s)
        if not isinstance(reply, Known) or not reply.epoch == epoch == self.epoch:
            raise RegistryDown("the registry that was being read is gone, or does not know this process any more")
        gone = {uid: cause for uid, cause in reply.gone.items() if uid not in system.gone}
        system.take(DirectoryUpdate(reply.entries, gone, epoch=epoch, ended=reply.ended))
        return reply, {entry.name for entry in reply.entries}

    def _enter(self, joined: Joined) -> None:
        system, before = self.system, self.registry
        self.registry = joined.registry
        self.epoch, self._lease_s, self._number = joined.epoch, joined.lease_s, joined.number
        if before is not None and before.uid != joined.registry.uid:
            self._bury(before, "another registry has taken its place", ended=False)
        for entry in joined.entries:
            if entry.name == REGISTRY:
                system.directory.put(entry)
        early = [update for uid, update in self._early if uid == joined.registry.uid and update.epoch == self.epoch]
        self._early.clear()
        for update in (DirectoryUpdate(joined.entries, epoch=joined.epoch, ended=joined.ended), *early):
            system.take(update)
        self._unwatch()
        here = joined.registry.host == system.transport.address.host and joined.registry.pid != os.getpid()
        if here:
            who = "the primary node agent" if joined.registry.is_agent else f"process {joined.registry.name}"
            end = f"{who} (pid {joined.registry.pid}) ended"
            self._watch = PidWatch(joined.registry.pid, lambda: self.lost(end, ended=True))
        if (self._lease_s or not here) and self._renewing is None:
            self._renewing = self._own(self._renew(), "renew the membership")

    async def _renew(self) -> None:
        """Says that we are there, and so learns whether the registry is."""
        while self._lease_s or self._watch is None:
            period = (self._lease_s or self.system.config.lease_s) / LOOKS
            await asyncio.sleep(period)
            await self._up.wait()
            try:
                reply = await self.system.ref(REGISTRY).ask(Renew(uid=self.system.config.uid), deadline_s=period)
            except ActorError as error:
                self.lost(f"it did not answer: {error}")
                continue
            if isinstance(reply, Refused):
                if reply.fenced:
                    self._end(f"the registry refuses this process: {reply.reason}")
                    return
                self.lost(f"it does not know this process: {reply.reason}")
            elif reply.epoch == self.epoch and reply.number > self._number:
                self._catch_up()
        self._renewing = None

    # ------------------------------------------------------------------ without it

    def lost(self, cause: str, *, ended: bool = False) -> None:
        """The registry is silent, or (``ended``) its process is known to have ended. Everything else goes on while we look for it."""
        if self._closed or self.registry is None:
            return
        if self._down is None:
            limit = self.system.config.registry_lost_s
            log.warning("the registry is gone: %s. Going on without it for up to %g s", cause, limit)
            self._down = _Down(self.system.loop.time(), cause)
            self._up.clear()
            self._rejoining = self._own(self._rejoin(self._down), "come back to the registry")
        if ended:
            self._bury(self.registry, cause, ended=True)

    def _bury(self, registry: ProcessRecord, cause: str, ended: bool) -> None:
        """Nobody waits any longer for the registry's process, nor, when it has ended, for its children, which end with it."""
        if registry.uid in self.system.gone:
            return
        gone = {registry.uid: cause}
        if ended:
            for entry in self.system.directory.entries.values():
                if entry.alive and entry.meta.get("agent") == registry.uid and entry.uid != self.system.config.uid:
                    gone[entry.uid] = f"its node agent is gone: {cause}"
        self.system.take(DirectoryUpdate(self._entries_of(gone, cause), gone))

    def _entries_of(self, uids: Iterable[str], cause: str, clean: bool = False) -> tuple[Entry, ...]:
        return tuple(died(e, cause, clean) for e in self.system.directory.entries.values() if e.alive and e.uid in uids)

    async def _rejoin(self, down: _Down) -> None:
        system, config = self.system, self.system.config
        until = down.since + config.registry_lost_s * (_CHILD_PATIENCE if config.agent else 1.0)
        pause = config.rejoin_s / 8
        before = self.registry
        assert before is not None
        while (left := until - system.loop.time()) > 0:
            try:
                reply = await self._present(min(config.rejoin_s, left))
                if isinstance(reply, Refused):
                    self._end(f"the registry does not let this process come back: {reply.reason}")
                    return
                self._enter(reply)
                await self._read(reply.more)
                if not await self._claim():
                    return
            except ActorError as error:
                log.info("no registry yet at %s: %s", config.rendezvous, error)
                await asyncio.sleep(min(pause, max(0.0, until - system.loop.time())))
                pause = min(2 * pause, config.rejoin_s)
                continue
            self._down = None
            self._up.set()
            log.info("back in the registry after %.1f s", system.loop.time() - down.since)
            assert self.registry is not None
            if self.on_rejoin is not None:
                self.on_rejoin(before, self.registry)
            return
        limit = until - down.since
        self._end(f"the registry was lost {limit:g} s ago ({down.cause}) and none came back at {config.rendezvous}")

    async def _present(self, seconds: float) -> Joined | Refused:
        """Joins through a connection of its own: one that has seen another process at this address is of no use."""
        system, config = self.system, self.system.config
        door = Entry(REGISTRY, 0, _DOOR, parse_rendezvous(config.rendezvous), config.window, REGISTRY_CONTROL)
        deadline = system.loop.time() + seconds  # the door's incarnation 0: whichever is there
        try:
            body = await system.caller.ask_entry(door, config.name, Join(process=system.process), deadline)
        finally:
            system.caller.on_gone(_DOOR, "nobody answered there in time")
        return reply_decoder(Join)(body)

    async def _claim(self) -> bool:
        """Tells a registry what we hold and what we know; False when it says that we are to end."""
        system, uid = self.system, self.system.config.uid
        known = [entry for entry in system.directory.entries.values() if entry.name != REGISTRY]
        known.sort(key=lambda entry: entry.uid != uid)
        children, forgotten = tuple(self.children()), system.directory.entries.forgotten
        claims = list(news_parts(system.gone, known, part_bytes(system.config.max_frame_bytes)))
        for number, (entries, gone) in enumerate(claims, 1):
            last = number == len(claims)
            claim = Claim(uid=uid, entries=entries, gone=gone, children=children, last=last, forgotten=forgotten)
            reply = await system.ref(REGISTRY).ask(claim, deadline_s=system.config.registry_s)
            if isinstance(reply, Refused):
                if not reply.fenced:
                    raise RegistryDown(f"the registry that let this process in is gone again: {reply.reason}")
                self._end(f"the registry refuses what this process holds: {reply.reason}")
                return False
            children = ()
        return True

    # ------------------------------------------------------------------ the rest

    def _end(self, why: str) -> None:
        self.system.crash(ActorCrashed(why), f"{self.system.config.name}'s membership")

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self.system.loop.create_task(work, name=name, context=fresh())
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.system.crash(task.exception(), task.get_name())

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
