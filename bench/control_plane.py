"""Asks and tells between two processes over ipc, beside the floor of blocking pipes measured in the same run.

`python bench/control_plane.py` prints one JSON object. Single times on a shared machine mean little: compare the ratios.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import uvloop

from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.system import ActorSystem

ASKS = 3_000
PIPELINED = 60_000
TELLS = 100_000
IN_FLIGHT = 64


class Score(msgspec.Struct, frozen=True, tag=True):
    version: int
    score: float


class Push(Message[Score], frozen=True):
    """About 64 bytes, as the usual control message."""

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


def serve(prefix: str, ready: Connection) -> None:
    async def main() -> None:
        async with ActorSystem(SystemConfig(name="server", ipc_prefix=prefix)) as system:
            await system.start(Server(), "server")
            ready.send("ready")
            await asyncio.to_thread(ready.recv)

    uvloop.run(main())


def echo(pipe: Connection) -> None:
    while (data := pipe.recv_bytes()) != b"end":
        pipe.send_bytes(data)


async def measure(prefix: str) -> dict[str, float]:
    message = Push(rollout="r-000123", step=1234, version=17, score=0.75)
    async with ActorSystem(SystemConfig(name="client", rendezvous=f"ipc://{prefix}")) as system:
        ref = system.ref("server")
        for _ in range(200):
            await ref.ask(message)
        times = []
        for _ in range(ASKS):
            start = time.perf_counter()
            await ref.ask(message)
            times.append(time.perf_counter() - start)

        async def worker(count: int) -> None:
            for _ in range(count):
                await ref.ask(message)

        start = time.perf_counter()
        await asyncio.gather(*(worker(PIPELINED // IN_FLIGHT) for _ in range(IN_FLIGHT)))
        pipelined = PIPELINED / (time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(TELLS):
            await ref.tell(message)
        await ref.ask(Drain(), deadline_s=60.0)
        tells = TELLS / (time.perf_counter() - start)
    return {"ask_p50_us": sorted(times)[len(times) // 2] * 1e6, "asks_per_s_64": pipelined, "tells_per_s": tells}


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dy-bench-") as path:
        ours, theirs = spawn.Pipe()
        server = spawn.Process(target=serve, args=(f"{path}/s.", theirs))
        server.start()
        ours.recv()
        result = uvloop.run(measure(f"{path}/s."))
        ours.send("end")
        server.join()
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=echo, args=(theirs,))
    server.start()
    times = []
    for _ in range(ASKS):
        start = time.perf_counter()
        ours.send_bytes(b"x" * 64)
        ours.recv_bytes()
        times.append(time.perf_counter() - start)
    ours.send_bytes(b"end")
    server.join()
    result["pipe_p50_us"] = sorted(times)[len(times) // 2] * 1e6
    result["ask_p50_over_pipe"] = result["ask_p50_us"] / result["pipe_p50_us"]
    json.dump({key: round(value, 1) for key, value in result.items()} | {"program": Path(__file__).name}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
