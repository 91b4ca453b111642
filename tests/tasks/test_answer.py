"""From text to program: cutting, appending, patching, and what counts as malformed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard_actors.tasks.answer import MalformedAnswer, build_program, completion_text
from dockyard_actors.tasks.types import Task

APPEND = Task(
    id="a", split="train", prompt="p", prefix="def f(x):\n    return", stop=("\n", "#"), tests=("assert f(1) == 2",)
)
SOURCE = "def f(a,b): # sum of a and b\n return a-b\n"
PATCH = Task(id="p", split="train", prompt="p", prefix=SOURCE, tests=("assert f(1,2) == 3",), answer="patch")


def test_the_completion_ends_before_the_earliest_stop_string():
    assert completion_text(APPEND, " x + 1 # one more\nprint(1)") == " x + 1 "
    assert completion_text(APPEND, " x + 1") == " x + 1"
    assert completion_text(PATCH, "anything\nat all") == "anything\nat all"


def test_an_append_program_is_prefix_plus_completion():
    assert build_program(APPEND, " x + 1\nassert False") == "def f(x):\n    return x + 1\n"


def test_a_hunk_replaces_exactly_the_line_it_names():
    wanted = "def f(a,b): # sum of a and b\n return a+b\n"
    assert build_program(PATCH, "- return a-b\n+ return a+b\n") == wanted
    assert build_program(PATCH, "- return a-b\n+ return a+b") == wanted


@pytest.mark.parametrize(
    ("hunk", "reason"),
    [
        ("", "two lines"),
        ("- return a-b\n", "two lines"),
        ("- return a-b\n+ return a+b\n+ pass", "two lines"),
        ("- return a-b\n+ return a+b\n\n", "two lines"),
        (" return a-b\n+ return a+b", "first line"),
        ("- return a-b\n return a+b", "second line"),
        ("- return a - b\n+ return a+b", "is not a line"),
        ("-return a-b\n+ return a+b", "is not a line"),
        ("-\n+ return a+b", "is not a line"),
    ],
)
def test_a_hunk_that_does_not_apply_exactly_is_malformed_with_the_reason(hunk, reason):
    answer = build_program(PATCH, hunk)
    assert isinstance(answer, MalformedAnswer)
    assert reason in answer.reason


def test_a_hunk_for_a_line_that_occurs_twice_is_malformed():
    task = Task(id="p", split="train", prompt="p", prefix="x = 1\nx = 1\n", tests=("assert x",), answer="patch")
    answer = build_program(task, "-x = 1\n+x = 2")
    assert isinstance(answer, MalformedAnswer)
    assert "2 lines" in answer.reason


@given(text=st.text(), task=st.sampled_from([APPEND, PATCH]))
def test_no_text_raises(text, task):
    assert isinstance(build_program(task, text), str | MalformedAnswer)
