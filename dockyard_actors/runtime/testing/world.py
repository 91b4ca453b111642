"""Simulated processes: a registry, and any number of actor systems that are started, killed, stopped and started again.

Each is a real ActorSystem on the simulated network. Whoever is killed runs nothing more, not even a ``finally``, and says no goodbye; the
registry hears of it a moment later, as from a node agent. Who is told to end, or crashes, ends in order as a role process does.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import random
from collections.abc import Coroutine
from typing import Any

from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.runtime.process import Build
from dockyard_actors.runtime.registry import Registry
from dockyard_actors.runtime.status import StopRequest
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.runtime.testing.clock import VirtualLoop, here
from dockyard_actors.runtime.testing.network import Faults, SimNetwork, SimTransport

REGISTRY_PREFIX = "/simulated/registry."


class Process:
    """One start of a process. ended_at: simulated seconds when it had ended, by whatever; stop: why, when it ended by itself."""

    def __init__(self, name: str, start: int, build: Build | None) -> None:
        self.name, self.start, self.build = name, start, build
        self.uid = f"{name}.{start}"
        self.system: ActorSystem
        self.stop: StopRequest | None = None
        self.told_at: float | None = None  # when it knew that it was to end
        self.ended_at: float | None = None
        self.held: list[tuple[float, float]] = []  # when it was stopped: from, to (inf: still)
        self.context = contextvars.copy_context()
        self.context.run(here.set, self)

    def __repr__(self) -> str:
        return self.uid

    @property
    def alive(self) -> bool:
        return self.ended_at is None

    @property
    def transport(self) -> SimTransport:
        transport = self.system.transport
        assert isinstance(transport, SimTransport)
        return transport

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """A task of this process, which stops and dies with it."""
        task = asyncio.get_running_loop().create_task(work, context=self.context.copy())
        task.set_name(f"{self.uid}/{name or task.get_name()}")
        return task


class World:
    """``async with World(seed) as world``, in `run`. ``config``: settings of every process."""

    def __init__(
        self, seed: int, faults: Faults | None = None, config: SystemConfig | None = None, detect_s: float = 0.05
    ) -> None:
        self.random = random.Random(f"world {seed}")
        self.network = SimNetwork(seed, faults)
        self.detect_s = detect_s  # from a death to the registry's hearing of it
        self.processes: dict[str, Process] = {}  # the newest start of each, living or not
        self.all: dict[str, Process] = {}  # by uid, of every start
        self._config = config or SystemConfig(
            retry_every_s=0.5, registry_s=1.0, join_s=1.0, probe_s=0.5, lease_s=3.0, rejoin_s=1.0, settle_s=2.0
        )
        self._reports: set[asyncio.Task[None]] = set()
        self._home: asyncio.Future[Process]

    async def __aenter__(self) -> World:
        self._home = asyncio.get_running_loop().create_future()
        await self.start_registry()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._reports:
            task.cancel()
        for process in [*self.processes.values(), *([self.home] if self._home.done() else [])]:
            if process.alive:
                self._vanish(process)

    @property
    def home(self) -> Process:
        """The registry's process."""
        return self._home.result()

    @property
    def registry(self) -> Registry:
        registry = self.home.system.registry
        assert registry is not None
        return registry

    # ------------------------------------------------------------------ starts

    async def start_registry(self) -> None:
        process = self._new("registry", None)
        await self._open(process, "", REGISTRY_PREFIX)
        assert process.system.registry is not None
        process.system.registry.epoch = process.start  # not from the clock
        self._home.set_result(process)

    async def start(self, name: str, build: Build | None = None) -> Process:
        """Starts a process and, in it, whatever ``build`` starts, which gets its actor system as in `main_process`; tries until the
        network lets it."""
        while True:
            process = self._new(name, build)
            try:
                await self._open(process, f"ipc://{REGISTRY_PREFIX}", f"/simulated/{process.uid}.")
                if build is not None:
                    await process.spawn(self._build(build, process), "build")
            except ActorError:
                await self.kill(process)
                await asyncio.sleep(self.detect_s)
            else:
                self.processes[name] = process
                return process

    async def _build(self, build: Build, process: Process) -> None:
        await build(process.system)

    def _new(self, name: str, build: Build | None) -> Process:
        start = 1 + sum(process.name == name for process in self.all.values())
        process = Process(name, start, build)
        self.all[process.uid] = process
        return process

    async def _open(self, process: Process, rendezvous: str, prefix: str) -> None:
        config = dataclasses.replace(
            self._config, name=process.name, uid=process.uid, rendezvous=rendezvous, ipc_prefix=prefix
        )
        process.system = ActorSystem(config, transport=self.network.open)
        await process.spawn(process.system.__aenter__(), "open")
        process.spawn(self._end_in_order(process), "main")

    async def _end_in_order(self, process: Process) -> None:
        process.stop = await process.system.wait_stop()
        loop = asyncio.get_running_loop()
        process.told_at = loop.time()
        await process.system.close()
        process.ended_at = loop.time()
        loop.call_soon(self._vanish, process, context=contextvars.Context())
        if process is not self.home:
            self._report(process, process.stop.reason)

    # ------------------------------------------------------------------ ends

    async def kill(self, process: Process) -> None:
        """SIGKILL: it vanishes with everything in it; the registry hears of it ``detect_s`` later."""
        if process.alive:
            self._vanish(process)
            self._report(process, "killed (simulated)")

    def declare_dead(self, process: Process, cause: str) -> None:
        """The registry is told that it is dead, which need not be so."""
        self.home.context.copy().run(self.registry.declare_dead, process.uid, cause)

    async def restart(self, process: Process) -> Process:
        """Kills it and starts it again."""
        await self.kill(process)
        return await self.start(process.name, process.build)

    async def kill_registry(self) -> None:
        """Its process vanishes; `start_registry` starts the next one, at the same address."""
        home, self._home = self.home, asyncio.get_running_loop().create_future()
        self._vanish(home)

    async def revive(self) -> None:
        """Starts everybody again who has ended, as node agents do."""
        for process in list(self.processes.values()):
            if not process.alive:
                await self.start(process.name, process.build)

    def hold(self, process: Process) -> None:
        """SIGSTOP: nothing in it runs, and what arrives waits."""
        if process.alive and not process.transport.dead:
            process.held.append((asyncio.get_running_loop().time(), float("inf")))
            process.transport.hold(True)
            _loop().hold(process)

    def release(self, process: Process) -> None:
        """SIGCONT."""
        if process.alive and process.held and process.held[-1][1] == float("inf"):
            process.held[-1] = (process.held[-1][0], asyncio.get_running_loop().time())
            _loop().release(process)
            process.transport.hold(False)

    def _vanish(self, process: Process) -> None:
        if process.ended_at is None:
            process.ended_at = asyncio.get_running_loop().time()
        self.network.crash(process.uid)
        _loop().hold(process)

    def _report(self, process: Process, cause: str) -> None:
        async def report() -> None:
            await asyncio.sleep(self.detect_s)
            await asyncio.shield(self._home)  # a node agent that cannot tell it now tells it later
            self.declare_dead(process, cause)

        task = asyncio.get_running_loop().create_task(report(), context=contextvars.Context())
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "a World lives in simulated time: use `run`"
    return loop
