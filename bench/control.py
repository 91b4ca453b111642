"""Asks and tells between two processes over ipc, beside two floors: a blocking pair of ZMQ sockets and a blocking pipe.

The floors do what no actor runtime can do without: one message there, one back, nobody else served meanwhile.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
import uvloop
import zmq

from bench.harness import Figures, Options, figure
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.ref import Ref
from dockyard_actors.runtime.system import ActorSystem

IN_FLIGHT = 64
PAYLOAD = b"x" * 64
FLOOR_WAIT_MS = 60_000  # a floor's other end that died is an error, not a benchmark that hangs


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


def echo_pipe(pipe: Connection) -> None:
    while (data := pipe.recv_bytes()) != b"end":
        pipe.send_bytes(data)


def echo_pair(path: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(path)
        while (data := socket.recv()) != b"end":
            socket.send(data)


def run(options: Options) -> Figures:
    """`ask_p50_over_pair_floor`; asks and tells a second are for orientation."""
    asks, pipelined, tells = (3_000, 60_000, 100_000) if options.size == "full" else (50, 128, 200)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dy-bench-") as path, zmq.Context() as context:
        pipe, pipe_end = spawn.Pipe()
        ours, ours_end = spawn.Pipe()
        pair = context.socket(zmq.PAIR)
        pair.setsockopt(zmq.LINGER, 0)
        pair.setsockopt(zmq.RCVTIMEO, FLOOR_WAIT_MS)
        pair.bind(f"ipc://{path}/pair")
        servers = [
            spawn.Process(target=serve, args=(f"{path}/s.", ours_end)),
            spawn.Process(target=echo_pipe, args=(pipe_end,)),
            spawn.Process(target=echo_pair, args=(f"ipc://{path}/pair",)),
        ]
        for server in servers:
            server.start()
        try:
            ours.recv()

            def over_pipe() -> None:
                pipe.send_bytes(PAYLOAD)
                pipe.recv_bytes()

            def over_pair() -> None:
                pair.send(PAYLOAD)
                pair.recv()

            figures = uvloop.run(
                measure(f"{path}/s.", options.rounds, asks, pipelined, tells, {"pair": over_pair, "pipe": over_pipe})
            )
            ours.send("end")
            pipe.send_bytes(b"end")
            pair.send(b"end")
            for server in servers:
                server.join()
        finally:
            for server in servers:
                server.kill()
            pair.close()
    return figures


async def measure(
    prefix: str, rounds: int, asks: int, pipelined: int, tells: int, floors: dict[str, Callable[[], None]]
) -> Figures:
    p50: dict[str, list[float]] = {"ours": [], **{name: [] for name in floors}}
    rates: dict[str, list[float]] = {"asks": [], "tells": []}
    async with ActorSystem(SystemConfig(name="client", rendezvous=f"ipc://{prefix}")) as system:
        ref = system.ref("server")
        await ask_p50(ref, 200)
        for _ in range(rounds):
            p50["ours"].append(await ask_p50(ref, asks))
            for name, exchange in floors.items():
                p50[name].append(floor_p50(exchange, asks))
        for _ in range(rounds):
            rates["asks"].append(await asks_per_s(ref, pipelined))
            rates["tells"].append(await tells_per_s(ref, tells))
    over = {name: statistics.median(a / b for a, b in zip(p50["ours"], p50[name], strict=True)) for name in floors}
    return {
        "ask_p50_over_pair_floor": figure(
            over["pair"],
            "x",
            over_pipe=round(over["pipe"], 2),
            p50_us={name: round(statistics.median(times) * 1e6, 1) for name, times in p50.items()},
            asks_per_s_64_in_flight=round(statistics.median(rates["asks"])),
            tells_per_s=round(statistics.median(rates["tells"])),
            rounds=rounds,
        )
    }


MESSAGE = Push(rollout="r-000123", step=1234, version=17, score=0.75)


async def ask_p50(ref: Ref, count: int) -> float:
    """Seconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        await ref.ask(MESSAGE)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def floor_p50(exchange: Callable[[], None], count: int) -> float:
    """Seconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


async def asks_per_s(ref: Ref, count: int) -> float:
    async def worker() -> None:
        for _ in range(count // IN_FLIGHT):
            await ref.ask(MESSAGE)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return count / (time.perf_counter() - start)


async def tells_per_s(ref: Ref, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        await ref.tell(MESSAGE)
    await ref.ask(Drain(), deadline_s=60.0)
    return count / (time.perf_counter() - start)
