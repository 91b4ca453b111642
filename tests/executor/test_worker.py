"""One fork server seen from the executor's side: hangs, deaths and late cancellations."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from dockyard_executor.config import ExecutorConfig, Limits, from_env
from dockyard_executor.worker import Worker, WorkerDied

from tests.executor.conftest import processes_of


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    config = ExecutorConfig(worker_grace_s=0.3, workers=1, limits=Limits())
    one = Worker(config, 0)  # no reaping: this process has other children
    await one.start()
    yield one
    await one.close(grace_s=10.0)
    assert one.pid is None
    assert processes_of(range(config.first_uid, config.first_uid + 64)) == []


async def test_a_fork_server_that_hangs_is_ended_after_its_grace(worker: Worker) -> None:
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="lost after 0"):
        await worker.run(b"", [{"statement": "pass"}], 0.1)
    assert not worker.alive
    with pytest.raises(WorkerDied, match="not running"):
        await worker.run(b"", [], 0.1)
    await worker.start()
    assert (await worker.run(b"", [{"statement": "pass"}], 5.0)).status == 0


async def test_a_cancellation_that_comes_too_late_hurts_nobody(worker: Worker) -> None:
    worker.cancel()
    for _ in range(3):
        run = await worker.run(b"x = 1", [{"leaves": ["x"]}], 5.0)
        assert (run.status, run.ended) == (0, "")
        worker.cancel()


async def test_a_cancellation_ends_the_run_at_once(worker: Worker) -> None:
    task = asyncio.create_task(worker.run(b"while True: pass", [], 60.0))
    await asyncio.sleep(0)  # the run is on its way before the cancellation
    worker.cancel()
    assert (await task).ended == "cancelled"


async def test_tests_of_a_run_that_did_not_ask_for_them_do_not_meet_the_next(worker: Worker) -> None:
    first = await worker.run(b"while True: pass", [{"statement": "first"}], 0.2)
    assert (first.ended, first.events) == ("timeout", b"")
    second = await worker.run(b"x = 1", [{"leaves": ["x"]}], 5.0)
    assert second.status == 0
    assert b'"1"' in second.events


async def test_each_run_has_a_key_of_its_own(worker: Worker) -> None:
    runs = [await worker.run(b"x = 1", [{"leaves": ["x"]}], 5.0) for _ in range(2)]
    assert runs[0].key != runs[1].key
    assert runs[0].events != runs[1].events


def test_the_defaults_are_a_valid_configuration() -> None:
    assert from_env({}) == ExecutorConfig()
