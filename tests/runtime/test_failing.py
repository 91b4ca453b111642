"""A node agent's block when a process fails for good: it is cancelled, and whoever waits outside of it gets the cause."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import AskTimeout, OutcomeUnknown, PeerDied, RunFailed
from dockyard_actors.runtime.supervision import Failure, ProcessSpec, RestartPolicy
from dockyard_actors.runtime.system import ActorSystem
from tests.runtime.actors import Block, Total
from tests.runtime.agent_main import role

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


async def test_who_waits_for_a_process_that_does_not_come_back_hears_why_at_once(tmp_path: Path) -> None:
    async with asyncio.timeout(UP_S), NodeAgent(AgentConfig(raise_failures=False)) as agent:
        await agent.spawn(role("c", tmp_path, policy=RestartPolicy(max_restarts=0)))
        ref = agent.system.ref("c")
        await ref.ask(Total(), retry=True, deadline_s=UP_S)
        waiting = asyncio.ensure_future(ref.ask(Block(), retry=True, deadline_s=10 * UP_S))
        await asyncio.sleep(0)
        os.kill(agent.processes()[0].pid, signal.SIGKILL)
        with pytest.raises(OutcomeUnknown, match=r"not started again: it failed for good \(killed by SIGKILL\)"):
            await waiting
        with pytest.raises(PeerDied, match="not started again: it failed for good"):
            await ref.ask(Total(), retry=True, deadline_s=10 * UP_S)
        with pytest.raises(PeerDied, match="not started again"):
            await ref.ask(Total())
        await agent.restart("c")
        assert await ref.ask(Total(), retry=True, deadline_s=UP_S) == 0, "somebody's wish brought it back"
        await agent.stop("c")
        with pytest.raises(PeerDied, match="it was stopped"):
            await ref.ask(Total(), retry=True, deadline_s=10 * UP_S)


async def test_it_is_heard_in_other_processes_and_of_those_under_other_agents(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(2 * UP_S),
        NodeAgent() as primary,
        NodeAgent(AgentConfig(name="host2", rendezvous=primary.rendezvous)) as secondary,
    ):
        await secondary.spawn(role("c", tmp_path))
        refs = [agent.system.ref("c") for agent in (primary, secondary)]
        for ref in refs:
            await ref.ask(Total(), retry=True, deadline_s=UP_S)
        await secondary.stop("c", tell=False)
        with pytest.raises(AskTimeout, match="waited for it to be registered in vain; #1 died: left"):
            await refs[0].ask(Total(), retry=True, deadline_s=0.05)
        await secondary.restart("c")
        for ref in refs:
            await ref.ask(Total(), retry=True, deadline_s=UP_S)
        await secondary.stop("c")
        for ref in refs:
            with pytest.raises(PeerDied, match="it was stopped"):
                await ref.ask(Total(), retry=True, deadline_s=10 * UP_S)
        async with ActorSystem(
            SystemConfig(name="late", rendezvous=primary.rendezvous, key_file=primary.key_file)
        ) as late:
            with pytest.raises(PeerDied, match="it was stopped"):
                await late.ref("c").ask(Total(), retry=True, deadline_s=10 * UP_S)


async def test_a_process_that_failed_before_it_registered_a_name_is_named_to_who_asked_for_it(tmp_path: Path) -> None:
    async with asyncio.timeout(UP_S), NodeAgent(AgentConfig(raise_failures=False)) as agent:
        await agent.spawn(role("c", tmp_path, "hopeless"))
        await agent.wait_exited("c")
        await agent.wait_failed()
        with pytest.raises(
            AskTimeout, match=r"a process of this name is not started again: it failed for good .*Hopeless"
        ):
            await agent.system.ref("c").ready(0.05)
