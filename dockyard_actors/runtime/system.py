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

import msgspec

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime import guard
from dockyard_actors.runtime.actor import Actor, Death, handlers_of, schema_of, urgent_of
from dockyard_actors.runtime.caller import Caller
from dockyard_actors.runtime.cell import Cell
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.deadlines import Deadlines
from dockyard_actors.runtime.directory import Directory, Entry, ProcessRecord
from dockyard_actors.runtime.errors import ActorCrashed, ActorError, NameTaken, ProtocolRefused
from dockyard_actors.runtime.message import encoder, reply_decoder
from dockyard_actors.runtime.reception import Reception
from dockyard_actors.runtime.ref import Ref
from dockyard_actors.runtime.registry import (
    REGISTRY,
    DirectoryUpdate,
    Join,
    Joined,
    Leave,
    Lookup,
    Refused,
    Register,
    Registered,
    Registry,
    Unregister,
)
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
    parse_rendezvous,
)

log = logging.getLogger("dockyard.runtime.system")

DEAD_LETTERS = 100  # the newest ones are kept to be looked at
OpenTransport = Callable[[ControlConfig, Receiver], ControlTransport]

_REGISTRY_CONTROL = tuple(
    sorted(handlers_of(Registry))
)  # the registry's messages are all control messages, known before any directory is


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
        self.gone: dict[str, str] = {}  # uid → cause, of dead processes
        self.counts = Counts()
        self.registry: Registry | None = None  # when hosted here
        self.on_update: Callable[[DirectoryUpdate], None] | None = None  # the node agent listens here
        self._is_agent = is_agent
        self.cells: dict[str, Cell] = {}
        self._watchers: dict[str, set[Cell]] = {}
        self._full: set[Service] = set()
        self._dead_letters: deque[DeadLetter] = deque(maxlen=DEAD_LETTERS)
        self._own_dir: Path | None = None
        self._own_meta: dict[str, str] | None = None
        self._closing = self._joined = False
        self.watching_handlers = False
        self.pongs: dict[int, asyncio.Future[None]] = {}
        self._last_ping = 0

    # ------------------------------------------------------------------ opening

    async def __aenter__(self) -> ActorSystem:
        self.loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[StopRequest] = self.loop.create_future()
        self.deadlines = Deadlines()
        self._reception = Reception(self)
        config = self.config
        keys = load_keys(config.key_file) if config.key_file else None
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
                await self._join()
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
        self.registry = Registry(self.process, self._push)
        entry = Entry(
            REGISTRY, 1, self.config.uid, self.transport.address, self.config.window, _REGISTRY_CONTROL, self._meta()
        )
        self.directory.apply(entry)
        self.registry.entries[REGISTRY] = entry
        self.cells[REGISTRY] = cell = Cell(self, self.registry, REGISTRY, 1, handlers_of(Registry))
        cell.serve()

    async def _join(self) -> None:
        address = parse_rendezvous(self.config.rendezvous)
        door = Entry(
            REGISTRY, 0, "rendezvous", address, self.config.window, _REGISTRY_CONTROL
        )  # incarnation 0: whichever is there
        deadline = self.loop.time() + self.config.join_s
        body = await self.caller.ask_entry(door, self.config.name, Join(process=self.process), deadline)
        reply: Joined | Refused = reply_decoder(Join)(body)
        self.caller.on_gone("rendezvous", "joined")  # from here on the registry is an actor like any other
        self.gone.clear()
        if isinstance(reply, Refused):
            raise ProtocolRefused(f"{self.config.name} may not join {self.config.rendezvous}: {reply.reason}")
        self.primary = reply.registry
        for entry in reply.entries:
            self.directory.apply(entry)

    # ------------------------------------------------------------------ actors

    async def start(self, actor: Actor, name: str, meta: dict[str, str] | None = None) -> Ref:
        """Registers the name, runs `on_start`, then serves messages. Raises NameTaken, or what `on_start` raised.

        ``meta`` is kept by the registry beside pid, host and agent and is seen by everyone.
        """
        table = handlers_of(type(actor))
        if name in self.cells or name in self._reception.early:
            raise NameTaken(f"{self.config.name} runs an actor called {name!r} already")
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
        try:
            if self.registry is not None:
                reply = await self.registry.register(register)
            else:
                reply = await self.ref(REGISTRY).ask(register, deadline_s=self.config.registry_s)
        except BaseException:
            self._reception.give_up(name)
            raise
        if not isinstance(reply, Registered):
            self._reception.give_up(name)
            raise NameTaken(f"cannot register {name!r}: {reply.reason}")
        cell = self.cells[name] = Cell(self, actor, name, reply.incarnation, table)
        if log.isEnabledFor(logging.INFO):
            log.info("%s#%d starts, schema %s", name, reply.incarnation, schema_of(type(actor)))
        self.directory.apply(
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

    async def stop(self, name: str, cause: str = "stopped") -> None:
        """Stops one actor in order: refuses what waits, lets the handler at work end, runs `on_stop`."""
        cell = self.cells[name]
        try:
            await cell.stop()
        finally:
            await self._withdraw(cell, cause)

    async def _withdraw(self, cell: Cell, cause: str) -> None:
        self.cells.pop(cell.name, None)
        cell.abandon()
        if cell.name != REGISTRY and self._joined and not self._closing:  # at close one Leave stands for all names
            message = Unregister(name=cell.name, incarnation=cell.incarnation, cause=cause)
            try:
                await self.ref(REGISTRY).ask(message, deadline_s=self.config.registry_s)
            except ActorError as error:  # the registry may be gone before us, which says the same
                log.info("could not unregister %s: %s", cell.name, error)

    def ref(self, name: str, *, owner: str | None = None, incarnation: int | None = None) -> Ref:
        return Ref(self.caller, name, owner or self.config.name, incarnation)

    def watch(self, name: str, cell: Cell) -> None:
        self._watchers.setdefault(name, set()).add(cell)
        entry = self.directory.entries.get(name)
        if entry is not None and not entry.alive:
            cell.event("on_death", Death(name, entry.incarnation, entry.cause, entry.clean))

    def _meta(self, more: dict[str, str] | None = None) -> dict[str, str]:
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
        """Stops actors (last started first), leaves the registry, closes sockets. Errors of `on_stop` are logged."""
        if self._closing:
            return
        self._closing = True
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
        if self._joined and self.registry is None and not crashed:
            try:
                await self.ref(REGISTRY).ask(Leave(uid=self.config.uid), deadline_s=self.config.registry_s)
            except ActorError as error:
                log.info("could not say goodbye to the registry: %s", error)
        if REGISTRY in self.cells:
            await self.cells.pop(REGISTRY).stop()
        self.caller.close()
        self.deadlines.close()
        await self.transport.close()
        if self._own_dir is not None:
            shutil.rmtree(self._own_dir, ignore_errors=True)

    # ------------------------------------------------------------------ views

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
        if self.on_update is not None:
            self.on_update(update)
        for uid, cause in update.gone.items():
            if uid == self.config.uid:
                self.crash(ActorCrashed(f"the registry declared this process dead: {cause}"), self.config.name)
                return
            self.gone[uid] = cause
            self.caller.on_gone(uid, cause)
            for cell in self.cells.values():
                if cell.service is not None:
                    cell.service.process_gone(uid)
            self.transport.forget(uid)
        for entry in update.entries:
            if self.directory.apply(entry) and not entry.alive:
                self.caller.on_entry_dead(entry)
                for cell in self._watchers.get(entry.name, ()):
                    cell.event("on_death", Death(entry.name, entry.incarnation, entry.cause, entry.clean))

    async def lookup(self, name: str, deadline: float) -> Entry | None:
        reply = await self.ref(REGISTRY).ask(
            Lookup(name=name), deadline_s=min(self.config.registry_s, max(0.0, deadline - self.loop.time()))
        )
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
