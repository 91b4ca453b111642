"""Whatever handlers raise, cancel or leave behind, an actor's lanes go on, every ask is answered, and stopping ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from dockyard_actors.runtime.actor import Actor, concurrent, control
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import (
    AskTimeout,
    MailboxFull,
    OutcomeUnknown,
    PeerDied,
    RemoteError,
    SystemClosed,
    UnknownName,
)
from dockyard_actors.runtime.message import Message, Stream, decoder
from dockyard_actors.runtime.system import ActorSystem

SOON_S = 5.0  # far more than anything here takes: a hang guard


class Raise(Message[int], frozen=True):
    what: str


class RaiseBeside(Message[int], frozen=True):
    what: str


class Wait(Message[int], frozen=True):
    """Takes a place of the user lane until `Go`."""


class WaitUrgently(Message[int], frozen=True):
    """... of the control lane."""


class Hold(Message[int], frozen=True):
    """Holds the user lane until `Go`."""


class Go(Message[None], frozen=True):
    pass


class Hi(Message[int], frozen=True):
    pass


class Urgent(Message[int], frozen=True):
    pass


class CancelSelf(Message[int], frozen=True):
    pass


class AwaitCancelled(Message[int], frozen=True):
    pass


class StopSelf(Message[int], frozen=True):
    pass


class Count(Stream[int], frozen=True):
    most: int


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Odd(BaseException):
    pass


ERRORS = {
    "surrogate": lambda: ValueError("cannot open \udcff.txt"),
    "unsayable": Unsayable,
    "odd": lambda: Odd("not an Exception"),
    "group": lambda: BaseExceptionGroup("several", [Odd("one")]),
}


class Worker(Actor):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = 0
        self.stops = 0
        self.handled: list[str] = []

    async def fail(self, msg: Raise) -> int:
        raise ERRORS[msg.what]()

    @concurrent
    async def fail_beside(self, msg: RaiseBeside) -> int:
        raise ERRORS[msg.what]()

    @concurrent
    async def wait(self, msg: Wait) -> int:
        return await self._wait("wait")

    @control
    @concurrent
    async def wait_urgently(self, msg: WaitUrgently) -> int:
        return await self._wait("urgent wait")

    async def _wait(self, what: str) -> int:
        self.handled.append(what)
        self.waiting += 1
        await self.gate.wait()
        return 1

    async def hold(self, msg: Hold) -> int:
        return await self._wait("hold")

    @control
    async def go(self, msg: Go) -> None:
        self.gate.set()

    async def hi(self, msg: Hi) -> int:
        return 7

    @control
    async def urgent(self, msg: Urgent) -> int:
        return 8

    async def cancel_self(self, msg: CancelSelf) -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.sleep(SOON_S)
        except asyncio.CancelledError:  # as timeout helpers of old do
            return 9
        raise AssertionError

    async def await_cancelled(self, msg: AwaitCancelled) -> int:
        other = asyncio.ensure_future(asyncio.sleep(SOON_S))
        other.cancel()
        await other
        raise AssertionError

    async def stop_self(self, msg: StopSelf) -> int:
        await self.ctx.system.stop(self.ctx.name)
        return 3

    async def count(self, msg: Count) -> AsyncIterator[int]:
        for number in range(msg.most):
            yield number

    async def on_stop(self) -> None:
        self.stops += 1

    async def on_death(self, death: object) -> None:
        other = asyncio.ensure_future(asyncio.sleep(SOON_S))
        other.cancel()
        await other


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110  # what it looks at tells nobody
            await asyncio.sleep(0)


@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.parametrize("kind", [Raise, RaiseBeside])
async def test_whatever_a_handler_raises_its_asker_hears_and_the_actor_goes_on(
    kind: type[Raise | RaiseBeside], what: str
) -> None:
    async with asyncio.timeout(SOON_S), ActorSystem() as system:
        ref = await system.start(Worker(), "w")
        with pytest.raises(RemoteError) as raised:
            await ref.ask(kind(what=what))
        assert raised.value.type == type(ERRORS[what]()).__name__
        assert await ref.ask(Hi()) == 7


async def test_a_handler_that_cancelled_itself_costs_the_next_one_nothing() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem() as system:
        ref = await system.start(Worker(), "w")
        assert await ref.ask(CancelSelf()) == 9
        with pytest.raises(RemoteError):
            await ref.ask(AwaitCancelled())
        assert await ref.ask(Hi()) == 7


async def test_a_cancellation_within_an_event_does_not_end_the_control_lane() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem() as system:
        worker = Worker()
        ref = await system.start(worker, "w")
        await system.start(Worker(), "other")
        worker.ctx.watch("other")
        await system.stop("other")
        assert await ref.ask(Urgent()) == 8
        assert system.stats().handler_errors == 1


async def test_a_handler_cancelled_before_its_first_step_gives_its_place_back() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem(SystemConfig(concurrency=2)) as system:
        worker = Worker()
        ref = await system.start(worker, "w")
        for ticks in range(8):
            asking = asyncio.ensure_future(ref.ask(Wait()))
            for _ in range(ticks):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        worker.gate.set()
        assert await ref.ask(Hi()) == 7
        assert await asyncio.gather(*(ref.ask(Wait()) for _ in range(4))) == [1] * 4


async def test_lanes_that_wait_for_a_place_do_not_wait_for_each_other() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem(SystemConfig(concurrency=1)) as system:
        worker = Worker()
        ref = await system.start(worker, "w")
        asks = [asyncio.ensure_future(ref.ask(kind())) for kind in (Wait, Wait, WaitUrgently, WaitUrgently)]
        await until(lambda: worker.waiting == 2)
        worker.gate.set()
        assert await asyncio.gather(*asks) == [1] * 4
        assert (await ref.ask(Hi()), await ref.ask(Urgent())) == (7, 8)


async def test_an_ask_that_is_given_up_while_it_waits_for_a_place_is_not_handled() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem(SystemConfig(concurrency=1)) as system:
        worker = Worker()
        ref = await system.start(worker, "w")
        first = asyncio.ensure_future(ref.ask(Wait()))
        await until(lambda: worker.waiting == 1)
        with pytest.raises(AskTimeout):
            await ref.ask(Wait(), deadline_s=0.05)
        second = asyncio.ensure_future(ref.ask(Wait()))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        worker.gate.set()
        assert await first == 1
        assert await ref.ask(Hi()) == 7
        assert worker.handled == ["wait"]


async def test_who_asked_a_handler_that_had_to_be_cut_at_the_stop_hears_that_nothing_is_known() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem(SystemConfig(stop_s=0.1)) as system:
        worker = Worker()
        ref = await system.start(worker, "w")
        asking = asyncio.ensure_future(ref.ask(Hold()))
        await until(lambda: worker.waiting == 1)
        await system.stop("w")
        with pytest.raises(OutcomeUnknown, match="stopped in mid-handler"):
            await asking


async def test_stopping_ends_although_handlers_wait_for_places() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem(SystemConfig(stop_s=0.1, concurrency=1)) as system:
        worker = Worker()
        ref = await system.start(worker, "w")
        asks = [asyncio.ensure_future(ref.ask(Wait())) for _ in range(3)]
        await until(lambda: worker.waiting == 1)
        await asyncio.gather(system.stop("w"), system.stop("w"))
        assert worker.stops == 1
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(answer, PeerDied) for answer in answers)
        assert worker.handled == ["wait"]


async def test_an_actor_may_stop_itself() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem() as system:
        worker = Worker()
        ref = await system.start(worker, "w")
        assert await ref.ask(StopSelf()) == 3
        await until(lambda: "w" not in system.cells)
        assert worker.stops == 1
        with pytest.raises(UnknownName, match="runs no actor called 'w'"):
            await system.stop("w")
        await system.start(Worker(), "w")


class Slow(Worker):
    async def on_start(self) -> None:
        await self.gate.wait()
        raise RuntimeError("no licence")


async def test_what_came_for_an_actor_that_did_not_start_is_refused() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem() as system:
        slow = Slow()
        starting = asyncio.ensure_future(system.start(slow, "w"))
        await until(lambda: "w" in system.cells)
        asking = asyncio.ensure_future(system.ref("w").ask(Hi()))
        await system.ref("w").tell(Hi())
        await asyncio.sleep(0)
        slow.gate.set()
        with pytest.raises(RuntimeError, match="no licence"):
            await starting
        with pytest.raises(PeerDied, match="did not start"):
            await asking
        await until(lambda: system.stats().dead_letters == 1)


async def test_a_start_that_is_cancelled_leaves_no_name_behind() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem() as system:
        for ticks in range(6):
            starting = asyncio.ensure_future(system.start(Worker(), "w"))
            for _ in range(ticks):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if "w" in system.cells:
                await system.stop("w")
            await until(lambda: not system._giving_up)
            await system.start(Worker(), "w")
            await system.stop("w")


async def test_senders_that_found_no_room_keep_nothing_alive() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem(SystemConfig(window=2)) as system:
        worker = Worker()
        ref = await system.start(worker, "w")
        asking = [asyncio.ensure_future(ref.ask(Hold()))]
        await until(lambda: worker.waiting == 1)
        for _ in range(20):
            await asyncio.gather(*(ref.tell(Hi(), deadline_s=0.001) for _ in range(4)), return_exceptions=True)
        with pytest.raises(MailboxFull):
            await ref.tell(Hi(), deadline_s=0.001)
        windows = [
            window for outlet in system.caller._outlets.values() for ws in outlet.windows.values() for window in ws
        ]
        assert not any(window.waiters for window in windows)
        await ref.tell(Go())
        await asyncio.gather(*asking)


async def test_a_stream_left_in_the_tick_in_which_it_is_sent_is_cancelled() -> None:
    async with asyncio.timeout(SOON_S), ActorSystem(SystemConfig(window=1)) as system:
        worker = Worker()
        ref = await system.start(worker, "w")
        holding = asyncio.ensure_future(ref.ask(Hold()))
        await until(lambda: worker.waiting == 1)
        await ref.tell(Hi())

        async def read() -> None:
            async with ref.stream(Count(most=1000), credit=1):
                await asyncio.Event().wait()

        reading = asyncio.ensure_future(read())
        await until(lambda: system.caller._waiting)
        (waiting,) = system.caller._waiting.values()
        waiting.future.add_done_callback(lambda _: reading.cancel())
        await ref.tell(Go())
        await asyncio.gather(holding, reading, return_exceptions=True)
        await until(lambda: not system.caller.feeds and not worker.ctx._cell.service.running)


async def test_a_closed_system_says_so() -> None:
    system = ActorSystem()
    async with asyncio.timeout(SOON_S):
        async with system:
            ref = await system.start(Worker(), "w")
            assert await ref.ask(Hi()) == 7
        for doing in (ref.ask(Hi()), ref.tell(Hi()), ref.ask(Hi(), retry=True), system.start(Worker(), "x")):
            with pytest.raises(SystemClosed):
                await doing


@pytest.mark.parametrize("meta", [{"n": 5}, {5: "n"}, "text"])
async def test_meta_that_nobody_could_read_is_refused_where_it_is_given(meta: object) -> None:
    async with asyncio.timeout(SOON_S), ActorSystem() as system:
        with pytest.raises(TypeError, match="meta is a dict of text to text"):
            await system.start(Worker(), "w", meta)  # type: ignore[arg-type]
        await system.start(Worker(), "w", {"n": "5"})


@pytest.mark.parametrize("data", [b"", b"\x05", b"\xff" * 40, b"\x01\xc0\x00"])
def test_bytes_that_are_no_array_are_a_validation_error(data: bytes) -> None:
    import numpy as np

    encoded = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, data))
    with pytest.raises(msgspec.ValidationError, match="malformed array"):
        decoder(np.ndarray).decode(encoded)
