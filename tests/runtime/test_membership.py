"""Registries that are killed and started again while real processes go on, and members that go silent."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dockyard_actors.runtime.actor import Birth, Unresponsive
from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import ActorCrashed, RegistryDown, UnknownName
from dockyard_actors.runtime.registry import REGISTRY, DirectoryUpdate, ListAll, ProcessSuspect
from dockyard_actors.runtime.system import ActorSystem
from tests.runtime.actors import Add, Counter, Hold, Pid
from tests.runtime.agent_main import role
from tests.runtime.member_main import Chase, Tally

UP_S = 30.0


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(UP_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Watcher(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.births: list[Birth] = []
        self.silent: list[Unresponsive] = []

    async def on_birth(self, birth: Birth) -> None:
        self.births.append(birth)

    async def on_unresponsive(self, silent: Unresponsive) -> None:
        self.silent.append(silent)

    @property
    def events(self) -> list[tuple[str, str, int]]:
        """What was heard of deaths and births, as (what, name, incarnation)."""
        return [("dead", d.name, d.incarnation) for d in self.deaths] + [
            ("born", b.name, b.incarnation) for b in self.births
        ]


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path leaves room for sockets."""
    path = Path(tempfile.mkdtemp(prefix="dy-test-"))
    yield path
    shutil.rmtree(path)


