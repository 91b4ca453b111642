"""How envelopes leave and how frames are noticed: at once when alone, packed when many, and never lost with a swallowed edge."""

from __future__ import annotations

import asyncio
import select
import time
from pathlib import Path

import pytest

from dockyard_actors.transport.base import ControlConfig, Lane
from dockyard_actors.transport.control import ZmqControl
from dockyard_actors.transport.control_ports import Link, Outbox, unpack
from tests.transport.test_control import WAIT_S, Inbox, eventually, on_uvloop, opened

DULL_S = 0.005  # a send looks at its socket's commands again when so much time has passed since it last did: about 1 ms


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")  # ipc paths have 107 bytes


async def introduced(path: Path) -> tuple[ZmqControl, Inbox, ZmqControl, Inbox, Link]:
    """Two transports, and the first one's link to the second: both have said something to each other."""
    a, inbox_a = await opened(path, "a")
    b, inbox_b = await opened(path, "b")
    link = a.connect(b.address)
    assert isinstance(link, Link)
    link.send(Lane.USER, b"hello")
    await inbox_b.until(lambda: inbox_b.got)
    inbox_b.got[0][0].send(Lane.USER, b"hello yourself")
    await inbox_a.until(lambda: inbox_a.got)
    for _ in range(3):  # what the exchange left to do in this loop is done
        await asyncio.sleep(0)
    return a, inbox_a, b, inbox_b, link


def readable(fd: int, wait_s: float) -> bool:
    return bool(select.select([fd], [], [], wait_s)[0])


@on_uvloop
async def test_a_message_whose_wake_up_a_send_swallowed_is_read_all_the_same(short: Path) -> None:
    a, inbox_a, b, inbox_b, link = await introduced(short)
    port = link.ports[Lane.USER]
    assert port is not None
    fd, back = port._fd, inbox_b.got[0][0]
    swallowed = 0
    try:
        for n in range(20):
            before = len(inbox_a.got)
            back.send(Lane.USER, b"x%d" % n)
            assert readable(fd, WAIT_S)  # it has arrived, and the loop was not asked yet
            until = time.perf_counter() + DULL_S
            while time.perf_counter() < until:
                pass
            link.send(Lane.USER, b"y%d" % n)
            swallowed += not readable(fd, 0)
            await inbox_a.until(lambda before=before: len(inbox_a.got) > before)
            await inbox_b.until(lambda n=n: inbox_b.bodies()[-1] == b"y%d" % n)
        assert swallowed, "no send swallowed an edge: this run proved nothing"
    finally:
        await a.close()
        await b.close()


@on_uvloop
async def test_a_lone_envelope_is_on_its_way_before_the_loop_goes_on(short: Path) -> None:
    a, _, b, inbox_b, link = await introduced(short)
    try:
        router = next(port for port in b._routers if port.lane == Lane.USER)
        assert not readable(router._fd, 0)
        link.send(Lane.USER, b"alone")
        assert readable(router._fd, WAIT_S)
        await inbox_b.until(lambda: b"alone" in inbox_b.bodies())
    finally:
        await a.close()
        await b.close()


@on_uvloop
async def test_a_port_that_is_paused_with_something_to_read_leaves_the_processor_alone(short: Path) -> None:
    a, _, b, inbox_b, link = await introduced(short)
    try:
        b.pause(Lane.USER, True)
        await asyncio.sleep(0)
        router = next(port for port in b._routers if port.lane == Lane.USER)
        link.send(Lane.USER, b"later")
        assert readable(router._fd, WAIT_S)
        await eventually(lambda: not readable(router._fd, 0))  # or the loop would call the port without end
        b.pause(Lane.USER, False)
        await inbox_b.until(lambda: b"later" in inbox_b.bodies())
    finally:
        await a.close()
        await b.close()


def frames(outbox: Outbox) -> list[list[bytes]]:
    return [[bytes(view) for view in unpack(frame)] for frame, _ in outbox.frames]


def test_envelopes_that_come_thick_are_packed_and_one_that_comes_alone_again_leaves_at_once():
    outbox = Outbox(ControlConfig(uid="u", frame_envelopes=4))
    assert outbox.add(b"1")  # the first may leave before anything else is known
    assert not outbox.add(b"2")
    assert not outbox.add(b"3")
    outbox.end_tick()
    assert frames(outbox) == [[b"1"], [b"2", b"3"]]
    outbox.frames.clear()
    assert [outbox.add(b"%d" % n) for n in range(6)] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]  # a full frame does not wait
    outbox.end_tick()
    assert frames(outbox) == [[b"0", b"1", b"2", b"3"], [b"4", b"5"]]
    outbox.frames.clear()
    assert not outbox.add(b"a")  # the tick before was a busy one
    outbox.end_tick()
    outbox.frames.clear()
    assert outbox.add(b"b")  # the tick before had this one only
    outbox.end_tick()
    assert not outbox.add(b"c")  # the socket did not take the last frame yet: order
    outbox.end_tick()
    assert frames(outbox) == [[b"b"], [b"c"]]
    assert outbox.waiting() == outbox.clear() == 2
    assert outbox.waiting() == 0
