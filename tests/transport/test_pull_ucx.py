"""What UCX does when it goes wrong: each trap that was met, and that memory is used again only when UCX has let go of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dockyard_actors.transport import ucx
from dockyard_actors.transport.pull import Deadline, PeerLost, PullError, PullTimeout, ShortBuffer
from dockyard_actors.transport.puller import Puller
from dockyard_actors.transport.remote import RemotePlane
from dockyard_actors.transport.ucx import UcxEngine
from tests.transport.pull_peer import MIB, Host, payload
from tests.transport.slab_peer import wait_until
from tests.transport.test_pull import BLOCKS, SIZE, WAIT_S, Opened, StartHost, needs_ucx, opened, server, start

__all__ = ["opened", "server", "start"]  # fixtures
pytestmark = needs_ucx

IDLE_S = 0.5
LOOPBACK = "127.0.0.1"


class Halfway:
    """Stops the other host's process as soon as this one asked UCX to receive from it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
        self.reached = threading.Event()
        receive = ucx.Link.receive

        def stopping(link: ucx.Link, into: np.ndarray, tag: int) -> ucx.Transfer:
            if not self.reached.is_set():
                host.stop()
            transfer = receive(link, into, tag)
            self.reached.set()
            return transfer

        monkeypatch.setattr(ucx.Link, "receive", stopping)


@pytest.fixture
def engine() -> UcxEngine:
    return UcxEngine.get(LOOPBACK)


def deadline() -> Deadline:
    return Deadline(WAIT_S, "this test")


class _Pair:
    """A socket pair: what a transfer watches beside UCX."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()


@pytest.fixture
def pair() -> Iterator[_Pair]:
    pair = _Pair()
    yield pair
    pair.here.close()
    pair.there.close()


def test_a_process_has_one_worker_an_interface(engine: UcxEngine) -> None:
    assert UcxEngine.get(LOOPBACK) is engine
    assert sum(thread.name == "ucx" for thread in threading.enumerate()) == len(UcxEngine.all())


def test_an_address_that_is_not_ours_is_said() -> None:
    with pytest.raises(PullError, match=r"no interface of this host has the address 203\.0\.113\.1"):
        UcxEngine.get("203.0.113.1")


def test_a_receive_buffer_that_is_too_small_is_an_error_at_the_receiver(engine: UcxEngine, pair: _Pair) -> None:
    link = engine.link(engine.address)
    tag = engine.next_tag()
    into = np.zeros(1000, np.uint8)
    receiving = link.receive(into[:500], tag)
    sending = link.send(payload(1, 600), tag)
    with pytest.raises(ShortBuffer, match=r"receiving 500 bytes by UCX: .*Truncated"):
        receiving.wait(pair.here, deadline())
    sending.wait(pair.here, deadline())  # the sender never hears of it
    assert not into[500:].any()
    link.close()
    link.close()
    with pytest.raises(PeerLost, match="NoneType"):
        link.send(into, tag).wait(pair.here, deadline())


def test_a_wait_ends_with_the_other_ends_hang_up_and_the_buffer_with_the_endpoint(
    engine: UcxEngine, pair: _Pair
) -> None:
    link = engine.link(engine.address)
    pending = engine.pending
    transfer = link.receive(np.zeros(100, np.uint8), engine.next_tag())
    let_go = threading.Event()
    transfer.when_complete(let_go.set)
    with pytest.raises(PullTimeout, match="receiving 100 bytes"):
        transfer.wait(pair.here, Deadline(0.01, "this test"))
    pair.there.close()
    with pytest.raises(PeerLost, match="the other end hung up"):
        transfer.wait(pair.here, deadline())
    assert not let_go.is_set()
    assert engine.pending == pending + 1  # whoever waited gave up, UCX did not
    link.close()
    assert let_go.wait(WAIT_S)
    assert engine.pending == pending


def test_an_idle_engine_sleeps_also_with_a_receive_pending(engine: UcxEngine) -> None:
    link = engine.link(engine.address)
    link.receive(np.zeros(100, np.uint8), engine.next_tag())

    def ticks() -> int:
        """Of this process's engine thread: 1/100 s on a core."""
        stat = Path(f"/proc/self/task/{engine.thread_id}/stat").read_text()
        return sum(map(int, stat.rpartition(")")[2].split()[11:13]))

    time.sleep(0.05)  # the last words of earlier tests' endpoints
    wakeups, spent = engine.wakeups, ticks()
    time.sleep(IDLE_S)
    assert ticks() - spent <= 1
    assert engine.wakeups - wakeups <= 5
    link.close()


