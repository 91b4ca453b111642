"""Rest-for-one with real processes: who goes down with whom, in which order they come back, and what counts as a crash."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dockyard_actors.runtime.actor import Actor, Birth, Death
from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.supervision import ProcessInfo, RestartPolicy
from tests.runtime.agent_main import role

FAST = RestartPolicy(max_restarts=5, window_s=300.0, backoff_s=0.02, backoff_max_s=0.1)
UP_S = 30.0


class Events(Actor):
    """What is told of births and deaths, in order."""

    def __init__(self, names: str) -> None:
        self.names, self.seen = names, []

    async def on_start(self) -> None:
        for name in self.names:
            self.ctx.watch(name)

    async def on_death(self, death: Death) -> None:
        self.seen.append(f"-{death.name}{death.incarnation}" + ("" if death.clean else "!"))

    async def on_birth(self, birth: Birth) -> None:
        self.seen.append(f"+{birth.name}{birth.incarnation}")


class Watched:
    """An agent with its processes, and what was seen of them."""

    def __init__(self, agent: NodeAgent, events: Events, log_dir: Path) -> None:
        self.agent, self.events, self.log_dir = agent, events, log_dir

    async def up(self, names: str, group: str = "line", how: dict[str, str] | None = None, **options: Any) -> None:
        for name in names:
            more = {"policy": FAST, "group": group, **options}
            await self.agent.spawn(role(name, self.log_dir, *filter(None, [(how or {}).get(name)]), **more))
        await self.until(lambda: all(self.info(name).state == "running" for name in names))

    def info(self, name: str) -> ProcessInfo:
        return self.agent.children[name].info()

    def kill(self, name: str) -> None:
        """Returns when the kernel has ended it; the agent's loop has not looked yet."""
        pid = self.info(name).pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(UP_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def seen(self, *last: str) -> list[str]:
        """Everything that was seen, once these came."""
        await self.until(lambda: all(event in self.events.seen for event in last))
        return self.events.seen


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with NodeAgent(AgentConfig(ping_s=0.1, runtime_parent=tmp_path, raise_failures=False)) as agent:
        events = Events("abcd")
        await agent.system.start(events, "events")
        yield Watched(agent, events, tmp_path)


async def test_those_behind_the_dead_stop_in_reverse_and_all_start_in_order(watched: Watched) -> None:
    await watched.up("abc")
    await watched.up("d", group="")
    await watched.seen("+a1", "+b1", "+c1", "+d1")
    watched.events.seen.clear()
    watched.kill("a")
    assert await watched.seen("+c2") == ["-a1!", "-c1", "-b1", "+a2", "+b2", "+c2"]
    await watched.until(lambda: watched.info("c").state == "running")
    watched.kill("b")
    assert (await watched.seen("+c3"))[6:] == ["-b2!", "-c2", "+b3", "+c3"]
    assert [watched.info(name).restarts for name in "abcd"] == [1, 1, 0, 0], "a crash counts for who crashed"
    assert [watched.info(name).incarnation for name in "abcd"] == [2, 3, 3, 1]


async def test_a_second_crash_while_the_group_restarts_starts_nobody_twice(watched: Watched) -> None:
    await watched.up("abc")
    watched.kill("a")
    await watched.until(lambda: watched.info("a").incarnation == 2 and watched.info("a").state == "starting")
    watched.kill("a")
    seen = await watched.seen("+c2")
    assert seen[3:] == ["-a1!", "-c1", "-b1", "+a2", "+b2", "+c2"], "the one that was killed had no name yet"
    assert [watched.info(name).incarnation for name in "abc"] == [3, 2, 2]
    assert [watched.info(name).restarts for name in "abc"] == [2, 0, 0]


async def test_a_crash_that_follows_another_is_not_counted(watched: Watched) -> None:
    await watched.up("ab", policy=RestartPolicy(max_restarts=1, backoff_s=0.02))
    watched.kill("a")
    watched.kill("b")  # whichever end the loop is told of first
    await watched.seen("+b2")
    assert [watched.info(name).restarts for name in "ab"] == [1, 0]
    await watched.until(lambda: watched.info("b").state == "running")
    watched.kill("b")
    await watched.seen("+b3")
    assert [watched.info(name).restarts for name in "ab"] == [1, 1], "one of its own is"


async def test_nobody_starts_on_the_strength_of_one_whose_death_is_still_being_looked_into(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await watched.up("ab")
    first, told = watched.agent.children["a"], watched.agent.child_died
    looked_into = asyncio.Event()

    async def slowly(uid: str, socket_dir: Path, cause: str, clean: bool) -> None:
        if uid == first_uid:
            await looked_into.wait()
        await told(uid, socket_dir, cause, clean)

    first_uid = first.uid
    monkeypatch.setattr(watched.agent, "child_died", slowly)
    watched.kill("a")
    watched.kill("b")
    await watched.until(lambda: watched.info("b").state not in ("running", "stopping"))
    for _ in range(20):
        await asyncio.sleep(0)  # enough turns of the loop to start, were it to
    states = (watched.info("a").state, watched.info("b").state)
    looked_into.set()
    assert states == ("running", "waiting")
    await watched.seen("+b2")
    assert [watched.info(name).incarnation for name in "ab"] == [2, 2]


async def test_one_that_does_not_stop_is_killed_after_its_grace_and_has_not_crashed(watched: Watched) -> None:
    await watched.up("ab", how={"b": "deaf"}, grace_s=0.2)
    watched.kill("a")
    await watched.seen("+b2")
    info = watched.info("b")
    assert (info.cause, info.restarts) == ("killed by SIGKILL", 0)


async def test_who_fails_for_good_takes_the_run_with_its_first_cause_and_nobody_waits(watched: Watched) -> None:
    await watched.up("abc", policy=RestartPolicy(max_restarts=0))
    watched.kill("b")
    watched.kill("c")
    async with asyncio.timeout(UP_S):
        failure = await watched.agent.wait_failed()
    assert (failure.name, failure.cause, failure.restarts) == ("b", "killed by SIGKILL", 0)
    await watched.until(lambda: watched.info("c").state == "waiting")
    async with asyncio.timeout(UP_S):
        await watched.agent.stop("c")
    assert [watched.info(name).state for name in "abc"] == ["running", "failed", "stopped"]


async def test_a_wished_restart_takes_the_rest_along_and_a_wished_stop_does_not(watched: Watched) -> None:
    await watched.up("ab")
    await watched.agent.restart("a")
    await watched.seen("+b2")
    assert [watched.info(name).restarts for name in "ab"] == [0, 0]
    await watched.until(lambda: watched.info("b").state == "running")
    await watched.agent.stop("a")
    watched.kill("b")
    await watched.seen("+b3")
    assert watched.info("a").state == "stopped", "what was stopped stays so and nobody waits for it"


async def test_an_agent_that_closes_in_the_middle_of_a_group_restart_does_not_wait_for_it(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(UP_S),
        NodeAgent(AgentConfig(ping_s=0.1, runtime_parent=tmp_path, raise_failures=False)) as agent,
    ):
        watched = Watched(agent, Events(""), tmp_path)
        await watched.up("abc", policy=RestartPolicy(backoff_s=1000.0, backoff_max_s=1000.0))
        watched.kill("b")
        await watched.until(lambda: watched.info("c").state == "waiting" and watched.info("b").state == "backoff")
    assert [watched.info(name).state for name in "abc"] == ["stopped"] * 3
