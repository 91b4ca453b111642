"""An actor system: the actors of one process, their way to the rest of the run, and the process's place in the registry.

It promises that every ask ends (reply, typed error or deadline), that deaths are told as soon as the registry knows, and that
closing leaves nothing behind. It knows nothing of what actors do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime import guard
from dockyard_actors.runtime.actor import Actor, Birth, Death, Unresponsive, handlers_of, schema_of, urgent_of
from dockyard_actors.runtime.caller import Caller
from dockyard_actors.runtime.cell import Cell
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.deadlines import Deadlines
from dockyard_actors.runtime.directory import Directory, Entry, Gone, ProcessRecord, died
from dockyard_actors.runtime.errors import ActorCrashed, ActorError, NameTaken, RegistryDown, SystemClosed, UnknownName
from dockyard_actors.runtime.membership import Membership, enrol
from dockyard_actors.runtime.message import encoder
from dockyard_actors.runtime.parts import part_bytes
from dockyard_actors.runtime.reception import Reception
from dockyard_actors.runtime.ref import Ref
from dockyard_actors.runtime.registry import (
    REGISTRY,
    REGISTRY_CONTROL,
    DirectoryUpdate,
    Leave,
    Lookup,
    Register,
    Registered,
    Registry,
    Unregister,
)
from dockyard_actors.runtime.scope import fresh
from dockyard_actors.runtime.service import Service
from dockyard_actors.runtime.status import CRASH_CODE, Counts, DeadLetter, StopRequest, SystemStats, SystemStatus
from dockyard_actors.runtime.waits import Wait
from dockyard_actors.transport.base import (
    Address,
    ControlConfig,
    ControlTransport,
    Lane,
    Receiver,
    load_keys,
    open_control,
)

log = logging.getLogger("dockyard.runtime.system")

DEAD_LETTERS = 100  # the newest ones are kept to be looked at
OpenTransport = Callable[[ControlConfig, Receiver], ControlTransport]


class ActorSystem:
    """``async with ActorSystem(config) as system``: opens sockets, joins (or hosts) the registry; leaves at exit.

    At exit of the block it raises ActorCrashed when an actor's own task had failed and nothing else is being raised.
    """

    def __init__(
        self, config: SystemConfig | None = None, *, is_agent: bool = False, transport: OpenTransport = open_control
    ) -> None:
        """``transport`` opens the control transport: ZMQ, or a simulated network (`runtime.testing`)."""
        self.config = config or SystemConfig()
        self._open_transport = transport
        self.directory = Directory()
        self.gone = Gone()
        self.counts = Counts()
        self.registry: Registry | None = None  # when hosted here
        self.membership: Membership | None = None  # else
        self.former: dict[str, set[int]] = {}  # incarnations under which actors that live were known before
        self.on_update: Callable[[DirectoryUpdate], None] | None = None  # the node agent listens here
        self._is_agent = is_agent
        self.cells: dict[str, Cell] = {}
        self._watchers: dict[str, dict[Cell, None]] = {}  # by name, in the order in which they are told
        self._starting: dict[str, Actor] = {}  # those whose names are being registered
        self._giving_up: dict[str, asyncio.Task[None]] = {}  # names whose start failed before the registry's answer
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._full: set[Service] = set()
        self._dead_letters: deque[DeadLetter] = deque(maxlen=DEAD_LETTERS)
        self._own_dir: Path | None = None
        self._own_meta: dict[str, str] | None = None
        self._closing = self._joined = False
        self._close_task: asyncio.Task[None] | None = None
        self.watching_handlers = False
        self.pongs: dict[int, asyncio.Future[None]] = {}
        self._last_ping = 0

    # ------------------------------------------------------------------ opening

    if not TYPE_CHECKING:  # a type checker is to go on seeing which attributes there are

        def __getattr__(self, name: str) -> object:
            if name in ("caller", "loop", "transport", "_reception", "_stop"):
                raise SystemClosed(
                    "this actor system is not open: `async with ActorSystem(...) as system:`, and in it what needs it"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def __aenter__(self) -> ActorSystem:
        self.loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[StopRequest] = self.loop.create_future()
        self.deadlines = Deadlines()
        self._reception = Reception(self)
        config = self.config
        keys = load_keys(Path(config.key_file)) if config.key_file else None
        if config.rendezvous and not config.ipc_prefix:
            self._own_dir = Path(tempfile.mkdtemp(prefix="dy-"))
            config = self.config = dataclasses.replace(config, ipc_prefix=f"{self._own_dir}/")
        self.transport = self._open_transport(config.control(keys), self._reception)
        self.caller = Caller(self)
        try:
            await self.transport.start()
            self.process = ProcessRecord(
                config.uid,
                config.name,
                os.getpid(),
                self.transport.address.host,
                self.transport.address,
                config.agent,
                self._is_agent,
            )
            if config.rendezvous:
                self.membership = Membership(self)
                await self.membership.join()
            else:
                await self._host_registry()
            self._joined = True
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        if error is None and self._stop.done() and self._stop.result().cause is not None:
            stop = self._stop.result()
            raise ActorCrashed(f"{self.config.name}: {stop.reason}") from stop.cause

    async def _host_registry(self) -> None:
        config = self.config
        self.registry = Registry(
            self.process,
            self._push,
            lease_s=config.lease_s,
            settle_s=config.settle_s,
            part_bytes=part_bytes(config.max_frame_bytes),
        )
        entry = Entry(REGISTRY, 1, config.uid, self.transport.address, config.window, REGISTRY_CONTROL, self._meta())
        self.directory.apply(entry)
        self.registry.entries[REGISTRY] = entry
        self.cells[REGISTRY] = cell = Cell(self, self.registry, REGISTRY, 1, handlers_of(Registry))
        cell.serve()

    # ------------------------------------------------------------------ actors

    async def start(self, actor: Actor, name: str, meta: dict[str, str] | None = None) -> Ref:
        """Registers the name, runs `on_start`, then serves messages. Raises NameTaken, or what `on_start` raised.

        ``meta`` is kept by the registry beside pid, host and agent and is seen by everyone.
        """
        self._refuse(actor, name)
        if self._closing:
            raise SystemClosed(f"{self.config.name}: the actor system is closed")
        table = handlers_of(type(actor))
        if name in self._giving_up:
            raise NameTaken(f"an earlier start of {name!r} was given up a moment ago, and its name still is: try again")
        if name in self.cells or name in self._reception.early:
            raise NameTaken(
                f"{self.config.name} runs an actor called {name!r} already: stop it first, or choose another name"
            )
        urgent = urgent_of(type(actor))
        register = Register(
            name=name,
            uid=self.config.uid,
            window=self.config.window,
            window_bytes=self.config.window_bytes,
            control=urgent,
            meta=self._meta(meta),
        )
        self._reception.expect(name)  # the first messages may overtake the registry's answer: another connection
        self._starting[name] = actor
        try:
            reply = await enrol(self, register)
        except BaseException:
            self._give_up(name)
            raise
        finally:
            del self._starting[name]
        if not isinstance(reply, Registered):
            self._reception.give_up(name)
            raise NameTaken(f"cannot register {name!r}: {reply.reason}")
        cell = self.cells[name] = Cell(self, actor, name, reply.incarnation, table)
        if log.isEnabledFor(logging.INFO):
            log.info("%s#%d starts, schema %s", name, reply.incarnation, schema_of(type(actor)))
        self._take_entry(
            Entry(
                name,
                reply.incarnation,
                self.config.uid,
                self.transport.address,
                self.config.window,
                urgent,
                register.meta,
                window_bytes=self.config.window_bytes,
            )
        )
        self._reception.admit(name)
        try:
            await actor.on_start()
        except BaseException:
            await self._withdraw(cell, "on_start failed")
            raise
        cell.serve()
        return self.ref(name)

    def _refuse(self, actor: Actor, name: str) -> None:
        if not isinstance(actor, Actor):
            given = f"the class {actor.__name__}" if isinstance(actor, type) else f"a {type(actor).__name__}"
            raise TypeError(f"start({name!r}) takes an instance of an Actor's subclass, not {given}")
        before = getattr(actor, "ctx", None)
        known = [before.name] if before is not None and before.running else []
        known += [other for other, starting in self._starting.items() if starting is actor]
        if known:
            raise ValueError(
                f"this {type(actor).__name__} runs as {known[0]!r} already and cannot be {name!r} as well: start another instance"
            )

    async def stop(self, name: str, cause: str = "stopped") -> None:
        """Stops one actor in order: refuses what waits, lets the handler at work end, runs `on_stop`. Who asks again waits for the same
        stop; it goes on when who asked is cancelled. Asked by the actor itself it returns at once: its handler has to end first."""
        cell = self.cells.get(name)
        if cell is None:
            raise UnknownName(f"{self.config.name} runs no actor called {name!r}")
        task = self._stopping.get(name)
        if task is None:
            task = self.loop.create_task(self._stop_cell(cell, cause), name=f"stop {name}", context=fresh())
            self._stopping[name] = task
            task.add_done_callback(lambda _: self._stopping.pop(name, None))
        if not cell.runs(asyncio.current_task()):
            await asyncio.shield(task)

    async def _stop_cell(self, cell: Cell, cause: str) -> None:
        try:
            await cell.stop()
        finally:
            await self._withdraw(cell, cause)

    def _give_up(self, name: str) -> None:
        """The start of an actor failed before the registry's answer came: it may have registered the name all the same."""
        self._reception.give_up(name)
        if self._joined and not self._closing:
            self._giving_up[name] = self.loop.create_task(self._disown(name), name=f"give up {name}", context=fresh())

    async def _disown(self, name: str) -> None:
        message = Unregister(name=name, incarnation=0, cause="its start was given up", uid=self.config.uid)
        try:
            await self.ref(REGISTRY).ask(message, deadline_s=self.config.registry_s)
        except ActorError as error:
            log.info("could not give up the name %s: %s", name, error)
        finally:
            del self._giving_up[name]

    async def _withdraw(self, cell: Cell, cause: str) -> None:
        self.cells.pop(cell.name, None)
        if cell.service is not None:
            cell.service.refuse_all()
            self.room_in(cell.service)
        cell.abandon()
        self.former.pop(cell.name, None)
        for watchers in self._watchers.values():
            watchers.pop(cell, None)
        if cell.name != REGISTRY and self._joined and not self._closing:  # at close one Leave stands for all names
            message = Unregister(name=cell.name, incarnation=cell.incarnation, cause=cause, uid=self.config.uid)
            try:
                await self.ref(REGISTRY).ask(message, deadline_s=self.config.registry_s)
            except ActorError as error:  # the registry is gone before us: the next one will hear that we do not have it
                log.info("could not unregister %s: %s", cell.name, error)
                entry = self.directory.alive(cell.name)
                if entry is not None and entry.incarnation == cell.incarnation:
                    self.take(DirectoryUpdate((died(entry, cause, clean=True),)))

    def ref(self, name: str, *, owner: str | None = None, incarnation: int | None = None) -> Ref:
        return Ref(self.caller, name, owner or self.config.name, incarnation)

    def watch(self, name: str, cell: Cell) -> None:
        self._watchers.setdefault(name, {})[cell] = None
        entry = self.directory.entries.get(name)
        if entry is not None:
            self._tell_watcher(cell, entry)

    def _tell_watcher(self, cell: Cell, entry: Entry) -> None:
        if not entry.alive:
            cell.event("on_death", Death(entry.name, entry.incarnation, entry.cause, entry.clean))
        elif type(cell.actor).on_birth is not Actor.on_birth:
            cell.event("on_birth", Birth(entry.name, entry.incarnation, entry.meta))

    def _meta(self, more: dict[str, str] | None = None) -> dict[str, str]:
        if more is not None and not (
            isinstance(more, dict) and all(isinstance(part, str) for pair in more.items() for part in pair)
        ):
            raise TypeError(f"meta is a dict of text to text, which everybody can read, not {more!r}")
        if self._own_meta is None:
            self._own_meta = {
                "pid": str(os.getpid()),
                "host": socket.gethostname(),
                "process": self.config.name,
                "agent": self.config.agent,
            }
        return {**more, **self._own_meta} if more else self._own_meta  # shared by most actors of a process

    # ------------------------------------------------------------------ ending

    def request_stop(self, reason: str, exit_code: int = 0) -> None:
        """Asks the process to end in order; the first request counts."""
        if not self._stop.done():
            self._stop.set_result(StopRequest(reason, exit_code))

    def crash(self, error: BaseException | None, where: str) -> None:
        """The process cannot go on: the first cause is kept for whoever waits in `wait_stop`."""
        if self._stop.done():
            log.error("after the stop was requested, %s failed: %r", where, error, exc_info=error)
            return
        log.critical("%s crashed: %r", where, error, exc_info=error)
        self._stop.set_result(StopRequest(f"{where} crashed", CRASH_CODE, error))

    async def wait_stop(self) -> StopRequest:
        """Resolves when the process was asked to end or has crashed."""
        return await asyncio.shield(self._stop)

    async def close(self) -> None:
        """Stops actors (last started first), leaves the registry, closes sockets. Errors of `on_stop` are logged.

        Every caller returns when it is done. One that is cancelled ends the stopping of actors and the farewell, and still returns only
        when everything is closed.
        """
        if self._close_task is None:
            self._closing = True
            self._close_task = self.loop.create_task(self._close(), name=f"{self.config.name}/close")
        task = self._close_task
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            raise
        if not task.cancelled():
            task.result()

    async def _close(self) -> None:
        try:
            await self._stop_actors_and_leave()
        finally:
            try:
                if self.membership is not None:
                    await self.membership.close()
                if REGISTRY in self.cells:
                    await self.cells.pop(REGISTRY).stop()
            finally:
                for cell in self.cells.values():  # when the stopping was cut short
                    cell.abandon()
                if self.registry is not None:
                    self.registry.close()
                self.caller.close()
                self.deadlines.close()
                try:
                    await self.transport.close()
                finally:
                    if self._own_dir is not None:
                        shutil.rmtree(self._own_dir, ignore_errors=True)

    async def _stop_actors_and_leave(self) -> None:
        crashed = self._stop.done() and self._stop.result().cause is not None
        for name, cell in reversed(list(self.cells.items())):
            if name == REGISTRY:
                continue
            if crashed:
                cell.abandon()
                continue
            try:
                await self.stop(name)
            except Exception:
                log.exception("stopping %s failed", name)
        if self._joined and self.membership is not None and not crashed and not self.membership.down:
            try:
                await self.ref(REGISTRY).ask(Leave(uid=self.config.uid), deadline_s=self.config.registry_s)
            except ActorError as error:
                log.info("could not say goodbye to the registry: %s", error)

    # ------------------------------------------------------------------ views

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def primary(self) -> ProcessRecord:
        """The process of the registry: the primary node agent."""
        known = self.membership.registry if self.membership is not None else None
        return known or self.process

    def waits(self) -> list[Wait]:
        """Who in this process waits for whom, for what and for how long; the oldest first."""
        return self.caller.waits()

    @contextlib.contextmanager
    def waiting(self, owner: str, peer: str, what: str, deadline_s: float) -> Iterator[None]:
        """Shows a wait that is not an ask (data plane, engine) among `waits()`; whoever waits keeps the deadline itself."""
        with self.caller.waiting(owner, peer, "", what, self.loop.time() + deadline_s):
            yield

    def stats(self) -> SystemStats:
        actors = {name: cell.status() for name, cell in self.cells.items() if cell.service is not None}
        depth = {name: actor.mailbox + actor.control for name, actor in actors.items()}
        busy = {name: f"{actor.busy} {actor.busy_s:.1f}s" for name, actor in actors.items() if actor.busy}
        return SystemStats(
            **msgspec.structs.asdict(self.counts),
            **self.transport.counters(),
            mailboxes=depth,
            busy=busy,
            deadlines=len(self.deadlines),
        )

    def status(self) -> SystemStatus:
        held = guard.current()
        return SystemStatus(
            self.config.name,
            os.getpid(),
            self.stats(),
            tuple(self.waits()),
            held[1] if held else "",
            {name: cell.status() for name, cell in self.cells.items()},
            tuple(self._dead_letters),
        )

    # ------------------------------------------------------------------ inside the runtime

    def dead_letter(self, text: str) -> None:
        self.counts.dead_letters += 1
        self._dead_letters.append(DeadLetter(time.time(), text))
        log.warning("dead letter: %s", text)

    def watch_handlers(self) -> None:
        """A serial handler is at work: whether it still is after slow_handler_s is looked at until none is."""
        self.watching_handlers = True
        self.loop.call_later(self.config.slow_handler_s, self._look_at_handlers)

    def _look_at_handlers(self) -> None:
        self.watching_handlers = False
        services = [cell.service for cell in self.cells.values() if cell.service is not None and cell.service.busy]
        for service in services:
            service.warn_when_slow()
        if services and not self._closing:
            self.watch_handlers()

    def no_room_in(self, service: Service) -> None:
        """A mailbox is full although every sender kept to its window: stop reading requests until it is half empty."""
        self._full.add(service)
        self.transport.pause(Lane.USER, True)

    def room_in(self, service: Service) -> None:
        if service in self._full:
            self._full.discard(service)
            if not self._full:
                self.transport.pause(Lane.USER, False)

    def ping(self, address: Address) -> asyncio.Future[None]:
        """Resolves when the loop of the process at ``address`` answers; the caller bounds the wait."""
        self._last_ping = seq = self._last_ping + 1
        pong = self.pongs[seq] = self.loop.create_future()
        pong.add_done_callback(lambda _: self.pongs.pop(seq, None))
        self.transport.connect(address).send(Lane.CONTROL, encoder.encode(wire.Ping(seq)))
        return pong

    def hang_up(self, address: Address) -> None:
        """Closes the connection that pings made."""
        self.transport.disconnect(self.transport.connect(address))

    def push(self, address: Address, update: DirectoryUpdate) -> None:
        """Tells a process what the registry knows (or that the registry is gone)."""
        tell = wire.Tell(wire.SYSTEM, 0, REGISTRY, "DirectoryUpdate", wire.raw(update))
        self.transport.connect(address).send(Lane.CONTROL, encoder.encode(tell))

    def take(self, update: DirectoryUpdate) -> None:
        """The directory changed: what waits for the dead fails now, and watchers are told."""
        membership = self.membership
        if membership is not None and not membership.accepts(update):
            return
        if self.on_update is not None:
            self.on_update(update)
        for uid, cause in update.gone.items():
            if uid == self.config.uid:
                self.crash(ActorCrashed(f"the registry declared this process dead: {cause}"), self.config.name)
                return
            self.gone.add(uid, cause)
            self.caller.on_gone(uid, cause)
            for cell in self.cells.values():
                if cell.service is not None:
                    cell.service.process_gone(uid)
            self.transport.forget(uid)
            if membership is not None and membership.registry is not None and uid == membership.registry.uid:
                membership.lost(cause)
        for entry in update.entries:
            self._take_entry(entry)
        for process, cause in update.ended.items():
            self.directory.end(process, cause)
        for uid, silent_s in update.suspects.items():
            for name, cells in self._watchers.items():
                entry = self.directory.alive(name)
                if entry is not None and entry.uid == uid:
                    for cell in cells:
                        cell.event("on_unresponsive", Unresponsive(name, entry.incarnation, silent_s))

    def _take_entry(self, entry: Entry) -> None:
        before = self.directory.alive(entry.name)
        if not self.directory.apply(entry):
            return
        watchers = tuple(self._watchers.get(entry.name, ()))
        if not entry.alive:
            self.caller.on_entry_dead(entry)
        elif before is not None and before.uid == entry.uid:
            self._renumber(before, entry)
        elif before is not None:  # its death was never told: the registry was gone meanwhile
            self.caller.on_entry_dead(before)
            for cell in watchers:
                self._tell_watcher(cell, died(before, f"incarnation {entry.incarnation} has taken its place"))
        for cell in watchers:
            self._tell_watcher(cell, entry)

    def _renumber(self, before: Entry, entry: Entry) -> None:
        """The same actor under a higher incarnation, given by a registry that was started anew; messages for the old one still count."""
        self.caller.on_renumbered(before, entry)
        cell = self.cells.get(entry.name)
        if cell is not None and entry.uid == self.config.uid and cell.incarnation < entry.incarnation:
            self.former.setdefault(entry.name, set()).add(cell.incarnation)
            cell.incarnation = cell.actor.ctx.incarnation = entry.incarnation

    async def lookup(self, name: str, deadline: float) -> Entry | None:
        deadline = min(deadline, self.loop.time() + self.config.registry_s)
        if self.membership is not None:
            try:
                reply = await self.membership.ask(Lookup(name=name), f"look up {name!r}", deadline)
            except RegistryDown as error:
                known = self.directory.entries.get(name)  # it may have become known in another way
                if known is None:
                    raise RegistryDown(f"{name!r} is not known here: {error}") from None
                return known
        else:
            reply = await self.ref(REGISTRY).ask(Lookup(name=name), deadline_s=max(0.0, deadline - self.loop.time()))
        if isinstance(reply, Entry):
            self.directory.apply(reply)
            return self.directory.entries[name]
        return None

    def _push(self, process: ProcessRecord, update: DirectoryUpdate | None, last: bool) -> None:
        """The hosted registry's voice: tells a process what changed."""
        if process.uid == self.config.uid:
            if update is not None:
                self.take(update)
            return
        if update is not None:
            self.push(process.address, update)
        if last:
            self.hang_up(process.address)
