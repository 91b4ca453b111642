"""The client: what it tries again, what it raises, and that `infra` never becomes a verdict."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dockyard_actors.sandbox.child import ExecutorProcess
from dockyard_actors.sandbox.client import ClientConfig, ExecutorClient, ExecutorRefused, ExecutorUnavailable
from dockyard_actors.sandbox.types import Verdict
from tests.sandbox.conftest import RIGHT

FAST = ClientConfig(poll_s=0.3, backoff_s=0.01, backoff_max_s=0.05)
GOOD = {
    "task_id": "t", "status": "completed", "state": "ok", "passed": 1, "total": 1, "resolved": True, "stdout": "", "stderr": "", "error": "",
    "tests": [{"name": "tests[0]", "hidden": False, "outcome": "passed", "message": ""}],
    "isolation": "weak", "execution_time": 0.5, "evidence_hash": "0" * 64, "a_field_of_a_newer_executor": 1,
}  # fmt: skip
INFRA = {**GOOD, "state": "infra", "resolved": False, "passed": 0, "error": "fork server 0 was lost"}


async def ask(client: ExecutorClient, deadline_s: float = 20.0, **changes: Any) -> Verdict:
    request: dict[str, Any] = {
        "request_id": "r1",
        "program": RIGHT,
        "tests": ["assert f(1) == 2"],
        "hidden_tests": [],
        "timeout_s": 5.0,
    }
    return await client.run_program(**{**request, **changes}, deadline_s=deadline_s)


async def test_a_program_gets_its_verdict_from_a_real_executor(child: ExecutorProcess) -> None:
    await child.start()
    async with ExecutorClient(socket_path=child.config.socket_path) as client:
        verdict = await ask(client, hidden_tests=["assert f(5) == 6"])
        assert verdict.resolved
        assert (verdict.passed, verdict.total, verdict.state) == (2, 2, "ok")
        assert [test.hidden for test in verdict.tests] == [False, True]
        assert verdict.seconds > 0
        wrong = await ask(client, request_id="r2", program="def f(x): return x")
        assert (wrong.resolved, wrong.tests[0].outcome) == (False, "failed")
        slow = await ask(client, request_id="r3", program="def f(x):\n    while True: pass", timeout_s=0.3)
        assert slow.state == "timeout"
        health = await client.health()
        assert (health.status, health.workers, health.isolation) == ("ok", 1, verdict.isolation)


async def test_long_polls_carry_a_slow_program_to_its_verdict(child: ExecutorProcess) -> None:
    await child.start()
    async with ExecutorClient(socket_path=child.config.socket_path, config=FAST) as client:
        assert (await ask(client, program="import time\ndef f(x):\n    time.sleep(1)\n    return x + 1")).resolved


async def test_many_programs_at_once(child: ExecutorProcess) -> None:
    await child.start()
    async with ExecutorClient(socket_path=child.config.socket_path) as client:
        verdicts = await asyncio.gather(
            *(ask(client, request_id=f"m{n}", program=f"def f(x): return x + {n % 2}") for n in range(30))
        )
    assert [verdict.resolved for verdict in verdicts] == [n % 2 == 1 for n in range(30)]


async def test_infra_full_queues_and_lost_connections_are_tried_again_under_one_id(scripted: Any) -> None:
    server, path = await scripted(
        [
            (429, {"error": "full"}),
            "drop",
            (200, INFRA),
            (503, {"error": "ending"}),
            (500, {"error": "oops"}),
            (200, GOOD),
        ]
    )
    async with ExecutorClient(socket_path=path, config=FAST) as client:
        verdict = await ask(client)
    assert verdict.resolved
    assert verdict.seconds == 0.5
    assert server.request_ids == ["r1"] * 6


async def test_a_task_forgotten_by_a_restarted_executor_is_submitted_again(scripted: Any) -> None:
    server, path = await scripted(
        [(202, {"task_id": "t", "status": "running"}), (404, {"error": "no task"}), (200, GOOD)]
    )
    async with ExecutorClient(socket_path=path, config=FAST) as client:
        assert (await ask(client)).resolved
    assert server.request_ids == ["r1", "r1"]


async def test_infra_until_the_deadline_is_raised_and_says_who_what_and_how_long(scripted: Any) -> None:
    _, path = await scripted([(200, INFRA)])
    async with ExecutorClient(socket_path=path, config=FAST) as client:
        with pytest.raises(ExecutorUnavailable) as raised:
            await ask(client, deadline_s=0.4)
    message = str(raised.value)
    for part in (f"executor unix:{path}", "waited 0.", "'r1'", "attempts", "fork server 0 was lost"):
        assert part in message


async def test_an_executor_that_does_not_exist_or_answer_is_raised_at_the_deadline(
    directory: Any, scripted: Any
) -> None:
    async with ExecutorClient(socket_path=directory / "none", config=FAST) as client:
        with pytest.raises(ExecutorUnavailable, match="none"):
            await ask(client, deadline_s=0.2)
        with pytest.raises(ExecutorUnavailable, match="health"):
            await client.health()
    _, path = await scripted([(202, {"task_id": "t", "status": "running"})])
    async with ExecutorClient(socket_path=path, config=FAST) as client:
        with pytest.raises(ExecutorUnavailable, match=r"no answer|no verdict"):
            await ask(client, deadline_s=0.3)


@pytest.mark.parametrize("status", [400, 401, 409, 413])
async def test_a_request_that_is_wrong_is_raised_at_once(scripted: Any, status: int) -> None:
    server, path = await scripted([(status, {"error": "tests[0]: not a Python statement"})])
    async with ExecutorClient(socket_path=path, config=FAST) as client:
        with pytest.raises(ExecutorRefused, match=rf"{status} tests\[0\]: not a Python"):
            await ask(client)
    assert len(server.request_ids) == 1


async def test_the_token_travels_and_is_in_no_error(scripted: Any) -> None:
    server, path = await scripted([(401, {"error": "no"})])
    async with ExecutorClient(socket_path=path, token="secret", config=FAST) as client:
        with pytest.raises(ExecutorRefused) as raised:
            await ask(client)
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in str(raised.value)


async def test_a_program_too_large_is_refused_by_a_real_executor(child: ExecutorProcess) -> None:
    await child.start()
    async with ExecutorClient(socket_path=child.config.socket_path) as client:
        with pytest.raises(ExecutorRefused, match="413"):
            await ask(client, program="#" * (2 << 20))
        assert (await ask(client, request_id="after")).resolved


def test_exactly_one_address_is_needed() -> None:
    with pytest.raises(ValueError, match="either"):
        ExecutorClient()
    with pytest.raises(ValueError, match="either"):
        ExecutorClient(socket_path="/s", base_url="http://x")
