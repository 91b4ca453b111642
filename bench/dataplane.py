"""Tensors from one process to another: in place and with one copy, beside memcpy and Ray's object store.

A handover ends when the consumer holds torch tensors and has said so. In place, the producer's writing is not counted, as it would
have written somewhere; with one copy, arrays that exist already are put. Checksums are off on all sides; details have ours with them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from bench.harness import Figures, Options, absent, figure, missing_peer, note
from bench.peers import across_hosts, tensors_on_ray
from bench.peers.driven import SPAWN, Driven
from dockyard_actors.transport.plane import TensorRef
from dockyard_actors.transport.slab import SlabConfig, SlabPlane

MIB = 1 << 20
ANSWER_S = 60.0  # one handover takes milliseconds; a consumer that hangs is an error


class Size(NamedTuple):
    small: int  # bytes of the 64 MiB keys
    large: int  # bytes of the 256 MiB key
    ours: int  # handovers a round
    peers: int
    pulls: int  # from another host, a round and side
    idle_s: float


SIZES = {"full": Size(64 * MIB, 256 * MIB, 20, 8, 8, 5.0), "tiny": Size(MIB, 2 * MIB, 3, 2, 2, 0.2)}
Rounds = dict[str, list[float]]  # side → seconds of a handover, the median of each round


def run(options: Options) -> Figures:
    size = SIZES[options.size]
    reason = missing_peer("ray") if options.peers == "all" else "left out: --peers none"
    with tempfile.TemporaryDirectory(prefix="dy-d-") as path, contextlib.ExitStack() as stack:
        os.chmod(path, 0o700)
        server = stack.enter_context(across_hosts.served(Path(path)))
        ours = stack.enter_context(_Handover.opened(server.path, size.small, checked=False))
        checked = stack.enter_context(_Handover.opened(server.path, size.small, checked=True))
        large = stack.enter_context(_Handover.opened(server.path, size.large, checked=False))
        source = np.random.default_rng(0).integers(0, 256, size.small, np.uint8)
        target = np.ones_like(source)
        sides: dict[str, Callable[[int], float]] = {
            "in place": lambda count: _p50(ours.in_place, count),
            "in place, large": lambda count: _p50(large.in_place, count),
            "in place, checked": lambda count: _p50(checked.in_place, count),
            "one copy": lambda count: _p50(lambda: ours.copied(source), count),
            "one copy, checked": lambda count: _p50(lambda: checked.copied(source), count),
            "memcpy": lambda count: _p50(lambda: _timed(lambda: np.copyto(target, source)), count),
        }
        if reason is None:
            note("  starting a Ray cluster")
            ray = stack.enter_context(Driven("ray", tensors_on_ray.opened, f"{path}/ray", size.small))
            sides["ray"] = lambda count: ray.call("put_to_actor", count)
        rounds: Rounds = {name: [] for name in sides}
        for name, side in sides.items():
            side(size.peers)  # every page was touched, every store is warm
            note(f"  warmed {name}")
        for number in range(options.rounds):
            for name, side in sides.items():
                rounds[name].append(side(size.peers if name == "ray" else size.ours))
            note(
                f"  round {number + 1}: " + ", ".join(f"{name} {_ms(found[-1:])} ms" for name, found in rounds.items())
            )
    figures = _figures(rounds, size, reason)
    return figures | _across_hosts(options, size)


def _figures(rounds: Rounds, size: Size, no_ray: str | None) -> Figures:
    times = {side: _ms(found) for side, found in rounds.items()}
    figures: Figures = {
        "inplace_64mib_ms_p50": figure(
            statistics.median(rounds["in place"]) * 1e3,
            "ms",
            bytes=size.small,
            with_checksums_of_both_sides_ms=times["in place, checked"],
        ),
        "inplace_256mib_ms_p50": figure(
            statistics.median(rounds["in place, large"]) * 1e3, "ms", bytes=size.large, rounds=len(rounds["in place"])
        ),
        "onecopy_64mib_vs_memcpy": figure(
            _ratio(rounds["memcpy"], rounds["one copy"]),
            "x",
            ms=times,
            with_checksums=round(_ratio(rounds["memcpy"], rounds["one copy, checked"]), 3),
        ),
    }
    for key, side in (("inplace_speedup_vs_warm_ray", "in place"), ("onecopy_speedup_vs_warm_ray", "one copy")):
        if no_ray is not None:
            figures[key] = absent("x", no_ray)
        else:
            with_checksums = round(_ratio(rounds["ray"], rounds[f"{side}, checked"]), 2)
            figures[key] = figure(
                _ratio(rounds["ray"], rounds[side]), "x", ray_ms=times["ray"], with_checksums_of_ours=with_checksums
            )
    return figures


def _across_hosts(options: Options, size: Size) -> Figures:
    no_ucx = None if importlib.util.find_spec("ucxx") else "ucxx is not installed: make setup EXTRAS=ucx"
    note("  pulling from another host")
    rounds, idle, path = across_hosts.measured(size.small, options.rounds, size.pulls, size.idle_s, no_ucx is None)
    floor = rounds["blocking loop"]
    detail = {
        "ms": {side: _ms(found) for side, found in rounds.items()},
        "tcp_backend_vs_blocking_tcp": round(_ratio(floor, rounds["tcp"]), 3),
        "path": path,
        "bytes": size.small,
    }
    if no_ucx is not None or idle is None:
        without = absent("x", str(no_ucx))
        without["detail"] |= detail
        return {"ucx_vs_blocking_tcp_64mib": without, "ucx_idle_cpu_pct": absent("%", str(no_ucx))}
    return {
        "ucx_vs_blocking_tcp_64mib": figure(_ratio(floor, rounds["ucx"]), "x", **detail),
        "ucx_idle_cpu_pct": figure(idle, "%", seconds=size.idle_s, of="both ends, one with a receive pending"),
    }


class _Handover:
    """This process produces into one block, another consumes."""

    def __init__(self, fd_path: str, nbytes: int, checked: bool, pipe: Connection) -> None:
        config = SlabConfig(blocks=1, block_bytes=nbytes, checksum=checked)
        self._plane = SlabPlane(fd_path, "producer", config)
        self._plane.prepare()
        self._fields = {"x": ("uint8", (nbytes,))}
        self._pipe = pipe

    @classmethod
    @contextlib.contextmanager
    def opened(cls, fd_path: str, nbytes: int, checked: bool) -> Iterator[_Handover]:
        pipe, end = SPAWN.Pipe()
        consumer = SPAWN.Process(target=_consume, args=(end, fd_path, checked))
        consumer.start()
        end.close()  # so that a dead consumer is an end of file
        handover = cls(fd_path, nbytes, checked, pipe)
        try:
            yield handover
            pipe.send_bytes(b"")
            consumer.join(ANSWER_S)
        finally:
            handover._plane.close()
            consumer.kill()
            consumer.join()

    def in_place(self) -> float:
        """Seconds from a written block to the consumer's word that it holds the tensor."""
        block = self._plane.try_alloc(self._fields)
        assert block is not None
        block.array("x")[:: 1 << 16] += 1  # what was produced in place, in short
        return self._hand_over(lambda: block.seal())

    def copied(self, source: np.ndarray) -> float:
        """The same from an array that exists already."""

        def put() -> TensorRef:
            block = self._plane.try_alloc(self._fields)
            assert block is not None
            block.array("x")[...] = source
            return block.seal()

        return self._hand_over(put)

    def _hand_over(self, seal: Callable[[], TensorRef]) -> float:
        started = time.perf_counter()
        ref = seal()
        self._pipe.send_bytes(msgspec.msgpack.encode(ref))
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"the consumer said nothing for {ANSWER_S} s")
        self._pipe.recv_bytes()
        seconds = time.perf_counter() - started
        self._pipe.send_bytes(b"release")
        self._pipe.recv_bytes()
        return seconds


def _consume(pipe: Connection, fd_path: str, verify: bool) -> None:
    from dockyard_actors.transport.torch_views import as_torch

    plane = SlabPlane(fd_path, "consumer")
    while data := pipe.recv_bytes():
        ref = msgspec.msgpack.decode(data, type=TensorRef)
        tensor = as_torch(plane.get(ref, verify=verify)["x"])
        pipe.send_bytes(bytes([int(tensor[-1])]))
        assert pipe.recv_bytes() == b"release"
        plane.release(ref)
        del tensor
        pipe.send_bytes(b"released")
    plane.close()


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _p50(seconds: Callable[[], float], count: int) -> float:
    return statistics.median(seconds() for _ in range(count))


def _ratio(slow: list[float], fast: list[float]) -> float:
    """Median over the rounds of the two times of the same round."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)
