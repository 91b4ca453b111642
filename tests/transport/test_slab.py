"""Shared slabs within one process: who may write, how long views last, and that nothing is left."""

from __future__ import annotations

import gc
import os
import resource
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dockyard_actors.transport.fdserver import FdServer
from dockyard_actors.transport.plane import ChecksumError, DataPlaneError, StaleRef
from dockyard_actors.transport.slab import SlabConfig, SlabPlane
from dockyard_actors.transport.torch_views import as_array, as_torch
from tests.transport.slab_peer import serving, wait_until

BLOCKS = 4
BLOCK = 64 << 10
FIELDS = {"x": ("float32", (8, 4)), "h": ("bfloat16", (6,))}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FdServer]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def plane(server: FdServer) -> Iterator[SlabPlane]:
    plane = SlabPlane(server.path, "trainer", SlabConfig(blocks=BLOCKS, block_bytes=BLOCK))
    yield plane
    plane.close()


def seal(plane: SlabPlane, value: float = 1.0):
    block = plane.try_alloc(FIELDS)
    assert block is not None
    as_torch(block.array("x")).fill_(value)
    as_torch(block.array("h")).copy_(torch.arange(6))
    return block.seal()


def test_torch_reads_and_writes_the_block_itself_without_a_warning(plane: SlabPlane) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ref = seal(plane, 2.5)
        fields = plane.get(ref, verify=True)
        x, h = as_torch(fields["x"]), as_torch(fields["h"])
    assert x.data_ptr() == fields["x"].ctypes.data
    assert h.dtype is torch.bfloat16
    assert h.tolist() == [0, 1, 2, 3, 4, 5]
    assert (x == 2.5).all()
    assert as_array(h).dtype == np.uint16
    assert as_array(h).ctypes.data == h.data_ptr()


@pytest.mark.parametrize(
    "escape",
    [
        lambda array: array,
        lambda array: array[1:, ::2],
        lambda array: array.view(np.int32).T,
        lambda array: memoryview(array),
        lambda array: as_torch(array),
        lambda array: as_torch(array).detach().view(torch.int32)[2],
        lambda array: as_torch(array).numpy(),
        lambda array: as_torch(array).flatten(),
    ],
    ids=["array", "slice", "dtype view", "memoryview", "tensor", "detached", "tensor's array", "flattened"],
)
def test_a_released_block_is_not_reused_while_any_view_of_it_lives(plane: SlabPlane, escape) -> None:
    ref = seal(plane)
    fields = plane.get(ref)
    escaped = escape(fields["x"])
    fields.release()
    del fields
    assert plane.release(ref)
    assert not plane.release(ref)
    with pytest.raises(StaleRef, match="DRAINING"):
        plane.get(ref)
    blocks = [plane.try_alloc(FIELDS) for _ in range(BLOCKS - 1)]
    assert all(block is not None for block in blocks)
    assert plane.try_alloc(FIELDS) is None
    assert plane.stats().draining == plane.stats().live_views == 1
    del escaped
    gc.collect()
    assert plane.stats().draining == plane.stats().live_views == 0
    assert plane.try_alloc(FIELDS) is not None


def test_a_block_without_views_is_free_at_once(plane: SlabPlane) -> None:
    ref = seal(plane)
    plane.get(ref)["x"].sum()
    assert plane.release(ref)
    assert plane.stats().free == BLOCKS


def test_a_copy_outlives_the_block(plane: SlabPlane) -> None:
    ref = seal(plane, 3.0)
    kept = as_torch(plane.get(ref)["x"]).clone()
    plane.release(ref)
    assert plane.stats().free == BLOCKS
    for _ in range(BLOCKS):
        seal(plane, 4.0)
    assert (kept == 3.0).all()


def test_views_outlive_a_closed_plane(server: FdServer) -> None:
    producer, reader = (SlabPlane(server.path, name, SlabConfig(BLOCKS, BLOCK)) for name in ("p", "r"))
    ref = seal(producer, 5.0)
    x = as_torch(reader.get(ref)["x"])
    assert reader.release(ref)
    reader.close()
    assert producer.stats().draining == 1
    assert (x == 5.0).all()
    del x
    assert producer.stats().free == BLOCKS
    producer.close()


