"""Start, death and end of the executor and its fork servers, with real processes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from dockyard_executor.config import ConfigError, from_env

from tests.executor.conftest import RIGHT, Executor, processes_of

HANG = "import time\ndef f(x): time.sleep(3600)"
ROOT = os.geteuid() == 0


def wait_ended(pid: int) -> None:
    """Until the process is gone or a zombie, by its pidfd."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(10_000), f"{pid} lives on"
    os.close(descriptor)


def submit_hang(executor: Executor) -> str:
    request = {"request_id": uuid.uuid4().hex, "program": HANG, "tests": ["f(1)"], "timeout": 60.0}
    status, answer, _ = executor.call("POST", "/task/submit?wait=0.3", request)
    assert (status, answer["status"]) == (202, "running")
    return answer["task_id"]


def test_a_killed_fork_server_is_replaced_and_its_task_is_infra(own_executor: Any) -> None:
    executor = own_executor("--workers", "1")
    worker = executor.call("GET", "/health")[1]["workers"][0]["pid"]
    task = submit_hang(executor)
    os.kill(worker, signal.SIGKILL)
    result = executor.call("GET", f"/task/{task}/result?wait=20")[1]
    assert result["state"] == "infra"
    assert "fork server 0 was lost" in result["error"]
    assert executor.run(RIGHT)["resolved"]
    health = executor.call("GET", "/health")[1]
    assert health["workers"][0]["pid"] != worker
    assert health["workers"][0]["starts"] == 2
    assert health["counts"]["workers_lost"] == 1
    assert processes_of(executor.uids) == []  # the lost server's program died with it


def test_a_fork_server_killed_while_idle_is_replaced(own_executor: Any) -> None:
    executor = own_executor("--workers", "1")
    worker = executor.call("GET", "/health")[1]["workers"][0]["pid"]
    os.kill(worker, signal.SIGKILL)
    wait_ended(worker)
    verdicts = [executor.run(RIGHT)["state"] for _ in range(2)]
    assert verdicts[-1] == "ok"


def test_a_program_killed_from_outside_is_infra(own_executor: Any) -> None:
    executor = own_executor("--workers", "1")
    if executor.call("GET", "/health")[1]["isolation"] != "landlock+seccomp+uid":
        pytest.skip("programs are found by their uid, which needs root")
    task = submit_hang(executor)
    (program,) = processes_of(executor.uids)
    os.kill(program, signal.SIGKILL)
    result = executor.call("GET", f"/task/{task}/result?wait=20")[1]
    assert result["state"] == "infra"
    assert "SIGKILL from outside" in result["error"]


def test_sigterm_finishes_what_was_accepted(own_executor: Any) -> None:
    executor = own_executor("--workers", "1")
    answers: list[dict] = []
    slow = "import time\ndef f(x):\n    time.sleep(0.5)\n    return x + 1"
    threads = [threading.Thread(target=lambda: answers.append(executor.run(slow))) for _ in range(3)]
    for thread in threads:
        thread.start()
    while (health := executor.call("GET", "/health")[1])["queued"] + health["running"] < 3:
        pass  # each look is a round trip
    executor.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert [answer["resolved"] for answer in answers] == [True] * 3
    assert executor.ended(by=0) == 0


def test_what_does_not_finish_in_the_drain_is_infra(own_executor: Any) -> None:
    executor = own_executor("--workers", "1", "--drain", "0.1")
    answers: list[dict] = []
    thread = threading.Thread(target=lambda: answers.append(executor.run(HANG, timeout=60.0)))
    thread.start()
    while executor.call("GET", "/health")[1]["running"] < 1:
        pass  # each look is a round trip
    executor.process.send_signal(signal.SIGTERM)
    thread.join()
    assert answers[0]["state"] == "infra"
    assert executor.ended(by=0) == 0


def test_a_second_signal_ends_at_once_and_leaves_nothing(own_executor: Any) -> None:
    executor = own_executor("--workers", "1", "--drain", "60")
    workers = [worker["pid"] for worker in executor.call("GET", "/health")[1]["workers"]]
    submit_hang(executor)
    programs = processes_of(executor.uids)
    executor.process.send_signal(signal.SIGTERM)
    assert executor.process.stderr is not None
    while "draining" not in executor.process.stderr.readline():
        pass
    assert executor.ended(by=signal.SIGTERM) == 128 + signal.SIGTERM
    for pid in (*workers, *programs):
        wait_ended(pid)
    assert not executor.socket.exists()


