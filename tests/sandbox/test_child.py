"""The child executor: starts healthy or says why not, dies with us, comes back, leaves nothing."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dockyard_actors.sandbox.child import ExecutorProcess, ExecutorProcessConfig, ExecutorStartError
from dockyard_actors.sandbox.client import ClientConfig, ExecutorClient
from dockyard_actors.sandbox.types import Verdict
from tests.sandbox.conftest import RIGHT


async def ask(child: ExecutorProcess, request_id: str, program: str = RIGHT, deadline_s: float = 30.0) -> Verdict:
    async with ExecutorClient(socket_path=child.config.socket_path, config=ClientConfig(backoff_s=0.02)) as client:
        return await client.run_program(
            request_id, program, ["assert f(1) == 2"], [], timeout_s=20.0, deadline_s=deadline_s
        )


def group_of(leader: int) -> list[int]:
    """Living processes of the group."""
    found = []
    for name in os.listdir("/proc"):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split() if name.isdigit() else []
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        if fields and int(fields[2]) == leader and fields[0] not in "ZX":
            found.append(int(name))
    return found


async def test_start_stop_and_start_again(child: ExecutorProcess) -> None:
    assert not child.is_alive
    assert child.pid is None
    for n in range(2):
        health = await child.start()
        assert health.workers == 1
        assert child.is_alive
        assert (await ask(child, f"r{n}")).resolved
        pid = child.pid
        assert pid is not None
        await child.stop()
        assert not child.is_alive
        assert child.returncode == 0
        assert group_of(pid) == []
        assert not child.config.socket_path.exists()
    await child.stop()  # fine at any time
    assert "draining" in child.config.log_path.read_text()


async def test_starting_twice_is_an_error(child: ExecutorProcess) -> None:
    await child.start()
    with pytest.raises(RuntimeError, match="runs already"):
        await child.start()


async def test_a_killed_child_is_noticed_and_a_waiting_client_gets_its_verdict_from_the_next(
    child: ExecutorProcess,
) -> None:
    await child.start()
    waiting = asyncio.create_task(ask(child, "through", "import time\ntime.sleep(0.5)\n" + RIGHT))
    async with ExecutorClient(socket_path=child.config.socket_path) as client:
        while (await client.health()).running < 1:
            pass  # each look is a round trip
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert await child.wait_dead() == -signal.SIGKILL
    assert not child.is_alive
    assert group_of(first) == []
    await child.restart()
    assert child.pid != first
    assert (await waiting).resolved


async def test_a_killed_fork_server_is_invisible_to_the_client(child: ExecutorProcess) -> None:
    await child.start()
    waiting = asyncio.create_task(ask(child, "through", "import time\ntime.sleep(0.5)\n" + RIGHT))
    async with ExecutorClient(socket_path=child.config.socket_path) as client:
        while (await client.health()).running < 1:
            pass  # each look is a round trip
    assert child.pid is not None
    (worker,) = [pid for pid in group_of(child.pid) if pid != child.pid]
    os.kill(worker, signal.SIGKILL)
    assert (await waiting).resolved


async def test_a_child_that_cannot_start_says_why(directory: Path) -> None:
    (directory / "s").write_text("no socket")
    child = ExecutorProcess(ExecutorProcessConfig(socket_path=directory / "s", log_path=directory / "log", workers=1))
    with pytest.raises(ExecutorStartError, match="is no socket"):
        await child.start()
    assert not child.is_alive


async def test_a_start_has_a_deadline(directory: Path) -> None:
    child = ExecutorProcess(
        ExecutorProcessConfig(socket_path=directory / "s", log_path=directory / "log", workers=1, start_s=0.01)
    )
    with pytest.raises(ExecutorStartError, match=r"not healthy within 0\.01 s"):
        await child.start()
    assert not child.is_alive


async def test_stop_ends_a_child_that_does_not_drain(directory: Path) -> None:
    child = ExecutorProcess(
        ExecutorProcessConfig(socket_path=directory / "s", log_path=directory / "log", workers=1, stop_s=0.3)
    )
    await child.start()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    await child.stop()
    assert child.returncode == -signal.SIGKILL
    assert group_of(child.pid) == []


def test_the_child_dies_with_us(directory: Path) -> None:
    script = """
        import asyncio, pathlib, sys
        from dockyard_actors.sandbox.child import ExecutorProcess, ExecutorProcessConfig
        async def main():
            child = ExecutorProcess(ExecutorProcessConfig(pathlib.Path(sys.argv[1]) / "s", pathlib.Path(sys.argv[1]) / "log", workers=1))
            await child.start()
            print(child.pid, flush=True)
            await child.wait_dead()
        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    descriptor = os.pidfd_open(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(10_000)
    os.close(descriptor)
    (directory / "s").unlink()


def test_a_socket_path_too_long_is_refused_early(directory: Path) -> None:
    with pytest.raises(ValueError, match="107 bytes"):
        ExecutorProcess(ExecutorProcessConfig(socket_path=directory / ("x" * 120), log_path=directory / "log"))


async def test_waiting_for_a_child_never_started_is_an_error(child: ExecutorProcess) -> None:
    with pytest.raises(RuntimeError, match="never started"):
        await child.wait_dead()


async def test_the_memory_limit_of_a_program_is_the_configured_one(tmp_path: Path) -> None:
    source = "def f():\n    return len(bytearray(100 << 20))\n"
    passed = {}
    for mib in (64, 256):
        socket = tmp_path / f"{mib}.sock"
        child = ExecutorProcess(
            ExecutorProcessConfig(socket, tmp_path / "executor.log", workers=1, memory_bytes=mib << 20)
        )
        await child.start()
        try:
            async with ExecutorClient(socket_path=socket) as client:
                verdict = await client.run_program(
                    "one", source, ["assert f() == 104857600"], [], timeout_s=10, deadline_s=60
                )
            passed[mib] = verdict.resolved
        finally:
            await child.stop()
    assert passed == {64: False, 256: True}
