"""Programs that take more than their share. Each is run for real; afterwards the executor still serves."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.executor.conftest import RIGHT, Executor, processes_of


@pytest.fixture(autouse=True)
def _nothing_is_left(executor: Executor) -> Iterator[None]:
    yield
    assert executor.run(RIGHT)["resolved"]
    assert processes_of(executor.uids) == []


def test_a_fork_bomb_gets_no_process(executor: Executor) -> None:
    program = "import os\ndef f(x):\n    made = 0\n    for _ in range(1000):\n        try:\n            os.fork(); made += 1\n        except PermissionError: pass\n    return made"
    verdict = executor.run(program, ["assert f(1) == 0"])
    assert verdict["resolved"], verdict


@pytest.mark.parametrize(
    "act",
    [
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run(['/bin/true'])",
        "os.execv('/bin/true', ['true'])",
        "os.forkpty()",
    ],
)
def test_no_other_program_can_be_started(executor: Executor, act: str) -> None:
    verdict = executor.run(f"import os, subprocess\ndef f(x): {act}", ["f(1)"])
    assert verdict["tests"][0]["outcome"] == "error"
    assert "PermissionError" in verdict["tests"][0]["message"]


def test_a_thread_bomb_is_bounded(executor: Executor) -> None:
    program = """
import threading, time
def f(x):
    threading.stack_size(65536)
    started = 0
    try:
        while started < 2000:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            started += 1
    except RuntimeError:
        pass
    return started < 100
