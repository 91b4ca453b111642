"""Agents in processes of their own: joining over ipc and CURVE, and what the death of each leaves behind: nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import AskTimeout, OutcomeUnknown, ProtocolRefused
from dockyard_actors.runtime.supervision import RestartPolicy
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import TransportError, create_keys
from tests.runtime.actors import Add, Block, Counter, Die, Pid, Total
from tests.runtime.agent_main import role
from tests.runtime.role import Heard

UP_S = 30.0


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(UP_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class Started:
    """An agent process that is up."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict) -> None:
        self.process, self.ready = process, ready

    async def end(self) -> tuple[int, str]:
        async with asyncio.timeout(UP_S):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    started: list[asyncio.subprocess.Process] = []

    async def start(**settings: Any) -> Started:
        path = tmp_path / f"agent{len(started)}.json"
        path.write_text(json.dumps({"log_dir": str(tmp_path), "roles": [], **settings}))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.runtime.agent_main",
            str(path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(UP_S):
            line = await process.stdout.readline()
            assert line, (await process.communicate())[1].decode()
        return Started(process, json.loads(line))

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


async def test_a_killed_primary_leaves_no_orphan_and_its_directory_is_swept_by_the_next(launch, tmp_path: Path) -> None:
    primary = await launch(roles=["a", "b"], runtime_parent=str(tmp_path))
    assert len(alive(primary.ready["pids"])) == 2
    os.kill(primary.process.pid, signal.SIGKILL)
    await primary.end()
    await eventually(lambda: not alive(primary.ready["pids"]))
    left = Path(primary.ready["runtime_dir"])
    assert left.exists()
    async with NodeAgent(AgentConfig(runtime_parent=tmp_path)):
        assert not left.exists()


async def test_a_secondary_agents_roles_are_part_of_the_run_and_end_with_the_primary(launch, tmp_path: Path) -> None:
    async with NodeAgent(AgentConfig(ping_s=0.1)) as primary:
        secondary = await launch(name="host2", rendezvous=primary.rendezvous, roles=["far"])
        assert await primary.system.ref("far").ask(Add()) == 1
        assert [e.name for e in primary.system.directory.entries.values() if e.alive and "/" in e.name] == [
            "agent/host2"
        ]
    code, errors = await secondary.end()
    assert (code, errors) == (0, "")
    assert not alive(secondary.ready["pids"])


async def test_when_the_primary_is_killed_secondaries_stop_their_children_and_say_why(launch) -> None:
    primary = await launch(roles=["a"])
    secondary = await launch(name="host2", rendezvous=primary.ready["rendezvous"], roles=["far"])
    os.kill(primary.process.pid, signal.SIGKILL)
    code, errors = await secondary.end()
    assert code == 3
    assert "the primary node agent" in errors
    assert "its processes are stopped" in errors
    assert not alive(secondary.ready["pids"])
    assert not Path(secondary.ready["runtime_dir"]).exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_when_a_secondary_dies_or_hangs_all_its_processes_count_as_dead(launch, number: signal.Signals) -> None:
    async with NodeAgent(AgentConfig(ping_s=0.1, agent_lost_s=1.0)) as primary:
        secondary = await launch(name="host2", rendezvous=primary.rendezvous, roles=["far"])
        watcher = Counter()
        await primary.system.start(watcher, "w")
        watcher.ctx.watch("far")
        pending = asyncio.ensure_future(primary.system.ref("far").ask(Block(), deadline_s=UP_S))
        await asyncio.sleep(0)
        os.kill(secondary.process.pid, number)
        with pytest.raises(OutcomeUnknown, match="node agent host2"):
            await pending
        await eventually(lambda: watcher.deaths)
        if number == signal.SIGSTOP:
            os.kill(secondary.process.pid, signal.SIGKILL)
        await secondary.end()
        await eventually(lambda: not alive(secondary.ready["pids"]))


async def test_a_failure_under_a_secondary_reaches_the_primary_with_its_first_cause(tmp_path: Path) -> None:
    async with (
        NodeAgent(AgentConfig(raise_failures=False)) as primary,
        NodeAgent(AgentConfig(name="host2", rendezvous=primary.rendezvous, raise_failures=False)) as secondary,
    ):
        await secondary.spawn(role("far", tmp_path, policy=RestartPolicy(max_restarts=0)))
        ref = primary.system.ref("far")
        await ref.ask(Total(), retry=True, deadline_s=UP_S)
        with pytest.raises(OutcomeUnknown):
            await ref.ask(Die(how="exit"))
        async with asyncio.timeout(UP_S):
            failure = await primary.wait_failed()
        assert (failure.name, failure.cause) == ("far", "exit code 3")


async def test_over_tcp_a_secondary_needs_the_runs_keys(launch, tmp_path: Path) -> None:
    primary = await launch(roles=["a"], listen="tcp://127.0.0.1:0")
    address = primary.ready["rendezvous"]
    assert address.startswith("tcp://127.0.0.1:")
    with pytest.raises(ValueError, match="needs key_file"):
        await NodeAgent(AgentConfig(name="x", rendezvous=address)).__aenter__()
    with pytest.raises(ValueError, match=r"there is no key file .*missing, which joining"):
        await NodeAgent(AgentConfig(name="x", rendezvous=address, key_file=str(tmp_path / "missing"))).__aenter__()
    with pytest.raises(TransportError, match="missing: No such file"):
        await ActorSystem(SystemConfig(name="x", rendezvous=address, key_file=str(tmp_path / "missing"))).__aenter__()
    with pytest.raises(TransportError, match="without the run's key file"):
        await ActorSystem(SystemConfig(name="x", rendezvous=address)).__aenter__()
    create_keys(tmp_path / "other")
    with pytest.raises(
        AskTimeout, match=f"no answer from a registry at {address} .* or the key file .*other is another run"
    ):
        await ActorSystem(
            SystemConfig(name="x", rendezvous=address, key_file=tmp_path / "other", join_s=0.5)
        ).__aenter__()
    keys = tmp_path / "copy"
    keys.write_bytes(Path(primary.ready["keys"]).read_bytes())
    keys.chmod(0o600)
    secondary = await launch(name="host2", rendezvous=address, roles=["far"], key_file=str(keys))
    async with ActorSystem(SystemConfig(name="view", rendezvous=address, key_file=keys)) as view:
        assert view.directory.entries["far"].address.tcp[0].startswith("tcp://127.0.0.1:")
        for name, pid in (("a", primary.ready["pids"][0]), ("far", secondary.ready["pids"][0])):
            assert await view.ref(name).ask(Pid(), retry=True, deadline_s=UP_S) == pid
    os.kill(primary.process.pid, signal.SIGKILL)
    assert (await secondary.end())[0] == 3


async def test_over_ipc_another_runs_keys_are_refused_with_the_reason(tmp_path: Path) -> None:
    create_keys(tmp_path / "other")
    async with NodeAgent(AgentConfig()) as primary:
        with pytest.raises(ProtocolRefused, match="wrong key file"):
            await ActorSystem(
                SystemConfig(name="x", rendezvous=primary.rendezvous, key_file=tmp_path / "other")
            ).__aenter__()


async def test_who_is_beside_a_process_hears_of_its_death_and_it_comes_back_while_the_primary_is_held(
    launch, tmp_path: Path
) -> None:
    primary = await launch(roles=["a"], runtime_parent=str(tmp_path))
    config = AgentConfig(name="host2", rendezvous=primary.ready["rendezvous"])
    async with NodeAgent(config) as secondary:
        watcher = Counter()
        await secondary.system.start(watcher, "w")
        watcher.ctx.watch("far")
        for name, how in (("far", ()), ("beside", ("watch", "far"))):
            policy = RestartPolicy(backoff_s=0.02)
            await secondary.spawn(role(name, tmp_path, *how, policy=policy))
            await secondary.system.ref(name).ask(Total(), retry=True, deadline_s=UP_S)
        os.kill(primary.process.pid, signal.SIGSTOP)
        pending = asyncio.ensure_future(secondary.system.ref("far").ask(Block(), deadline_s=UP_S))
        await asyncio.sleep(0)
        os.kill(secondary.children["far"].pid, signal.SIGKILL)
        async with asyncio.timeout(config.agent_lost_s / 2):  # before it is missed
            with pytest.raises(OutcomeUnknown, match="killed by SIGKILL"):
                await pending
            await eventually(lambda: secondary.children["far"].starts == 2)
            while not (heard := await secondary.system.ref("beside").ask(Heard())):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert heard == ("killed by SIGKILL",)
        assert [death.cause for death in watcher.deaths] == ["killed by SIGKILL"]
        os.kill(primary.process.pid, signal.SIGCONT)
        assert await secondary.system.ref("far").ask(Add(), retry=True, deadline_s=UP_S) == 1
        assert secondary.children["far"].starts == 2, "it got its name at once"
        assert await secondary.system.ref("beside").ask(Heard()) == heard, "once"
        assert len(watcher.deaths) == 1
