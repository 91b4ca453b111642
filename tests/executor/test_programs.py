"""What an honest program's verdict says."""

from __future__ import annotations

import pytest

from tests.executor.conftest import RIGHT, Executor


def outcomes(verdict: dict) -> list[str]:
    return [test["outcome"] for test in verdict["tests"]]


def test_a_right_program_is_resolved(executor: Executor) -> None:
    verdict = executor.run(RIGHT, ["assert f(1) == 2", "assert f(-1) == 0"], ["assert f(10) == 11"])
    assert verdict["state"] == "ok"
    assert verdict["resolved"]
    assert (verdict["passed"], verdict["total"]) == (3, 3)
    assert [test["name"] for test in verdict["tests"]] == ["tests[0]", "tests[1]", "hidden_tests[0]"]
    assert [test["hidden"] for test in verdict["tests"]] == [False, False, True]
    assert verdict["error"] == ""
    assert len(verdict["evidence_hash"]) == 64


def test_one_failing_test_does_not_stop_the_next(executor: Executor) -> None:
    verdict = executor.run(RIGHT, ["assert f(1) == 2", "assert f(1) == 3", "assert g(1)", "assert f(2) == 3"])
    assert outcomes(verdict) == ["passed", "failed", "error", "passed"]
    assert "f(1) was 2" in verdict["tests"][1]["message"]
    assert "NameError" in verdict["tests"][2]["message"]
    assert verdict["state"] == "ok"
    assert not verdict["resolved"]


def test_passing_visible_tests_alone_do_not_resolve(executor: Executor) -> None:
    verdict = executor.run("def f(x):\n    return 2\n", ["assert f(1) == 2"], ["assert f(2) == 3"])
    assert (verdict["passed"], verdict["resolved"]) == (1, False)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("def f(x) return x", "SyntaxError"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("raise ValueError('at load')", "ValueError: at load"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("def f(x): return x\0", "null bytes"),
        ("x = '\udc80'", "unicode error"),
        ("# coding: nonsense\nx = 1", "SyntaxError"),
    ],
)
def test_a_program_that_does_not_load_is_judged_not_retried(executor: Executor, program: str, message: str) -> None:
    verdict = executor.run(program)
    assert verdict["state"] == "ok"
    assert outcomes(verdict) == ["not_run"]
    assert message in verdict["error"]


def test_the_same_interpreter_state_for_each_program(executor: Executor) -> None:
    for _ in range(4):  # more than there are workers
        verdict = executor.run(
            "import math\nmath.answer = getattr(math, 'answer', 0) + 1\ndef f(): return math.answer",
            ["assert f() == 1"],
        )
        assert verdict["resolved"]


def test_random_numbers_and_hashes_repeat(executor: Executor) -> None:
    program = "import random\ndef f(): return [random.random(), hash('a'), list({'a', 'b', 'c', 'd'})]"
    messages = {executor.run(program, ["assert f() == 0"])["tests"][0]["message"] for _ in range(4)}
    assert len(messages) == 1


def test_tests_share_the_programs_namespace_in_order(executor: Executor) -> None:
    program = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()"
    tests = ["s = Stack()", "s.push(1); s.push(2)", "assert s.pop() == 2", "assert s.pop() == 1"]
    verdict = executor.run(program, tests)
    assert verdict["resolved"], verdict


def test_statement_tests_report_their_own_failures(executor: Executor) -> None:
    tests = [
        "try:\n    f(None)\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError('no error')",
        "for i in range(3):\n    assert f(i) == i + 1, i",
        "for i in range(3):\n    assert f(i) == i, 'not ' + str(i)",
        "1 / 0",
    ]
    verdict = executor.run(RIGHT, tests)
    assert outcomes(verdict) == ["passed", "passed", "failed", "error"]
    assert verdict["tests"][2]["message"] == "AssertionError: not 0"


def test_values_that_are_not_plain_are_compared_inside_and_twinned(executor: Executor) -> None:
    program = "from fractions import Fraction\ndef f(x): return Fraction(x, 2)"
    verdict = executor.run(program, ["assert f(1) == 0.5"])
    assert verdict["resolved"], verdict
    assert verdict["twin"] == {"checked": 1, "skipped": 0}


def test_named_tuples_and_enumerations_equal_their_plain_values(executor: Executor) -> None:
    program = "import collections, enum\nclass Colour(enum.IntEnum):\n    RED = 1\nPair = collections.namedtuple('Pair', 'a b')\ndef f(): return [Colour.RED, Pair(1, 'x')]"
    assert executor.run(program, ["assert f() == [1, (1, 'x')]"])["resolved"]


def test_the_standard_library_beyond_the_preloaded_can_be_imported(executor: Executor) -> None:
    verdict = executor.run(
        "import calendar, difflib, encodings.cp1252, hashlib, sqlite3, zlib\ndef f(): return 1", ["assert f() == 1"]
    )
    assert verdict["resolved"], verdict


def test_threads_and_event_loops_work(executor: Executor) -> None:
    program = """
import asyncio, threading
async def double(x):
    await asyncio.sleep(0)
    return 2 * x
def f(x):
    found = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(double(x))))
    thread.start(); thread.join()
    return found
"""
    assert executor.run(program, ["assert f(2) == [4]"])["resolved"]


def test_output_is_kept_as_tails_and_decides_nothing(executor: Executor) -> None:
    program = (
        "import sys\nprint('x' * 10000 + 'end')\nprint('\\udc80', file=sys.stderr)\nsys.stdout.buffer.write(b'\\xff')\n"
        + RIGHT
    )
    verdict = executor.run(program)
    assert verdict["resolved"]
    assert verdict["stdout"].startswith("x")
    assert "end" in verdict["stdout"]
    assert len(verdict["stdout"]) <= 4096
    assert "udc80" in verdict["stderr"]


def test_input_is_empty(executor: Executor) -> None:
    assert executor.run("import sys\ndef f(): return sys.stdin.read()", ["assert f() == ''"])["resolved"]


def test_a_large_program_below_the_limit_is_run(executor: Executor) -> None:
    assert executor.run("# " + "x" * 900_000 + "\n" + RIGHT)["resolved"]
