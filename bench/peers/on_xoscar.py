"""xoscar as a peer: its pool with one worker process, asked from the pool's main process; both on uvloop.
It gets the faster of a stateful and a stateless actor. `batch` is not used: 64 callers that know nothing of each other cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from bench.peers.driven import IN_FLIGHT, PAYLOAD, WARM

TRIAL = 300  # calls that decide which kind of actor is the faster one


@contextlib.contextmanager
def opened() -> Iterator[Xoscar]:
    import xoscar

    class Stateful(xoscar.Actor):
        async def push(self, data: bytes) -> bytes:
            return data

    class Stateless(xoscar.StatelessActor):
        async def push(self, data: bytes) -> bytes:
            return data

    async def start() -> tuple[Any, dict[str, Any]]:
        pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1, use_uvloop=True)
        worker = next(iter(pool.sub_processes))
        kinds = {"stateful": Stateful, "stateless": Stateless}
        return pool, {name: await xoscar.create_actor(kind, address=worker, uid=name) for name, kind in kinds.items()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pool, actors = runner.run(start())
        try:
            yield Xoscar(runner, actors)
        finally:
            runner.run(pool.stop())


class Xoscar:
    """See `driven.Side`."""

    def __init__(self, runner: asyncio.Runner, actors: dict[str, Any]) -> None:
        self.runner = runner
        times = {name: runner.run(_ask_p50(actor, TRIAL)) for name, actor in actors.items()}
        self.kind = min(times, key=lambda name: times[name])
        self.actor = actors[self.kind]

    def ask_p50(self, count: int) -> float:
        return self.runner.run(_ask_p50(self.actor, count))

    def asks_per_s(self, count: int) -> float:
        return self.runner.run(_asks_per_s(self.actor, count))

    def tells_per_s(self, count: int) -> float:
        return self.runner.run(_tells_per_s(self.actor, count))

    def notes(self, count: int) -> dict[str, Any]:
        return {"xoscar_actor": self.kind}


async def _ask_p50(actor: Any, count: int) -> float:
    for _ in range(min(count, WARM)):
        await actor.push(PAYLOAD)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        await actor.push(PAYLOAD)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


async def _asks_per_s(actor: Any, count: int) -> float:
    async def worker(calls: int) -> None:
        for _ in range(calls):
            await actor.push(PAYLOAD)

    async def all_of(calls: int) -> None:
        await asyncio.gather(*(worker(calls // IN_FLIGHT) for _ in range(IN_FLIGHT)))

    await all_of(2 * IN_FLIGHT)
    start = time.perf_counter()
    await all_of(count)
    return count / (time.perf_counter() - start)


async def _tells_per_s(actor: Any, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        await actor.push.tell(PAYLOAD)
    await actor.push(PAYLOAD)
    return count / (time.perf_counter() - start)
