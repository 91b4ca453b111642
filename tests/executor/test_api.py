"""The HTTP API: what is accepted, refused, remembered and cancelled."""

from __future__ import annotations

import json
import threading
import time
import uuid
from typing import Any

import pytest

from tests.executor.conftest import RIGHT, Executor, processes_of

HANG = "import time\ndef f(x): time.sleep(3600)"


def body(**changes: Any) -> dict[str, Any]:
    good = {
        "request_id": uuid.uuid4().hex,
        "program": RIGHT,
        "tests": ["assert f(1) == 2"],
        "hidden_tests": [],
        "timeout": 5.0,
    }
    return {key: value for key, value in {**good, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"request_id": ...}, "request_id is missing"),
        ({"request_id": 7}, "request_id must be a string"),
        ({"request_id": ""}, "request_id must have 1 to 256"),
        ({"program": ...}, "program is missing"),
        ({"program": ["x"]}, "program must be a string"),
        ({"tests": "assert True"}, "tests must be a list"),
        ({"tests": [1]}, "tests[0] must be a string"),
        ({"tests": ["assert f(1) == 2", "assert f("]}, "tests[1]: not a Python statement"),
        ({"hidden_tests": ["x\0"]}, "hidden_tests[0]: not a Python statement"),
        ({"tests": []}, "both empty"),
        ({"tests": ["assert f(1)"] * 1001}, "at most 1000"),
        ({"timeout": ...}, "timeout must be a number"),
        ({"timeout": 0}, "timeout must be a number"),
        ({"timeout": True}, "timeout must be a number"),
        ({"timeout": 1e9}, "at most 300"),
        ({"timeout": float("nan")}, "timeout must be a number"),
        ({"programme": "x"}, "unknown field 'programme'"),
    ],
)
def test_a_bad_field_is_named(executor: Executor, change: dict[str, Any], named: str) -> None:
    status, answer, _ = executor.call("POST", "/task/submit", body(**change))
    assert status == 400
    assert named in answer["error"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(executor: Executor, raw: bytes) -> None:
    assert executor.call("POST", "/task/submit", raw)[0] == 400


def test_a_wait_that_is_no_number_is_refused(executor: Executor) -> None:
    for wait in ("soon", "-1", "nan", "inf"):
        assert executor.call("POST", f"/task/submit?wait={wait}", body())[0] == 400


def test_a_body_of_more_than_a_mebibyte_is_refused(executor: Executor) -> None:
    status, answer, _ = executor.call("POST", "/task/submit", body(program="#" * (1 << 20)))
    assert status == 413
    assert "error" in answer


@pytest.mark.parametrize("token", [None, "", "wrong"])
def test_without_the_token_nothing_is_run(executor: Executor, token: str | None) -> None:
    for method, path in (
        ("POST", "/task/submit"),
        ("GET", "/task/x"),
        ("GET", "/task/x/result"),
        ("DELETE", "/task/x"),
    ):
        status, answer, _ = executor.call(method, path, body() if method == "POST" else None, token=token)
        assert status == 401
        assert "Authorization" in answer["error"]


def test_health_needs_no_token_and_names_the_level(executor: Executor) -> None:
    status, health, _ = executor.call("GET", "/health", token=None)
    assert status == 200
    assert health["isolation"] in ("landlock+seccomp+uid", "landlock+seccomp")
    assert health["status"] == "ok"
    assert [worker["alive"] for worker in health["workers"]] == [True, True]
    assert health["queued"] == 0


def test_an_unknown_task_or_path_is_404(executor: Executor) -> None:
    for method, path in (("GET", "/task/x"), ("GET", "/task/x/result"), ("DELETE", "/task/x"), ("GET", "/nowhere")):
        assert executor.call(method, path)[0] == 404


def test_submit_poll_and_read(executor: Executor) -> None:
    status, accepted, _ = executor.call("POST", "/task/submit", body())
    assert status == 202
    status, result, _ = executor.call("GET", f"/task/{accepted['task_id']}/result?wait=20")
    assert (status, result["resolved"]) == (200, True)
    assert executor.call("GET", f"/task/{accepted['task_id']}")[1]["status"] == "completed"


def test_one_request_id_is_graded_once(executor: Executor) -> None:
    same = body()
    answers = [executor.call("POST", "/task/submit?wait=20", same)[1] for _ in range(3)]
    assert len({json.dumps(answer) for answer in answers}) == 1
    status, answer, _ = executor.call("POST", "/task/submit", {**same, "program": "other"})
    assert status == 409
    assert same["request_id"] in answer["error"]


def test_a_running_task_is_really_cancelled(executor: Executor) -> None:
    request = body(program=HANG, timeout=60.0)
    _, accepted, _ = executor.call("POST", "/task/submit?wait=0.2", request)
    task = accepted["task_id"]
    status, answer, _ = executor.call("DELETE", f"/task/{task}")
    assert (status, answer["status"]) == (200, "cancelled")
    assert processes_of(executor.uids) == []
    result = executor.call("GET", f"/task/{task}/result")[1]
    assert (result["state"], result["error"]) == ("infra", "the task was cancelled")
    assert executor.run(RIGHT)["resolved"]
    assert executor.call("POST", "/task/submit", request)[1]["task_id"] != task  # may be asked again
    executor.call("DELETE", f"/task/{executor.call('POST', '/task/submit', request)[1]['task_id']}")


def test_a_full_queue_pushes_back_and_a_waiting_task_can_be_cancelled(own_executor: Any) -> None:
    executor = own_executor("--workers", "1", "--queue-limit", "2", "--drain", "0")
    running = executor.call("POST", "/task/submit?wait=0.2", body(program=HANG, timeout=60.0))[1]["task_id"]
    waiting = [executor.call("POST", "/task/submit", body(program=HANG))[1]["task_id"] for _ in range(2)]
    status, answer, headers = executor.call("POST", "/task/submit", body())
    assert status == 429
    assert int(headers["Retry-After"]) >= 1
    assert "2 tasks wait" in answer["error"]
    assert executor.call("GET", "/health")[1]["queued"] == 2
    assert executor.call("DELETE", f"/task/{waiting[0]}")[1]["status"] == "cancelled"
    assert executor.call("POST", "/task/submit", body())[0] == 202
    assert executor.call("GET", f"/task/{running}")[1]["status"] == "running"


def test_many_programs_at_once_each_get_their_own_verdict(executor: Executor) -> None:
    verdicts: dict[int, dict] = {}

    def ask(n: int) -> None:
        verdicts[n] = executor.run(f"def f(x): return x + {n % 3}", ["assert f(1) == 2"])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [verdicts[n]["resolved"] for n in range(24)] == [n % 3 == 1 for n in range(24)]


def test_a_long_poll_that_is_not_answered_says_not_yet(executor: Executor) -> None:
    started = time.monotonic()
    status, answer, _ = executor.call("POST", "/task/submit?wait=0.1", body(program=HANG, timeout=60.0))
    assert (status, answer["status"]) == (202, "running")
    assert time.monotonic() - started >= 0.1
    executor.call("DELETE", f"/task/{answer['task_id']}")


def test_the_debug_log_has_a_line_a_task_and_never_the_token(own_executor: Any) -> None:
    executor = own_executor("--log-level", "debug", "--workers", "1")
    verdict = executor.run(RIGHT, request_id="named")
    executor.call("POST", "/task/submit", body(), token="wrong")
    assert executor.ended() == 0
    lines = [json.loads(line[line.index("{") :]) for line in executor.lines if '"task"' in line]
    assert len(lines) == 1
    assert lines[0]["request"] == "named"
    assert lines[0]["evidence_hash"] == verdict["evidence_hash"]
    assert "token-that" not in "".join(executor.lines)