class Member:
    """A member process that is up."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict) -> None:
        self.process, self.pid, self.tcp = process, ready["pid"], ready["tcp"]

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        await self.process.communicate()

    async def end(self) -> tuple[int | None, str]:
        async with asyncio.timeout(UP_S):
            _, errors = await self.process.communicate()
        return self.process.returncode, errors.decode()


Launch = Callable[..., Any]


@pytest.fixture
async def launch(short: Path) -> AsyncIterator[Launch]:
    started: list[asyncio.subprocess.Process] = []
    numbers = itertools.count()

    async def start(actors: dict[str, int] | None = None, host: str = "", **system: Any) -> Member:
        path = short / f"member{next(numbers)}.json"
        settings: dict[str, Any] = {"actors": actors or {}, "system": {"allow_plain_loopback": True, **system}}
        path.write_text(json.dumps(settings | ({"host": host} if host else {})))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.runtime.member_main",
            str(path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(UP_S):
            line = await process.stdout.readline()
            assert line, (await process.communicate())[1].decode()
        return Member(process, json.loads(line))

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def answered(system: ActorSystem, name: str) -> int:
    count, failed = await system.ref(name).ask(Tally())
    assert failed == ()
    return count


async def more_answers(system: ActorSystem, name: str, than: int) -> None:
    async with asyncio.timeout(UP_S):
        while await answered(system, name) <= than:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_no_ask_fails_while_the_registry_is_dead_and_the_next_one_learns_what_the_living_know(
    launch: Launch, short: Path
) -> None:
    home: dict[str, Any] = {"name": "home", "ipc_prefix": f"{short}/home.", "settle_s": 0.5}
    there = f"ipc://{short}/home."
    registry = await launch(**home)
    a, b = await asyncio.gather(
        launch({"a": 1}, name="a", rendezvous=there), launch({"b": 3}, name="b", rendezvous=there)
    )
    c = await launch({"c": 2}, name="c", rendezvous=there)
    async with ActorSystem(SystemConfig(name="view", rendezvous=there)) as view:
        membership = view.membership
        assert membership is not None
        watcher = Watcher()
        await view.start(watcher, "watcher")
        for name in ("a", "b", "c"):
            watcher.ctx.watch(name)
        await eventually(lambda: len(watcher.events) == 3)
        assert sorted(watcher.events) == [("born", "a", 1), ("born", "b", 3), ("born", "c", 2)]
        await view.ref("a").ask(Chase(name="b"))
        await view.ref("b").ask(Chase(name="a"))
        epoch = membership.epoch

        await registry.kill()
        await eventually(lambda: membership.down)
        with pytest.raises(RegistryDown, match=r"'nobody' is not known here.*the registry is down since .*ended"):
            await view.ref("nobody").ask(Add(), deadline_s=0.2)
        for name in ("a", "b"):  # whole asks begin and end without a registry
            await more_answers(view, name, await answered(view, name) + 10)
        await c.kill()
        waiting = asyncio.ensure_future(view.ref("c").ask(Pid(), retry=True, deadline_s=UP_S))
        starting = asyncio.ensure_future(view.start(Counter(), "new"))

        await launch(**home)
        await eventually(lambda: not membership.down)
        assert membership.epoch != epoch
        await starting
        async with ActorSystem(SystemConfig(name="late", rendezvous=there)) as late:
            for name, member, incarnation in (("a", a, 1), ("b", b, 3)):
                assert await late.ref(name).ask(Pid(), retry=True) == member.pid
                assert late.directory.entries[name].incarnation == incarnation
            await eventually(lambda: watcher.deaths)
            again = await launch({"c": 1}, name="c", rendezvous=there)
            assert await waiting == again.pid
            await eventually(lambda: len(watcher.events) > 4)
            assert late.directory.entries["c"].incarnation == 3
        assert [(d.name, d.incarnation) for d in watcher.deaths] == [("c", 2)]
        assert "process c did not come back to the registry" in watcher.deaths[0].cause
        assert [(e.name, e.incarnation) for e in watcher.births if e.name == "c"] == [("c", 2), ("c", 3)]
        for name in ("a", "b"):
            await more_answers(view, name, await answered(view, name) + 10)
        known = await view.ref(REGISTRY).ask(ListAll())
        assert sorted(p.name for p in known.processes) == ["a", "b", "c", "home", "view"]
        with pytest.raises(UnknownName) as caught:
            await view.ref("nobody").ask(Add())
        assert not isinstance(caught.value, RegistryDown)


async def test_of_two_claimants_the_lower_incarnation_is_fenced_and_its_process_ends(
    launch: Launch, short: Path
) -> None:
    home: dict[str, Any] = {"name": "home", "ipc_prefix": f"{short}/home."}
    there = f"ipc://{short}/home."
    registry = await launch(**home)
    older = await launch({"x": 2}, name="older", rendezvous=there)
    os.kill(older.pid, signal.SIGSTOP)
    await registry.kill()
    await launch(**home)
    newer = await launch({"x": 1}, name="newer", rendezvous=there)  # nobody who knows of the other one is there
    async with ActorSystem(SystemConfig(name="view", rendezvous=there)) as view:
        assert await view.ref("x").ask(Pid()) == newer.pid
        os.kill(older.pid, signal.SIGCONT)
        code, errors = await newer.end()
        assert code == 3
        assert "its x#1 is fenced: the name is at #2 in process older" in errors
        assert await view.ref("x").ask(Pid(), retry=True) == older.pid
        assert view.directory.entries["x"].incarnation == 2


async def test_a_member_on_another_host_that_is_silent_for_its_lease_is_dead_and_ends_when_it_wakes_up(
    launch: Launch,
) -> None:
    home = await launch(name="home", tcp_bind="tcp://127.0.0.1:0", lease_s=0.6)
    far = await launch({"far": 1}, host="elsewhere", name="far", rendezvous=home.tcp, tcp_bind="tcp://127.0.0.1:0")
    config = SystemConfig(
        name="view", rendezvous=home.tcp, allow_plain_loopback=True, tcp_bind="tcp://127.0.0.1:0", lease_s=0.6
    )
    async with ActorSystem(config) as view:
        watcher = Watcher()
        await view.start(watcher, "watcher")
        watcher.ctx.watch("far")
        assert await view.ref("far").ask(Pid()) == far.pid
        await asyncio.sleep(3 * 0.6)  # what is promised is that nothing happens in this time
        assert await view.ref("far").ask(Pid()) == far.pid
        assert watcher.deaths == []
        os.kill(far.pid, signal.SIGSTOP)
        await eventually(lambda: watcher.deaths)
        assert "nothing was heard of process far" in watcher.deaths[0].cause
        assert "(lease_s=0.6)" in watcher.deaths[0].cause
        os.kill(far.pid, signal.SIGCONT)
        code, errors = await far.end()
        assert code == 3
        assert "declared this process dead: nothing was heard of process far" in errors


async def test_a_member_on_another_host_notices_by_silence_that_the_registry_is_gone_and_comes_back(
    launch: Launch,
) -> None:
    home = await launch(name="home", tcp_bind="tcp://127.0.0.1:0", lease_s=0.6)
    far = await launch({"far": 1}, host="elsewhere", name="far", rendezvous=home.tcp, tcp_bind="tcp://127.0.0.1:0")
    await home.kill()
    await launch(name="home", tcp_bind=home.tcp, lease_s=0.6)
    async with ActorSystem(SystemConfig(name="view", rendezvous=home.tcp, allow_plain_loopback=True)) as view:
        assert await view.ref("far").ask(Pid(), retry=True, deadline_s=UP_S) == far.pid
        assert view.directory.entries["far"].incarnation == 1


async def test_a_process_that_starts_before_its_dead_predecessor_is_missed_waits_for_the_name(
    launch: Launch, short: Path
) -> None:
    home: dict[str, Any] = {"name": "home", "ipc_prefix": f"{short}/home.", "settle_s": 0.5}
    there = f"ipc://{short}/home."
    registry = await launch(**home)
    x = await launch({"x": 1}, name="x", rendezvous=there)
    async with ActorSystem(SystemConfig(name="view", rendezvous=there)) as view:
        membership = view.membership
        assert membership is not None
        await registry.kill()
        await eventually(lambda: membership.down)
        await x.kill()
        await launch(**home)
        await eventually(lambda: not membership.down)
        entry = view.directory.alive("x")
        assert entry is not None  # believed to live, by us alone
        ref = await view.start(Counter(), "x")
        assert await ref.ask(Pid()) == os.getpid()
        assert view.directory.entries["x"].incarnation == 2


@pytest.mark.parametrize("under", ["the primary", "a secondary"])
async def test_a_watcher_hears_from_the_agent_that_a_loop_is_held_and_that_it_is_free_again(
    tmp_path: Path, under: str
) -> None:
    def settings(**more: Any) -> AgentConfig:
        return AgentConfig(ping_s=0.05, suspect_s=0.3, hang_s=UP_S, **more)

    async with (
        NodeAgent(settings()) as primary,
        NodeAgent(settings(name="host2", rendezvous=primary.rendezvous)) as secondary,
    ):
        watcher = Watcher()
        await primary.system.start(watcher, "watcher")
        watcher.ctx.watch("c")
        await (primary if under == "the primary" else secondary).spawn(role("c", tmp_path))
        ref = primary.system.ref("c")
        await ref.ask(Pid(), retry=True, deadline_s=UP_S)
        await ref.ask(Hold(seconds=0.8), deadline_s=UP_S)
        await eventually(lambda: len(watcher.silent) == 2)
        assert watcher.silent[0].silent_s > 0.3
        assert watcher.silent[1].silent_s == 0.0
        assert watcher.deaths == []


async def test_without_another_registry_a_member_ends_with_the_cause_after_its_patience(
    launch: Launch, short: Path
) -> None:
    home = await launch(name="home", ipc_prefix=f"{short}/home.")
    config = SystemConfig(name="view", rendezvous=f"ipc://{short}/home.", registry_lost_s=0.3)
    with pytest.raises(ActorCrashed) as caught:  # noqa: PT012
        async with ActorSystem(config) as view:
            await home.kill()
            await view.wait_stop()
    assert f"process home (pid {home.pid}) ended" in str(caught.value.__cause__)
    assert "none came back at ipc://" in str(caught.value.__cause__)


async def test_what_another_epochs_registry_says_is_ignored(short: Path) -> None:
    home = SystemConfig(name="home", ipc_prefix=f"{short}/home.")
    async with (
        ActorSystem(home) as system,
        ActorSystem(SystemConfig(name="view", rendezvous=f"ipc://{short}/home.")) as view,
    ):
        await system.start(Counter(), "c")
        assert await view.ref("c").ask(Add()) == 1
        membership, registry = view.membership, system.registry
        assert membership is not None
        assert registry is not None
        assert membership.epoch == registry.epoch
        view.take(DirectoryUpdate((), {system.process.uid: "a zombie says so"}, epoch=registry.epoch - 1))
        assert await view.ref("c").ask(Add()) == 2
        view.take(DirectoryUpdate((), {system.process.uid: "its own says so"}, epoch=registry.epoch))
        assert membership.down


async def test_watchers_are_told_of_births_and_of_processes_that_do_not_answer(short: Path) -> None:
    home = SystemConfig(name="home", ipc_prefix=f"{short}/home.")
    async with (
        ActorSystem(home) as system,
        ActorSystem(SystemConfig(name="view", rendezvous=f"ipc://{short}/home.")) as view,
    ):
        watcher = Watcher()
        await view.start(watcher, "watcher")
        watcher.ctx.watch("c")
        for _ in range(2):
            await system.start(Counter(), "c")
            await system.stop("c")
        await system.start(Counter(), "c")
        await system.ref(REGISTRY).ask(ProcessSuspect(uid=system.process.uid, silent_s=2.0))
        await system.ref(REGISTRY).ask(ProcessSuspect(uid=system.process.uid, silent_s=0.0))
        await eventually(lambda: len(watcher.silent) == 2)
        assert [b.incarnation for b in watcher.births] == [1, 2, 3]
        assert [d.incarnation for d in watcher.deaths] == [1, 2]
        assert watcher.births[0].meta["process"] == "home"
        assert [(s.name, s.incarnation, s.silent_s) for s in watcher.silent] == [("c", 3, 2.0), ("c", 3, 0.0)]
