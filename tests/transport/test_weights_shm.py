"""Weights in shared memory: no version is overwritten under a reader, none is lost with the trainer."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.transport.fdserver import FdClient, FdServer
from dockyard_actors.transport.plane import DTYPES, ChecksumError, MalformedRef, StaleRef, TornBlock, WrongHost
from dockyard_actors.transport.torch_views import as_torch
from dockyard_actors.transport.weights_shm import (
    WeightManifest,
    WeightPublisher,
    WeightReader,
    WeightRef,
    WeightSlotHeld,
    WeightVersionError,
)
from tests.transport.slab_peer import WEIGHTS, Peer, content, same, serving, wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FdServer]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def publisher(server: FdServer) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(FdClient(server.path), WeightManifest.of(WEIGHTS))
    yield publisher
    publisher.close()


@pytest.fixture
def reader(server: FdServer) -> Iterator[WeightReader]:
    reader = WeightReader(FdClient(server.path))
    yield reader
    reader.close()


@pytest.fixture
def start(server: FdServer) -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def start() -> Peer:
        peers.append(Peer(server.path))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


def publish(publisher: WeightPublisher, version: int) -> WeightRef:
    for name, array in publisher.slot(version).items():
        array[...] = content(version, WEIGHTS)[name]
    return msgspec.msgpack.decode(msgspec.msgpack.encode(publisher.publish(version)), type=WeightRef)


def hexed(seed: int) -> dict[str, str]:
    return {name: array.tobytes().hex() for name, array in content(seed, WEIGHTS).items()}


@given(
    shapes=st.dictionaries(
        st.text(min_size=1),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    )
)
@settings(deadline=None)
def test_manifest_entries_are_aligned_disjoint_and_survive_the_wire(shapes: dict) -> None:
    manifest = WeightManifest.of(shapes)
    end = 0
    for entry, (name, (dtype, shape)) in zip(manifest.entries, shapes.items(), strict=True):
        assert (entry.name, entry.dtype, entry.shape) == (name, dtype, shape)
        assert entry.offset % 64 == 0
        assert entry.offset >= end
        end = entry.offset + entry.nbytes
    assert manifest.nbytes == end
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest) == manifest


def test_published_weights_are_read_in_another_process_byte_for_byte(
    publisher: WeightPublisher, start: Callable[[], Peer]
) -> None:
    engine = start()
    for version in (1, 2):
        assert engine("open_weights", ref=msgspec.to_builtins(publish(publisher, version))) == hexed(version)


def test_a_reader_finds_the_manifest_in_the_arena_and_cannot_write(
    publisher: WeightPublisher, reader: WeightReader
) -> None:
    ref = publish(publisher, 1)
    assert reader.manifest(ref) == publisher.manifest
    views = reader.open(ref)
    assert same(views, 1, WEIGHTS)
    with pytest.raises(ValueError, match="read-only"):
        views["embed"][...] = 0


def test_the_trainer_writes_tensors_in_place(publisher: WeightPublisher, reader: WeightReader) -> None:
    slot = publisher.slot(1)
    as_torch(slot["head"]).copy_(torch.full((33, 5), 1.5))
    as_torch(slot["embed"]).copy_(torch.ones(50, 16))
    views = reader.open(publisher.publish(1), verify=True)
    assert as_torch(views["head"]).dtype is torch.bfloat16
    assert (as_torch(views["head"]) == 1.5).all()
    assert (as_torch(views["embed"]) == 1.0).all()


def test_a_version_that_nobody_released_is_never_overwritten(publisher: WeightPublisher, reader: WeightReader) -> None:
    refs = {version: publish(publisher, version) for version in (1, 2)}
    with pytest.raises(WeightSlotHeld, match=r"version 3 finds both slots held by versions 1 \(ready .*, 2 \(ready"):
        publisher.slot(3)
    assert publisher.held() == (1, 2)
    for version, ref in refs.items():
        assert same(reader.open(ref, verify=True), version, WEIGHTS)
    assert publisher.release(1)
    assert not publisher.release(1)
    assert not publisher.release(7)
    publish(publisher, 3)
    assert publisher.held() == (2, 3)
    assert same(reader.open(refs[2], verify=True), 2, WEIGHTS)
    with pytest.raises(StaleRef):
        reader.open(refs[1])


def test_a_reader_can_tell_that_its_version_was_released_under_it(
    publisher: WeightPublisher, reader: WeightReader
) -> None:
    views = reader.open(publish(publisher, 1))
    views.check()
    publisher.release(1)
    with pytest.raises(StaleRef):
        views.check()


def test_versions_only_grow_and_only_what_was_written_is_published(publisher: WeightPublisher) -> None:
    with pytest.raises(WeightVersionError, match="being written is none"):
        publisher.publish(1)
    publisher.slot(1)
    publisher.slot(2)  # gave up on 1: the same slot
    with pytest.raises(WeightVersionError, match="being written is 2"):
        publisher.publish(1)
    publisher.publish(2)
    with pytest.raises(WeightVersionError, match="version 2 after 2"):
        publisher.slot(2)
    publisher.slot(3)


def test_a_half_written_version_is_not_readable(publisher: WeightPublisher, reader: WeightReader) -> None:
    ref = publish(publisher, 1)
    publisher.slot(2)["embed"][...] = 1
    with pytest.raises(TornBlock):
        reader.open(msgspec.structs.replace(ref, slot=1 - ref.slot, generation=1))


def test_corruption_names_the_entries_that_are_wrong(publisher: WeightPublisher, reader: WeightReader) -> None:
    slot = publisher.slot(1)
    for array in slot.values():
        array[...] = 0
    escaped = as_torch(slot["head"])
    ref = publisher.publish(1)
    reader.verify(ref)
    escaped[3, 3] = 1.0
    with pytest.raises(ChecksumError, match=r"1 of 3 entries of weights version 1 .*: head$"):
        reader.verify(ref)
    with pytest.raises(ChecksumError, match=r": embed, head$"):
        reader.verify(msgspec.structs.replace(ref, checksums=(1, *ref.checksums[1:])))


def test_refs_that_fit_nothing_are_refused(publisher: WeightPublisher, reader: WeightReader, server: FdServer) -> None:
    ref = publish(publisher, 1)
    replace = msgspec.structs.replace
    with pytest.raises(MalformedRef):
        reader.open(replace(ref, slot=2))
    with pytest.raises(MalformedRef, match="2 checksums for 3 entries"):
        reader.verify(replace(ref, checksums=(1, 2)))
    with pytest.raises(StaleRef):
        reader.open(replace(ref, arena="gone"))
    with pytest.raises(WrongHost):
        WeightReader(FdClient(server.path), host="elsewhere").open(ref)


def test_weights_survive_the_trainer_and_its_restart_replaces_them(
    server: FdServer, reader: WeightReader, start: Callable[[], Peer]
) -> None:
    trainer = start()
    old = msgspec.convert(trainer("publish", version=1, seed=1), WeightRef)
    trainer.kill()
    wait_until(lambda: server.stats().orphaned == 1)
    views = reader.open(old, verify=True)  # an engine that starts while there is no trainer
    assert same(views, 1, WEIGHTS)
    engine = start()
    assert engine("open_weights", ref=msgspec.to_builtins(old)) == hexed(1)

    again = start()
    new = msgspec.convert(again("publish", version=2, seed=2), WeightRef)
    assert new.arena != old.arena
    assert same(reader.open(new, verify=True), 2, WEIGHTS)
    assert again("drop_predecessors") == 1
    assert again("drop_predecessors") == 0
    assert [arena.name for arena in server.arenas()] == [new.arena]
    assert same(views, 1, WEIGHTS)  # who maps it keeps it
    with pytest.raises(StaleRef):
        views.check()
    with pytest.raises(StaleRef):
        reader.open(old)


def test_a_living_publisher_is_nobodys_predecessor(
    server: FdServer, publisher: WeightPublisher, reader: WeightReader
) -> None:
    ref = publish(publisher, 1)
    other = WeightPublisher(FdClient(server.path), publisher.manifest)
    assert other.drop_predecessors() == 0
    assert same(reader.open(ref, verify=True), 1, WEIGHTS)
    other.close()


def test_a_trainer_killed_while_writing_leaves_the_version_before(
    server: FdServer, reader: WeightReader, start: Callable[[], Peer]
) -> None:
    trainer = start()
    ref = msgspec.convert(trainer("publish", version=1, seed=1), WeightRef)
    trainer("half_publish", version=2)
    trainer.kill()
    wait_until(lambda: server.stats().orphaned == 1)
    assert same(reader.open(ref, verify=True), 1, WEIGHTS)
    (info,) = server.arenas()
    assert (info.ready, info.torn) == (1, 1)
    assert reader.release(ref)
    assert not reader.release(ref)
    assert server.stats().arenas == 0


def test_publishing_over_and_over_leaves_nothing(server: FdServer, reader: WeightReader) -> None:
    publisher = WeightPublisher(FdClient(server.path), WeightManifest.of(WEIGHTS))
    ref = publish(publisher, 0)
    before = None
    for version in range(1, 300):
        ref = publish(publisher, version)
        reader.open(ref, verify=True).release()
        assert publisher.release(version - 1)
        if version == 20:
            gc.collect()
            before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == before
    publisher.close()
    publisher.close()
    assert reader.release(ref)
    assert server.stats().arenas == 0
    assert not [name for name in os.listdir("/dev/shm") if "dockyard" in name]


def test_scalars_and_empty_entries_travel_too(server: FdServer, reader: WeightReader) -> None:
    manifest = WeightManifest.of({"scalar": ("float32", ()), "empty": ("int64", (0, 3))})
    publisher = WeightPublisher(FdClient(server.path), manifest)
    publisher.slot(0)["scalar"][...] = 4.0
    views = reader.open(publisher.publish(0), verify=True)
    assert np.array_equal(views["scalar"], np.float32(4.0))
    assert views["empty"].shape == (0, 3)
    publisher.close()
