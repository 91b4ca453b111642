"""Our side: an actor system with one actor in a process, and another system that asks it, over ipc or tcp.
A message is a struct of about 64 bytes with a typed reply, encoded, checked and decoded on both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import uvloop

from bench.peers.driven import IN_FLIGHT, SPAWN, START_S, WARM
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.ref import Ref
from dockyard_actors.runtime.system import ActorSystem


class Score(msgspec.Struct, frozen=True, tag=True):
    version: int
    score: float


class Push(Message[Score], frozen=True):
    rollout: str
    step: int
    version: int
    score: float


class Drain(Message[int], frozen=True):
    pass


class Server(Actor):
    def __init__(self) -> None:
        self.count = 0

    async def push(self, msg: Push) -> Score:
        self.count += 1
        return Score(msg.version, msg.score)

    async def drain(self, msg: Drain) -> int:
        return self.count


MESSAGE = Push(rollout="r-000123", step=1234, version=17, score=0.75)


def serve(config: SystemConfig, pipe: Connection) -> None:
    async def main() -> None:
        async with ActorSystem(config) as system:
            await system.start(Server(), "server")
            address = system.transport.address
            pipe.send(f"ipc://{address.ipc}" if address.ipc else address.tcp[1])
            await asyncio.to_thread(pipe.recv)

    uvloop.run(main())


@contextlib.contextmanager
def opened(server: SystemConfig, client: dict[str, Any]) -> Iterator[Dockyard]:
    """``client``: settings of the asking system beside its name and rendezvous."""
    pipe, end = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(server, end))
    process.start()
    try:
        if not pipe.poll(START_S):
            raise TimeoutError(f"no actor system within {START_S:.0f} s")
        config = SystemConfig(name="client", rendezvous=pipe.recv(), **client)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            system = ActorSystem(config)
            runner.run(system.__aenter__())
            try:
                yield Dockyard(runner, system.ref("server"))
            finally:
                runner.run(system.close())
        pipe.send("end")
        process.join(START_S)
    finally:
        process.kill()
        process.join()


class Dockyard:
    """See `driven.Side`."""

    def __init__(self, runner: asyncio.Runner, ref: Ref) -> None:
        self.runner, self.ref = runner, ref

    def ask_p50(self, count: int) -> float:
        return self.runner.run(self._ask_p50(count))

    def asks_per_s(self, count: int) -> float:
        return self.runner.run(self._asks_per_s(count))

    def tells_per_s(self, count: int) -> float:
        return self.runner.run(self._tells_per_s(count))

    def notes(self, count: int) -> dict[str, Any]:
        return {}

    async def _ask_p50(self, count: int) -> float:
        ref = self.ref
        for _ in range(min(count, WARM)):
            await ref.ask(MESSAGE)
        times = []
        for _ in range(count):
            start = time.perf_counter()
            await ref.ask(MESSAGE)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    async def _asks_per_s(self, count: int) -> float:
        async def worker(calls: int) -> None:
            for _ in range(calls):
                await self.ref.ask(MESSAGE)

        async def all_of(calls: int) -> None:
            await asyncio.gather(*(worker(calls // IN_FLIGHT) for _ in range(IN_FLIGHT)))

        await all_of(2 * IN_FLIGHT)
        start = time.perf_counter()
        await all_of(count)
        return count / (time.perf_counter() - start)

    async def _tells_per_s(self, count: int) -> float:
        ref = self.ref
        start = time.perf_counter()
        for _ in range(count):
            await ref.tell(MESSAGE)
        await ref.ask(Drain(), deadline_s=60.0)
        return count / (time.perf_counter() - start)
