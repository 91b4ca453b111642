"""Memory that is shared across pid namespaces: a reader's lease ends with the reader although its pid says nothing where it is looked at."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from dockyard_actors.transport.fdclient import ArenaRefused, FdClient
from dockyard_actors.transport.fdserver import FdServer
from dockyard_actors.transport.slab import SlabConfig, SlabPlane
from tests.transport.pull_peer import Host
from tests.transport.slab_peer import ANSWER_S, BLOCK, FIELDS, Peer, serving, wait_until

pytestmark = pytest.mark.netns

HOST = "one host, it was said"  # the default tells pid namespaces apart
INSIDE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture(autouse=True)
def allowed() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("pid namespaces need root and unshare")
    done = subprocess.run([*INSIDE, "true"], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no pid namespaces here: {done.stderr.strip()}")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FdServer]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(fd_path: str, *prefix: str) -> Peer:
        peers.append(Peer(fd_path, *prefix, host_id=HOST))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


def kill_inside(peer: Peer) -> None:
    """The reader itself; `unshare` then ends."""
    (reader,) = psutil.Process(peer.pid).children()
    reader.send_signal(signal.SIGKILL)


def plane_of(server: FdServer) -> SlabPlane:
    """Of one block, and a producer that trusts the bell alone."""
    config = SlabConfig(blocks=1, block_bytes=BLOCK, host_id=HOST, recheck_s=10 * ANSWER_S)
    return SlabPlane(server.path, "producer", config)


async def test_a_reader_in_a_namespace_of_its_own_keeps_its_block_until_it_is_killed(
    server: FdServer, start: Callable[..., Peer]
) -> None:
    plane, reader = plane_of(server), start(server.path, *INSIDE)
    with await plane.alloc(FIELDS, ANSWER_S) as block:
        ref = block.seal()
    reader("get", ref=msgspec.to_builtins(ref))
    assert plane.release(ref)
    assert (plane.stats().draining, plane.try_alloc(FIELDS)) == (1, None)
    waiting = asyncio.create_task(plane.alloc(FIELDS, ANSWER_S))
    await asyncio.sleep(0)
    kill_inside(reader)
    (await waiting).abort()
    plane.close()


def test_a_reader_in_a_namespace_of_its_own_gives_back_what_it_has_done_with(
    server: FdServer, start: Callable[..., Peer]
) -> None:
    plane, reader = plane_of(server), start(server.path, *INSIDE)
    block = plane.try_alloc(FIELDS)
    assert block is not None
    ref = block.seal()
    reader("get", ref=msgspec.to_builtins(ref))
    plane.release(ref)
    assert plane.stats().draining == 1
    reader("forget")
    assert plane.stats().free == 1
    plane.close()


def test_a_producer_in_a_namespace_of_its_own_respects_readers_outside(
    server: FdServer, start: Callable[..., Peer]
) -> None:
    producer, reader = start(server.path, *INSIDE), start(server.path)
    ref = producer("produce", seed=1)
    reader("get", ref=ref)
    assert reader("release", ref=ref)
    stats = producer("stats")
    assert (stats["draining"], stats["free"]) == (1, 3), "the reader lives"
    reader.kill()
    wait_until(lambda: producer("stats")["free"] == 4)


def test_a_reader_whose_pid_the_server_cannot_see_keeps_its_block_until_it_is_killed(
    tmp_path: Path, start: Callable[..., Peer]
) -> None:
    inside = Host(tmp_path, host_id=HOST, prefix=INSIDE)
    try:
        ref = inside.ref(1, 1000)
        reader = start(ref.fd_path)
        reader("get", ref=msgspec.to_builtins(ref))
        assert reader("release", ref=msgspec.to_builtins(ref))
        assert inside("info")["free"] == 3, "the reader lives"
        reader.kill()
        wait_until(lambda: inside("info")["free"] == 4)
    finally:
        inside.kill()


def test_a_producer_whose_pid_the_server_cannot_see_is_refused(tmp_path: Path) -> None:
    inside = Host(tmp_path, host_id=HOST, prefix=INSIDE)
    try:
        path = inside.ref(1, 1000).fd_path
        with pytest.raises(ArenaRefused, match="the producer lives in another pid namespace"):
            FdClient(path).create_arena("mine", BLOCK, BLOCK)
    finally:
        inside.kill()
