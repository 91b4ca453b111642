"""Whoever asks an agent to stop or restart a process may give up: what was begun goes on to its end, and supervision with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.errors import AskTimeout
from dockyard_actors.runtime.supervision import RestartPolicy, RestartProcess, StopProcess
from tests.runtime.actors import Pid
from tests.runtime.agent_main import role

UP_S = 30.0
FAST = RestartPolicy(backoff_s=0.05)


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(UP_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def agent() -> AsyncIterator[NodeAgent]:
    async with NodeAgent(AgentConfig(ping_s=0.1)) as agent:
        yield agent


async def up(agent: NodeAgent, tmp_path: Path, *how: str) -> int:
    """Starts process c; its pid, when it serves."""
    await agent.spawn(role("c", tmp_path, *how, policy=FAST, grace_s=1.0))
    return await agent.system.ref("c").ask(Pid(), retry=True, deadline_s=UP_S)


async def test_a_deaf_process_is_killed_after_its_grace_although_nobody_waits_any_longer(
    agent: NodeAgent, tmp_path: Path
) -> None:
    pid = await up(agent, tmp_path, "deaf")
    with pytest.raises(AskTimeout):
        await agent.system.ref("agent").ask(StopProcess(name="c"), deadline_s=0.2)
    assert agent.processes()[0].state == "stopping"
    await eventually(lambda: agent.processes()[0].state == "stopped")
    assert not psutil.pid_exists(pid)
    assert agent.processes()[0].cause == "killed by SIGKILL"
    assert await up(agent, tmp_path) != pid


async def test_a_wished_restart_happens_although_nobody_waits_any_longer_and_the_next_crash_counts(
    agent: NodeAgent, tmp_path: Path
) -> None:
    pid = await up(agent, tmp_path, "deaf")
    with pytest.raises(AskTimeout):
        await agent.system.ref("agent").ask(RestartProcess(name="c"), deadline_s=0.2)
    await eventually(lambda: agent.processes()[0].state == "running" and agent.processes()[0].incarnation == 2)
    assert not psutil.pid_exists(pid)
    assert agent.processes()[0].restarts == 0
    os.kill(agent.processes()[0].pid, signal.SIGKILL)
    await eventually(lambda: agent.processes()[0].incarnation == 3)
    assert agent.processes()[0].restarts == 1


async def test_an_end_that_is_being_looked_into_is_looked_into_to_its_end(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = await up(agent, tmp_path)
    told, reached, go_on = agent.child_died, asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any) -> None:
        reached.set()
        await go_on.wait()
        await told(*args)

    monkeypatch.setattr(agent, "child_died", slowly)
    stopping = asyncio.ensure_future(agent.stop("c"))
    async with asyncio.timeout(UP_S):
        await reached.wait()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    go_on.set()
    await eventually(lambda: agent.processes()[0].state == "stopped")
    assert not psutil.pid_exists(pid), "it was reaped"
    assert await up(agent, tmp_path) != pid
