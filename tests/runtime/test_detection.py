"""Deaths are known at once, held loops soon, and an agent that was held itself blames nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dockyard_actors.runtime.actor import Actor, Death, Unresponsive
from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.supervision import ListProcesses, ProcessInfo, RestartPolicy
from dockyard_actors.runtime.system import ActorSystem
from tests.runtime.actors import Add, Hold, HoldAll, Pid
from tests.runtime.agent_main import role
from tests.runtime.test_agents import Started, launch  # noqa: F401

FAST = RestartPolicy(max_restarts=5, window_s=300.0, backoff_s=0.05, backoff_max_s=0.2)
UP_S = 30.0
NEVER_S = 1000.0


class Watcher(Actor):
    def __init__(self, name: str) -> None:
        self.name = name
        self.deaths: asyncio.Queue[Death] = asyncio.Queue()
        self.silences: asyncio.Queue[Unresponsive] = asyncio.Queue()

    async def on_start(self) -> None:
        self.ctx.watch(self.name)

    async def on_death(self, death: Death) -> None:
        self.deaths.put_nowait(death)

    async def on_unresponsive(self, silent: Unresponsive) -> None:
        self.silences.put_nowait(silent)


async def test_a_death_reaches_a_watcher_elsewhere_before_anybody_was_pinged(tmp_path: Path) -> None:
    async with asyncio.timeout(UP_S), NodeAgent(AgentConfig(ping_s=NEVER_S, runtime_parent=tmp_path)) as agent:
        await agent.spawn(role("c", tmp_path, policy=FAST))
        await agent.system.ref("c").ask(Add(), retry=True, deadline_s=UP_S)
        async with ActorSystem(SystemConfig(name="view", rendezvous=agent.rendezvous, key_file=agent.key_file)) as view:
            watcher = Watcher("c")
            await view.start(watcher, "watcher")
            os.kill(agent.processes()[0].pid, signal.SIGKILL)
            death = await watcher.deaths.get()
        assert (death.incarnation, death.cause, death.clean) == (1, "killed by SIGKILL", False)


async def test_a_held_loop_is_known_within_two_seconds_with_the_settings_as_shipped(tmp_path: Path) -> None:
    config = AgentConfig(runtime_parent=tmp_path)
    async with asyncio.timeout(UP_S), NodeAgent(config) as agent:
        await agent.spawn(role("c", tmp_path, policy=FAST, hang_s=NEVER_S))
        ref = agent.system.ref("c")
        await ref.ask(Add(), retry=True, deadline_s=UP_S)
        watcher = Watcher("c")
        await agent.system.start(watcher, "watcher")
        held = asyncio.ensure_future(ref.ask(Hold(seconds=config.suspect_s + 1.0), deadline_s=UP_S))
        silent = await watcher.silences.get()
        assert config.suspect_s <= silent.silent_s < 2.0, (
            "silence begins with the last answer, so before the loop was held"
        )
        assert agent.processes()[0].state == "unresponsive"
        await held
        assert (await watcher.silences.get()).silent_s == 0.0
        assert agent.processes()[0].state == "running"


async def test_a_guard_that_a_thread_declares_is_no_hang_and_an_overrun_one_is(tmp_path: Path) -> None:
    config = AgentConfig(ping_s=0.1, suspect_s=0.3, hang_s=0.6, runtime_parent=tmp_path)
    async with asyncio.timeout(UP_S), NodeAgent(config) as agent:
        await agent.spawn(role("c", tmp_path, policy=FAST))
        ref = agent.system.ref("c")
        await ref.ask(HoldAll(seconds=1.2, declared=20.0), retry=True, deadline_s=UP_S)
        (info,) = agent.processes()
        assert (info.restarts, info.state) == (0, "running")
        watcher = Watcher("c")
        await agent.system.start(watcher, "watcher")
        with pytest.raises(Exception, match="hung: its loop did not answer"):
            await ref.ask(HoldAll(seconds=20.0, declared=0.1), deadline_s=UP_S)
        assert "hung" in (await watcher.deaths.get()).cause


async def wait_state(pid: int, state: str) -> None:
    while psutil.Process(pid).status() != state:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_an_agent_that_was_stopped_blames_nobody_for_its_own_silence(launch: Callable[..., Any]) -> None:  # noqa: F811
    hang_s = 2.0
    started: Started = await launch(roles=["a"], hang_s=hang_s)
    (pid,), agent_pid = started.ready["pids"], started.process.pid
    config = SystemConfig(name="view", rendezvous=started.ready["rendezvous"], key_file=Path(started.ready["keys"]))
    async with asyncio.timeout(UP_S), ActorSystem(config) as view:

        async def info() -> ProcessInfo:
            return (await view.ref("agent").ask(ListProcesses(), deadline_s=UP_S)).processes[0]

        before = await info()
        for number in (agent_pid, pid):  # as when the whole machine is suspended
            os.kill(number, signal.SIGSTOP)
            await wait_state(number, psutil.STATUS_STOPPED)
        until = time.monotonic() + 1.5 * hang_s
        await asyncio.sleep(until - time.monotonic())  # how long the pause takes
        os.kill(agent_pid, signal.SIGCONT)
        for _ in range(3):  # the agent is at work again, and its child not yet
            await info()
            await asyncio.sleep(0.15)  # more than a period of its pings
        os.kill(pid, signal.SIGCONT)
        assert await view.ref("a").ask(Pid(), deadline_s=UP_S) == pid
        after = await info()
        assert (after.incarnation, after.restarts, after.pid) == (before.incarnation, 0, pid)
        os.kill(pid, signal.SIGSTOP)  # and it still notices who really hangs
        while (await info()).restarts == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