"""
    assert executor.run(program, ["assert f(1)"])["resolved"]


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): return len(bytearray(1 << 40))",
        "def f(x):\n    kept = []\n    while True: kept.append(bytearray(1 << 20))",
        "kept = []\ndef f(x):\n    while True: kept.append(bytearray(1 << 20))",
        "def f(x): return [0] * (1 << 34)",
        "import mmap\ndef f(x):\n    maps = []\n    while True:\n        try: maps.append(mmap.mmap(-1, 1 << 24))\n        except OSError as error: raise MemoryError from error",
    ],
)
def test_a_memory_bomb_ends_at_the_limit_in_plain_words(executor: Executor, program: str) -> None:
    verdict = executor.run(program, ["assert f(1) == 2", "assert 1 + 1 == 2"])
    assert verdict["state"] == "ok", verdict
    assert verdict["error"] == "memory limit of 256 MiB reached"
    assert verdict["tests"][0]["outcome"] == "error"
    assert not verdict["resolved"]


def test_a_memory_bomb_at_load_time(executor: Executor) -> None:
    assert executor.run("x = [0] * (1 << 34)")["error"] == "memory limit of 256 MiB reached while it was loaded"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_ends_the_program(executor: Executor, stream: str) -> None:
    verdict = executor.run(f"import sys\ndef f(x):\n    while True: sys.{stream}.write('y' * 4096)", timeout=30)
    assert verdict["error"] == "output limit of 1 MiB reached in tests[0]"
    assert verdict["tests"][0]["outcome"] == "not_run"
    assert len(verdict[stream]) == 4096
    assert not verdict["resolved"]


@pytest.mark.parametrize(
    "act",
    [
        "open('/tmp/dockyard-full', 'w')",
        "open('/dev/shm/dockyard-full', 'w')",
        "open('/var/tmp/dockyard-full', 'w')",
        "os.mkdir('/tmp/dockyard-inode')",
        "os.symlink('/etc/passwd', '/tmp/dockyard-link')",
        "os.mkfifo('/tmp/dockyard-pipe')",
        "os.memfd_create('full')",
        "tempfile.TemporaryFile()",
        "os.truncate('/tmp', 1)",
        "open('/proc/self/oom_score_adj', 'w')",
    ],
)
def test_nothing_can_be_written_or_made(executor: Executor, act: str) -> None:
    verdict = executor.run(f"import os, tempfile\ndef f(x): {act}", ["f(1)"])
    assert verdict["tests"][0]["outcome"] == "error", verdict
    assert any(name in verdict["tests"][0]["message"] for name in ("PermissionError", "FileNotFoundError")), verdict


def test_the_null_device_can_be_written(executor: Executor) -> None:
    assert executor.run("import os\ndef f(x): return open(os.devnull, 'w').write('x')", ["assert f(1) == 1"])[
        "resolved"
    ]


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time; time.sleep(3600)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import threading; threading.Event().wait()",
        "return 9 ** 9 ** 9",
        "import signal\n    for n in range(1, 32):\n        if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n    while True: pass",
    ],
)
def test_a_hang_ends_at_the_time_limit(executor: Executor, body: str) -> None:
    started = time.monotonic()
    verdict = executor.run(
        f"def f(x):\n    {body}", ["assert 1 == 1", "assert f(1) == 2", "assert f(1) == 3"], timeout=0.4
    )
    assert verdict["state"] == "timeout", verdict
    assert verdict["error"] == "time limit of 0.4 s reached in tests[1]"
    assert [test["outcome"] for test in verdict["tests"]] == ["passed", "not_run", "not_run"]
    assert time.monotonic() - started < 20 * 0.4


def test_a_hang_at_load_time(executor: Executor) -> None:
    verdict = executor.run("while True: pass", timeout=0.3)
    assert (verdict["state"], verdict["error"]) == (
        "timeout",
        "time limit of 0.3 s reached while the program was loaded",
    )


def test_threads_left_behind_end_with_the_program(executor: Executor) -> None:
    program = (
        "import threading\ndef spin():\n    while True: pass\nfor _ in range(3): threading.Thread(target=spin).start()\n"
        + RIGHT
    )
    assert executor.run(program)["resolved"]


def test_exit_handlers_never_run(executor: Executor) -> None:
    program = "import atexit, time\natexit.register(time.sleep, 3600)\natexit.register(print, 'ran')\n" + RIGHT
    verdict = executor.run(program)
    assert verdict["resolved"]
    assert "ran" not in verdict["stdout"]


def test_recursion_is_an_error_of_its_test(executor: Executor) -> None:
    verdict = executor.run("def f(x): return f(x + 1)", ["assert f(1) == 2", "assert 2 == 2"])
    assert verdict["tests"][0]["message"].startswith("RecursionError")
    assert verdict["tests"][1]["outcome"] == "passed"


def test_recursion_through_the_c_stack_is_a_crash_not_infra(executor: Executor) -> None:
    program = "import sys\nsys.setrecursionlimit(1 << 30)\nclass A:\n    def __repr__(self): return repr(self)\ndef f(x): return repr(A())"
    verdict = executor.run(program, ["assert f(1) == 2"])
    assert (verdict["state"], verdict["resolved"]) == ("ok", False), verdict
    assert verdict["error"] in ("ended by SIGSEGV in tests[0]", "memory limit of 256 MiB reached"), verdict


@pytest.mark.parametrize(
    "value",
    [
        "10 ** 100_000",
        "'x' * 10_000_000",
        "list(range(1_000_000))",
        "range(10 ** 30)",
        "float('nan')",
        "b'\\0' * 10",
        "'\\0\\ud800'",
    ],
)
def test_values_of_any_size_and_kind_are_judged(executor: Executor, value: str) -> None:
    verdict = executor.run(f"def f(x): return {value}", ["assert f(1) == 2", "assert f(1) != 2"])
    assert verdict["state"] == "ok"
    assert [test["outcome"] for test in verdict["tests"]] == ["failed", "passed"], verdict


def test_a_deeply_nested_value_is_judged(executor: Executor) -> None:
    verdict = executor.run(
        "def f(x):\n    y = []\n    for _ in range(100_000): y = [y]\n    return y", ["assert f(1) == 2"]
    )
    assert verdict["state"] == "ok"
    assert verdict["passed"] == 0


def test_a_message_without_end_is_cut(executor: Executor) -> None:
    verdict = executor.run("def f(x): raise ValueError('z' * 1_000_000)")
    assert len(verdict["tests"][0]["message"]) <= 300


def test_limits_can_be_read_but_not_raised(executor: Executor) -> None:
    program = """
import resource
def f(name):
    limit = getattr(resource, name)
    soft, hard = resource.getrlimit(limit)
    try:
        resource.setrlimit(limit, (hard, hard + 1))
    except (PermissionError, ValueError):
        return soft
"""
    verdict = executor.run(
        program,
        ["assert f('RLIMIT_NOFILE') == 64", "assert f('RLIMIT_FSIZE') == 0", "assert f('RLIMIT_AS') > 256 * 2 ** 20"],
    )
    assert verdict["resolved"], verdict
