"""The registry's own decisions: incarnations, fences, leases, and what it makes of claims after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.runtime.directory import GONE, Directory, Entry, Gone, ProcessRecord, died
from dockyard_actors.runtime.leases import Leases
from dockyard_actors.runtime.registry import (
    Claim,
    Claimed,
    DirectoryUpdate,
    Join,
    Joined,
    Refused,
    Register,
    Registered,
    Registry,
    Renew,
    Renewed,
    Unregister,
)
from dockyard_actors.runtime.testing import run
from dockyard_actors.transport.base import Address

HERE = "here"


def record(uid: str, **more: Any) -> ProcessRecord:
    return ProcessRecord(uid, f"process-{uid}", 1, "elsewhere", Address(ipc=f"/{uid}"), **more)


def held(name: str, incarnation: int, uid: str, alive: bool = True) -> Entry:
    entry = Entry(name, incarnation, uid, Address(ipc=f"/{uid}"), meta={"process": f"process-{uid}"})
    return entry if alive else died(entry, "it died before")


class World:
    """A registry and a replica that hears everything it pushes."""

    def __init__(self, settle_s: float = 60.0, lease_s: float = 60.0) -> None:
        own = ProcessRecord("own", "home", 1, HERE, Address(), is_agent=True)
        self.replica = Directory()
        self.updates: list[DirectoryUpdate] = []
        self.last_words: dict[str, DirectoryUpdate | None] = {}
        self.registry = Registry(own, self.push, settle_s=settle_s, lease_s=lease_s, epoch=7)

    def push(self, process: ProcessRecord, update: DirectoryUpdate | None, last: bool) -> None:
        if last:
            self.last_words[process.uid] = update
        elif process.uid == "own":
            assert update is not None
            self.updates.append(update)
            for entry in update.entries:
                known = self.replica.entries.get(entry.name)
                forgotten = known is None and not entry.alive
                assert self.replica.apply(entry) or known == entry or forgotten, f"{entry} cannot follow {known}"

    async def join(self, uid: str, **more: Any) -> Joined | Refused:
        return await self.registry.join(Join(process=record(uid, **more)))

    async def register(self, name: str, uid: str) -> Registered | Refused:
        return await self.registry.register(Register(name=name, uid=uid, window=1, control=(), meta={}))

    async def claim(self, uid: str, *entries: Entry, **more: Any) -> Claimed | Refused:
        return await self.registry.claim(Claim(uid=uid, entries=entries, **more))

    def holder(self, name: str) -> tuple[int, str] | None:
        entry = self.registry.entries.get(name)
        return (entry.incarnation, entry.uid) if entry is not None and entry.alive else None


async def until(world: World, condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await world.registry.next_change()


async def test_a_process_that_was_declared_dead_is_refused_everything_with_the_reason() -> None:
    world = World()
    await world.join("a")
    assert await world.register("x", "a") == Registered(1)
    assert isinstance(await world.registry.renew(Renew(uid="a")), Renewed)
    world.registry.declare_dead("a", "nobody heard of it")
    for reply in (
        await world.join("a"),
        await world.register("y", "a"),
        await world.registry.renew(Renew(uid="a")),
        await world.registry.unregister(Unregister(name="x", incarnation=1, cause="", uid="a")),
        await world.claim("a", held("x", 9, "a")),
    ):
        assert isinstance(reply, Refused)
        assert reply.fenced
        assert "nobody heard of it" in reply.reason
    assert world.holder("x") is None
    heard = world.last_words["a"]
    assert heard is not None
    assert heard.gone == {"a": "nobody heard of it"}


async def test_a_second_process_under_the_uid_of_a_living_one_is_refused() -> None:
    world = World()
    await world.join("a")
    assert isinstance(await world.join("a"), Joined), "the same one, again"
    reply = await world.registry.join(
        Join(process=ProcessRecord("a", "impostor", 2, "elsewhere", Address(ipc="/other")))
    )
    assert isinstance(reply, Refused)
    assert "process-a (pid 1 on elsewhere) has joined under the uid a" in reply.reason


async def test_who_has_not_joined_is_refused_but_may_join() -> None:
    world = World()
    reply = await world.registry.renew(Renew(uid="a"))
    assert reply == Refused("the process has not joined")
    assert isinstance(await world.join("a"), Joined)


async def test_a_name_is_unregistered_only_by_the_incarnation_that_has_it() -> None:
    world = World()
    for uid in "ab":
        await world.join(uid)
    await world.register("x", "a")
    for incarnation, uid in ((2, "a"), (1, "b")):
        reply = await world.registry.unregister(Unregister(name="x", incarnation=incarnation, cause="", uid=uid))
        assert isinstance(reply, Refused)
        assert "the name is at incarnation 1" in reply.reason
    assert world.holder("x") == (1, "a")
    assert await world.registry.unregister(Unregister(name="x", incarnation=1, cause="", uid="a")) is None
    assert world.holder("x") is None
    assert await world.register("x", "b") == Registered(2)


async def test_a_child_of_a_dead_agent_may_not_join() -> None:
    world = World()
    await world.join("agent", is_agent=True)
    world.registry.declare_dead("agent", "its host burnt")
    reply = await world.join("child", agent="agent")
    assert isinstance(reply, Refused)
    assert "its host burnt" in reply.reason


async def test_only_who_is_watched_by_nobody_has_a_lease() -> None:
    world = World(lease_s=60.0)
    leases = {}
    for uid, more in (("alone", {}), ("agent", {"is_agent": True}), ("child", {"agent": "agent"})):
        reply = await world.join(uid, **more)
        assert isinstance(reply, Joined)
        assert reply.epoch == 7
        leases[uid] = reply.lease_s
    assert leases == {"alone": 60.0, "agent": 0.0, "child": 0.0}
    await world.registry.on_stop()


async def test_a_lease_ends_with_silence_and_the_cause_says_how_long_it_was() -> None:
    world = World(lease_s=0.15)
    await world.join("silent")
    await world.join("alive")
    await world.register("x", "silent")
    while "silent" not in world.registry.gone:
        await world.registry.renew(Renew(uid="alive"))
        await asyncio.sleep(0.01)
    assert world.registry.gone["silent"].startswith("nothing was heard of process process-silent")
    assert "lease_s=0.15" in world.registry.gone["silent"]
    assert world.holder("x") is None
    assert "alive" in world.registry.processes
    await world.registry.on_stop()


async def test_nobody_loses_a_lease_while_the_registrys_own_loop_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    expired: list[str] = []
    leases = Leases(30.0, lambda uid, _: expired.append(uid))
    leases.grant("a")
    now = loop.time()
    for seconds, dead in (
        (1000.0, []),
        (1000.1, ["a"]),
    ):  # the first look came 990 s late; the next one has seen all there is
        with monkeypatch.context() as patch:
            patch.setattr(leases, "_due", now + (10.0 if not dead else seconds))
            patch.setattr(asyncio, "get_running_loop", lambda at=now + seconds: Clock(at))
            leases._look()
        assert expired == dead
    leases.close()


class Clock:
    """As much of a loop as a lease needs, at a given time."""

    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Clock:
        return self

    def cancel(self) -> None:
        pass


def test_of_the_dead_only_the_last_are_remembered() -> None:
    gone = Gone()
    for n in range(GONE + 10):
        gone.add(str(n), "dead")
    assert len(gone) == GONE
    assert "9" not in gone
    assert "10" in gone


# ---------------------------------------------------------------------- claims


async def test_a_claimed_incarnation_is_kept_and_the_next_one_is_higher_than_all_that_were_seen() -> None:
    world = World()
    await world.join("a")
    await world.claim("a", held("x", 3, "a"), held("y", 8, "z", alive=False))
    assert world.holder("x") == (3, "a")
    assert await world.register("y", "a") == Registered(9)


async def test_a_name_given_before_the_claims_came_goes_on_above_the_dead_that_had_it() -> None:
    world = World()
    await world.join("new")
    await world.register("x", "new")
    await world.join("a")
    await world.claim("a", held("x", 4, "z", alive=False))
    assert world.holder("x") == (5, "new")


@pytest.mark.parametrize(("claimed", "winner"), [(1, "old"), (2, "old"), (3, "new")])
async def test_of_two_living_claimants_the_higher_wins_and_the_other_process_is_fenced(
    claimed: int, winner: str
) -> None:
    world = World()
    await world.join("new")
    await world.register("x", "new")
    if winner == "new":
        for _ in range(4):
            await world.register("x", "new")
    await world.join("old")
    reply = await world.claim("old", held("x", claimed, "old"), held("y", 1, "old"))
    assert isinstance(reply, Claimed if winner == "old" else Refused)
    loser = {"old": "new", "new": "old"}[winner]
    assert "is fenced: the name is at" in world.registry.gone[loser]
    heard = world.last_words[loser]
    assert heard is not None
    assert loser in heard.gone
    at = world.holder("x")
    assert at is not None
    assert at[1] == winner
    assert at[0] >= claimed


async def test_hearsay_fences_nobody_until_the_one_it_is_about_comes_back() -> None:
    world = World()
    for uid in ("new", "gossip", "old"):
        await world.join(uid) if uid != "old" else None
    await world.register("x", "new")
    await world.claim("gossip", held("x", 3, "old"))
    assert world.holder("x") == (1, "new")
    await world.join("old")
    await world.claim("old", held("x", 3, "old"))
    assert world.holder("x") == (3, "old")
    assert "new" in world.registry.gone


async def test_who_does_not_come_back_in_time_is_dead_and_its_names_too() -> None:
    world = World(settle_s=0.05)
    await world.join("a")
    await world.claim("a", held("x", 2, "missing"), held("y", 1, "a"))
    assert world.holder("x") == (2, "missing")
    await until(world, lambda: world.holder("x") is None)
    assert world.registry.gone["missing"] == "process process-missing did not come back to the registry within 0.05 s"
    assert world.holder("y") == (1, "a")


async def test_a_name_is_refused_for_now_while_its_holder_is_only_believed_to_live() -> None:
    world = World(settle_s=0.05)
    for uid in "ab":
        await world.join(uid)
    await world.claim("a", held("x", 2, "missing"), held("y", 1, "a"))
    refused = {name: await world.register(name, "b") for name in "xy"}
    assert all(isinstance(reply, Refused) for reply in refused.values())
    assert {name: getattr(reply, "later", None) for name, reply in refused.items()} == {"x": True, "y": False}
    await until(world, lambda: world.holder("x") is None)
    assert await world.register("x", "b") == Registered(3)


async def test_a_child_for_which_its_agent_vouches_is_waited_for_and_dies_with_the_agent() -> None:
    world = World(settle_s=0.05)
    await world.join("agent", is_agent=True)
    await world.join("a")
    await world.claim("a", held("x", 2, "child"), held("y", 1, "missing"))
    await world.claim("agent", children=("child",))
    await until(world, lambda: world.holder("y") is None)
    assert world.holder("x") == (2, "child")
    world.registry.declare_dead("agent", "its host burnt")
    assert world.holder("x") is None
    assert "its host burnt" in world.registry.gone["child"]


async def test_a_death_that_an_agent_reports_late_is_told_with_its_cause() -> None:
    world = World()
    await world.join("a")
    await world.claim("a", held("x", 2, "child"))
    await world.join("agent", is_agent=True)
    await world.claim("agent", gone={"child": "exit code 3"})
    assert world.holder("x") is None
    assert world.updates[-1].gone == {"child": "exit code 3"}


async def test_a_zombie_that_others_know_to_be_dead_is_fenced_when_they_say_so() -> None:
    world = World()
    await world.join("zombie")
    await world.claim("zombie", held("x", 2, "zombie"))
    await world.join("a")
    await world.claim("a", held("x", 2, "zombie", alive=False), gone={"zombie": "it was silent"})
    assert world.holder("x") is None
    assert world.registry.gone["zombie"] == "it was silent"


async def test_a_name_that_its_process_no_longer_holds_is_dead() -> None:
    world = World()
    await world.join("a")
    await world.claim("a", held("x", 2, "b"))
    await world.join("b")
    await world.claim("b", held("y", 1, "b"))
    assert world.holder("x") is None
    assert world.holder("y") == (1, "b")
    assert world.registry.entries["x"].clean


NAMES, OLD, NEW = "xyz", "abcd", "mn"


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, list[Entry]], set[str], list[tuple[str, str, list[Entry]]]]:
    """What an old registry gave, who of its processes live, and the events after its restart in some order."""
    given_: dict[str, list[Entry]] = {}
    living = set(draw(st.lists(st.sampled_from(OLD), unique=True, min_size=1)))
    for name in NAMES:
        holders = draw(st.lists(st.sampled_from(OLD), max_size=4))
        given_[name] = [
            held(name, n, uid, alive=n == len(holders) and draw(st.booleans())) for n, uid in enumerate(holders, 1)
        ]
    events: list[tuple[str, str, list[Entry]]] = []
    for uid in sorted(living):
        knows = [
            history[-1] if history[-1].uid == uid else draw(st.sampled_from(history))
            for history in given_.values()
            if history and (history[-1].uid == uid or draw(st.booleans()))
        ]
        events.append(("claim", uid, knows))
    events += [("register", name, []) for name in draw(st.lists(st.sampled_from(NAMES), max_size=4))]
    return given_, living, draw(st.permutations(events))


@settings(max_examples=150, deadline=None)
@given(histories(), st.data())
def test_whatever_the_order_of_claims_numbers_only_grow_and_the_living_keep_their_names(
    history: tuple[dict[str, list[Entry]], set[str], list[tuple[str, str, list[Entry]]]], data: st.DataObject
) -> None:
    async def main() -> None:
        given_, living, events = history
        world = World(settle_s=0.01)
        for uid in NEW:
            await world.join(uid)
        for kind, what, entries in events:  # the replica in World refuses numbers that go back
            if kind == "register":
                await world.register(what, data.draw(st.sampled_from(NEW)))
            elif isinstance(await world.join(what), Joined):
                await world.claim(what, *entries)
        async with asyncio.timeout(10.0):
            while world.registry._reconciliation._missing:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        registry = world.registry
        for name, entry in registry.entries.items():
            assert world.replica.entries[name] == entry
            assert not entry.alive or entry.uid in registry.processes
            claims = [e.incarnation for kind, _, told in events if kind == "claim" for e in told if e.name == name]
            assert entry.incarnation >= max(claims, default=1)
        for name, past in given_.items():
            kept = past and past[-1].alive and past[-1].uid in living and past[-1].uid not in registry.gone
            if kept and ("register", name, []) not in events:
                assert world.holder(name) == (len(past), past[-1].uid)
        assert not (set(registry.gone) & living) or any(kind == "register" for kind, _, _ in events)
        await registry.on_stop()

    run(main())  # simulated time: nobody is late because the machine is busy


async def test_a_process_that_its_node_agent_started_anew_takes_the_place_of_the_one_before_it() -> None:
    world = World()
    await world.join("agent", is_agent=True)
    first = ProcessRecord("first", "role", 1, "elsewhere", Address(ipc="/first"), agent="agent")
    again = ProcessRecord("again", "role", 2, "elsewhere", Address(ipc="/again"), agent="agent")
    other = ProcessRecord("other", "role", 3, "elsewhere", Address(ipc="/other"), agent="another agent")
    for process in (first, other):
        await world.registry.join(Join(process=process))
    assert await world.register("x", "first") == Registered(1)
    assert isinstance(await world.registry.join(Join(process=again)), Joined)
    assert "started role anew" in world.registry.gone["first"]
    assert await world.register("x", "again") == Registered(2)
    assert "other" in world.registry.processes, "that of another agent is another"
