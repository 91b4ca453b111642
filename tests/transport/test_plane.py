"""The data plane's contract, the same for shared slabs and for plain memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dockyard_actors.transport.fdserver import FdServer
from dockyard_actors.transport.plane import (
    DTYPES,
    ArenaFull,
    BlockTooLarge,
    ChecksumError,
    DataPlane,
    LocalPlane,
    MalformedRef,
    ReleasedFields,
    StaleRef,
    TensorRef,
    TornBlock,
    WrongHost,
)
from dockyard_actors.transport.slab import SlabConfig, SlabPlane
from tests.transport.slab_peer import serving

BLOCKS = 4
BLOCK = 64 << 10
WAIT_S = 20.0  # far beyond what a free block takes to arrive
FULL_S = 0.02  # a deadline that is meant to pass
SMALL = {"x": ("int32", (3, 2)), "y": ("float32", (5,))}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FdServer]:
    with serving(tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture(params=["slab", "local"])
def plane(request: pytest.FixtureRequest, server: FdServer) -> Iterator[DataPlane]:
    if request.param == "slab":
        plane = SlabPlane(server.path, "rollout-0", SlabConfig(blocks=BLOCKS, block_bytes=BLOCK))
    else:
        plane = LocalPlane("rollout-0", BLOCKS, BLOCK)
    yield plane
    plane.close()


def seal(plane: DataPlane, value: int = 7) -> TensorRef:
    block = plane.try_alloc(SMALL)
    assert block is not None
    block.array("x")[...] = value
    block.array("y")[...] = value / 2
    return block.seal()


def test_both_planes_are_data_planes(plane: DataPlane) -> None:
    assert isinstance(plane, DataPlane)


_shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
_layouts = st.dictionaries(
    st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(sorted(DTYPES)), _shapes), max_size=6
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=_layouts, data=st.data())
def test_any_fields_come_back_byte_for_byte(plane: DataPlane, fields: dict, data: st.DataObject) -> None:
    block = plane.try_alloc(fields)
    assert block is not None
    written = {}
    with block:  # a draw may end the example early
        for name, (dtype, shape) in fields.items():
            array = block.array(name)
            assert array.dtype == DTYPES[dtype]
            assert array.shape == shape
            assert array.ctypes.data % 64 == 0 or not array.nbytes
            raw = np.frombuffer(data.draw(st.binary(min_size=array.nbytes, max_size=array.nbytes)), np.uint8)
            array[...] = (raw % 2 if dtype == "bool" else raw).view(array.dtype).reshape(shape)
            written[name] = array.tobytes()
        ref = msgspec.msgpack.decode(msgspec.msgpack.encode(block.seal()), type=TensorRef)
    with plane.get(ref, verify=True) as got:
        assert list(got) == list(fields)
        assert {name: array.tobytes() for name, array in got.items()} == written
        assert all(not array.flags.writeable for array in got.values())
    del got
    assert plane.release(ref)
    assert plane.stats().free == BLOCKS


def test_selected_fields_are_the_only_ones(plane: DataPlane) -> None:
    ref = seal(plane)
    assert list(plane.get(ref, select_fields=["y"])) == ["y"]
    with pytest.raises(KeyError, match="no field 'z'; the ref has x, y"):
        plane.get(ref, select_fields=["z"])


async def test_put_copies_arrays_that_exist_already(plane: DataPlane) -> None:
    ref = await plane.put({"ids": np.arange(6, dtype=np.int64)}, deadline_s=WAIT_S)
    assert plane.get(ref)["ids"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="dtype float64"):
        await plane.put({"ids": np.zeros(3)}, deadline_s=WAIT_S)


def test_a_second_release_does_nothing_even_when_the_block_is_in_use_again(plane: DataPlane) -> None:
    refs = [seal(plane) for _ in range(BLOCKS)]
    assert plane.release(refs[0])
    assert not plane.release(refs[0])
    again = seal(plane, 9)
    assert again.block == refs[0].block
    assert not plane.release(refs[0])
    assert plane.get(again, verify=True)["x"][0, 0] == 9


def test_a_ref_of_an_earlier_generation_is_refused(plane: DataPlane) -> None:
    refs = [seal(plane) for _ in range(BLOCKS)]
    fields = plane.get(refs[0])
    fields.check()
    fields.release()
    gc.collect()
    plane.release(refs[0])
    with pytest.raises(StaleRef):
        plane.get(refs[0])
    seal(plane)
    with pytest.raises(StaleRef, match=f"generation {refs[0].generation + 1}, not {refs[0].generation}"):
        plane.get(refs[0])


def test_a_reader_can_tell_that_its_block_was_released_under_it(plane: DataPlane) -> None:
    ref = seal(plane)
    fields = plane.get(ref)
    plane.release(ref)
    with pytest.raises(StaleRef):
        fields.check()


def test_fields_refuse_after_their_release(plane: DataPlane) -> None:
    fields = plane.get(seal(plane))
    fields.release()
    fields.release()
    with pytest.raises(ReleasedFields, match="copy before releasing"):
        fields["x"]


def test_an_unsealed_block_is_not_readable_and_an_aborted_one_is_free(plane: DataPlane) -> None:
    ref = seal(plane)
    plane.release(ref)
    blocks = [plane.try_alloc(SMALL) for _ in range(BLOCKS)]
    assert plane.try_alloc(SMALL) is None
    with pytest.raises(TornBlock):
        plane.get(msgspec.structs.replace(ref, generation=ref.generation + 1))
    for block in blocks:
        assert block is not None
        block.abort()
        block.abort()
        with pytest.raises(ReleasedFields):
            block.seal()
    assert plane.stats().free == BLOCKS


def test_an_exception_while_writing_frees_the_block(plane: DataPlane) -> None:
    block = plane.try_alloc(SMALL)
    assert block is not None
    with pytest.raises(ZeroDivisionError), block:
        raise ZeroDivisionError
    assert plane.stats().free == BLOCKS


def test_a_sealed_block_takes_no_more_writes(plane: DataPlane) -> None:
    block = plane.try_alloc(SMALL)
    assert block is not None
    array = block.array("x")
    block.seal()
    with pytest.raises(ReleasedFields):
        block.array("x")
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 1


def test_too_large_fields_name_the_key_to_raise(plane: DataPlane) -> None:
    with pytest.raises(BlockTooLarge, match=r"data_plane\.block_bytes"):
        plane.try_alloc({"x": ("uint8", (BLOCK + 1,))})


def test_unknown_dtypes_and_negative_sizes_are_refused(plane: DataPlane) -> None:
    with pytest.raises(ValueError, match="unknown dtype 'float64'"):
        plane.try_alloc({"x": ("float64", (2,))})
    with pytest.raises(ValueError, match="negative size"):
        plane.try_alloc({"x": ("int32", (-1,))})


async def test_a_full_plane_says_who_waited_for_what(plane: DataPlane) -> None:
    for _ in range(BLOCKS):
        seal(plane)
    with pytest.raises(
        ArenaFull, match=r"rollout-0 waited .* for 1 block, 1 waiting: 4 blocks.*4 ready.*data_plane\.blocks"
    ):
        await plane.alloc(SMALL, deadline_s=FULL_S)
    assert plane.stats().waiting == 0


async def test_waiters_are_served_in_order_as_blocks_become_free(plane: DataPlane) -> None:
    refs = [seal(plane) for _ in range(BLOCKS)]
    served: list[int] = []

    async def wait(number: int) -> None:
        block = await plane.alloc(SMALL, deadline_s=WAIT_S)
        served.append(number)
        block.seal()

    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(wait(number)) for number in range(BLOCKS)]
        await asyncio.sleep(0)  # let them queue up
        assert plane.stats().waiting == BLOCKS
        for number, ref in enumerate(refs):
            await asyncio.to_thread(plane.release, ref)
            await waits[number]
            assert served == list(range(number + 1))


async def test_a_cancelled_wait_takes_no_block(plane: DataPlane) -> None:
    refs = [seal(plane) for _ in range(BLOCKS)]
    wait = asyncio.create_task(plane.alloc(SMALL, deadline_s=WAIT_S))
    await asyncio.sleep(0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    plane.release(refs[0])
    assert plane.stats().free == 1
    assert plane.stats().waiting == 0


async def test_each_notify_makes_a_wait_look_again_once(plane: DataPlane) -> None:
    for _ in range(BLOCKS):
        seal(plane)
    looks = 0
    looked = asyncio.Event()
    try_alloc = plane.try_alloc

    def counting(fields: dict) -> object:
        nonlocal looks
        looks += 1
        looked.set()
        return try_alloc(fields)

    plane.try_alloc = counting  # type: ignore[method-assign]
    plane._recheck_s = 3600.0  # type: ignore[attr-defined]
    wait = asyncio.create_task(plane.alloc(SMALL, deadline_s=WAIT_S))
    async with asyncio.timeout(WAIT_S):
        for expected in (2, 3, 4):  # before queueing, in the queue, after each ring
            await looked.wait()
            looked.clear()
            for _ in range(20):  # turns of the loop in which a bell left ringing would make it look again
                await asyncio.sleep(0)
            assert looks == expected
            plane.notify()
    wait.cancel()
    await asyncio.gather(wait, return_exceptions=True)


def test_refs_that_do_not_fit_their_arena_are_refused(plane: DataPlane) -> None:
    ref = seal(plane)
    spec = ref.fields[0]
    replace = msgspec.structs.replace
    wrong = [
        replace(ref, nbytes=BLOCK + 1),
        replace(ref, block=BLOCKS),
        replace(ref, block=-1),
        replace(ref, fields=(replace(spec, offset=-64),)),
        replace(ref, fields=(replace(spec, offset=4),)),
        replace(ref, fields=(replace(spec, shape=(1 << 20,)),)),
        replace(ref, fields=(replace(spec, shape=(-1, -1)),)),
        replace(ref, fields=(replace(spec, dtype="float64"),)),
    ]
    for bad in wrong:
        with pytest.raises(MalformedRef):
            plane.get(bad)


def test_a_wrong_checksum_is_noticed(plane: DataPlane) -> None:
    ref = seal(plane)
    plane.get(ref, verify=True)
    with pytest.raises(ChecksumError, match=f"block {ref.block} generation 1"):
        plane.get(msgspec.structs.replace(ref, checksum=ref.checksum ^ 1), verify=True)


def test_a_ref_of_another_host_is_refused(server: FdServer) -> None:
    config = SlabConfig(blocks=BLOCKS, block_bytes=BLOCK)
    here = SlabPlane(server.path, "here", config)
    there = SlabPlane(server.path, "there", SlabConfig(host_id="elsewhere"))
    try:
        with pytest.raises(WrongHost, match=r"host .*, and there on elsewhere"):
            there.get(seal(here))
    finally:
        here.close()
        there.close()
    local = LocalPlane("me", BLOCKS, BLOCK)
    with pytest.raises(WrongHost):
        local.get(msgspec.structs.replace(seal(local), arena="other"))
    local.close()


def test_the_path_argument_may_be_any_run_directory(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        plane = SlabPlane(server.path, "r", SlabConfig(blocks=1, block_bytes=1))
        assert plane.get(seal(plane))["x"].shape == (3, 2)
        plane.close()
