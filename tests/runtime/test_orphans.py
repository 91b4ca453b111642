"""What a node agent's violent death leaves behind: nothing that can be found by its environment, whenever and however it was started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.supervision import RestartPolicy
from tests.runtime.actors import Die
from tests.runtime.agent_main import role
from tests.runtime.test_agents import UP_S, Started, launch  # noqa: F401


def carrying(text: str) -> set[int]:
    """Processes with this in their environment."""
    found = set()
    for pid in psutil.pids():
        try:
            if text.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
        except OSError:  # gone, or another user's
            continue
    return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(UP_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_killed_agents_roles_end_with_all_that_they_started(launch: Callable[..., Any]) -> None:  # noqa: F811
    started: Started = await launch(roles=["a"], how=["family"])
    mark = f'"runtime_dir":"{started.ready["runtime_dir"]}"'
    assert len(carrying(mark)) == 4, "the role, a child, one in a session of its own, and a daemon"
    os.kill(started.process.pid, signal.SIGKILL)
    await started.end()
    await until(lambda: not carrying(mark))


async def test_a_dead_roles_daemon_ends_before_the_role_comes_back(tmp_path: Path) -> None:
    async with asyncio.timeout(UP_S), NodeAgent(AgentConfig(ping_s=0.1, runtime_parent=tmp_path)) as agent:
        await agent.spawn(role("c", tmp_path, "family", policy=RestartPolicy(backoff_s=0.01)))
        child = agent.children["c"]
        await until(lambda: child.state == "running" and len(carrying(child.uid)) == 4)
        uid = child.uid
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.uid != uid)
        assert not carrying(uid)


PARENT = """
import os, signal, subprocess, sys
from dockyard_actors.runtime import leash
def stop():
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
subprocess.Popen(leash.command(["sleep", "1003"]), preexec_fn=stop)
"""


async def test_a_child_between_its_fork_and_its_leash_ends_when_its_parent_died() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(await asyncio.to_thread(parent.stdout.readline))
    child = psutil.Process(pid)
    await until(lambda: child.status() == psutil.STATUS_STOPPED)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    child.resume()
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_a_failure_is_reported_although_its_agent_ends_at_once(launch: Callable[..., Any]) -> None:  # noqa: F811
    async with asyncio.timeout(UP_S), NodeAgent(AgentConfig(raise_failures=False)) as primary:
        policy = {"max_restarts": 0}
        secondary: Started = await launch(name="host2", rendezvous=primary.rendezvous, roles=["far"], policy=policy)
        await primary.system.ref("far").tell(Die(how="exit"))
        failure = await primary.wait_failed()
        assert (failure.name, failure.cause) == ("far", "exit code 3")
        assert (await secondary.end())[0] == 3
