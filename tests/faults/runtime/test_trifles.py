"""Supervision outlives trifles: a log that was removed, a start that fails half-way, a cause that cannot be read, many descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dockyard_actors.runtime import child, pidwatch
from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.process import cause_path
from dockyard_actors.runtime.supervision import ProcessSpec, RestartPolicy

PATIENCE_S = 30.0


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
async def agent() -> AsyncIterator[NodeAgent]:
    async with NodeAgent(AgentConfig(raise_failures=False)) as agent:
        yield agent


def sleeper(tmp_path: Path, name: str = "c", log: str = "c.log", **policy: Any) -> ProcessSpec:
    """A process that says nothing and does nothing."""
    argv = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
    rules = RestartPolicy(**{"backoff_s": 0.01, **policy})
    return ProcessSpec(name, argv, {}, rules, tmp_path / log, 5.0)


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


async def test_a_log_that_was_removed_is_no_reason_to_end_supervision(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(sleeper(tmp_path))
    (tmp_path / "c.log").unlink()
    os.kill(agent.processes()[0].pid, signal.SIGKILL)
    await eventually(lambda: agent.processes()[0].incarnation == 2)
    info = agent.processes()[0]
    assert (info.restarts, info.cause) == (1, "killed by SIGKILL")
    await agent.stop("c")
    assert agent.processes()[0].state == "stopped"


async def test_a_cause_that_cannot_be_read_is_not_needed(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(sleeper(tmp_path))
    cause_path(agent.children["c"].socket_dir).write_bytes(b'{"where": ')
    os.kill(agent.processes()[0].pid, signal.SIGKILL)
    await eventually(lambda: agent.processes()[0].incarnation == 2)
    assert agent.processes()[0].cause == "killed by SIGKILL"


async def test_what_cannot_be_started_has_failed_and_can_be_tried_again(agent: NodeAgent, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        await agent.spawn(sleeper(tmp_path, log="file/c.log"))
    info = agent.processes()[0]
    assert (info.state, info.pid) == ("failed", 0)
    assert "cannot be started" in info.cause
    assert sorted(path.name for path in agent.runtime_dir.iterdir() if path.name.startswith("c.")) == []
    await agent.spawn(sleeper(tmp_path))
    assert agent.children["c"].lives()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No process can be watched: a descriptor is wanted for each."""

    def no_descriptor(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(pidwatch.os, "pidfd_open", no_descriptor)
        yield patch


async def test_a_process_that_cannot_be_watched_does_not_run(
    agent: NodeAgent, tmp_path: Path, blind: pytest.MonkeyPatch
) -> None:
    before = descendants()
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        await agent.spawn(sleeper(tmp_path))
    warden = {process.pid for process in psutil.Process().children() if "warden" in " ".join(process.cmdline())}
    assert descendants() - before <= warden
    assert agent.processes()[0].state == "failed"
    blind.undo()
    await agent.spawn(sleeper(tmp_path))
    assert agent.children["c"].lives()


async def test_a_restart_that_cannot_be_watched_is_a_failure_and_leaves_nothing_running(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.spawn(sleeper(tmp_path))
    pid, before = agent.processes()[0].pid, descendants()

    class Blind:
        def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(child, "PidWatch", Blind)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        failure = await agent.wait_failed()
    assert (failure.name, failure.cause) == ("c", "killed by SIGKILL")
    assert "cannot be started again" in failure.last_cause
    assert descendants() == before - {pid}
    assert agent.processes()[0].state == "failed"


async def test_a_supervision_that_fails_all_the_same_ends_its_process_and_says_so(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.spawn(sleeper(tmp_path))
    pid = agent.processes()[0].pid

    async def broken(*args: Any) -> None:
        raise RuntimeError("nobody can be told")

    monkeypatch.setattr(agent, "child_died", broken)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        failure = await agent.wait_failed()
        info = await agent.wait_exited("c")
    assert "nobody can be told" in failure.cause
    assert (info.state, info.pid) == ("failed", 0)
    assert "nobody can be told" in info.cause
    assert not psutil.pid_exists(pid), "it was reaped"


async def test_a_process_whose_descriptor_has_a_high_number_is_seen_to_live(agent: NodeAgent, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < 1100:
            taken.append(os.dup(taken[0]))
        await agent.spawn(sleeper(tmp_path))
        assert agent.children["c"].lives()
        await agent.stop("c")
        assert not agent.children["c"].lives()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
