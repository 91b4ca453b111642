"""Blocks of another host, over loopback: what arrives, by what, and how each failure ends. `test_pull_netns` has real links."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dockyard_actors.transport import puller
from dockyard_actors.transport.fdserver import FdServer
from dockyard_actors.transport.plane import ArenaFull, ChecksumError, DataPlane, StaleRef, TensorRef, WrongHost
from dockyard_actors.transport.pull import (
    BadAddress,
    Connection,
    Deadline,
    Failed,
    Got,
    Hello,
    NoBackend,
    NotOfThisRun,
    PeerLost,
    PeerUnreachable,
    Prove,
    Pull,
    PullConfig,
    PullError,
    PullTimeout,
    Sending,
    ShortBuffer,
    Welcome,
    choose_backend,
    nonce,
    proof,
)
from dockyard_actors.transport.remote import RemotePlane
from dockyard_actors.transport.slab import SlabConfig, SlabPlane
from dockyard_actors.transport.tensors import lay_out
from tests.transport.pull_peer import COOKIE, MIB, Host, payload
from tests.transport.slab_peer import serving, wait_until

WAIT_S = 30.0
SHORT_S = 0.3  # a deadline that is meant to pass
SIZE = MIB + 17
BLOCKS = 4
needs_ucx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")
BACKENDS = ["tcp", pytest.param("ucx", marks=needs_ucx)]

StartHost = Callable[..., Host]
Opened = Callable[..., RemotePlane]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FdServer]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartHost]:
    hosts: list[Host] = []

    def start(**options) -> Host:
        hosts.append(Host(tmp_path_factory.mktemp("there"), **options))
        return hosts[-1]

    yield start
    for host in hosts:
        host.kill()


@pytest.fixture
def opened(server: FdServer) -> Iterator[Opened]:
    planes: list[RemotePlane] = []

    def opened(address: str, cookie: str = COOKIE, block_bytes: int = 4 * MIB, **config) -> RemotePlane:
        def server_of(host_id: str) -> str:
            if host_id != "there":
                raise WrongHost(f"no host {host_id}")
            return address

        local = SlabPlane(server.path, "me", SlabConfig(blocks=BLOCKS, block_bytes=block_bytes, host_id="here"))
        planes.append(RemotePlane(local, cookie, server_of, PullConfig(retry_s=0.001, **config)))
        return planes[-1]

    yield opened
    for plane in planes:
        plane.close()


def made_up(nbytes: int = SIZE) -> TensorRef:
    specs, total = lay_out({"x": ("uint8", (nbytes,))})
    return TensorRef("arena", 1, 1, total, specs, 0, "there", "")


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_block_of_another_host_is_read_and_released_like_one_of_this(
    start: StartHost, opened: Opened, backend: str
) -> None:
    host = start(backend=backend)
    plane = opened(host.address, backend=backend)
    assert isinstance(plane, DataPlane)
    for seed in range(2 * BLOCKS):
        ref = host.ref(seed, SIZE)
        with pytest.raises(WrongHost, match="lies on host there: fetch"):
            plane.get(ref)
        await asyncio.gather(*(plane.fetch([ref, ref], WAIT_S) for _ in range(2)))  # asked for twice, pulled once
        fields = plane.get(ref, verify=True)
        assert np.array_equal(fields["x"], payload(seed, SIZE))
        assert (fields["h"] == 0x3F80 + seed).all()
        fields.release()
        del fields
        assert plane.release(ref)
        assert not plane.release(ref)
        wait_until(lambda: host("info")["free"] == BLOCKS)
    total = 2 * BLOCKS * ref.nbytes
    assert plane.pull_stats().received_bytes == {backend: total}
    assert host("info")["sent"] == {backend: total}
    assert plane.stats().free == BLOCKS


async def test_what_is_forgotten_stays_where_it_came_from(start: StartHost, opened: Opened) -> None:
    host = start()
    plane, ref = opened(host.address), host.ref(1, SIZE)
    await plane.fetch([ref], WAIT_S)
    plane.forget(ref)
    plane.forget(ref)
    assert (plane.stats().free, host("info")["free"]) == (BLOCKS, BLOCKS - 1)
    with pytest.raises(WrongHost, match="fetch"):
        plane.get(ref)
    await plane.fetch([ref], WAIT_S)
    assert np.array_equal(plane.get(ref)["x"], payload(1, SIZE))
    plane.release(ref)
    wait_until(lambda: host("info")["free"] == BLOCKS)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_hosts_reach_each_other_by_ipv6_too(start: StartHost, opened: Opened, backend: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    host = start(backend=backend, bind="[::1]:0")
    plane, ref = opened(host.address, backend=backend), host.ref(1, SIZE)
    await plane.fetch([ref], WAIT_S)
    assert np.array_equal(plane.get(ref, verify=True)["x"], payload(1, SIZE))
    assert plane.pull_stats().received_bytes == {backend: ref.nbytes}


async def test_a_full_arena_makes_a_fetch_wait(start: StartHost, opened: Opened) -> None:
    host = start(blocks=BLOCKS + 1)
    plane = opened(host.address)
    refs = [host.ref(seed, SIZE) for seed in range(BLOCKS + 1)]
    await plane.fetch(refs[:-1], WAIT_S)
    with pytest.raises(ArenaFull):
        await plane.fetch(refs, SHORT_S)
    plane.release(refs[0])
    await plane.fetch(refs[-1:], WAIT_S)
    assert np.array_equal(plane.get(refs[-1])["x"], payload(BLOCKS, SIZE))


async def test_only_what_the_ref_says_is_taken(start: StartHost, opened: Opened) -> None:
    host = start()
    plane = opened(host.address)
    ref = host.ref(1, SIZE)
    replace = msgspec.structs.replace
    with pytest.raises(ChecksumError):
        await plane.fetch([replace(ref, checksum=ref.checksum ^ 1)], WAIT_S)
    with pytest.raises(StaleRef):
        await plane.fetch([replace(ref, generation=ref.generation + 1)], WAIT_S)
    with pytest.raises(StaleRef, match="no arena"):
        await plane.fetch([replace(ref, arena="other")], WAIT_S)
    longer, total = lay_out({"x": ("uint8", (2 * SIZE,)), "h": ("bfloat16", (3, 5))})
    with pytest.raises(ShortBuffer, match=f"holds {ref.nbytes} bytes, not {total}"):
        await plane.fetch([replace(ref, fields=longer, nbytes=total)], WAIT_S)
    assert plane.stats().free == BLOCKS
    await plane.fetch([ref], WAIT_S)  # none of it did any harm


# ---------------------------------------------------------------------- who may speak


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_stranger_is_turned_away_before_ucx_sees_its_address(
    start: StartHost, opened: Opened, backend: str
) -> None:
    host = start(backend=backend)
    ref = host.ref(1, SIZE)
    with pytest.raises(NotOfThisRun, match="does not know this run's cookie"):
        await opened(host.address, cookie="guessed", backend=backend).fetch([ref], WAIT_S)
    name, port = host.address.split(":")
    connection = Connection(socket.create_connection((name, int(port))), WAIT_S)
    deadline = Deadline(WAIT_S, "this test")
    assert isinstance(connection.hear(deadline), Hello)
    connection.say(Prove(nonce(), b"\0" * 32, backend, b"a malformed address"), deadline)
    assert connection.hear(deadline) == Failed("NotOfThisRun", f"{_name(connection)} does not know this run's cookie")
    connection.close()
    assert host("info")["refused"] == 2
    await opened(host.address, backend=backend).fetch([ref], WAIT_S)  # it lives


def _name(connection: Connection) -> str:
    host, port = connection.sock.getsockname()[:2]
    return f"{host}:{port}"


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""])
async def test_noise_ends_its_own_connection_alone(start: StartHost, opened: Opened, said: bytes) -> None:
    host = start()
    name, port = host.address.split(":")
    with socket.create_connection((name, int(port))) as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    ref = host.ref(1, SIZE)
    await opened(host.address).fetch([ref], WAIT_S)


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:", ":7", "127.0.0.1:70000", "127.0.0.1:-1"])
async def test_an_address_that_is_none_is_refused_by_name(opened: Opened, address: str) -> None:
    plane = opened(address)
    with pytest.raises(BadAddress, match="not HOST:PORT"):
        await plane.fetch([made_up()], WAIT_S)
    assert plane.stats().free == BLOCKS


async def test_nobody_listening_is_said_after_every_attempt(opened: Opened) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    plane = opened(address, attempts=3)
    with pytest.raises(PeerUnreachable, match=f"block 1 of arena arena from host there: nobody answers at {address}"):
        await plane.fetch([made_up()], WAIT_S)
    stats = plane.pull_stats()
    assert (stats.retries, stats.failures, stats.quarantined) == (2, 1, 0)
    assert plane.stats().free == BLOCKS


# ---------------------------------------------------------------------- what the other end may do


class Scripted:
    """A pull server that does as `script` says, once for each connection."""

    def __init__(self, script: Callable[[Scripted, Connection, Pull], None], cookie: str = COOKIE) -> None:
        self._script, self._cookie = script, cookie
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.deadline = Deadline(WAIT_S, "this test")
        self.pulls: list[Pull] = []
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = Connection(self._listener.accept()[0], WAIT_S)
                with contextlib.suppress(PullError):
                    self._serve(connection)
                connection.close()

    def _serve(self, connection: Connection) -> None:
        hello = Hello(nonce(), ("tcp",))
        connection.say(hello, self.deadline)
        prove = connection.hear(self.deadline)
        assert isinstance(prove, Prove)
        connection.say(Welcome(proof(self._cookie, "server", hello, prove, b"")), self.deadline)
        pull = connection.hear(self.deadline)
        assert isinstance(pull, Pull)
        self.pulls.append(pull)
        self._script(self, connection, pull)

    def close(self) -> None:
        self.done.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    servers: list[Scripted] = []

    def scripted(*args, **options) -> Scripted:
        servers.append(Scripted(*args, **options))
        return servers[-1]

    yield scripted
    for server in servers:
        server.close()


async def test_an_attempt_that_breaks_halfway_is_made_again_under_another_tag(opened: Opened, scripted) -> None:
    data = payload(3, SIZE)

    def script(server: Scripted, connection: Connection, pull: Pull) -> None:
        connection.say(Sending(pull.tag, SIZE), server.deadline)
        first = len(server.pulls) == 1
        connection.send(data[: SIZE // 2].data if first else data.data, server.deadline)
        if not first:
            assert connection.hear(server.deadline) == Got(pull.tag)

    server = scripted(script)
    plane = opened(server.address)
    await plane.fetch([made_up()], WAIT_S)
    assert np.array_equal(plane.get(made_up())["x"], data)
    assert len({pull.tag for pull in server.pulls}) == len(server.pulls) == 2
    assert plane.pull_stats().retries == 1
    assert plane.pull_stats().received_bytes == {"tcp": SIZE}  # what arrived in vain is not counted


async def test_a_sender_that_always_breaks_is_named_and_the_block_is_free(opened: Opened, scripted) -> None:
    def script(server: Scripted, connection: Connection, pull: Pull) -> None:
        connection.say(Sending(pull.tag, SIZE), server.deadline)
        connection.send(memoryview(b"x" * 100), server.deadline)

    plane = opened(scripted(script).address, attempts=2)
    with pytest.raises(PeerLost, match=f"hung up after 100 of {SIZE} bytes"):
        await plane.fetch([made_up()], WAIT_S)
    assert plane.stats().free == BLOCKS


async def test_a_sender_that_stalls_costs_the_deadline_and_no_more(opened: Opened, scripted) -> None:
    def script(server: Scripted, connection: Connection, pull: Pull) -> None:
        connection.say(Sending(pull.tag, SIZE), server.deadline)
        connection.send(memoryview(b"x" * 100), server.deadline)
        server.done.wait(WAIT_S)

    server = scripted(script)
    plane = opened(server.address)
    with pytest.raises(PullTimeout, match=rf"not done within .* s, 100 of {SIZE} bytes received"):
        await plane.fetch([made_up()], SHORT_S)
    assert len(server.pulls) == 1  # no attempt after the deadline
    assert server.pulls[0].within_s <= SHORT_S
    assert plane.stats().free == BLOCKS


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda pull: Sending(pull.tag, SIZE - 1), ShortBuffer),
        (lambda pull: Sending(pull.tag + 1, SIZE), PeerLost),
        (lambda pull: Failed("RuntimeError", "no idea"), PullError),
        (lambda pull: Got(pull.tag), PeerLost),
    ],
    ids=["other size", "other tag", "unknown error", "nonsense"],
)
async def test_answers_that_do_not_fit_the_question_are_errors(opened: Opened, scripted, answer, error) -> None:
    server = scripted(lambda server, connection, pull: connection.say(answer(pull), server.deadline))
    plane = opened(server.address, attempts=1)
    with pytest.raises(error):
        await plane.fetch([made_up()], WAIT_S)
    assert plane.stats().free == BLOCKS


async def test_a_server_that_cannot_prove_itself_gets_no_question(opened: Opened, scripted) -> None:
    server = scripted(lambda *_: None, cookie="another run's")
    with pytest.raises(NotOfThisRun, match=r"the server at .* does not know"):
        await opened(server.address).fetch([made_up()], WAIT_S)
    assert server.pulls == []


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_server_that_was_restarted_is_dialled_anew(start: StartHost, opened: Opened, backend: str) -> None:
    first = start(backend=backend)
    plane = opened(first.address, backend=backend)
    await plane.fetch([first.ref(1, SIZE)], WAIT_S)
    first.kill()
    second = start(backend=backend, bind=first.address)
    ref = second.ref(2, SIZE)
    await plane.fetch([ref], WAIT_S)
    assert np.array_equal(plane.get(ref)["x"], payload(2, SIZE))
    assert plane.pull_stats().retries == 1


async def test_a_block_stays_while_it_travels_whoever_releases_it(start: StartHost, opened: Opened) -> None:
    size = 32 * MIB  # more than sockets hold
    host = start(blocks=1, block_bytes=size + MIB)
    plane = opened(host.address)
    ref = host.ref(1, size)
    deadline = Deadline(WAIT_S, "this test")
    line = plane._puller._line(host.address, deadline)
    line.connection.say(Pull(ref.arena, ref.block, ref.generation, ref.nbytes, 5, WAIT_S), deadline)
    assert line.connection.hear(deadline) == Sending(5, ref.nbytes)
    plane.release(ref)  # on another connection
    plane._releases.submit(int).result(WAIT_S)  # after it
    assert host("info")["free"] == 0
    line.close()
    wait_until(lambda: host("info")["free"] == 1)


# ---------------------------------------------------------------------- the choice


async def test_the_choice_is_announced_and_never_silent(
    start: StartHost, opened: Opened, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    host = start(backend="tcp")
    opened(host.address, backend="tcp")
    assert "blocks of other hosts come by tcp (configured)" in caplog.text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_backend("auto").backend == "tcp"
    assert "ucxx is not installed" in choose_backend("auto").why
    with pytest.raises(NoBackend, match="EXTRAS=ucx"):
        choose_backend("ucx")


@needs_ucx
async def test_a_server_without_ucx_is_asked_by_tcp_and_said_so_unless_ucx_is_configured(
    start: StartHost, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    host = start(backend="tcp")
    ref = host.ref(1, SIZE)
    with pytest.raises(PullError, match=r"offers tcp, and data_plane\.backend is ucx"):
        await opened(host.address, backend="ucx").fetch([ref], WAIT_S)
    plane = opened(host.address, backend="auto")
    await plane.fetch([ref], WAIT_S)
    assert f"blocks of {host.address} come by tcp: it has no ucx" in caplog.text
    assert plane.pull_stats().received_bytes == {"tcp": ref.nbytes}


# ---------------------------------------------------------------------- many


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_many_transfers_grow_neither_descriptors_nor_memory(
    start: StartHost, opened: Opened, backend: str, count: int
) -> None:
    host = start(backend=backend)
    plane = opened(host.address, backend=backend)
    ref = host.ref(1, 20_000)

    async def cycles(number: int) -> dict:
        for _ in range(number):
            await plane.fetch([ref], WAIT_S)
            copy = plane._copies.pop(ref)  # the original stays
            assert plane._local.release(copy)
        return host("info")

    before = await cycles(100)
    after = await cycles(count)
    assert after["descriptors"] == before["descriptors"]
    assert after["threads"] == before["threads"]
    assert after["connections"] == 1
    assert after["resident"] - before["resident"] < 4 * MIB
    assert plane.pull_stats().pulls == count + 100


def test_the_puller_says_what_kinds_of_error_a_server_may_name() -> None:
    assert all(issubclass(kind, Exception) for kind in puller.ERRORS.values())
    assert {"StaleRef", "TornBlock", "ShortBuffer"} <= set(puller.ERRORS)


async def test_closing_cuts_a_pull_that_waits(opened: Opened, scripted) -> None:
    asked = threading.Event()

    def script(server: Scripted, connection: Connection, pull: Pull) -> None:
        asked.set()
        server.done.wait(WAIT_S)

    plane = opened(scripted(script).address)
    waiting = asyncio.create_task(plane.fetch([made_up()], WAIT_S))
    assert await asyncio.to_thread(asked.wait, WAIT_S)
    started = time.monotonic()
    plane._puller.close()
    with pytest.raises(PeerLost):
        await waiting
    assert time.monotonic() - started < WAIT_S / 2


async def test_releases_that_nobody_answers_hold_up_no_close_and_are_said(
    start: StartHost, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    host = start(blocks=BLOCKS)
    plane = opened(host.address, release_s=SHORT_S)
    refs = [host.ref(seed, SIZE) for seed in range(3)]
    await plane.fetch(refs, WAIT_S)
    host.stop()
    assert all(plane.release(ref) for ref in refs)
    assert plane.stats().free == BLOCKS  # the copies went at once
    started = time.monotonic()
    await asyncio.to_thread(plane.close)
    assert time.monotonic() - started < WAIT_S / 2
    assert caplog.text.count("a block of another host was not released") == len(refs)


async def test_a_fetch_that_is_cancelled_leaves_the_block_to_who_asks_next(opened: Opened, scripted) -> None:
    data, go = payload(4, SIZE), threading.Event()

    def script(server: Scripted, connection: Connection, pull: Pull) -> None:
        assert go.wait(WAIT_S)
        connection.say(Sending(pull.tag, SIZE), server.deadline)
        connection.send(data.data, server.deadline)
        connection.hear(server.deadline)

    server = scripted(script)
    plane = opened(server.address)
    first = asyncio.create_task(plane.fetch([made_up()], WAIT_S))
    await asyncio.to_thread(wait_until, lambda: bool(server.pulls))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    go.set()
    await plane.fetch([made_up()], WAIT_S)
    assert np.array_equal(plane.get(made_up())["x"], data)
    assert len(server.pulls) == 1
