"""What becomes of processes that crash: how long they wait, and which of them come back at all."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random

import pytest

from dockyard_actors.policy.checkpoint import CheckpointError
from dockyard_actors.policy.model import ModelSourceError
from dockyard_actors.roles.journal import JournalDamaged
from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.errors import PermanentError
from dockyard_actors.runtime.supervision import ProcessSpec, RestartPolicy
from dockyard_actors.tasks.dataset import TaskFileError

UP_S = 30.0


def test_pauses_grow_up_to_a_limit_and_no_two_processes_wait_alike() -> None:
    policy = RestartPolicy(backoff_s=0.2, backoff_max_s=5.0, jitter=0.2)
    pauses = [policy.pause_s(crash, Random(1)) for crash in range(1, 9)]
    for crash, pause in enumerate(pauses, 1):
        expected = min(0.2 * 2 ** (crash - 1), 5.0)
        assert 0.8 * expected <= pause <= 1.2 * expected
    assert policy.pause_s(3, Random(1)) == pauses[2], "the same randomness, the same pause"
    assert len({policy.pause_s(3, Random(seed)) for seed in range(20)}) == 20
    assert RestartPolicy(backoff_s=0.2, jitter=0.0).pause_s(1, Random(1)) == 0.2


async def test_what_no_restart_can_fix_fails_at_once_with_its_cause(tmp_path: Path) -> None:
    async with NodeAgent(AgentConfig(runtime_parent=tmp_path, raise_failures=False)) as agent, asyncio.timeout(UP_S):
        argv = [sys.executable, "-m", "tests.runtime.role", "c", "hopeless"]
        policy = RestartPolicy(max_restarts=50, backoff_s=60.0)
        await agent.spawn(ProcessSpec("c", argv, {}, policy, tmp_path / "c.log", 5.0))
        failure = await agent.wait_failed()
        assert failure.restarts == 0
        assert "starting c crashed: Hopeless: the checkpoint is damaged" in failure.cause
        assert agent.processes()[0].state == "failed"


@pytest.mark.parametrize("error", [CheckpointError, ModelSourceError, JournalDamaged, TaskFileError])
def test_damaged_or_missing_data_is_such_a_thing(error: type[Exception]) -> None:
    assert issubclass(error, PermanentError)
