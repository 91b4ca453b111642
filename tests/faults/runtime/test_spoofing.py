"""A process that is let in and says what is not for it to say: answers to asks that others got, who lives, who leaves, who is dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.directory import Entry
from dockyard_actors.runtime.errors import RemoteError
from dockyard_actors.runtime.message import Message, encoder
from dockyard_actors.runtime.registry import (
    REGISTRY,
    Claim,
    DirectoryUpdate,
    Join,
    Leave,
    ProcessDied,
    ProcessSuspect,
    Refused,
    Register,
    Renew,
    Resync,
    Unregister,
)
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import Address, Lane
from tests.runtime.actors import Add, Block, Counter, Total
from tests.runtime.test_registry import held, record
from tests.runtime.test_streams import Lines, Printer

IDS = range(1, 50)  # request ids are counted from 1: no art to guess


class Town:
    """A registry's process with a counter, a victim and a liar that have joined it."""

    def __init__(self, home: ActorSystem, victim: ActorSystem, liar: ActorSystem) -> None:
        self.home, self.victim, self.liar = home, victim, liar

    async def lie(self, to: ActorSystem, lane: Lane, *envelopes: Any) -> None:
        """Returns when they have been read."""
        link = self.liar.transport.connect(to.transport.address)
        for envelope in envelopes:
            link.send(lane, encoder.encode(envelope))
        read = to.counts.dead_letters + 1
        link.send(lane, encoder.encode(wire.Lost("nobody", 1, "Nothing", "test: the last word")))
        await eventually(lambda: to.counts.dead_letters >= read)


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    def member(name: str) -> SystemConfig:
        return SystemConfig(name=name, uid=name, rendezvous=f"ipc://{tmp_path}/r", registry_s=0.2)

    async with (
        ActorSystem(SystemConfig(name="home", uid="home", ipc_prefix=f"{tmp_path}/r")) as home,
        ActorSystem(member("victim")) as victim,
        ActorSystem(member("liar")) as liar,
    ):
        await home.start(Counter(), "counter")
        await home.start(Printer(), "printer")
        yield Town(home, victim, liar)


def said(update: DirectoryUpdate) -> wire.Tell:
    return wire.Tell(wire.SYSTEM, 0, REGISTRY, "DirectoryUpdate", wire.raw(update))


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.parametrize("answer", [wire.Reply(0, wire.raw(666)), wire.Fail(0, wire.RAISED, "ValueError", "a lie")])
async def test_only_who_was_asked_answers(town: Town, lane: Lane, answer: wire.Reply | wire.Fail) -> None:
    asking = asyncio.ensure_future(town.victim.ref("counter").ask(Block(), deadline_s=30.0))
    await eventually(lambda: town.home.stats().busy)
    late = town.victim.counts.late_replies
    lies = []
    for number in IDS:
        answer.id = number
        lies.append(wire.decode(encoder.encode(answer)))
    await town.lie(town.victim, lane, *lies)
    assert not asking.done()
    assert town.victim.counts.late_replies == late + len(IDS)
    counter = town.home.cells["counter"].actor
    assert isinstance(counter, Counter)
    counter.gate.set()
    assert await asking is None


async def test_only_whom_a_stream_was_asked_of_sends_its_items(town: Town) -> None:
    async with town.victim.ref("printer").stream(Lines(count=3)) as items:
        got = [(await anext(items)).number]
        await town.lie(town.victim, Lane.USER, *(wire.Item(n, 1, wire.raw(666)) for n in IDS))
        await town.lie(town.victim, Lane.USER, *(wire.Fail(n, wire.RAISED, "ValueError", "a lie") for n in IDS))
        got += [item.number async for item in items]
    assert got == [0, 1, 2]


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.parametrize("whom", ["home", "victim"])
@pytest.mark.parametrize("of_registry", [True, False])
async def test_only_the_registry_says_who_lives_and_who_is_dead(
    town: Town, whom: str, lane: Lane, of_registry: bool
) -> None:
    told = getattr(town, whom)
    assert town.home.registry is not None
    assert await town.victim.ref("counter").ask(Add()) == 1
    impostor = Entry("counter", 1_000, "nobody", Address(host="nowhere", ipc="/nowhere"))
    epoch = town.home.registry.epoch if of_registry else 0
    lie = DirectoryUpdate((impostor,), {"home": "a lie", "victim": "a lie"}, epoch=epoch, number=1_000)
    await town.lie(told, lane, said(lie))
    assert told.counts.unbidden == 1
    assert not told.gone
    assert await told.ref("counter").ask(Add()) == 2


async def test_a_malformed_update_is_counted_and_nothing_else_is_lost(town: Town) -> None:
    bad = wire.Tell(wire.SYSTEM, 0, REGISTRY, "DirectoryUpdate", wire.raw({"type": "DirectoryUpdate", "entries": 5}))
    add = wire.Tell("counter", 1, "liar", "Add", wire.raw(Add()))
    await town.lie(town.home, Lane.USER, add, bad, *[add] * 10)
    assert town.home.counts.malformed == 1
    assert await town.home.ref("counter").ask(Total()) == 11


@pytest.mark.parametrize(
    "lie",
    [
        Leave(uid="victim"),
        ProcessDied(uid="victim", cause="a lie"),
        ProcessDied(uid="stranger", cause="a lie"),
        ProcessSuspect(uid="victim", silent_s=9.0),
    ],
)
async def test_nobody_but_its_node_agent_speaks_for_a_process(town: Town, lie: Message[None]) -> None:
    with pytest.raises(RemoteError, match="may not"):
        await town.liar.ref(REGISTRY).ask(lie)
    assert town.home.registry is not None
    assert "victim" in town.home.registry.processes
    assert not town.home.registry.gone
    await town.victim.ref(REGISTRY).ask(Leave(uid="victim"))
    assert "victim" not in town.home.registry.processes


@pytest.mark.parametrize(
    "lie",
    [
        Join(process=record("somebody")),
        Renew(uid="victim"),
        Resync(uid="victim"),
        Claim(uid="victim", entries=(held("of the victim", 9, "victim"),)),
        Register(name="of the victim", uid="victim", window=1, control=(), meta={}),
        Unregister(name="counter", incarnation=1, cause="a lie", uid="home"),
        Unregister(name="counter", incarnation=1, cause="a lie"),
    ],
)
async def test_nobody_speaks_for_another_process(town: Town, lie: Message[Any]) -> None:
    assert town.home.registry is not None
    before = dict(town.home.registry.entries), set(town.home.registry.processes)
    assert isinstance(await town.liar.ref(REGISTRY).ask(lie), Refused)
    assert (town.home.registry.entries, set(town.home.registry.processes)) == before
