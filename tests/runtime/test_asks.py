"""Asks and tells between two systems in one process: replies, errors, order, pushback, deadlines, incarnations."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import (
    ActorCrashed,
    AskTimeout,
    BadReply,
    MailboxFull,
    NameTaken,
    NotUnderstood,
    OutcomeUnknown,
    PeerDied,
    RemoteError,
    StaleIncarnation,
    SystemClosed,
    UnknownName,
)
from dockyard_actors.runtime.message import encoder
from dockyard_actors.runtime.status import Inspect
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import Lane
from tests.runtime.actors import (
    Add,
    Block,
    Counter,
    Die,
    Exhausted,
    Fail,
    Granted,
    Lease,
    Note,
    Open,
    Scale,
    Seen,
    Total,
    Urgent,
    Waiter,
)


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[ActorSystem, ActorSystem]]:
    """Two systems joined by sockets; the first hosts the registry."""
    path = tmp_path_factory.mktemp("p")
    async with ActorSystem(
        SystemConfig(name="home", ipc_prefix=f"{path}/h.", window=16, mailbox_capacity=64, stop_s=0.5)
    ) as home:
        away = SystemConfig(
            name="away", rendezvous=f"ipc://{path}/h.", window=16, mailbox_capacity=64, stop_s=0.5, retry_every_s=0.2
        )
        async with ActorSystem(away) as other:
            yield home, other


@pytest.mark.parametrize("where", ["same process", "over sockets"])
async def test_a_reply_is_of_the_type_that_the_message_names(pair, where: str) -> None:
    home, away = pair
    await (home if where == "over sockets" else away).start(Counter(), "c")
    ref = away.ref("c")
    assert await ref.ask(Lease(n=3)) == Granted(3)
    assert await ref.ask(Lease(n=0)) == Exhausted("none left")
    assert await ref.ask(Note(n=1)) is None
    np.testing.assert_array_equal(await ref.ask(Scale(values=np.arange(3.0), factor=2.0)), [0.0, 2.0, 4.0])
    assert (await ref.ask(Inspect())).process == ("home" if where == "over sockets" else "away")


async def test_a_system_on_its_own_needs_no_sockets() -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with ActorSystem() as system:
        ref = await system.start(Counter(), "c")
        assert await ref.ask(Add(amount=2)) == 2
        assert len(os.listdir("/proc/self/fd")) == before


async def test_tells_and_asks_of_one_sender_are_handled_in_order(pair) -> None:
    home, away = pair
    actor = Counter()
    await home.start(actor, "c")
    ref = away.ref("c")
    for n in range(500):
        if n % 7 == 0:
            await ref.ask(Note(n=n))
        else:
            await ref.tell(Note(n=n))
    assert await ref.ask(Seen()) == tuple(range(500))


async def test_an_error_in_a_handler_reaches_the_asker_with_its_traceback_and_the_actor_lives_on(pair, caplog) -> None:
    home, away = pair
    await home.start(Counter(), "c")
    ref = away.ref("c")
    with pytest.raises(RemoteError) as caught:
        await ref.ask(Fail(text="broken handler"))
    assert (caught.value.type, caught.value.text) == ("ValueError", "broken handler")
    assert "in fail" in caught.value.traceback
    assert "away asked c#1 for Fail" in str(caught.value)
    assert any(record.exc_info for record in caplog.records)
    assert await ref.ask(Add()) == 1
    assert home.stats().handler_errors == 1


class Unknown(Lease, frozen=True):
    pass


class Liar(Actor):
    async def lease(self, msg: Lease) -> Granted | Exhausted:
        return "neither"  # type: ignore[return-value]

    async def add(self, msg: Add) -> int:
        return object()  # type: ignore[return-value]


async def test_messages_and_replies_of_the_wrong_kind_are_typed_errors(pair) -> None:
    home, away = pair
    await home.start(Counter(), "c")
    await home.start(Liar(), "liar")
    with pytest.raises(NotUnderstood, match="no handler for Unknown; it handles Add, Block"):
        await away.ref("c").ask(Unknown(n=1))
    with pytest.raises(BadReply, match="reply type"):
        await away.ref("liar").ask(Lease(n=1))
    with pytest.raises(RemoteError, match="reply of Add: object cannot go over the wire"):
        await away.ref("liar").ask(Add())
    await away.ref("c").tell(Unknown(n=1))
    await eventually(lambda: away.stats().dead_letters == 1)


async def test_an_unknown_name_is_an_error_for_an_ask_and_a_dead_letter_for_a_tell(pair) -> None:
    _, away = pair
    with pytest.raises(UnknownName, match="'nobody'"):
        await away.ref("nobody").ask(Add())
    await away.ref("nobody").tell(Note(n=1))
    assert away.stats().dead_letters == 1


async def test_every_ask_ends_at_its_deadline_and_an_expired_one_is_never_handled(pair) -> None:
    home, away = pair
    actor = Counter()
    await home.start(actor, "c")
    ref = away.ref("c")
    blocked = asyncio.ensure_future(ref.ask(Block(), deadline_s=5.0))
    await actor.entered.wait()
    with pytest.raises(AskTimeout, match=r"away asked c#1 for Add and had no reply after 0\.05 s"):
        await ref.ask(Add(), deadline_s=0.05)
    actor.gate.set()
    await blocked
    assert await ref.ask(Total()) == 0
    assert home.stats().expired == 1
    assert not away.waits()


async def test_deadlines_are_kept_apart_and_forgotten_when_met(pair) -> None:
    home, away = pair
    actor = Counter()
    await home.start(actor, "c")
    for _ in range(10_000):
        await away.ref("c").ask(Add(), deadline_s=1000.0)
    assert away.stats().deadlines < 9000  # finished entries do not pile up until their time
    tasks = [asyncio.ensure_future(away.ref("c").ask(Block(), deadline_s=s)) for s in (0.3, 0.1, 0.2)]
    order = []
    for n, task in enumerate(tasks):
        task.add_done_callback(lambda _, n=n: order.append(n))
    assert all(isinstance(e, AskTimeout) for e in await asyncio.gather(*tasks, return_exceptions=True))
    assert order == [1, 2, 0]
    actor.gate.set()


async def test_a_full_mailbox_pushes_back_and_nothing_is_lost(pair) -> None:
    home, away = pair
    actor = Counter()
    await home.start(actor, "c")
    ref = away.ref("c")
    blocked = asyncio.ensure_future(ref.ask(Block()))
    await actor.entered.wait()
    for n in range(15):  # the window is 16 and Block's place is given back with half a window
        await ref.tell(Note(n=n))
    sent = 15
    with pytest.raises(MailboxFull, match="nothing was sent"):
        await ref.tell(Note(n=sent), deadline_s=0.1)
    assert away.stats().dead_letters == 1
    with pytest.raises(MailboxFull):
        await ref.ask(Add(), deadline_s=0.05)
    waiting = asyncio.ensure_future(ref.tell(Note(n=sent)))
    await eventually(lambda: any(wait.what == "room" and wait.peer == "c" for wait in away.waits()))
    actor.gate.set()
    await blocked
    await waiting
    assert await ref.ask(Seen()) == tuple(range(sent + 1))


async def test_many_senders_together_cannot_overfill_a_mailbox(tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("m")
    async with ActorSystem(SystemConfig(name="home", ipc_prefix=f"{path}/h.", window=64, mailbox_capacity=16)) as home:
        actor = Counter()
        await home.start(actor, "c")
        async with ActorSystem(SystemConfig(name="away", rendezvous=f"ipc://{path}/h.", window=64)) as away:
            blocked = asyncio.ensure_future(away.ref("c").ask(Block()))
            await actor.entered.wait()
            flood = [asyncio.ensure_future(away.ref("c").tell(Note(n=n))) for n in range(300)]
            for _ in range(20):
                await asyncio.sleep(0.005)
                assert home.stats().mailboxes["c"] <= 64
            assert await away.ref("c").ask(Urgent(), deadline_s=5.0) == 0  # the control lane is not paused
            actor.gate.set()
            await blocked
            await asyncio.gather(*flood)
            assert await away.ref("c").ask(Seen()) == tuple(range(300))


async def test_control_messages_pass_a_flood_of_user_messages(pair) -> None:
    home, away = pair
    actor = Counter()
    await home.start(actor, "c")
    ref = away.ref("c")
    blocked = asyncio.ensure_future(ref.ask(Block()))
    await actor.entered.wait()
    flood = [asyncio.ensure_future(ref.tell(Note(n=n))) for n in range(200)]
    await eventually(lambda: any(wait.what == "room" for wait in away.waits()))
    assert await ref.ask(Urgent(), deadline_s=5.0) == 0  # nothing of the flood was handled before it
    await ref.ask(Open(), deadline_s=5.0)
    await blocked
    await asyncio.gather(*flood)


async def test_a_repeated_request_is_handled_once_while_it_runs_and_after_it_was_answered(pair) -> None:
    home, away = pair
    actor = Counter()
    await home.start(actor, "c")
    await eventually(lambda: "c" in away.directory.entries)  # the news travels by itself
    entry = away.directory.entries["c"]
    outlet = away.caller.outlet(entry)

    def send(request: int) -> None:
        ask = wire.Ask(request, "c", entry.incarnation, "test", "Add", 10.0, True, wire.raw(Add()))
        outlet.peer.send(Lane.USER, encoder.encode(ask))

    for _ in range(3):
        send(10**9)
    assert await away.ref("c").ask(Total()) == 1
    send(10**9)
    assert await away.ref("c").ask(Total()) == 1
    send(10**9 + 1)
    assert await away.ref("c").ask(Total()) == 2
    assert home.stats().deduplicated == 3


async def test_a_retried_ask_that_takes_long_is_handled_once_and_answered_once(pair) -> None:
    home, away = pair
    actor = Waiter()
    await home.start(actor, "c")
    task = asyncio.ensure_future(away.ref("c").ask(Block(), deadline_s=10.0, retry=True))
    await eventually(lambda: home.stats().deduplicated >= 2)  # retry_every_s is 0.2 here
    actor.gate.set()
    await task
    assert actor.cancelled == 0


async def test_a_stale_incarnation_is_refused_and_a_retry_reaches_the_new_one(pair) -> None:
    home, away = pair
    await home.start(Counter(), "c")
    assert await away.ref("c").ask(Add()) == 1
    await eventually(lambda: "c" in away.directory.entries)
    old = away.directory.entries["c"]
    await home.stop("c")
    await home.start(Counter(), "c")
    deadline = away.loop.time() + 5.0
    with pytest.raises(StaleIncarnation, match="meant for incarnation 1 and this is 2"):
        await away.caller.ask_entry(old, "test", Add(), deadline)
    with pytest.raises(StaleIncarnation):
        await away.ref("c", incarnation=1).ask(Add())
    assert await away.ref("c", incarnation=2).ask(Add()) == 1
    away.directory.entries["c"] = old  # as if the news had not arrived yet
    retried = asyncio.ensure_future(away.ref("c").ask(Total(), retry=True, deadline_s=5.0))
    await eventually(lambda: any(wait.what == "start" for wait in away.waits()))
    away.directory.apply(home.directory.entries["c"])
    assert await retried == 1


async def test_a_retry_waits_for_a_name_that_is_not_registered_yet(pair) -> None:
    home, away = pair
    asked = asyncio.ensure_future(away.ref("late").ask(Add(amount=5), retry=True))
    await eventually(lambda: away.waits())
    assert away.waits()[0].what == "start"
    await home.start(Counter(), "late")
    assert await asked == 5
    with pytest.raises(AskTimeout, match="waited for it to be registered in vain"):
        await away.ref("never").ask(Add(), retry=True, deadline_s=0.05)


async def test_stopping_an_actor_answers_what_waits_and_says_what_ran(pair) -> None:
    home, away = pair
    actor = Waiter()
    await home.start(actor, "c")
    watcher = Counter()
    await away.start(watcher, "w")
    watcher.ctx.watch("c")
    running = asyncio.ensure_future(away.ref("c").ask(Block()))
    await actor.entered.wait()
    await home.stop("c")
    with pytest.raises(OutcomeUnknown, match="mid-handler"):
        await running
    await eventually(lambda: watcher.deaths)
    assert (watcher.deaths[0].name, watcher.deaths[0].incarnation, watcher.deaths[0].clean) == ("c", 1, True)
    with pytest.raises(PeerDied):
        await away.ref("c").ask(Add())
    late = Counter()
    await away.start(late, "late watcher")
    late.ctx.watch("c")
    await eventually(lambda: late.deaths)


async def test_a_concurrent_handler_waits_without_holding_up_others_and_ends_with_its_asker(pair) -> None:
    home, away = pair
    actor = Waiter()
    await home.start(actor, "c")
    ref = away.ref("c")
    with pytest.raises(AskTimeout):
        await ref.ask(Block(), deadline_s=0.1)
    await eventually(lambda: actor.cancelled == 1)
    given_up = asyncio.ensure_future(ref.ask(Block()))
    await eventually(lambda: any(wait.message == "Block" for wait in away.waits()))
    assert await ref.ask(Add()) == 1
    given_up.cancel()
    await eventually(lambda: actor.cancelled == 2)


async def test_a_name_has_one_living_owner_and_its_incarnations_only_grow(pair) -> None:
    home, away = pair
    await home.start(Counter(), "c")
    with pytest.raises(NameTaken, match="belongs to incarnation 1 in process home"):
        await away.start(Counter(), "c")
    with pytest.raises(NameTaken):
        await home.start(Counter(), "c")
    await home.stop("c")
    await away.start(Counter(), "c", meta={"gpu": "0"})
    assert home.directory.entries["c"].incarnation == 2
    assert home.directory.entries["c"].meta["gpu"] == "0"
    assert home.directory.entries["c"].meta["pid"] == str(os.getpid())


async def test_a_system_that_leaves_is_known_to_watchers_and_fails_pending_asks(pair, tmp_path_factory) -> None:
    home, away = pair
    path = Path(home.config.ipc_prefix)
    third = ActorSystem(SystemConfig(name="third", rendezvous=f"ipc://{path}", stop_s=0.2))
    async with third:
        actor = Counter()
        await third.start(actor, "t")
        watcher = Counter()
        await away.start(watcher, "w")
        watcher.ctx.watch("t")
        stuck = asyncio.ensure_future(away.ref("t").ask(Block()))
        queued = asyncio.ensure_future(away.ref("t").ask(Add()))
        await actor.entered.wait()
    with pytest.raises(PeerDied):
        await queued
    with pytest.raises((OutcomeUnknown, AskTimeout)):
        await stuck
    await eventually(lambda: watcher.deaths)
    assert watcher.deaths[0].clean


async def test_a_crash_of_an_owned_task_ends_the_system_with_that_cause() -> None:
    with pytest.raises(ActorCrashed, match=r"task c/doomed of actor c crashed") as caught:  # noqa: PT012
        async with ActorSystem() as system:
            ref = await system.start(Counter(), "c")
            await ref.ask(Die(how="task"))
            stop = await system.wait_stop()
            assert stop.exit_code == 70
    assert isinstance(caught.value.__cause__, RuntimeError)


class Unstartable(Counter):
    async def on_start(self) -> None:
        raise RuntimeError("no model")


async def test_an_actor_that_cannot_start_gives_its_name_back(pair) -> None:
    home, away = pair
    with pytest.raises(RuntimeError, match="no model"):
        await home.start(Unstartable(), "c")
    await away.start(Counter(), "c")
    assert await home.ref("c").ask(Add()) == 1


async def test_malformed_envelopes_of_a_peer_are_counted_and_harm_nobody(pair) -> None:
    home, away = pair
    await home.start(Counter(), "c")
    assert await away.ref("c").ask(Add()) == 1
    await eventually(lambda: "c" in away.directory.entries)
    outlet = away.caller.outlet(away.directory.entries["c"])
    for junk in (b"", b"junk", msgspec.msgpack.encode([99]), msgspec.msgpack.encode([0, "id"])):
        outlet.peer.send(Lane.USER, junk)
    outlet.peer.send(
        Lane.USER, encoder.encode(wire.Ask(7, "c", 1, "x", "Add", 1.0, False, wire.raw({"amount": "many"})))
    )
    assert await away.ref("c").ask(Add()) == 2
    assert home.stats().malformed == 4


async def test_asks_on_a_closed_system_fail_at_once() -> None:
    system = ActorSystem()
    async with system:
        ref = await system.start(Counter(), "c")
    with pytest.raises((SystemClosed, PeerDied)):
        await ref.ask(Add())


async def test_closing_leaves_no_task_no_descriptor_and_no_file(tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("l")

    async def once() -> None:
        async with (
            ActorSystem(SystemConfig(name="home", ipc_prefix=f"{path}/h.")) as home,
            ActorSystem(SystemConfig(name="away", rendezvous=f"ipc://{path}/h.")) as away,
        ):
            await home.start(Counter(), "c")
            assert await away.ref("c").ask(Add()) == 1

    await once()
    tasks, fds = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await once()
    assert len(asyncio.all_tasks()) <= tasks
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert not os.listdir(path)


def test_it_also_works_on_the_default_loop(tmp_path_factory) -> None:
    async def scenario() -> None:
        path = tmp_path_factory.mktemp("d")
        async with (
            ActorSystem(SystemConfig(name="home", ipc_prefix=f"{path}/h.")) as home,
            ActorSystem(SystemConfig(name="away", rendezvous=f"ipc://{path}/h.")) as away,
        ):
            await home.start(Counter(), "c")
            for n in range(100):
                await away.ref("c").tell(Note(n=n))
            assert await away.ref("c").ask(Seen()) == tuple(range(100))

    asyncio.run(scenario())
