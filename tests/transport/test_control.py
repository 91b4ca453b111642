"""The control transport: order, no silent loss, and who is let in."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
from hypothesis import given
from hypothesis import strategies as st

from dockyard_actors.transport.base import (
    Address,
    ControlConfig,
    Lane,
    Peer,
    RunKeys,
    TransportError,
    create_keys,
    ipc_endpoint,
    load_keys,
    parse_rendezvous,
)
from dockyard_actors.transport.control import ZmqControl
from dockyard_actors.transport.control_ports import Hello, pack, unpack

WAIT_S = 10.0


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on the loop that role processes use."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(test(*args, **kwargs))

    return run


async def eventually(condition: Callable[[], Any]) -> None:
    """For counters and foreign sockets, which have no event to wait for."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Inbox:
    """A receiver that remembers everything and lets tests wait for it."""

    def __init__(self) -> None:
        self.got: list[tuple[Peer, Lane, bytes]] = []
        self.lost: list[tuple[int, str]] = []
        self.refused: list[str] = []
        self.faults: list[BaseException] = []
        self.news = asyncio.Event()
        self.echo = False

    def on_envelope(self, peer: Peer, lane: Lane, envelope: memoryview) -> None:
        self.got.append((peer, lane, bytes(envelope)))
        if self.echo:
            peer.send(lane, bytes(envelope))
        self.news.set()

    def on_undeliverable(self, peer: Peer, lane: Lane, envelopes: int, reason: str) -> None:
        self.lost.append((envelopes, reason))
        self.news.set()

    def on_refused(self, peer: Peer, reason: str) -> None:
        self.refused.append(reason)
        self.news.set()

    def on_fault(self, error: BaseException) -> None:
        self.faults.append(error)
        self.news.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.news.clear()
                await self.news.wait()
        assert not self.faults

    def bodies(self, lane: Lane = Lane.USER) -> list[bytes]:
        return [body for _, at, body in self.got if at == lane]


async def opened(path: Path, name: str, **settings) -> tuple[ZmqControl, Inbox]:
    inbox = Inbox()
    prefix = settings.pop("ipc_prefix", f"{path}/{name}.")
    transport = ZmqControl(ControlConfig(uid=name, ipc_prefix=prefix, **settings), inbox)
    await transport.start()
    return transport, inbox


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")  # ipc paths have 107 bytes


@given(st.lists(st.binary(max_size=300), max_size=40))
def test_packed_frames_unpack_to_the_same_envelopes(envelopes: list[bytes]) -> None:
    assert [bytes(view) for view in unpack(pack(envelopes))] == envelopes


@given(st.binary(max_size=200))
def test_a_malformed_frame_is_an_error_and_never_an_endless_read(junk: bytes) -> None:
    try:
        total = sum(len(view) + 4 for view in unpack(b"D" + junk))
    except ValueError:
        return
    assert total == len(junk)


@pytest.mark.parametrize("kind", ["ipc", "curve"])
@on_uvloop
async def test_every_envelope_arrives_once_and_in_order_on_both_lanes_and_so_do_the_answers(
    short: Path, kind: str
) -> None:
    settings = {}
    if kind == "curve":
        settings = {"ipc_prefix": "", "tcp_bind": "tcp://127.0.0.1:0", "keys": create_keys(short / "keys")}
    a, inbox_a = await opened(short, "a", **settings)
    b, inbox_b = await opened(short, "b", **settings)
    inbox_b.echo = True
    try:
        peer = a.connect(b.address)
        sent = [b"%d" % n for n in range(5000)]
        for n, body in enumerate(sent):
            peer.send(Lane.USER, body)
            if n % 100 == 0:
                peer.send(Lane.CONTROL, body)
                await asyncio.sleep(0)
        await inbox_a.until(lambda: len(inbox_a.got) == 5050)
        assert inbox_b.bodies() == sent == inbox_a.bodies()
        assert inbox_b.bodies(Lane.CONTROL) == sent[::100] == inbox_a.bodies(Lane.CONTROL)
        assert {peer.uid for peer, _, _ in inbox_b.got} == {"a"}
    finally:
        await a.close()
        await b.close()