async def test_a_sender_killed_in_the_middle_is_known_long_before_the_deadline(
    start: StartHost, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start(backend="ucx")
    plane = opened(host.address, backend="ucx", attempts=1)
    ref = host.ref(1, SIZE)
    halfway = Halfway(monkeypatch, host)
    fetching = asyncio.create_task(plane.fetch([ref], WAIT_S))
    assert await asyncio.to_thread(halfway.reached.wait, WAIT_S)
    started = time.monotonic()
    host.kill()
    with pytest.raises(PeerLost):
        await fetching
    assert time.monotonic() - started < WAIT_S / 4
    wait_until(lambda: plane.stats().free == BLOCKS)
    assert plane.pull_stats().quarantined == 0
    assert plane.pull_stats().received_bytes == {}


async def test_a_killed_senders_successor_is_asked_again(
    start: StartHost, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, hosts = start(backend="ucx"), []
    address, dead = first.address, threading.Event()
    plane = opened(address, backend="ucx", attempts=20)
    ref = first.ref(1, SIZE)
    halfway = Halfway(monkeypatch, first)
    attempt = Puller._attempt

    def after_the_restart(self: Puller, *arguments) -> None:
        if halfway.reached.is_set():
            assert dead.wait(WAIT_S)
        attempt(self, *arguments)

    monkeypatch.setattr(Puller, "_attempt", after_the_restart)
    fetching = asyncio.create_task(plane.fetch([ref], WAIT_S))
    assert await asyncio.to_thread(halfway.reached.wait, WAIT_S)
    first.kill()
    hosts.append(await asyncio.to_thread(lambda: start(backend="ucx", bind=address)))
    dead.set()
    with pytest.raises(Exception, match=f"no arena {ref.arena}"):  # its memory went with the host, and that is said
        await fetching
    assert plane.pull_stats().retries >= 1
    other = hosts[0].ref(2, SIZE)
    await plane.fetch([other], WAIT_S)
    assert np.array_equal(plane.get(other)["x"], payload(2, SIZE))


async def test_a_stopped_sender_costs_the_deadline_and_its_late_bytes_meet_no_new_block(
    start: StartHost, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start(backend="ucx")
    plane = opened(host.address, backend="ucx")
    refs = [host.ref(seed, SIZE) for seed in range(3)]
    await plane.fetch(refs[:1], WAIT_S)
    halfway = Halfway(monkeypatch, host)
    fetching = asyncio.create_task(plane.fetch(refs[1:2], 0.5))
    assert await asyncio.to_thread(halfway.reached.wait, WAIT_S)
    with pytest.raises(PullTimeout, match=r"not done within .* s, receiving \d+ bytes by UCX"):
        await fetching
    wait_until(lambda: plane.pull_stats().quarantined == 0)
    wait_until(lambda: plane.stats().free == BLOCKS - 1)
    os.kill(host.pid, signal.SIGCONT)
    await plane.fetch(refs, WAIT_S)
    for seed, ref in enumerate(refs):
        assert np.array_equal(plane.get(ref, verify=True)["x"], payload(seed, SIZE))


async def test_thirty_two_endpoints_at_once_and_none_afterwards(start: StartHost, opened: Opened) -> None:
    count = 32
    host = start(backend="ucx", blocks=count, block_bytes=MIB)
    plane: RemotePlane = opened(host.address, backend="ucx", pulls=count)
    lines = await asyncio.gather(
        *(asyncio.to_thread(plane._puller._line, host.address, deadline(), True) for _ in range(count))
    )
    wait_until(lambda: (host("info")["links"], host("info")["connections"]) == (count, count))
    for line in lines:
        plane._puller._keep(line)
    refs = [host.ref(seed, 100_000) for seed in range(count)]
    for at in range(0, count, BLOCKS):
        await plane.fetch(refs[at : at + BLOCKS], WAIT_S)
        for seed, ref in list(enumerate(refs))[at : at + BLOCKS]:
            assert np.array_equal(plane.get(ref, verify=True)["x"], payload(seed, 100_000))
            plane.release(ref)
    assert plane.pull_stats().received_bytes == {"ucx": sum(ref.nbytes for ref in refs)}
    plane._puller.close()
    wait_until(lambda: (host("info")["links"], host("info")["connections"]) == (0, 0))


def test_tags_of_receives_are_never_the_same(engine: UcxEngine) -> None:
    tags = [engine.next_tag() for _ in range(1000)]
    assert len(set(tags)) == 1000
    assert all(0 <= tag < 1 << 64 for tag in tags)
