"""Streams: items in order as they are read, memory bounded by credit, and an end that both sides agree on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from dockyard_actors.runtime.actor import Actor, handlers_of
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import AskTimeout, OutcomeUnknown, RemoteError, StreamBroken, WireError
from dockyard_actors.runtime.message import Message, MessageTypeError, Stream
from dockyard_actors.runtime.registry import DirectoryUpdate
from dockyard_actors.runtime.system import ActorSystem
from tests.runtime.test_asks import eventually


class Line(msgspec.Struct, frozen=True):
    number: int
    text: str


class Lines(Stream[Line], frozen=True):
    count: int
    fail_at: int = -1
    hang_at: int = -1


class Total(Message[int], frozen=True):
    pass


class OutOfPaper(WireError):
    """Test only."""


class Printer(Actor):
    def __init__(self) -> None:
        self.made = 0
        self.ended = 0

    async def total(self, msg: Total) -> int:
        return self.made

    async def lines(self, msg: Lines) -> AsyncIterator[Line]:
        try:
            for number in range(msg.count):
                if number == msg.fail_at:
                    raise OutOfPaper(f"after {number} lines")
                if number == msg.hang_at:
                    await asyncio.Event().wait()
                self.made += 1
                yield Line(number, "x" * 100)
        finally:
            self.ended += 1


@pytest.fixture
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[ActorSystem, ActorSystem, Printer]]:
    path = tmp_path_factory.mktemp("s")
    async with ActorSystem(SystemConfig(name="home", ipc_prefix=f"{path}/h.")) as home:
        printer = Printer()
        await home.start(printer, "printer")
        async with ActorSystem(SystemConfig(name="away", rendezvous=f"ipc://{path}/h.")) as away:
            yield home, away, printer


@pytest.mark.parametrize("credit", [1, 2, 16])
@pytest.mark.parametrize("count", [0, 1, 40])
async def test_all_items_come_in_order_and_the_stream_ends(pair, count: int, credit: int) -> None:
    _, away, printer = pair
    async with away.ref("printer").stream(Lines(count=count), credit=credit) as lines:
        assert [line.number async for line in lines] == list(range(count))
    assert printer.ended == 1
    assert not away.caller.feeds
    assert not away.waits()


async def test_a_fast_sender_is_held_by_a_slow_reader(pair) -> None:
    home, away, printer = pair
    async with away.ref("printer").stream(Lines(count=1_000), credit=8) as lines:
        first = await anext(lines)
        for _ in range(50):
            await home.ref("printer").ask(Total())  # many rounds of both loops: whatever could be sent was
        assert first.number == 0
        assert printer.made <= 1 + 8 + 1, "what is read, what may be on its way, and one that waits for room"
        assert [line.number async for line in lines] == list(range(1, 1_000))


async def test_leaving_early_ends_the_generator(pair) -> None:
    _, away, printer = pair
    async with away.ref("printer").stream(Lines(count=1_000), credit=4) as lines:
        await anext(lines)
    await eventually(lambda: printer.ended == 1)
    assert printer.made < 20
    assert not away.caller.feeds


async def test_a_reader_that_is_cancelled_ends_the_generator(pair) -> None:
    _, away, printer = pair
    got = asyncio.Event()

    async def read() -> None:
        async with away.ref("printer").stream(Lines(count=5, hang_at=2)) as lines:
            async for _ in lines:
                got.set()

    reading = asyncio.ensure_future(read())
    await got.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await eventually(lambda: printer.ended == 1)


async def test_an_error_of_the_generator_comes_behind_its_items_and_with_its_type(pair) -> None:
    _, away, _ = pair
    seen = []
    async with away.ref("printer").stream(Lines(count=9, fail_at=3)) as lines:
        caught = None
        try:
            async for line in lines:
                seen.append(line.number)
        except OutOfPaper as error:
            caught = error
    assert seen == [0, 1, 2]
    assert caught is not None
    assert str(caught) == "after 3 lines"
    assert isinstance(caught.__cause__, RemoteError)
    assert "in lines" in caught.__cause__.traceback


async def test_an_item_that_does_not_come_is_a_timeout_that_says_who_waited_for_what(pair) -> None:
    _, away, printer = pair
    async with away.ref("printer").stream(Lines(count=9, hang_at=1), deadline_s=0.1) as lines:
        await anext(lines)
        with pytest.raises(AskTimeout, match=r"away asked printer#1 for Lines and had no further item after 0.1 s"):
            await anext(lines)
    await eventually(lambda: printer.ended == 1)


async def test_a_sender_that_stops_ends_the_stream_with_an_error(pair) -> None:
    home, away, _ = pair
    async with away.ref("printer").stream(Lines(count=9, hang_at=1)) as lines:
        await anext(lines)
        stopping = asyncio.ensure_future(home.stop("printer"))
        with pytest.raises(OutcomeUnknown):
            await anext(lines)
        await stopping


async def test_a_process_that_dies_ends_its_streams_on_either_side(pair) -> None:
    home, away, printer = pair
    async with away.ref("printer").stream(Lines(count=9, hang_at=1)) as lines:
        await anext(lines)
        home.take(DirectoryUpdate(entries=(), gone={away.config.uid: "test: the reader is dead"}))
        await eventually(lambda: printer.ended == 1)
        away.caller.on_gone(home.config.uid, "test: the sender is dead")
        with pytest.raises(OutcomeUnknown, match="which died before its end"):
            await anext(lines)


async def test_a_missing_item_is_noticed(pair) -> None:
    _, away, _ = pair
    drop = iter([False, True])
    take = away.caller.on_item
    away.caller.on_item = lambda peer, lane, item: None if next(drop, False) else take(peer, lane, item)
    async with away.ref("printer").stream(Lines(count=9)) as lines:
        await anext(lines)
        with pytest.raises(StreamBroken, match="item 2 came where 1 was due"):
            await anext(lines)


async def test_a_handler_of_a_stream_is_a_generator_and_no_other_is() -> None:
    class Plain(Actor):
        async def lines(self, msg: Lines) -> None: ...

    class Generating(Actor):
        async def total(self, msg: Total) -> AsyncIterator[int]:
            yield 1

    for cls in (Plain, Generating):
        with pytest.raises(MessageTypeError, match="a Stream is handled by an async generator"):
            handlers_of(cls)


async def test_a_stream_needs_credit(pair) -> None:
    _, away, _ = pair
    with pytest.raises(ValueError, match="credit=0"):
        away.ref("printer").stream(Lines(count=1), credit=0)


async def test_a_stream_is_neither_asked_nor_told_nor_read_outside_of_its_block(pair) -> None:
    home, away, _ = pair
    ref = away.ref("printer")
    with pytest.raises(MessageTypeError, match="Lines is a stream"):
        await ref.ask(Lines(count=3))
    with pytest.raises(MessageTypeError, match="Lines is a stream"):
        await ref.tell(Lines(count=3))
    with pytest.raises(TypeError, match=r"async with ref\.stream\(Lines"):
        async for _ in ref.stream(Lines(count=3)):
            pass
    assert home.stats().handler_errors == 0
    assert await ref.ask(Total()) == 0
    assert list(home.status().actors["printer"].handlers) == ["Total"], "nothing else was sent"