@on_uvloop
async def test_a_receiver_that_stops_reading_loses_nothing_when_it_reads_again(short: Path) -> None:
    a, inbox_a = await opened(short, "a", hwm_frames=2, frame_envelopes=4)
    b, inbox_b = await opened(short, "b", hwm_frames=2)
    try:
        peer = a.connect(b.address)
        peer.send(Lane.USER, b"first")
        await inbox_b.until(lambda: inbox_b.got)
        b.pause(Lane.USER, True)
        big = b"x" * 20_000  # more than kernel buffers and two frames hold
        for n in range(1000):
            peer.send(Lane.USER, b"%06d" % n + big)
        peer.send(Lane.CONTROL, b"urgent")
        await inbox_b.until(lambda: inbox_b.bodies(Lane.CONTROL))
        before = len(inbox_b.bodies())
        b.pause(Lane.USER, False)
        await inbox_b.until(lambda: len(inbox_b.bodies()) == 1001)
        assert before < 100, "a paused lane must not be read"
        assert [body[:6] for body in inbox_b.bodies()[1:]] == [b"%06d" % n for n in range(1000)]
        assert not inbox_a.lost
    finally:
        await a.close()
        await b.close()


@on_uvloop
async def test_answers_to_a_peer_that_does_not_read_wait_and_then_all_arrive(short: Path) -> None:
    a, inbox_a = await opened(short, "a", hwm_frames=2)
    b, inbox_b = await opened(short, "b", hwm_frames=2, frame_envelopes=4)
    try:
        a.connect(b.address).send(Lane.USER, b"hello")
        await inbox_b.until(lambda: inbox_b.got)
        back = inbox_b.got[0][0]
        for n in range(1000):
            back.send(Lane.USER, b"%06d" % n + b"y" * 20_000)
        await inbox_a.until(lambda: len(inbox_a.got) == 1000)
        assert [body[:6] for body in inbox_a.bodies()] == [b"%06d" % n for n in range(1000)]
    finally:
        await a.close()
        await b.close()


@on_uvloop
async def test_what_cannot_reach_a_vanished_peer_is_reported_and_counted(short: Path) -> None:
    a, inbox_a = await opened(short, "a")
    b, _ = await opened(short, "b")
    try:
        b.connect(a.address).send(Lane.USER, b"hello")
        await inbox_a.until(lambda: inbox_a.got)
        back = inbox_a.got[0][0]
        await b.close()
        async with asyncio.timeout(WAIT_S):
            while not inbox_a.lost:  # the socket learns of the disconnection in its own time
                back.send(Lane.USER, b"anybody there?")
                await asyncio.sleep(0.01)
        assert "gone" in inbox_a.lost[0][1]
        link = a.connect(b.address)
        a.disconnect(link)
        link.send(Lane.USER, b"late")
        assert inbox_a.lost[-1] == (1, "the connection was closed")
    finally:
        await a.close()


@on_uvloop
async def test_bytes_of_strangers_on_a_loopback_port_never_reach_the_receiver(short: Path) -> None:
    server, inbox = await opened(
        short, "server", tcp_bind="tcp://127.0.0.1:0", allow_plain_loopback=True, handshake_s=0.2
    )
    friend, _ = await opened(short, "friend", allow_plain_loopback=True)
    context = zmq.Context()
    try:
        for endpoint in server.address.tcp:
            port = int(endpoint.rpartition(":")[2])
            for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + b"\0" * 8 + b"\x7f", b""):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(junk)
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 1000
            dealer.connect(endpoint)
            for frame in (
                pack([b"no hello before"]),
                b"H\x00garbage",
                b"",
                b"Z",
                b"R",
                b"H" + msgspec.msgpack.encode([1, 0]),
                b"H" + b"\x91" * 20_000,  # nested deeper than any decoder goes
                b"H" + b"\x91" * 2_000,
            ):
                dealer.send(frame)
            dealer.send_multipart([b"D", b"two", b"parts"])
            dealer.close()
        await eventually(lambda: server.counters()["bad_frames"] >= 18)
        friend.connect(Address(host="elsewhere", tcp=server.address.tcp)).send(Lane.USER, b"still serving")
        await inbox.until(lambda: inbox.got)
        assert inbox.bodies() == [b"still serving"]
    finally:
        context.destroy(linger=1000)
        await friend.close()
        await server.close()