def test_a_late_writer_is_caught_by_the_checksum(plane: SlabPlane) -> None:
    block = plane.try_alloc(FIELDS)
    assert block is not None
    escaped = as_torch(block.array("x"))
    escaped.fill_(1.0)
    ref = block.seal()
    plane.get(ref, verify=True)
    escaped[3, 1] = 1.0001  # torch knows no read-only tensors
    with pytest.raises(ChecksumError, match=f"arena {ref.arena}: xxh3"):
        plane.get(ref, verify=True)


def test_without_checksums_there_is_nothing_to_verify(server: FdServer) -> None:
    plane = SlabPlane(server.path, "p", SlabConfig(BLOCKS, BLOCK, checksum=False))
    ref = seal(plane)
    plane.get(ref)
    with pytest.raises(DataPlaneError, match="checksum off"):
        plane.get(ref, verify=True)
    plane.close()


def test_a_closed_plane_refuses(server: FdServer) -> None:
    plane = SlabPlane(server.path, "p", SlabConfig(BLOCKS, BLOCK))
    ref = seal(plane)
    block = plane.try_alloc(FIELDS)
    assert block is not None
    plane.close()
    with pytest.raises(DataPlaneError, match="closed"):
        plane.get(ref)
    with pytest.raises(DataPlaneError, match="closed"):
        plane.try_alloc(FIELDS)
    with pytest.raises(DataPlaneError, match="closed"):
        block.seal()
    block.abort()


def test_a_plane_that_only_reads_makes_no_arena(server: FdServer, plane: SlabPlane) -> None:
    ref = seal(plane)
    reader = SlabPlane(server.path, "buffer", SlabConfig(BLOCKS, BLOCK))
    assert reader.release(ref)
    assert reader.stats().arenas == 0
    assert server.stats().arenas == 1
    reader.close()


def test_ten_thousand_cycles_grow_neither_descriptors_nor_memory(plane: SlabPlane) -> None:
    def cycle(value: float) -> None:
        block = plane.try_alloc(FIELDS)
        assert block is not None
        block.array("x")[...] = value
        ref = block.seal()
        with plane.get(ref, verify=True) as fields:
            assert fields["x"][0, 0] == value
            tensor = as_torch(fields["x"])
        assert plane.release(ref)
        del tensor

    def footprint() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        return len(os.listdir("/proc/self/fd")), resident

    for number in range(500):
        cycle(float(number))
    descriptors, resident = footprint()
    for number in range(10_000):
        cycle(float(number))
    now_descriptors, now_resident = footprint()
    assert now_descriptors == descriptors
    assert now_resident - resident < 2 << 20  # 10,000 leaked objects of any kind would be more
    stats = plane.stats()
    assert (stats.free, stats.live_views, stats.attached) == (BLOCKS, 0, 1)


def test_arenas_that_come_and_go_leave_no_descriptor_and_no_mapping(server: FdServer) -> None:
    def mappings() -> int:
        gc.collect()
        with open("/proc/self/maps") as file:
            return sum("dockyard-" in line for line in file)

    reader = SlabPlane(server.path, "reader", SlabConfig(BLOCKS, BLOCK))
    before = len(os.listdir("/proc/self/fd")), mappings()
    for _ in range(20):
        producer = SlabPlane(server.path, "p", SlabConfig(BLOCKS, BLOCK))
        ref = seal(producer)
        reader.get(ref).release()
        producer.close()
        assert reader.release(ref)
    wait_until(lambda: (len(os.listdir("/proc/self/fd")), mappings()) == before)  # the last hang-up is the server's
    assert server.stats().arenas == 0
    reader.close()
    assert not [name for name in os.listdir("/dev/shm") if "dockyard" in name]


def test_reading_64_mib_costs_a_fraction_of_copying_it(server: FdServer) -> None:
    nbytes = 64 << 20
    plane = SlabPlane(server.path, "p", SlabConfig(blocks=1, block_bytes=nbytes, checksum=False))
    block = plane.try_alloc({"x": ("uint8", (nbytes,))})
    assert block is not None
    block.array("x")[...] = 1
    ref = block.seal()
    target = np.ones(nbytes, np.uint8)
    plane.get(ref)

    def seconds(work) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    reads = min(seconds(lambda: plane.get(ref)["x"][-1]) for _ in range(5))
    copies = min(seconds(lambda: np.copyto(target, plane.get(ref)["x"])) for _ in range(5))
    assert reads < copies / 10
    plane.close()