def test_sigkill_of_the_executor_takes_everything_with_it(own_executor: Any) -> None:
    executor = own_executor("--workers", "2")
    workers = [worker["pid"] for worker in executor.call("GET", "/health")[1]["workers"]]
    submit_hang(executor)
    programs = processes_of(executor.uids)
    executor.process.kill()
    executor.process.wait()
    for pid in (*workers, *programs):
        wait_ended(pid)
    executor.socket.unlink()


def test_the_executor_dies_with_its_parent() -> None:
    script = """
        import os, subprocess, sys, tempfile
        p = subprocess.Popen([sys.executable, "-m", "dockyard_executor", "--socket", sys.argv[1], "--parent-pid", str(os.getpid())],
                             stderr=subprocess.PIPE, text=True)
        p.stderr.readline()
        print(p.pid, flush=True)
        sys.stdin.read()
    """
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", textwrap.dedent(script), f"{directory}/s"]
        parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        wait_ended(child)
        for stream in (parent.stdin, parent.stdout):
            assert stream is not None
            stream.close()


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(
    own_executor: Any, executor: Executor, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "dockyard_executor", "--socket", str(executor.socket)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert "another executor listens" in second.stderr
    plain = tmp_path / "file"
    plain.touch()
    third = subprocess.run([*command[:-1], str(plain)], capture_output=True, text=True, timeout=60)
    assert "is no socket" in third.stderr
    assert plain.exists()


# Starts the executor on a kernel that (as far as it can see) lacks a system call.
WITHOUT = """
import ctypes, os, struct, sys
number = int(sys.argv[1])
i = lambda c, k, t=0, f=0: struct.pack("=HBBI", c, t, f, k)
program = i(0x20, 0) + i(0x15, number, 0, 1) + i(6, 0x50000 | 38) + i(6, 0x7FFF0000)
class P(ctypes.Structure): _fields_ = [("n", ctypes.c_ushort), ("f", ctypes.c_void_p)]
buffer = ctypes.create_string_buffer(program, len(program))
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, ctypes.byref(P(4, ctypes.addressof(buffer))), 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
LANDLOCK_CREATE_RULESET = 444


def without(number: int) -> list[str]:
    return [sys.executable, "-c", WITHOUT, str(number)]


def test_a_host_without_landlock_is_refused_with_the_remedy(tmp_path: Path) -> None:
    command = [*without(LANDLOCK_CREATE_RULESET), "-m", "dockyard_executor", "--socket", str(tmp_path / "s")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 3
    for part in ("cannot isolate", "Landlock: needs Linux 5.13", "--allow-weak"):
        assert part in refused.stderr
    assert not (tmp_path / "s").exists()


def test_a_weak_host_says_so_in_every_result(own_executor: Any) -> None:
    executor = own_executor("--allow-weak", "--workers", "1", launcher=without(LANDLOCK_CREATE_RULESET))
    assert any("WEAK" in line for line in executor.lines)
    assert executor.call("GET", "/health")[1]["isolation"] == "weak"
    verdict = executor.run(RIGHT)
    assert (verdict["resolved"], verdict["isolation"]) == (True, "weak")


# Without the right to change uid: what an ordinary user has. (A real uid might not reach the interpreter.)
UNPRIVILEGED = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
for capability in (6, 7):  # CAP_SETGID, CAP_SETUID
    assert libc.prctl(24, capability, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.skipif(not ROOT, reason="needs root to give up; without root every other test covers this level")
def test_without_the_uid_switch_landlock_and_seccomp_still_hold(own_executor: Any) -> None:
    executor = own_executor("--workers", "1", launcher=[sys.executable, "-c", UNPRIVILEGED])
    verdict = executor.run(RIGHT)
    assert (verdict["resolved"], verdict["isolation"]) == (True, "landlock+seccomp")
    worker = executor.call("GET", "/health")[1]["workers"][0]["pid"]
    for act in (
        "open('/etc/shadow').read(1)",
        f"open('/proc/{executor.process.pid}/environ').read(1)",
        f"os.kill({executor.process.pid}, 9)",
        f"os.kill({worker}, 0)",
        "os.fork()",
        "os.setuid(1)",
        "open('/tmp/dockyard-weak', 'w')",
        "__import__('socket').socket()",
    ):
        refused = executor.run(f"import os\ndef f(x): {act}", ["f(1)"])
        assert "PermissionError" in refused["tests"][0]["message"], (act, refused)
    assert executor.run("def f(x):\n    while True: pass", timeout=0.3)["state"] == "timeout"


def test_in_weak_mode_a_daemon_left_behind_is_still_swept(own_executor: Any) -> None:
    """Without seccomp a program can fork; the fork server is the reaper of whatever it leaves."""
    if not ROOT:
        pytest.skip("the sweep by uid needs root")
    daemon = """
import os, time
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    return x + 1
"""
    seccomp_less = own_executor("--allow-weak", "--workers", "1", launcher=[sys.executable, "-c", NO_SECCOMP])
    verdict = seccomp_less.run(daemon, timeout=2.0)
    assert verdict["isolation"] == "weak"
    assert verdict["resolved"], verdict
    assert processes_of(seccomp_less.uids) == []


# A filter that answers EINVAL to prctl(PR_SET_SECCOMP): a kernel without seccomp filters.
NO_SECCOMP = """
import ctypes, os, struct, sys
i = lambda c, k, t=0, f=0: struct.pack("=HBBI", c, t, f, k)
program = (i(0x20, 0) + i(0x15, 157 if os.uname().machine == "x86_64" else 167, 0, 3)
           + i(0x20, 16) + i(0x15, 22, 0, 1) + i(6, 0x50000 | 22) + i(6, 0x7FFF0000))
class P(ctypes.Structure): _fields_ = [("n", ctypes.c_ushort), ("f", ctypes.c_void_p)]
buffer = ctypes.create_string_buffer(program, len(program))
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, ctypes.byref(P(6, ctypes.addressof(buffer))), 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_settings_come_from_the_environment_and_bad_ones_are_named(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    config = from_env({"API_PORT": "8123", "WORKERS": "3", "API_TOKEN_FILE": str(token), "MEMORY_BYTES": str(64 << 20)})
    assert (config.port, config.workers, config.token, config.limits.memory_bytes) == (8123, 3, "secret", 64 << 20)
    assert "secret" not in repr(config)
    assert from_env({"WORKERS": "3"}, workers=1).workers == 1
    for environ, named in (
        ({"API_PORT": "http"}, "API_PORT is 'http'"),
        ({"WORKERS": "0"}, "workers is 0"),
        ({"API_PORT": "70000"}, "port is 70000"),
        ({"API_TOKEN": " "}, "token is empty"),
        ({"API_TOKEN": "a", "API_TOKEN_FILE": "b"}, "both set"),
        ({"API_TOKEN_FILE": str(tmp_path / "none")}, "cannot be read"),
        ({"API_HOST": "0.0.0.0"}, "without a token"),
        ({"MEMORY_BYTES": "1"}, "memory_bytes is 1"),
    ):
        with pytest.raises(ConfigError, match=named):
            from_env(environ)


def test_a_tcp_port_serves_with_a_token() -> None:
    import json
    import socket
    import urllib.request

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dockyard_executor", "--port", str(port), "--workers", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "API_TOKEN": "t"}) as process:
        assert process.stderr is not None
        assert f"http://127.0.0.1:{port}" in process.stderr.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as response:
            assert json.load(response)["status"] == "ok"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_the_package_imports_nothing_heavy() -> None:
    code = "import sys, dockyard_executor.__main__; print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'numpy', 'dockyard_actors')])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "[]"
    )


def test_nothing_is_waited_for_longer_than_the_program_runs(executor: Executor) -> None:
    """A hundred trivial programs cost less than two hundred interpreters would."""
    started = time.monotonic()
    for _ in range(20):
        executor.run(RIGHT)
    mine = time.monotonic() - started
    started = time.monotonic()
    for _ in range(20):
        subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert mine < time.monotonic() - started
