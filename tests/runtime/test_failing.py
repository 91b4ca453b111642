"""A node agent's block when a process fails for good: it is cancelled, and whoever waits outside of it gets the cause."""

from __future__ import annotations

import asyncio
import sys

import pytest

from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.errors import RunFailed
from dockyard_actors.runtime.supervision import Failure, ProcessSpec, RestartPolicy

UP_S = 30.0
FAILURE = Failure("c", "it broke", "", "it broke", 0, "c.log", ())


async def test_a_failure_for_good_cancels_the_block_and_is_raised_at_its_end() -> None:
    cancelled = []
    argv = [sys.executable, "-c", "raise SystemExit('no config')"]
    with pytest.raises(RunFailed, match="first cause: exit code 1: no config") as caught:  # noqa: PT012
        async with asyncio.timeout(UP_S), NodeAgent() as agent:
            await agent.spawn(ProcessSpec("c", argv, policy=RestartPolicy(max_restarts=0)))
            assert agent.children["c"].log_path.is_relative_to(agent.runtime_dir)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(agent.processes()[0].state)
                raise
    assert cancelled == ["failed"]
    assert caught.value.failure.name == "c"
    assert not agent.runtime_dir.exists()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # nothing of the cancellation is left


async def test_a_block_that_ends_by_itself_at_that_moment_fails_all_the_same() -> None:
    with pytest.raises(RunFailed):
        async with NodeAgent() as agent:
            agent.fail(FAILURE)
    await asyncio.sleep(0)


async def test_an_error_of_the_block_itself_is_raised_with_the_failure_as_a_note() -> None:
    with pytest.raises(ValueError, match="mine") as caught:  # noqa: PT012
        async with NodeAgent() as agent:
            agent.fail(FAILURE)
            raise ValueError("mine")
    assert any("first cause: it broke" in note for note in caught.value.__notes__)


async def test_somebody_elses_cancellation_stays_one() -> None:
    async def run() -> None:
        async with NodeAgent() as agent:
            agent.fail(FAILURE)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(run())


async def test_a_block_that_looks_for_failures_itself_goes_on() -> None:
    async with NodeAgent(AgentConfig(raise_failures=False)) as agent:
        agent.fail(FAILURE)
        assert await agent.wait_failed() == FAILURE
