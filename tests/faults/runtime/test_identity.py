"""Who is at the other end of a connection: hellos that are lost, refused or forged, and identities that somebody else uses."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import zmq

from dockyard_actors.transport.base import Address, ControlConfig, Lane, create_keys, ipc_endpoint
from dockyard_actors.transport.control import ZmqControl
from dockyard_actors.transport.control_ports import DealerPort, Hello, Link, RouterPort, pack
from tests.faults.runtime.proxy import Proxy, Weather
from tests.transport.test_control import Inbox, eventually, opened

PATIENCE_S = 30.0


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def within() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await test(*args, **kwargs)

        uvloop.run(within())

    return run


def routers(transport: ZmqControl, lane: Lane) -> list[RouterPort]:
    return [router for router in transport._routers if router.lane == lane]


def hello(uid: str, cookie: str = "", major: int = 1) -> bytes:
    return b"H" + msgspec.msgpack.encode(Hello(major, 0, uid, cookie))


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("i")


@pytest.mark.parametrize("cut_at", [70, 100, 130])
@on_uvloop
async def test_a_hello_that_dies_with_its_connection_is_said_again(cut_at: int) -> None:
    """ZMQ dials anew by itself and tells nobody: the first frame of the new connection may be an envelope."""
    client, told = ZmqControl(ControlConfig(uid="client", allow_plain_loopback=True), Inbox()), Inbox()
    client.receiver = told
    server, inbox = (
        ZmqControl(ControlConfig("server", "", "tcp://127.0.0.1:0", allow_plain_loopback=True), Inbox()),
        Inbox(),
    )
    server.receiver = inbox
    await client.start()
    await server.start()
    try:
        async with Proxy(int(server.address.tcp[0].rpartition(":")[2]), Weather()) as proxy:
            proxy.cut_after(cut_at)
            link = client.connect(Address(tcp=(f"tcp://127.0.0.1:{proxy.port}", "")))
            n = 0
            while not inbox.got:
                link.send(Lane.USER, b"%d" % n)
                n += 1
                await asyncio.sleep(0.02)
            got = [int(body) for body in inbox.bodies()]
            assert got == sorted(set(got)), "in order and nothing twice"
            assert proxy.connections == 2
    finally:
        await client.close()
        await server.close()
    assert not inbox.refused


@on_uvloop
async def test_a_process_declared_dead_does_not_get_in_again_by_another_hello(short: Path) -> None:
    server, inbox = await opened(short, "server")
    zombie, _ = await opened(short, "zombie")
    try:
        link = zombie.connect(server.address)
        link.send(Lane.USER, b"before")
        await inbox.until(lambda: inbox.got)
        server.forget("zombie")
        assert isinstance(link, Link)
        port = link.ports[Lane.USER]
        assert isinstance(port, DealerPort)
        for body in (b"one", b"two"):
            link.send(Lane.USER, body)
            port.outbox.seal()
            port.outbox.frames.append((hello("zombie"), 0))
        link.send(Lane.USER, b"three")
        before = server.counters()["bad_frames"]
        await eventually(lambda: server.counters()["bad_frames"] >= before + 2)
        assert inbox.bodies() == [b"before"]
    finally:
        await zombie.close()
        await server.close()


@on_uvloop
async def test_another_major_is_refused_by_name_whatever_its_hello_looks_like(short: Path) -> None:
    server, inbox = await opened(short, "server", process="buffer")
    context = zmq.Context()
    try:
        for said, who in (([7, 3, "u1", "", "trainer"], "trainer (uid u1)"), ([7, {"uid": "u1"}], "? (uid ?)")):
            dealer = context.socket(zmq.DEALER)
            dealer.connect(ipc_endpoint(server.address.ipc, Lane.USER))
            dealer.send(b"H" + msgspec.msgpack.encode(said))
            await eventually(lambda dealer=dealer: dealer.poll(0))
            text = dealer.recv().decode()
            assert text.startswith("Rprotocol 7.")
            assert "process buffer (uid server), which speaks 1." in text
            assert "same release of dockyard-actors" in text
            assert who in text
        assert not inbox.got
    finally:
        context.destroy(linger=0)
        await server.close()


@on_uvloop
async def test_under_curve_a_stranger_cannot_take_over_a_connection_even_with_its_routing_id(short: Path) -> None:
    keys = create_keys(short / "keys")
    settings = {"ipc_prefix": "", "tcp_bind": "tcp://127.0.0.1:0", "keys": keys}
    server, inbox = await opened(short, "server", **settings)
    friend, answers = await opened(short, "friend", **settings)
    context = zmq.Context()
    try:
        link = friend.connect(server.address)
        link.send(Lane.USER, b"mine")
        await inbox.until(lambda: inbox.got)
        back = inbox.got[0][0]
        (router,) = routers(server, Lane.USER)
        (identity,) = router.peers
        public, secret = zmq.curve_keypair()
        for curve in (True, False):
            thief = context.socket(zmq.DEALER)
            thief.setsockopt(zmq.ROUTING_ID, identity)
            if curve:
                thief.curve_serverkey, thief.curve_publickey, thief.curve_secretkey = (
                    keys.public.encode(),
                    public,
                    secret,
                )
            thief.connect(server.address.tcp[Lane.USER])
            thief.send(pack([b"forged"]))
        await eventually(lambda: server.counters()["denied_keys"] >= 1)
        back.send(Lane.USER, b"for the friend")
        await answers.until(lambda: answers.got)
        link.send(Lane.USER, b"still mine")
        await inbox.until(lambda: len(inbox.got) == 2)
        assert inbox.bodies() == [b"mine", b"still mine"]
        assert answers.bodies() == [b"for the friend"]
    finally:
        context.destroy(linger=0)
        await friend.close()
        await server.close()


@on_uvloop
async def test_who_says_anothers_uid_does_not_get_its_answers_and_sockets_are_private(short: Path) -> None:
    server, inbox = await opened(short, "server")
    friend, answers = await opened(short, "friend")
    context = zmq.Context()
    try:
        for lane in Lane:
            path = ipc_endpoint(server.address.ipc, lane).removeprefix("ipc://")
            assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        friend.connect(server.address).send(Lane.USER, b"mine")
        await inbox.until(lambda: inbox.got)
        back = inbox.got[0][0]
        (router,) = routers(server, Lane.USER)
        (identity,) = router.peers
        assert len(identity) == 16, "nothing that is said elsewhere: 15 random bytes"
        assert b"friend" not in identity
        double = context.socket(zmq.DEALER)
        double.setsockopt(zmq.ROUTING_ID, b"friend")
        double.connect(ipc_endpoint(server.address.ipc, Lane.USER))
        double.send(hello("friend"))
        double.send(pack([b"also me"]))
        await inbox.until(lambda: len(inbox.got) == 2)
        back.send(Lane.USER, b"for the friend")
        await answers.until(lambda: answers.got)
        assert not double.poll(0)
    finally:
        context.destroy(linger=0)
        await friend.close()
        await server.close()


@on_uvloop
async def test_a_flood_of_different_nonsense_costs_bounded_memory_and_log(
    short: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, inbox = await opened(short, "server")
    context = zmq.Context()
    flood = 500
    try:
        with caplog.at_level(logging.WARNING, "dockyard.transport.control"):
            dealer = context.socket(zmq.DEALER)
            dealer.connect(ipc_endpoint(server.address.ipc, Lane.USER))
            for n in range(flood):
                await asyncio.sleep(0)
                dealer.send(hello(secrets.token_hex(5_000), major=n + 2))
            await eventually(lambda: server.counters()["bad_frames"] >= flood)
        said = [record.getMessage() for record in caplog.records]
        assert 1 <= len(said) < flood / 5
        assert max(map(len, said)) < 1_000
        assert sum(map(len, server._bad_reasons)) < flood * 100
        assert not any(router.peers for router in routers(server, Lane.USER))
        assert not inbox.got
    finally:
        context.destroy(linger=0)
        await server.close()


@on_uvloop
async def test_a_process_that_dials_anew_again_and_again_is_one_peer_with_few_connections(short: Path) -> None:
    server, inbox = await opened(short, "server")
    client, _ = await opened(short, "client")
    try:
        for n in range(30):
            link = client.connect(server.address)
            link.send(Lane.USER, b"%d" % n)
            await inbox.until(lambda n=n: len(inbox.got) == n + 1)
            client.disconnect(link)
        (router,) = routers(server, Lane.USER)
        assert 1 <= len(router.peers) <= 8
    finally:
        await client.close()
        await server.close()
