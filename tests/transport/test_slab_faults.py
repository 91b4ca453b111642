"""Real processes that die at the worst moment: what was sealed stays, what was not never shows."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dockyard_actors.transport.arena import ArenaLocked
from dockyard_actors.transport.fdserver import FdConfig, FdServer
from dockyard_actors.transport.leases import READERS, TooManyReaders
from dockyard_actors.transport.plane import StaleRef, TensorRef, TornBlock
from dockyard_actors.transport.slab import SlabConfig, SlabPlane
from tests.transport.slab_peer import ANSWER_S, BLOCK, FIELDS, Peer, content, same, serving, wait_until

LOCK_S = 0.1
SWEEP_S = 0.05


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FdServer]:
    with serving(tmp_path, FdConfig(sweep_s=SWEEP_S)) as server:
        yield server


@pytest.fixture
def plane(server: FdServer) -> Iterator[SlabPlane]:
    plane = SlabPlane(server.path, "me", SlabConfig(blocks=4, block_bytes=BLOCK, lock_wait_s=LOCK_S))
    yield plane
    plane.close()


@pytest.fixture
def start(server: FdServer) -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def start() -> Peer:
        peers.append(Peer(server.path))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


def ref_of(answer: Any) -> TensorRef:
    return msgspec.convert(answer, TensorRef)


def produce(plane: SlabPlane, seed: int) -> TensorRef:
    block = plane.try_alloc(FIELDS)
    assert block is not None
    for name, array in content(seed).items():
        block.array(name)[...] = array
    return block.seal()


def test_sealed_blocks_outlive_their_producer_and_the_arena_goes_with_the_last(
    server: FdServer, plane: SlabPlane, start: Callable[[], Peer]
) -> None:
    producer = start()
    refs = [ref_of(producer("produce", seed=seed)) for seed in range(3)]
    torn = ref_of(producer("half", seed=3))
    with pytest.raises(TornBlock, match="lives and is still writing"):
        plane.get(torn)
    producer.kill()
    wait_until(lambda: server.stats().orphaned == 1)
    for seed, ref in enumerate(refs):  # opened only now, after the death
        assert same(plane.get(ref, verify=True), seed)
    with pytest.raises(TornBlock, match=f"never sealed: its producer {producer.pid} died while writing"):
        plane.get(torn)
    (info,) = server.arenas()
    assert (info.ready, info.torn, info.writing, info.orphaned) == (3, 1, 0, True)
    assert not plane.release(torn)
    for ref in refs[:2]:
        assert plane.release(ref)
        assert server.stats().arenas == 1
    assert plane.release(refs[2])
    assert server.stats().arenas == 0
    assert plane.stats().attached == 0
    for ref in (*refs, torn):
        assert not plane.release(ref)
        with pytest.raises(StaleRef):
            plane.get(ref)


def test_a_producer_that_dies_with_nothing_sealed_takes_its_arena_along(
    server: FdServer, start: Callable[[], Peer]
) -> None:
    producer = start()
    producer("half", seed=1)
    assert server.stats().arenas == 1
    producer.kill()
    wait_until(lambda: server.stats().arenas == 0)


def test_copies_of_what_lies_elsewhere_go_with_their_producer(server: FdServer, plane: SlabPlane) -> None:
    producer = Peer(server.path, outlives=False)
    try:
        ref = ref_of(producer("produce", seed=1))
        with plane.get(ref, verify=True) as fields:
            producer.kill()
            wait_until(lambda: server.stats().arenas == 0)
            assert same(fields, 1), "whoever reads keeps its mapping"
        with pytest.raises(StaleRef):
            plane.get(ref)
    finally:
        producer.kill()


def test_a_reader_killed_with_views_disturbs_nobody(plane: SlabPlane, start: Callable[[], Peer]) -> None:
    ref = produce(plane, 1)
    reader, other = start(), start()
    assert reader("get", ref=msgspec.to_builtins(ref)) == {n: a.tobytes().hex() for n, a in content(1).items()}
    reader.kill()
    assert other("get", ref=msgspec.to_builtins(ref)) == {n: a.tobytes().hex() for n, a in content(1).items()}
    assert same(plane.get(ref, verify=True), 1)
    assert other("forget") is None
    assert other("release", ref=msgspec.to_builtins(ref))
    assert plane.stats().free == 4


def test_a_reader_killed_between_release_and_the_end_of_its_views_gives_the_block_back(
    plane: SlabPlane, start: Callable[[], Peer]
) -> None:
    reader = start()
    refs = [produce(plane, seed) for seed in range(4)]
    for ref in refs:
        reader("get", ref=msgspec.to_builtins(ref))
        assert reader("release", ref=msgspec.to_builtins(ref))
    assert plane.stats().draining == 4
    assert plane.try_alloc(FIELDS) is None
    assert f"4 draining (draining: views still alive in process {reader.pid})" in plane._why_full()
    reader.kill()
    assert plane.try_alloc(FIELDS) is not None


def test_a_block_that_another_process_released_stays_under_a_readers_views_until_they_or_it_end(
    plane: SlabPlane, start: Callable[[], Peer]
) -> None:
    staying, dying, releasing = start(), start(), start()
    refs = [produce(plane, seed) for seed in range(4)]
    for ref in refs:
        for reader in (staying, dying):
            reader("get", ref=msgspec.to_builtins(ref))
        assert releasing("release", ref=msgspec.to_builtins(ref))
    assert plane.try_alloc(FIELDS) is None
    dying.kill()
    assert plane.try_alloc(FIELDS) is None  # the other one still looks
    assert f"views still alive in process {staying.pid})" in plane._why_full()
    staying("forget")
    assert plane.stats().free == 4
    assert plane.try_alloc(FIELDS) is not None


def test_rows_of_dead_readers_are_taken_over(plane: SlabPlane, start: Callable[[], Peer]) -> None:
    ref = produce(plane, 1)
    page = plane._attachments.attach(ref.arena, ref.fd_path).page
    dead = start()
    dead("get", ref=msgspec.to_builtins(ref))
    assert page.leases.readers(ref.block) == [str(dead.pid)]
    dead.kill()
    assert page.leases.readers(ref.block) == []
    with page.locked():
        rows = [page.leases.claim() for _ in range(READERS)]
        assert len(set(rows)) == READERS
        with pytest.raises(TooManyReaders, match=f"{READERS} readers"):
            page.leases.claim()
        for row in rows:
            page.leases.give_up(row)


def test_only_one_of_many_processes_releases_a_block(plane: SlabPlane, start: Callable[[], Peer]) -> None:
    peers = [start() for _ in range(3)]
    for seed in range(40):
        ref = produce(plane, seed)
        for peer in peers:
            peer.send("release", ref=msgspec.to_builtins(ref))
        answers = [plane.release(ref), *(peer.answer() for peer in peers)]
        assert answers.count(True) == 1
    assert plane.stats().free == 4


async def test_a_producer_in_a_full_arena_is_woken_by_a_release_in_another_process(
    plane: SlabPlane, start: Callable[[], Peer]
) -> None:
    plane._recheck_s = 3600.0  # only the bell can wake it
    peer = start()
    refs = [produce(plane, seed) for seed in range(4)]
    waiting = asyncio.create_task(plane.alloc(FIELDS, deadline_s=ANSWER_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await asyncio.to_thread(peer, "release", ref=msgspec.to_builtins(refs[2]))
    (await waiting).abort()


async def test_a_bell_that_was_never_rung_costs_one_recheck(plane: SlabPlane) -> None:
    plane._recheck_s = 0.01
    refs = [produce(plane, seed) for seed in range(4)]
    waiting = asyncio.create_task(plane.alloc(FIELDS, deadline_s=ANSWER_S))
    await asyncio.sleep(0)
    own = plane._own
    assert own is not None
    own.page.let_go(refs[0].block, refs[0].generation)  # as by a releaser killed before it rang
    (await waiting).abort()


def test_a_releaser_killed_before_it_asks_the_server_leaves_no_arena_behind(
    server: FdServer, plane: SlabPlane, start: Callable[[], Peer]
) -> None:
    producer = start()
    ref = ref_of(producer("produce", seed=1))
    attachment = plane._attachments.attach(ref.arena, ref.fd_path)
    producer.kill()
    wait_until(lambda: server.stats().orphaned == 1)
    assert attachment.release(ref.block, ref.generation)  # all that a releaser does before it asks
    wait_until(lambda: server.stats().arenas == 0)


def test_a_process_stopped_inside_the_lock_is_named_and_its_death_frees_the_lock(
    server: FdServer, plane: SlabPlane, start: Callable[[], Peer]
) -> None:
    ref = produce(plane, 1)
    stopped = start()
    stopped.send("lock_and_stop", ref=msgspec.to_builtins(ref))
    stopped.wait_stopped()
    with pytest.raises(
        ArenaLocked, match=f"process {os.getpid()} waited for the arena lock that process {stopped.pid}"
    ):
        plane.release(ref)
    stopped.kill()
    assert plane.release(ref)


def test_a_stopped_lock_holder_does_not_hold_up_the_server(
    server: FdServer, plane: SlabPlane, start: Callable[[], Peer]
) -> None:
    producer, stopped = start(), start()
    ref = ref_of(producer("produce", seed=1))
    stopped.send("lock_and_stop", ref=msgspec.to_builtins(ref))
    stopped.wait_stopped()
    producer.kill()
    wait_until(lambda: server.stats().orphaned == 1)
    assert len(plane._client.list_arenas()) == 1  # it answers
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.answer() is None
    assert plane.release(ref)
    wait_until(lambda: server.stats().arenas == 0)


def test_a_restarted_producer_makes_a_new_arena_beside_the_old(
    server: FdServer, plane: SlabPlane, start: Callable[[], Peer]
) -> None:
    first = start()
    old = ref_of(first("produce", seed=1))
    first.kill()
    second = start()
    new = ref_of(second("produce", seed=2))
    assert old.arena != new.arena
    assert same(plane.get(old, verify=True), 1)
    assert same(plane.get(new, verify=True), 2)
    wait_until(lambda: server.stats().orphaned == 1)
    assert plane.release(old)
    assert [arena.name for arena in server.arenas()] == [new.arena]


def test_a_retired_arena_goes_at_once_when_empty_and_with_its_last_block_otherwise(server: FdServer) -> None:
    config = SlabConfig(blocks=4, block_bytes=BLOCK)
    reader = SlabPlane(server.path, "reader", config)
    empty, full = SlabPlane(server.path, "empty", config), SlabPlane(server.path, "full", config)
    empty.prepare()
    ref = produce(full, 1)
    empty.close()
    full.close()
    full.close()
    assert server.stats().arenas == 1
    assert same(reader.get(ref, verify=True), 1)
    assert reader.release(ref)
    assert server.stats().arenas == 0
    reader.close()
