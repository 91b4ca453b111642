"""The node agent with real processes: death, hangs, restarts, failure for good, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.errors import OutcomeUnknown, PeerDied, RemoteError
from dockyard_actors.runtime.supervision import (
    ListProcesses,
    ProcessSpec,
    RestartPolicy,
    RestartProcess,
    Shutdown,
    StopProcess,
)
from tests.runtime.actors import Add, Block, Counter, Die, Hold, Pid, Total
from tests.runtime.agent_main import role

FAST = RestartPolicy(max_restarts=5, window_s=300.0, backoff_s=0.05, backoff_max_s=0.2)
UP_S = 30.0  # a process on a busy 2-core host


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(UP_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[NodeAgent]:
    fds = len(os.listdir("/proc/self/fd"))
    others = set(psutil.Process().children(recursive=True))
    async with NodeAgent(AgentConfig(ping_s=0.1, suspect_s=0.3, hang_s=1.0, raise_failures=False)) as agent:
        yield agent
    assert not set(psutil.Process().children(recursive=True)) - others
    assert not agent.runtime_dir.exists()
    assert len(os.listdir("/proc/self/fd")) <= fds


async def test_a_killed_process_is_known_to_watchers_fails_pending_asks_and_comes_back(
    agent: NodeAgent, tmp_path: Path
) -> None:
    await agent.spawn(role("c", tmp_path, policy=FAST))
    ref = agent.system.ref("c")
    assert await ref.ask(Add(), retry=True, deadline_s=UP_S) == 1
    watcher = Counter()
    await agent.system.start(watcher, "w")
    watcher.ctx.watch("c")
    pending = asyncio.ensure_future(ref.ask(Block(), deadline_s=UP_S))
    await asyncio.sleep(0)
    pid = agent.processes()[0].pid
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(OutcomeUnknown, match="killed by SIGKILL"):
        await pending
    await eventually(lambda: watcher.deaths)
    assert time.monotonic() - killed < 2.0  # not waited for a timeout; the promise of 100 ms is the benchmark's
    assert (watcher.deaths[0].incarnation, watcher.deaths[0].clean) == (1, False)
    assert await ref.ask(Add(), retry=True, deadline_s=UP_S) == 1  # new state: nothing was replayed
    info = agent.processes()[0]
    assert (info.incarnation, info.restarts, info.cause) == (2, 1, "killed by SIGKILL")
    assert agent.system.directory.entries["c"].incarnation == 2


async def test_a_retried_ask_survives_the_death_of_its_receiver(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(role("c", tmp_path, policy=FAST))
    ref = agent.system.ref("c")
    assert await ref.ask(Total(), retry=True, deadline_s=UP_S) == 0
    with pytest.raises(PeerDied):
        await ref.ask(Die(how="kill"))
    results = await asyncio.gather(*(ref.ask(Add(), retry=True, deadline_s=UP_S) for _ in range(20)))
    assert sorted(results) == list(range(1, 21))


async def test_a_stopped_loop_is_killed_and_restarted_and_the_cause_says_so(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(role("c", tmp_path, policy=FAST))
    ref = agent.system.ref("c")
    await ref.ask(Total(), retry=True, deadline_s=UP_S)
    with pytest.raises(OutcomeUnknown, match=r"hung: its loop did not answer for 1 s"):
        await ref.ask(Die(how="stop"), deadline_s=UP_S)
    await ref.ask(Total(), retry=True, deadline_s=UP_S)
    with pytest.raises(OutcomeUnknown, match="hung"):
        await ref.ask(Hold(seconds=60.0), deadline_s=UP_S)
    assert "in hold" in (tmp_path / "c.log").read_text()  # where its threads were
    await ref.ask(Total(), retry=True, deadline_s=UP_S)
    assert agent.processes()[0].restarts == 2


async def test_a_declared_guard_is_no_hang_but_an_overrun_one_is(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(role("c", tmp_path, "slow", policy=FAST))
    ref = agent.system.ref("c")
    await ref.ask(Hold(seconds=1.5, declared=20.0), retry=True, deadline_s=UP_S)
    assert agent.processes()[0].restarts == 0
    with pytest.raises(OutcomeUnknown, match="hung"):
        await ref.ask(Hold(seconds=60.0, declared=0.2), deadline_s=UP_S)


async def test_a_crash_loop_gives_up_with_the_first_cause(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(role("c", tmp_path, policy=RestartPolicy(max_restarts=2, backoff_s=0.05)))
    ref = agent.system.ref("c")
    await ref.ask(Total(), retry=True, deadline_s=UP_S)
    await ref.ask(Die(how="task"))
    await eventually(lambda: agent.processes()[0].incarnation == 2)
    for _ in range(2):
        with pytest.raises(PeerDied):  # noqa: PT012
            await ref.ask(Total(), retry=True, deadline_s=UP_S)
            await ref.ask(Die(how="exit"))
    async with asyncio.timeout(UP_S):
        failure = await agent.wait_failed()
    assert "task c/doomed of actor c crashed: RuntimeError: the owned task broke (exit code 70)" in failure.cause
    assert "in _fail_later" in failure.traceback
    assert (failure.last_cause, failure.restarts) == ("exit code 3", 2)
    assert str(failure).splitlines()[0] == "c failed for good after 2 restarts"
    assert str(failure).splitlines()[-1].startswith("first cause: task c/doomed")
    assert (await agent.wait_exited("c")).state == "failed"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            [sys.executable, "-m", "tests.runtime.role", "c", "broken"],
            "starting c crashed: RuntimeError: this role cannot start",
        ),
        ([sys.executable, "-c", "raise SystemExit('no config')"], "exit code 1: no config"),
        (["/no/such/program"], "cannot run /no/such/program: No such file"),
    ],
)
async def test_a_process_that_cannot_start_fails_with_what_it_said(
    agent: NodeAgent, tmp_path: Path, argv: list[str], text: str
) -> None:
    await agent.spawn(
        ProcessSpec("c", argv, {}, RestartPolicy(max_restarts=1, backoff_s=0.01), tmp_path / "c.log", 1.0)
    )
    async with asyncio.timeout(UP_S):
        failure = await agent.wait_failed()
    assert text in failure.cause
    assert failure.log_tail


async def test_a_process_that_never_answers_is_not_waited_for_for_ever(agent: NodeAgent, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(1000)"]
    policy = RestartPolicy(max_restarts=0)
    await agent.spawn(ProcessSpec("mute", argv, {}, policy, tmp_path / "m.log", 1.0, start_grace_s=0.3))
    async with asyncio.timeout(UP_S):
        cause = (await agent.wait_failed()).cause
        assert cause == "did not come up: no answer within 0.3 s of its start (start_grace_s) (killed)"


async def test_a_dead_roles_descendants_end_with_it(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(role("c", tmp_path, "family", policy=FAST))
    ref = agent.system.ref("c")
    pid = await ref.ask(Pid(), retry=True, deadline_s=UP_S)
    family = psutil.Process(pid).children(recursive=True)
    assert len(family) == 2, "the daemon is nobody's child"
    os.kill(pid, signal.SIGKILL)
    await eventually(
        lambda: not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in family)
    )
    await ref.ask(Pid(), retry=True, deadline_s=UP_S)


async def test_stop_is_orderly_and_a_stubborn_process_is_killed_after_its_grace(
    agent: NodeAgent, tmp_path: Path
) -> None:
    await agent.spawn(role("c", tmp_path))
    await agent.system.ref("c").ask(Add(), retry=True, deadline_s=UP_S)
    await agent.stop("c")
    info = agent.processes()[0]
    assert (info.state, info.pid, info.cause) == ("stopped", 0, "exit code 0")
    assert agent.system.directory.entries["c"].clean
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"
    )
    log = tmp_path / "s.log"
    await agent.spawn(ProcessSpec("stubborn", [sys.executable, "-c", code], {}, FAST, log, 0.2))
    await eventually(lambda: log.exists() and "up" in log.read_text())
    await agent.stop("stubborn")
    assert agent.processes()[1].cause == "killed by SIGKILL"
    with pytest.raises(KeyError):
        await agent.stop("nobody")


async def test_a_process_that_ends_by_itself_with_code_0_is_not_restarted(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(ProcessSpec("once", [sys.executable, "-c", "pass"], {}, FAST, tmp_path / "o.log", 1.0))
    async with asyncio.timeout(UP_S):
        info = await agent.wait_exited("once")
    assert (info.state, info.restarts) == ("exited", 0)


async def test_an_agent_can_be_asked_by_message(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(role("c", tmp_path))
    ref, me = agent.system.ref("c"), agent.system.ref("agent")
    first = await ref.ask(Pid(), retry=True, deadline_s=UP_S)
    await me.ask(RestartProcess(name="c"), deadline_s=UP_S)
    assert await ref.ask(Pid(), retry=True, deadline_s=UP_S) != first
    (info,) = (await me.ask(ListProcesses())).processes
    assert (info.name, info.incarnation, info.restarts) == ("c", 2, 0)
    with pytest.raises(ValueError, match="already"):
        await agent.spawn(role("c", tmp_path))
    await me.ask(StopProcess(name="c"), deadline_s=UP_S)
    assert agent.processes()[0].state == "stopped"
    with pytest.raises(RemoteError, match="KeyError"):
        await me.ask(StopProcess(name="nobody"))
    await me.ask(Shutdown(reason="the run is complete", exit_code=0))
    assert (await agent.wait_shutdown()).reason == "the run is complete"


async def test_requested_restarts_with_a_cause_count_as_crashes_and_give_up(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(role("c", tmp_path, policy=RestartPolicy(max_restarts=2, backoff_s=0.05)))
    ref, me = agent.system.ref("c"), agent.system.ref("agent")
    for wrong in ("one", "two", "three"):
        await ref.ask(Pid(), retry=True, deadline_s=UP_S)
        await me.ask(RestartProcess(name="c", cause=f"answered {wrong}"), deadline_s=UP_S)
        (info,) = agent.processes()
        assert info.cause == f"answered {wrong}"
    assert (info.state, info.incarnation, info.restarts) == ("failed", 3, 2)
    failure = await agent.wait_failed()
    assert (failure.name, failure.cause, failure.last_cause) == ("c", "answered one", "answered three")
    assert failure.restarts == 2
    await me.ask(RestartProcess(name="c", cause="answered four"), deadline_s=UP_S)
    assert agent.processes()[0].state == "failed", "what failed for good is not brought back"


async def test_requested_restarts_without_a_cause_are_no_crashes(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(role("c", tmp_path, policy=RestartPolicy(max_restarts=0)))
    ref, me = agent.system.ref("c"), agent.system.ref("agent")
    for incarnation in (2, 3):
        await ref.ask(Pid(), retry=True, deadline_s=UP_S)
        await me.ask(RestartProcess(name="c"), deadline_s=UP_S)
        (info,) = agent.processes()
        assert (info.incarnation, info.restarts) == (incarnation, 0)
    await ref.ask(Pid(), retry=True, deadline_s=UP_S)
    await me.ask(RestartProcess(name="c", cause="answered wrong"), deadline_s=UP_S)
    assert (await agent.wait_failed()).cause == "answered wrong"


async def test_restarts_asked_for_while_one_is_under_way_count_once(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(role("c", tmp_path, policy=RestartPolicy(max_restarts=1, backoff_s=0.05)))
    ref = agent.system.ref("c")
    await ref.ask(Pid(), retry=True, deadline_s=UP_S)
    await asyncio.gather(*(agent.restart("c", f"answered {wrong}") for wrong in ("one", "two", "three")))
    (info,) = agent.processes()
    assert (info.incarnation, info.restarts, info.cause) == (2, 1, "answered one")
    await ref.ask(Pid(), retry=True, deadline_s=UP_S)


async def test_secrets_travel_in_no_argv_and_no_environment(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.spawn(role("c", tmp_path))
    pid = await agent.system.ref("c").ask(Pid(), retry=True, deadline_s=UP_S)
    seen = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
    keys = agent.key_file.read_text()
    assert not any(value.encode() in seen for value in keys.split('"') if len(value) > 20)
    assert agent.key_file.stat().st_mode & 0o777 == 0o600
    assert agent.runtime_dir.stat().st_mode & 0o777 == 0o700


async def test_a_child_leads_its_own_session_so_that_ctrl_c_reaches_only_the_agent(
    agent: NodeAgent, tmp_path: Path
) -> None:
    await agent.spawn(role("c", tmp_path))
    pid = await agent.system.ref("c").ask(Pid(), retry=True, deadline_s=UP_S)
    assert os.getsid(pid) == pid == os.getpgid(pid)
