"""Our runtime at scale: many idle actors in one process, and one process with many connected peers that say nothing.
Each is measured in processes of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench.peers.driven import SPAWN, START_S
from bench.peers.on_dockyard import Drain, Server
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.ref import collect
from dockyard_actors.runtime.system import ActorSystem

PEER_PROCESSES = 4  # the links' other ends share them
SETTLE_S = 1.0  # what connecting started has ended by then


class Idle(Actor):
    pass


class Spawned(NamedTuple):
    """rss, pss: bytes by which the process grew."""

    seconds: float
    rss: int
    pss: int


def spawned(actors: int) -> Spawned:
    """Starts so many actors in a new process that has an actor system already."""
    return _in_new_process(_spawn, actors)


def _spawn(pipe: Connection, actors: int) -> None:
    async def main() -> Spawned:
        async with ActorSystem() as system:
            await system.start(Idle(), "first")  # its class has been looked at
            rss, pss = _memory()
            start = time.perf_counter()
            for number in range(actors):
                await system.start(Idle(), f"a{number}")
            seconds = time.perf_counter() - start
            after = _memory()
            return Spawned(seconds, after[0] - rss, after[1] - pss)

    pipe.send(uvloop.run(main()))


def _memory() -> tuple[int, int]:
    """(RSS, PSS) of this process in bytes."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in lines[1:]}
    return sizes["Rss:"], sizes["Pss:"]


def idle_cpu_pct(links: int, seconds: float) -> float:
    """Processor time, in percent of a core, of a process that is connected with ``links`` others both ways and says nothing.

    A third process hosts the registry. The others are actor systems with sockets of their own in `PEER_PROCESSES` processes.
    """
    with tempfile.TemporaryDirectory(prefix="dy-bench-") as path, contextlib.ExitStack() as stack:

        def started(work, *args) -> Connection:
            pipe, end = SPAWN.Pipe()
            process = SPAWN.Process(target=work, args=(end, *args))
            process.start()
            stack.callback(process.join)
            stack.callback(pipe.close)  # which tells it to end
            end.close()
            return pipe

        rendezvous = f"ipc://{path}/r."
        _hear(started(_registry, f"{path}/r."))
        role = started(_role, rendezvous)
        _hear(role)
        shares = [links // PEER_PROCESSES + (number < links % PEER_PROCESSES) for number in range(PEER_PROCESSES)]
        for number, share in enumerate(shares):
            _hear(started(_peers, rendezvous, number, share))
        role.send(links)
        _hear(role)
        time.sleep(SETTLE_S)
        role.send("begin")
        before, start = _hear(role), time.perf_counter()
        time.sleep(seconds)
        role.send("end")
        after, end = _hear(role), time.perf_counter()
        return 100 * (after - before) / (end - start)


def _registry(pipe: Connection, prefix: str) -> None:
    async def main() -> None:
        async with ActorSystem(SystemConfig(name="primary", ipc_prefix=prefix)):
            await _until_told(pipe)

    uvloop.run(main())


def _role(pipe: Connection, rendezvous: str) -> None:
    async def main() -> None:
        async with ActorSystem(SystemConfig(name="role", rendezvous=rendezvous)) as system:
            await system.start(Server(), "role")
            pipe.send("ready")
            links = await asyncio.to_thread(pipe.recv)
            counts = await collect([system.ref(f"peer{number}") for number in range(links)], Drain())
            if counts != [0] * links:
                raise RuntimeError(f"not every peer answered: {counts}")
            pipe.send("connected")
            for _ in ("begin", "end"):
                await asyncio.to_thread(pipe.recv)
                pipe.send(time.process_time())
            with contextlib.suppress(EOFError):
                await asyncio.to_thread(pipe.recv)

    uvloop.run(main())


def _peers(pipe: Connection, rendezvous: str, number: int, share: int) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for index in range(share):
                name = f"peer{number + index * PEER_PROCESSES}"
                system = await stack.enter_async_context(ActorSystem(SystemConfig(name=name, rendezvous=rendezvous)))
                await system.start(Server(), name)
                await system.ref("role").ask(Drain())
            await _until_told(pipe)

    uvloop.run(main())


async def _until_told(pipe: Connection) -> None:
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        await asyncio.to_thread(pipe.recv)


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(START_S):
        raise TimeoutError(f"no process within {START_S:.0f} s")
    return pipe.recv()


def _in_new_process(work, *args) -> Spawned:
    pipe, end = SPAWN.Pipe()
    process = SPAWN.Process(target=work, args=(end, *args))
    process.start()
    end.close()
    try:
        if not pipe.poll(START_S):
            raise TimeoutError(f"no result within {START_S:.0f} s")
        return pipe.recv()
    finally:
        process.join()
        pipe.close()
