"""Ray's object store as a peer: put an array, have an actor hold it. Plasma is preallocated, so that no first touch of a page is counted.
Leaves no process and no file.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.peers import on_ray

STORE_FACTOR = 8  # room for objects whose end Ray has not yet noticed


class Consumer:
    def hold(self, array: np.ndarray) -> int:
        """Views of plasma, not copies: the argument is what Ray gives without asking."""
        import torch

        return int(torch.from_numpy(array)[-1])


@contextlib.contextmanager
def opened(directory: str, nbytes: int) -> Iterator[RayTensors]:
    os.environ.update(RAY_preallocate_plasma_memory="1")
    with on_ray.cluster(directory, max(STORE_FACTOR * nbytes, on_ray.STORE_BYTES)) as ray:
        yield RayTensors(ray, nbytes)


class RayTensors:
    def __init__(self, ray: Any, nbytes: int) -> None:
        self.ray = ray
        self.source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self.actor = ray.remote(num_cpus=0)(Consumer).remote()
        self.put_to_actor(2 * STORE_FACTOR)  # every page of the store was used

    def put_to_actor(self, count: int) -> float:
        """Seconds from `put` to the actor's answer, the median."""
        times = []
        for _ in range(count):
            started = time.perf_counter()
            ref = self.ray.put(self.source)
            self.ray.get(self.actor.hold.remote(ref))
            times.append(time.perf_counter() - started)
            del ref
        return statistics.median(times)
