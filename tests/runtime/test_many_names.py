"""Names and deaths that outgrow a frame are told in parts, and those of long ago are forgotten without their numbers being given again."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from dockyard_actors.runtime import directory
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.directory import REGISTRY, Directory
from dockyard_actors.runtime.errors import NameTaken, RemoteError
from dockyard_actors.runtime.registry import Joined, Known, Registered, Resync, Unregister
from dockyard_actors.runtime.status import Inspect
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.runtime.testing import Event, World, run
from dockyard_actors.transport.base import Lane
from tests.runtime.actors import Add, Counter
from tests.runtime.simulation import CONFIG
from tests.runtime.test_registry import World as Town
from tests.runtime.test_registry import held

FRAME = 32 << 10
NAMES = tuple(f"name-{number:03}" for number in range(200))  # some 60 KiB of entries


async def start_all(system: ActorSystem) -> None:
    for name in NAMES:
        await system.start(Actor(), name)


async def pass_by(town: Town, name: str) -> int:
    """Somebody takes a name and gives it up; its incarnation."""
    taken = await town.register(name, "a")
    assert isinstance(taken, Registered)
    incarnation = taken.incarnation
    assert await town.registry.unregister(Unregister(name=name, incarnation=incarnation, cause="", uid="a")) is None
    return incarnation


def living(system: ActorSystem) -> set[str]:
    return {e.name for e in system.directory.entries.values() if e.alive and e.name in NAMES}


def test_no_envelope_outgrows_a_frame_at_a_join_a_restart_of_the_registry_or_a_death() -> None:
    largest: dict[Lane, int] = {}

    def seen(event: Event) -> None:
        largest[event.lane] = max(len(event.envelope), largest.get(event.lane, 0))

    async def main() -> None:
        config = dataclasses.replace(CONFIG, max_frame_bytes=FRAME)
        async with World(1, None, config) as world:
            world.network.on_event = seen
            many = await world.start("many", start_all)
            view = await world.start("view")
            assert living(view.system) == set(NAMES), "of its join"
            await world.kill_registry()
            await asyncio.sleep(1.0)
            await world.start_registry()
            await asyncio.sleep(5.0)
            assert {name for name in NAMES if world.registry.entries[name].alive} == set(NAMES), "of the claims"
            await world.kill(many)
            await asyncio.sleep(1.0)
            assert living(view.system) == set()
            assert set(view.system.gone) >= {many.uid}

    run(main(), limit_s=600.0)
    assert FRAME / 4 < largest[Lane.CONTROL] < FRAME


async def test_a_member_joins_over_real_sockets_what_takes_several_frames(tmp_path: Path) -> None:
    home = SystemConfig(name="home", ipc_prefix=f"{tmp_path}/r", max_frame_bytes=FRAME)
    async with ActorSystem(home) as system:
        await start_all(system)
        away = SystemConfig(name="away", rendezvous=f"ipc://{tmp_path}/r", max_frame_bytes=FRAME)
        async with ActorSystem(away) as member:
            assert living(member) == set(NAMES)


async def test_what_changes_between_two_parts_is_not_lost() -> None:
    town = Town()
    town.registry.part_bytes = 1_000
    await town.join("a")
    for name in NAMES[::2]:
        await town.register(name, "a")
    for number in range(20):
        await town.join(f"dead-{number}")
        town.registry.declare_dead(f"dead-{number}", "killed " * 20)
    replica, gone = Directory(), {}
    joined = await town.join("b")
    assert isinstance(joined, Joined)
    after, count, told = "", 0, len(town.updates)
    late = list(NAMES[1::2])
    while count == 0 or after:
        part = await town.registry.resync(Resync(uid="b", after=after))
        assert isinstance(part, Known)
        for entry in part.entries:
            replica.apply(entry)
        gone |= part.gone
        after, count = part.more, count + 1
        if late:
            await town.register(late.pop(0), "a")
            await town.register(late.pop(), "a")
            await town.registry.unregister(Unregister(name=NAMES[2 * count], incarnation=1, cause="", uid="a"))
    for update in town.updates[told:]:
        for entry in update.entries:
            replica.apply(entry)
    assert count > 10
    assert replica.entries == town.registry.entries
    assert gone == town.registry.gone


async def test_the_dead_of_long_ago_are_forgotten_and_their_incarnations_are_not_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "DEAD_NAMES", 4)
    town = Town()
    await town.join("a")
    assert [await pass_by(town, "x") for _ in range(3)] == [1, 2, 3]
    others = [await pass_by(town, name) for name in NAMES[:10]]
    assert others[:4] == [1] * 4, "x is remembered"
    for known in (town.registry.entries, town.replica.entries):
        assert list(known) == list(NAMES[6:10])
        assert known.forgotten >= 3
    assert await pass_by(town, NAMES[9]) == others[9] + 1, "it is remembered"
    forgotten = town.registry.entries.forgotten
    assert await town.register("x", "a") == Registered(forgotten + 1)
    after = Town()
    await after.join("a")
    await after.claim("a", forgotten=town.replica.entries.forgotten)
    assert await after.register("y", "a") == Registered(forgotten + 1)


async def test_what_is_claimed_of_the_forgotten_does_not_bring_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "DEAD_NAMES", 1)
    town = Town()
    for uid in "ab":
        await town.join(uid)
    for name in ("x", "y", "z"):
        await pass_by(town, name)
    assert "x" not in town.registry.entries
    told = len(town.updates)
    await town.claim("b", held("y", 1, "a", alive=False))
    assert "y" not in town.registry.entries
    await town.claim("b", held("x", 1, "a"))
    assert len(town.updates) == told, "a may still claim it"
    await town.claim("a")
    await town.claim("b", held("x", 1, "a"))
    assert town.holder("x") is None
    assert [e.alive for update in town.updates[told:] for e in update.entries] == [False], "b hears that it died"
    await town.claim("a", held("x", 1, "a"))
    assert town.holder("x") is not None, "whose it is knows better"


async def test_who_comes_back_keeps_its_name_although_others_were_first_to_speak_of_it() -> None:
    town = Town()
    for uid in "ab":
        await town.join(uid)
    await town.claim("b", held("x", 3, "a"), forgotten=5)
    await town.claim("a", held("x", 3, "a"))
    assert town.holder("x") == (3, "a")
    assert [e.alive for update in town.updates for e in update.entries] == [True]


def test_a_replica_is_not_told_again_of_a_death_that_it_has_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "DEAD_NAMES", 1)
    replica = Directory()
    dead = [held(name, 2, "a", alive=False) for name in "xy"]
    assert [replica.apply(entry) for entry in dead] == [True, True]
    assert not replica.apply(dead[0])
    assert replica.apply(held("x", 3, "b"))
    assert replica.apply(held("x", 3, "b", alive=False))


async def test_who_catches_up_forgets_whom_the_registry_has_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        ActorSystem(SystemConfig(name="home", ipc_prefix=f"{tmp_path}/r")) as home,
        ActorSystem(SystemConfig(name="view", rendezvous=f"ipc://{tmp_path}/r")) as view,
    ):
        watcher = Counter()
        await view.start(watcher, "watcher")
        watcher.ctx.watch("x")
        await home.start(Counter(), "x")
        assert await view.ref("x").ask(Add()) == 1
        with monkeypatch.context() as patch:
            patch.setattr(directory, "DEAD_NAMES", 2)
            patch.setattr(view, "take", lambda update: None)  # as if the connection had been lost
            for name in ("x", "y", "z", "u"):
                if name != "x":
                    await home.start(Counter(), name)
                await home.stop(name)
            assert home.registry is not None
            assert "x" not in home.registry.entries
            await view.ref(REGISTRY).ask(Inspect())  # behind the updates
        assert view.directory.alive("x") is not None
        await home.start(Counter(), "later")
        async with asyncio.timeout(10.0):
            while not watcher.deaths:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert view.directory.alive("x") is None
        assert view.directory.alive("later") is not None
        assert view.directory.alive("watcher") is not None


async def test_a_name_with_more_to_say_than_everybody_can_be_told_is_refused(tmp_path: Path) -> None:
    config = SystemConfig(name="home", ipc_prefix=f"{tmp_path}/r", max_frame_bytes=FRAME)
    async with ActorSystem(config) as system:
        with pytest.raises(NameTaken, match="give it less meta"):
            await system.start(Counter(), "x", {"what": "x" * FRAME})
        assert await (await system.start(Counter(), "x")).ask(Add()) == 1


async def test_a_status_too_large_for_a_frame_fails_its_ask_and_nothing_else(tmp_path: Path) -> None:
    async with (
        ActorSystem(SystemConfig(name="home", ipc_prefix=f"{tmp_path}/r", max_frame_bytes=FRAME)) as home,
        ActorSystem(SystemConfig(name="view", rendezvous=f"ipc://{tmp_path}/r")) as view,
    ):
        await start_all(home)
        for number in range(5):
            await home.start(Counter(), f"{number}" * 4_000)
        await home.start(Counter(), "x")
        for number in range(5):
            await home.ref(f"{number}" * 4_000).ask(Add())
        for name in NAMES:
            home.cells[name].serving()
        with pytest.raises(RemoteError, match="the status of home, which has 207 actors"):
            await view.ref("x").ask(Inspect())
        assert await view.ref("x").ask(Add()) == 1