@on_uvloop
async def test_another_protocol_major_and_another_runs_cookie_are_refused_with_the_reason(short: Path) -> None:
    server, inbox = await opened(short, "server", keys=RunKeys("", "", "cookie"))
    stranger, told = await opened(short, "stranger", keys=RunKeys("", "", "another"))
    context = zmq.Context()
    try:
        stranger.connect(server.address).send(Lane.USER, b"let me in")
        await told.until(lambda: told.refused)
        assert "wrong key file" in told.refused[0]
        dealer = context.socket(zmq.DEALER)
        dealer.connect(ipc_endpoint(server.address.ipc, Lane.USER))
        dealer.send(b"H" + msgspec.msgpack.encode(Hello(99, 0, "x", "cookie")))
        dealer.send(pack([b"from the future"]))
        await eventually(lambda: dealer.poll(0))
        assert b"protocol 99.0" in dealer.recv()
        assert not inbox.got
    finally:
        context.destroy(linger=0)
        await stranger.close()
        await server.close()


@on_uvloop
async def test_a_newer_hello_with_more_fields_is_understood(short: Path) -> None:
    server, inbox = await opened(short, "server")
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(ipc_endpoint(server.address.ipc, Lane.USER))
        dealer.send(b"H" + msgspec.msgpack.encode([1, 7, "newer", "", "something new"]))
        dealer.send(pack([b"hi"]))
        await inbox.until(lambda: inbox.got)
        assert inbox.got[0][0].uid == "newer"
    finally:
        context.destroy(linger=0)
        await server.close()


@on_uvloop
async def test_a_client_with_another_runs_key_file_is_logged_now_and_then(
    short: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, other = create_keys(short / "keys"), create_keys(short / "other")
    server, _ = await opened(short, "server", ipc_prefix="", tcp_bind="tcp://127.0.0.1:0", keys=keys)
    client, _ = await opened(short, "client", ipc_prefix="", keys=other)
    client.connect(server.address).send(Lane.USER, b"to whom")
    try:
        await eventually(lambda: server.counters()["denied_keys"] >= 3)
    finally:
        await client.close()
        await server.close()
    told = [record.getMessage() for record in caplog.records if "the key file of another run" in record.getMessage()]
    warned = [r for r in caplog.records if r.levelname == "WARNING" and "the key file of another run" in r.getMessage()]
    assert told
    assert server.address.tcp[Lane.USER] in told[0]
    assert 1 <= len(warned) <= server.counters()["denied_keys"].bit_length()


@on_uvloop
async def test_a_curve_port_refuses_unknown_keys_and_plain_clients(short: Path) -> None:
    keys = create_keys(short / "keys")
    server, inbox = await opened(short, "server", ipc_prefix="", tcp_bind="tcp://127.0.0.1:0", keys=keys)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    context = zmq.Context()
    try:
        for curve in (True, False):
            dealer = context.socket(zmq.DEALER)
            if curve:
                dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = (
                    keys.public.encode(),
                    public.encode(),
                    secret.encode(),
                )
            dealer.connect(server.address.tcp[Lane.USER])
            dealer.send(b"H" + msgspec.msgpack.encode(Hello(1, 0, "thief", keys.cookie)))
            dealer.send(pack([b"stolen cookie"]))
        await eventually(lambda: server.counters()["denied_keys"] >= 1)
        friend, _ = await opened(short, "friend", ipc_prefix="", keys=keys)
        friend.connect(server.address).send(Lane.USER, b"mine")
        await inbox.until(lambda: inbox.got)
        assert inbox.bodies() == [b"mine"]
        await friend.close()
    finally:
        context.destroy(linger=0)
        await server.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tcp_bind": "tcp://127.0.0.1:0"}, "without the run's key file"),
        ({"tcp_bind": "tcp://192.0.2.1:0", "allow_plain_loopback": True}, "without the run's key file"),
        ({"tcp_bind": "127.0.0.1"}, "not tcp://HOST:PORT"),
        ({"tcp_bind": "tcp://0.0.0.0:0"}, "not a wildcard"),
        ({"ipc_prefix": "/tmp/" + "a" * 120}, "shorter runtime directory"),
    ],
)
@on_uvloop
async def test_unsafe_or_impossible_addresses_are_refused_with_the_way_out(
    short: Path, settings: dict, text: str
) -> None:
    with pytest.raises(TransportError, match=text):
        await opened(short, "a", **settings)


