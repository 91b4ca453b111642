"""Simulated processes: a registry, and any number of actor systems that are started, killed, stopped and started again.

Each is a real ActorSystem on the simulated network. Whoever is killed says no goodbye; the registry hears of it a moment later, as from
a node agent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.runtime.registry import Registry
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.runtime.testing.network import Faults, SimNetwork, SimTransport

Build = Callable[[ActorSystem], Awaitable[None]]
REGISTRY_PREFIX = "/simulated/registry."


class Killed(Exception):
    """What ends a simulated process."""


class Process:
    """One start of a process."""

    def __init__(self, name: str, start: int, system: ActorSystem, build: Build | None) -> None:
        self.name, self.start, self.system, self.build = name, start, system, build
        self.alive = True
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def uid(self) -> str:
        return self.system.config.uid

    @property
    def transport(self) -> SimTransport:
        transport = self.system.transport
        assert isinstance(transport, SimTransport)
        return transport

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that dies with the process."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class World:
    """``async with World(seed) as world``. ``config``: settings of every process."""

    def __init__(
        self, seed: int, faults: Faults | None = None, config: SystemConfig | None = None, detect_s: float = 0.05
    ) -> None:
        self.random = random.Random(f"world {seed}")
        self.network = SimNetwork(seed, faults)
        self.detect_s = detect_s  # from a death to the registry's hearing of it
        self.processes: dict[str, Process] = {}
        self._config = config or SystemConfig(retry_every_s=0.5, registry_s=1.0, join_s=1.0, probe_s=0.5)
        self._starts: dict[str, int] = {}
        self._reports: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> World:
        self.home = await self._open("registry", "", REGISTRY_PREFIX, None)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._reports:
            task.cancel()
        for process in [*self.processes.values(), self.home]:
            if process.alive:
                await self._bury(process)

    @property
    def registry(self) -> Registry:
        registry = self.home.system.registry
        assert registry is not None
        return registry

    async def start(self, name: str, build: Build | None = None) -> Process:
        """Starts a process and, in it, whatever ``build`` starts; tries until the network lets it."""
        while True:
            start = self._starts[name] = self._starts.get(name, 0) + 1
            process = None
            try:
                process = await self._open(name, f"ipc://{REGISTRY_PREFIX}", f"/simulated/{name}.{start}.", build)
                self.processes[name] = process
                if build is not None:
                    await build(process.system)
                return process
            except ActorError:
                if process is not None:
                    await self.kill(process)

    async def _open(self, name: str, rendezvous: str, prefix: str, build: Build | None) -> Process:
        start = self._starts.setdefault(name, 1)
        config = dataclasses.replace(
            self._config, name=name, uid=f"{name}.{start}", rendezvous=rendezvous, ipc_prefix=prefix
        )
        system = ActorSystem(config, transport=self.network.open)
        await system.__aenter__()
        return Process(name, start, system, build)

    async def kill(self, process: Process) -> None:
        """SIGKILL: it vanishes with everything in it; the registry hears of it ``detect_s`` later."""
        if not process.alive:
            return
        await self._bury(process)
        task = asyncio.ensure_future(self._report(process.uid))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def restart(self, process: Process) -> Process:
        """Kills it and starts it again."""
        await self.kill(process)
        return await self.start(process.name, process.build)

    async def _bury(self, process: Process) -> None:
        process.alive = False
        self.network.crash(process.uid)
        await process.end_tasks()
        process.system.crash(Killed(process.uid), process.name)
        await process.system.close()

    async def _report(self, uid: str) -> None:
        await asyncio.sleep(self.detect_s)
        self.registry.declare_dead(uid, "killed (simulated)")
