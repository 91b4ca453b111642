"""An engine in a process of its own that generates without a pause but for the weights it is given.

It takes two published versions in turn, as a run does: bytes checked, copied into the live model, proved by a canary.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from dockyard_actors.config import Config
from dockyard_actors.engines.base import Engine, GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.roles.build import make_engine
from dockyard_actors.roles.messages import Canary
from dockyard_actors.roles.weight_load import take
from dockyard_actors.roles.weight_source import WeightSource
from dockyard_actors.transport.fdclient import FdClient
from dockyard_actors.transport.weights_shm import WeightReader, WeightRef

EVERY_S = 2.0  # between two updates, as the throughput figure says


@contextlib.contextmanager
def opened(
    config: Config, fd_path: str, published: Sequence[tuple[WeightRef, Canary]], groups: int, samples: int
) -> Iterator[Generating]:
    engine = make_engine(config)
    engine.start()
    source = WeightSource(WeightReader(FdClient(fd_path)))
    try:
        side = Generating(config, engine, source, published, groups, samples)
        side.update(canary=True)
        yield side
    finally:
        source.close()
        engine.close()


class Generating:
    def __init__(
        self,
        config: Config,
        engine: Engine,
        source: WeightSource,
        published: Sequence[tuple[WeightRef, Canary]],
        groups: int,
        samples: int,
    ) -> None:
        self.config, self.engine, self.source, self.published = config, engine, source, list(published)
        self.groups, self.samples = groups, samples
        self.new = config.generation.max_new_tokens
        self.sampling = SamplingConfig(max_new_tokens=self.new)
        self.prompt = np.frombuffer(published[0][1].ids, "<i4").astype(np.int32)
        sync = config.weight_sync.model_copy(update={"recompute_kv_cache": False})
        self.kept = config.model_copy(update={"weight_sync": sync})
        self.version = self.keys = 0
        self.live: dict[int, GroupOutput] = {}
        self.ended = 0  # tokens of groups that are done

    def update(self, canary: bool, kept: bool = False) -> float:
        """Takes the next version; returns for how many seconds nothing could be generated. kept: old keys and values stay."""
        self.version += 1
        ref, proof = self.published[self.version % len(self.published)]
        offer = msgspec.structs.replace(ref, version=self.version)
        config = self.kept if kept else self.config
        return take(self.engine, self.source, offer, proof if canary else None, config).paused_s

    def pauses(self, count: int) -> dict[str, float]:
        """Median seconds of `count` updates in mid-generation, with the canary and without, and of copying the same bytes."""
        source = self._bytes()
        target = np.ones_like(source)
        pauses: dict[str, list[float]] = {"canary": [], "bare": [], "memcpy": []}
        self._fill(self.groups)
        for _ in range(count):
            for name in ("canary", "bare"):
                self._step(self.groups)
                pauses[name].append(self.update(name == "canary"))
            start = time.perf_counter()
            np.copyto(target, source)
            pauses["memcpy"].append(time.perf_counter() - start)
        self._abort()
        return {name: statistics.median(found) for name, found in pauses.items()}

    def _bytes(self) -> np.ndarray:
        """As many as a version has."""
        with WeightReader(FdClient(self.published[0][0].fd_path)).open(self.published[0][0]) as views:
            return np.ones(sum(view.nbytes for view in views.values()), np.uint8)

    def rates(self, milliseconds: int) -> dict[str, dict[int, float]]:
        """Tokens a second without updates, with one every EVERY_S, and with one that leaves old keys and values, by sequences at once."""
        found: dict[str, dict[int, float]] = {"alone": {}, "synced": {}, "kept": {}}
        for groups in (self.groups // 4, self.groups):
            for side, rates in found.items():
                rates[groups * self.samples] = self._tokens_per_s(groups, milliseconds / 1e3, side)
        return found

    def _tokens_per_s(self, groups: int, seconds: float, side: str) -> float:
        self._fill(groups)
        for _ in range(4):
            self._step(groups)
        start = last = time.perf_counter()
        before = self._written()
        while (now := time.perf_counter()) - start < seconds:
            if side != "alone" and now - last >= EVERY_S:
                self.update(canary=True, kept=side == "kept")
                last = now
            self._step(groups)
        rate = (self._written() - before) / (time.perf_counter() - start)
        self._abort()
        return rate

    def notes(self, count: int) -> dict[str, Any]:
        return {"engine": self.config.generation.engine, "updates": self.version}

    def _fill(self, groups: int) -> None:
        while len(self.live) < groups:
            self.keys += 1
            seeds = tuple(range(self.keys * self.samples, (self.keys + 1) * self.samples))
            output = self.live[self.keys] = GroupOutput.allocate(self.samples, self.new)
            self.engine.submit(GroupRequest(self.keys, self.prompt, self.samples, seeds), output, self.sampling)

    def _step(self, groups: int) -> None:
        for result in self.engine.step():
            self.ended += int(self.live.pop(result.key).lengths.sum())
        self._fill(groups)

    def _written(self) -> int:
        return self.ended + sum(int(output.lengths.sum()) for output in self.live.values())

    def _abort(self) -> None:
        self.engine.abort()
        self.live.clear()
