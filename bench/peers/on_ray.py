"""Ray as a peer: a local cluster of its own for two cores, without dashboard, log forwarding or usage statistics.
It gets the fastest of an async, a plain and a threaded actor for each figure, found before anything counts. Leaves no process and no file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from bench.peers.driven import IN_FLIGHT, PAYLOAD, p50

TRIAL = 256  # calls that decide which kind of actor is the fastest one
STORE_BYTES = 100 << 20  # 64 bytes travel inside the call, so the object store is never used
GONE_S = 10.0  # Ray's processes end within this after its shutdown, or are killed


class Plain:
    def push(self, data: bytes) -> bytes:
        return data

    def drain(self) -> None:
        pass


class Async:
    async def push(self, data: bytes) -> bytes:
        return data

    async def drain(self) -> None:
        pass


@contextlib.contextmanager
def opened(directory: str) -> Iterator[Ray]:
    with cluster(directory, STORE_BYTES) as ray:
        yield Ray(ray)


@contextlib.contextmanager
def cluster(directory: str, store_bytes: int) -> Iterator[Any]:
    """The module `ray`, connected. ``directory``: for everything that it writes; short, because sockets are among it."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=directory, RAY_memory_monitor_refresh_ms="0")
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=store_bytes,
        _temp_dir=directory,
    )
    try:
        yield ray
    finally:
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        for process in psutil.wait_procs(started, GONE_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Ray:
    """See `driven.Side`."""

    def __init__(self, ray: Any) -> None:
        self.get = ray.get
        settings = {"plain": (Plain, {}), "threaded": (Plain, {"max_concurrency": IN_FLIGHT}), "async": (Async, {})}
        self.actors = {
            name: ray.remote(num_cpus=0)(kind).options(**options).remote() for name, (kind, options) in settings.items()
        }
        self.get([actor.drain.remote() for actor in self.actors.values()])
        measures: dict[str, Callable[[Any, int], float]] = {
            "ask_p50": lambda actor, count: 1 / self._ask_p50(actor, count),
            "asks_per_s": self._asks_per_s,
            "tells_per_s": self._tells_per_s,
        }
        self.best: dict[str, str] = {}
        for what, measure in measures.items():
            rates = {name: measure(actor, TRIAL) for name, actor in self.actors.items()}
            self.best[what] = max(rates, key=lambda name: rates[name])

    def ask_p50(self, count: int) -> float:
        return self._ask_p50(self.actors[self.best["ask_p50"]], count)

    def asks_per_s(self, count: int) -> float:
        return self._asks_per_s(self.actors[self.best["asks_per_s"]], count)

    def tells_per_s(self, count: int) -> float:
        return self._tells_per_s(self.actors[self.best["tells_per_s"]], count)

    def notes(self, count: int) -> dict[str, Any]:
        return {f"ray_actor_{what}": name for what, name in self.best.items()}

    def _ask_p50(self, actor: Any, count: int) -> float:
        get, push = self.get, actor.push
        return p50(lambda: get(push.remote(PAYLOAD)), count)

    def _asks_per_s(self, actor: Any, count: int) -> float:
        """Waves of `IN_FLIGHT`: answering them in one `get` is faster than replacing each as it comes."""
        get, push = self.get, actor.push
        get([push.remote(PAYLOAD) for _ in range(IN_FLIGHT)])
        start = time.perf_counter()
        for _ in range(count // IN_FLIGHT):
            get([push.remote(PAYLOAD) for _ in range(IN_FLIGHT)])
        return count // IN_FLIGHT * IN_FLIGHT / (time.perf_counter() - start)

    def _tells_per_s(self, actor: Any, count: int) -> float:
        push = actor.push
        start = time.perf_counter()
        for _ in range(count):
            push.remote(PAYLOAD)
        self.get(actor.drain.remote())
        return count / (time.perf_counter() - start)