@on_uvloop
async def test_a_second_bind_cannot_steal_a_path_in_use(short: Path) -> None:
    first, inbox = await opened(short, "a")
    with pytest.raises(TransportError, match="in use by another live process"):
        await opened(short, "a")
    other, _ = await opened(short, "b")
    other.connect(first.address).send(Lane.USER, b"still mine")
    await inbox.until(lambda: inbox.got)
    await other.close()
    await first.close()


@on_uvloop
async def test_an_envelope_too_large_for_control_is_refused_at_the_sender_and_harms_nobody(short: Path) -> None:
    a, _ = await opened(short, "a", max_frame_bytes=10_000)
    b, inbox = await opened(short, "b", max_frame_bytes=10_000)
    try:
        peer = a.connect(b.address)
        for n in range(9):
            peer.send(Lane.USER, b"%d" % n * 3000)  # together more than one frame may hold
        with pytest.raises(TransportError, match="data plane"):
            peer.send(Lane.USER, b"x" * 10_001)
        peer.send(Lane.USER, b"after")
        await inbox.until(lambda: len(inbox.got) == 10)
        assert inbox.bodies()[-1] == b"after"
    finally:
        await a.close()
        await b.close()


@on_uvloop
async def test_a_closed_transport_leaves_no_file_and_no_descriptor(short: Path) -> None:
    async def once() -> None:
        keys = load_keys(short / "keys")
        a, _ = await opened(short, "a", tcp_bind="tcp://127.0.0.1:0", keys=keys)
        b, inbox = await opened(short, "b")
        c, _ = await opened(short, "c", keys=keys)
        b.connect(a.address).send(Lane.USER, b"unauthenticated")
        c.connect(b.address).send(Lane.CONTROL, b"unauthenticated")
        c.connect(Address(host=a.address.host, ipc="/nowhere/")).send(Lane.USER, b"to nobody")
        await asyncio.sleep(0)
        for transport in (a, b, c):
            await transport.close()
        assert not inbox.faults

    create_keys(short / "keys")
    await once()
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await once()
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert os.listdir(short) == ["keys"]


def test_a_key_file_is_private_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = create_keys(path)
    assert load_keys(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(TransportError, match="readable by others"):
        load_keys(path)
    with pytest.raises(TransportError, match="primary's runtime directory"):
        load_keys(tmp_path / "missing")
    path.chmod(0o600)
    path.write_text("{}")
    with pytest.raises(TransportError, match="malformed"):
        load_keys(path)


@pytest.mark.parametrize("text", ["", "tcp://host", "http://x:1", "ipc://relative", "tcp://:80"])
def test_a_rendezvous_in_no_known_form_is_refused(text: str) -> None:
    with pytest.raises(TransportError, match="rendezvous"):
        parse_rendezvous(text)
