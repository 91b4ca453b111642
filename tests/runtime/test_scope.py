"""What a handler works under: its asker's deadline and trace go with everything it asks; answers and errors keep their types."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import (
    AskTimeout,
    MailboxFull,
    PeerDied,
    RemoteError,
    TooLarge,
    UnknownName,
    WireError,
)
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.ref import broadcast, collect
from dockyard_actors.runtime.registry import DirectoryUpdate
from dockyard_actors.runtime.scope import current
from dockyard_actors.runtime.status import Inspect
from dockyard_actors.runtime.system import ActorSystem
from tests.runtime.actors import Add, Block, Counter, Note, Open, Seen, Total, Waiter
from tests.runtime.test_asks import eventually


class Relay(Message[tuple[float, int]], frozen=True):
    """Handled by asking the next one, or by saying what is left of the deadline, and the trace."""

    via: tuple[str, ...]


class Stall(Message[None], frozen=True):
    via: tuple[str, ...]


class Later(Message[None], frozen=True):
    pass


class Unlucky(Message[None], frozen=True):
    known: bool = True


class NoLuck(WireError):
    """Test only."""


class Node(Actor):
    def __init__(self) -> None:
        self.left: list[float] = []
        self.stalled = asyncio.Event()
        self.outlived: asyncio.Future[tuple[object, ...]] = asyncio.get_running_loop().create_future()

    @concurrent
    async def relay(self, msg: Relay) -> tuple[float, int]:
        scope = current()
        assert scope is not None
        if msg.via:
            return await self.ctx.ref(msg.via[0]).ask(Relay(via=msg.via[1:]), deadline_s=1_000.0)
        return scope.deadline - asyncio.get_running_loop().time(), scope.trace

    @concurrent
    async def stall(self, msg: Stall) -> None:
        if msg.via:
            await self.ctx.ref(msg.via[0]).ask(Stall(via=msg.via[1:]), deadline_s=1_000.0)
        self.stalled.set()
        await asyncio.Event().wait()

    async def later(self, msg: Later) -> None:
        async def work() -> None:
            self.outlived.set_result((current(),))

        self.ctx.spawn(work(), "later")

    async def unlucky(self, msg: Unlucky) -> None:
        if msg.known:
            raise NoLuck("today")
        gone = asyncio.ensure_future(asyncio.sleep(0))
        gone.cancel()
        await gone  # cancelled from inside: not the end of the actor


@pytest.fixture
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[ActorSystem, ActorSystem]]:
    path = tmp_path_factory.mktemp("s")
    config = SystemConfig(name="home", ipc_prefix=f"{path}/h.", window_bytes=8_000, window=64)
    async with (
        ActorSystem(config) as home,
        ActorSystem(SystemConfig(name="away", rendezvous=f"ipc://{path}/h.", probe_s=0.05)) as away,
    ):
        yield home, away


async def test_nested_asks_inherit_the_deadline_and_the_trace_of_the_first(pair) -> None:
    home, away = pair
    await home.start(Node(), "a")
    await away.start(Node(), "b")
    left, trace = await away.ref("a").ask(Relay(via=("b", "a")), deadline_s=5.0)
    assert 0 < left <= 5.0
    other, another = await away.ref("a").ask(Relay(via=("b",)), deadline_s=50.0)
    assert 5.0 < other <= 50.0
    assert trace
    assert trace != another, "every first ask has a trace of its own"


async def test_a_chain_ends_with_its_first_asker_and_waits_show_one_trace(pair) -> None:
    home, away = pair
    first, last = Node(), Node()
    await home.start(first, "a")
    await away.start(last, "b")
    asking = asyncio.ensure_future(away.ref("a").ask(Stall(via=("b",)), deadline_s=60.0))
    await last.stalled.wait()
    waits = [wait for wait in (*home.waits(), *away.waits()) if wait.message == "Stall"]
    assert len(waits) == 2
    assert len({wait.trace for wait in waits}) == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await eventually(lambda: not home.waits() and not away.waits())
    status = await away.ref("b").ask(Inspect())
    await eventually(lambda: not away.cells["b"].status().running)
    assert status.process == "away"


async def test_an_ask_without_time_left_is_not_sent(pair) -> None:
    home, away = pair
    actor = Counter()
    await home.start(actor, "c")
    with pytest.raises(AskTimeout, match=r"no time left to ask c for Add.*nothing was sent"):
        await away.ref("c").ask(Add(), deadline_s=-1.0)
    assert await away.ref("c").ask(Total()) == 0


async def test_a_task_that_outlives_its_handler_is_not_bound_by_its_deadline(pair) -> None:
    _, away = pair
    node = Node()
    await away.start(node, "n")
    await away.ref("n").ask(Later())
    assert await node.outlived == (None,)


async def test_a_declared_error_is_caught_by_its_type_and_carries_the_remote_traceback(pair) -> None:
    home, away = pair
    await home.start(Node(), "n")
    with pytest.raises(NoLuck, match="today") as caught:
        await away.ref("n").ask(Unlucky())
    remote = caught.value.__cause__
    assert isinstance(remote, RemoteError)
    assert "raise NoLuck" in remote.traceback


async def test_two_errors_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="two errors are called NoLuck"):
        type("NoLuck", (WireError,), {"__module__": "elsewhere", "__qualname__": "NoLuck"})


async def test_a_handler_that_is_cancelled_from_inside_costs_one_message_and_not_the_actor(pair) -> None:
    home, away = pair
    await home.start(Node(), "n")
    for _ in range(2):
        with pytest.raises(RemoteError, match="CancelledError"):
            await away.ref("n").ask(Unlucky(known=False))


async def test_collect_gives_every_answer_or_its_error_in_order(pair) -> None:
    home, away = pair
    for name in ("x", "y"):
        await home.start(Counter(), name)
    await home.start(Counter(), "z")
    await home.stop("z")
    await eventually(lambda: away.directory.alive("z") is None)
    refs = [away.ref(name) for name in ("x", "nobody", "y", "z")]
    one, two, three, four = await collect(refs, Add(amount=3))
    assert (one, three) == (3, 3)
    assert isinstance(two, UnknownName)
    assert isinstance(four, PeerDied)


async def test_broadcast_reaches_who_is_there_and_counts_who_is_not(pair) -> None:
    home, away = pair
    for name in ("x", "y"):
        await home.start(Counter(), name)
    await broadcast([away.ref(name) for name in ("x", "nobody", "y")], Note(n=4))
    assert await collect([away.ref("x"), away.ref("y")], Seen()) == [(4,), (4,)]
    status = away.status()
    assert status.stats.dead_letters == 1
    assert "nobody" in status.dead_letters[-1].text


class Heavy(Message[None], frozen=True):
    body: str


class Sink(Waiter):
    async def heavy(self, msg: Heavy) -> None:
        await self.gate.wait()


async def test_a_window_counts_bytes_and_one_large_message_still_passes(pair) -> None:
    home, away = pair
    sink = Sink()
    await home.start(sink, "s")
    ref = away.ref("s")
    for _ in range(4):  # three are 6,000 of 8,000 bytes; the fourth may overdraw
        await ref.tell(Heavy(body="x" * 2_000), wait=False)
    with pytest.raises(MailboxFull, match="no room in its mailbox; nothing was sent"):
        await ref.tell(Heavy(body="x"), wait=False)
    with pytest.raises(MailboxFull):
        await ref.ask(Add(), wait=False)
    assert home.status().actors["s"].mailbox_bytes < 9_000
    await ref.ask(Open())
    await ref.ask(Seen())
    await ref.tell(Heavy(body="x" * 100_000))
    assert await ref.ask(Seen()) == ()


async def test_a_message_that_fits_no_frame_is_refused_before_it_takes_room(pair) -> None:
    home, away = pair
    await home.start(Sink(), "s")
    for _ in range(100):  # more often than the window has places
        with pytest.raises(TooLarge, match="max_frame_bytes"):
            await away.ref("s").ask(Heavy(body="x" * (away.config.max_frame_bytes + 1)))


async def test_a_slow_handler_is_named_while_it_still_runs(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with ActorSystem(SystemConfig(slow_handler_s=0.02)) as system:
        actor = Counter()
        await system.start(actor, "c")
        blocked = asyncio.ensure_future(system.ref("c").ask(Block()))
        await actor.entered.wait()
        await eventually(lambda: "slow handler block" in caplog.text)
        assert system.status().actors["c"].busy == "Block"
        await system.ref("c").ask(Open())
        await blocked
        times = system.status().actors["c"].handlers["Block"]
        assert times.count == 1
        assert times.max_s >= 0.02
        assert 0 < times.quantile_s(0.5) <= times.max_s
        assert caplog.text.count("slow handler") == 1


async def test_what_runs_for_a_dead_asker_alone_is_cancelled(pair) -> None:
    home, away = pair
    actor = Waiter()
    await home.start(actor, "w")
    asking = asyncio.ensure_future(away.ref("w").ask(Block()))
    await actor.entered.wait()
    home.take(DirectoryUpdate(entries=(), gone={away.config.uid: "test: killed"}))
    await eventually(lambda: actor.cancelled == 1)
    asking.cancel()


async def test_an_idle_actor_has_no_task(pair) -> None:
    home, away = pair
    before = len(asyncio.all_tasks())
    for n in range(50):
        await home.start(Counter(), f"idle-{n}")
    assert len(asyncio.all_tasks()) == before
    assert await away.ref("idle-7").ask(Add()) == 1
    assert len(asyncio.all_tasks()) == before + 1


async def test_a_message_that_the_network_brings_twice_is_handled_once(pair) -> None:
    home, away = pair
    actor = Counter()
    await home.start(actor, "c")
    await eventually(lambda: away.directory.alive("c"))
    peer = away.caller.outlet(away.directory.entries["c"]).peer
    send = peer.send
    peer.send = lambda lane, envelope: (send(lane, envelope), send(lane, envelope))
    assert await away.ref("c").ask(Add()) == 1
    await away.ref("c").tell(Note(n=1))
    assert await away.ref("c").ask(Seen()) == (1,)
    assert home.counts.repeated == 3


async def test_room_that_was_lost_with_messages_or_credit_comes_back(pair) -> None:
    home, away = pair
    actor = Counter()
    await home.start(actor, "c")
    await eventually(lambda: away.directory.alive("c"))
    peer = away.caller.outlet(away.directory.entries["c"]).peer
    send, peer.send = peer.send, lambda lane, envelope: None  # a cut connection takes a whole window with it
    for n in range(home.config.window):
        await away.ref("c").tell(Note(n=n))
    peer.send = send
    waiting = [asyncio.ensure_future(away.ref("c").tell(Note(n=1_000 + n))) for n in range(70)]
    await asyncio.gather(*waiting)
    assert await away.ref("c").ask(Seen()) == tuple(range(1_000, 1_070)), "in the order in which they were told"
