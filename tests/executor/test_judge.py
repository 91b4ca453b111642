"""What of a test is judged outside of the program's process, and what a must-fail twin looks like."""

from __future__ import annotations

import pytest
from dockyard_executor import judge, values
from dockyard_executor.judge import BadTest, Inside, Outside, plan, shadowed_names, twin

OUTSIDE = {
    "assert add(2, 3) == 5": ("add(2, 3)",),
    "assert 5 == add(2, 3)": ("add(2, 3)",),
    "assert add(2, 3) == 5, 'message'": ("add(2, 3)",),
    "assert f([1]) == [1, (2, {'a': None})]": ("f([1])",),
    "assert f(1) is None": ("f(1)",),
    "assert f(1) is not True": ("f(1)",),
    "assert not f(1)": ("f(1)",),
    "assert f(1)": ("f(1)",),
    "assert f(1) == f(2)": ("f(1)", "f(2)"),
    "assert abs(f(1) - 0.5) < 1e-9": ("f(1)",),
    "assert 0 <= f(1) < 10": ("f(1)",),
    "assert round(f(1), 3) == 0.333": ("f(1)",),
    "assert len(f(1)) == 3": ("f(1)",),
    "assert sorted(f(1)) == [1, 2]": ("sorted(f(1))",),
    "assert list(f(1)) == [1, 2]": ("list(f(1))",),
    "assert isinstance(f(1), int)": ("f(1)",),
    "assert type(f(1)) == int": ("f(1)",),
    "assert f(1) == 2 and f(2) == 3": ("f(1)", "f(2)"),
    "assert f(1) in (1, 2)": ("f(1)",),
    "assert f(1)[0].name == 'x'": ("f(1)[0].name",),
    "assert stack.pop() == 1": ("stack.pop()",),
    "assert f(1) == 10 ** 6": ("f(1)",),
    "assert f(1) == -1": ("f(1)",),
    "assert f(1) * 2 == 4": ("f(1) * 2",),
    "assert f(1) == float('inf')": ("f(1)",),
}
INSIDE = [
    "assert all(f(i) == i for i in range(3))",
    "assert f(1) == 1 or f(1) == 2",
    "assert (x := f(1)) == 2",
    "assert f(1) is f",
    "assert f(2 if f(1) else 3) == 1",
    "assert True",
    "assert sorted([2, 1]) == [1, 2]",
    "x = 1",
    "assert f(1) == 1; assert f(2) == 2",
    "for i in range(3):\n    assert f(i) == i",
    "import math",
]


@pytest.mark.parametrize("source", OUTSIDE)
def test_comparisons_are_judged_outside(source: str) -> None:
    planned = plan(source, frozenset())
    assert isinstance(planned, Outside)
    assert planned.leaves == OUTSIDE[source]


@pytest.mark.parametrize("source", INSIDE)
def test_other_shapes_run_inside(source: str) -> None:
    assert plan(source, frozenset()) == Inside(source)


def test_no_expected_value_is_among_what_the_program_is_sent() -> None:
    for source, leaves in OUTSIDE.items():
        for secret in ("5", "0.333", "1e-09", "10 ** 6", "'x'", "inf"):
            if secret in source.split("==")[-1]:
                assert all(secret not in leaf for leaf in leaves), source


def outcome(source: str, *found: object) -> str:
    planned = plan(source, frozenset())
    assert isinstance(planned, Outside)
    return judge.judge(planned, [values.encode(value, 1 << 16) for value in found])[0]


@pytest.mark.parametrize(
    ("source", "found", "expected"),
    [
        ("assert f(1) == 2", [2], "passed"),
        ("assert f(1) == 2", [2.0], "passed"),
        ("assert f(1) == 2", [3], "failed"),
        ("assert f(1) == 2", [None], "failed"),
        ("assert f(1) < 2", [None], "error"),
        ("assert abs(f(1) - 0.5) < 1e-9", [0.5], "passed"),
        ("assert abs(f(1) - 0.5) < 1e-9", ["0.5"], "error"),
        ("assert abs(f(1) - 0.5) < 1e-9", [10**400], "error"),
        ("assert f(1) is None", [None], "passed"),
        ("assert f(1) is None", [0], "failed"),
        ("assert not f(1)", [[]], "passed"),
        ("assert f(1) == f(2)", [1, 1], "passed"),
        ("assert f(1) == f(2)", [1, 2], "failed"),
        ("assert f(1) == 2 and f(2) == 3", [2, 4], "failed"),
        ("assert isinstance(f(1), int)", [True], "passed"),
        ("assert isinstance(f(1), (list, tuple))", [()], "passed"),
        ("assert f(1) in {1, 2}", [[]], "error"),
        ("assert f(1) == [1, 2]", [(1, 2)], "failed"),
    ],
)
def test_the_judge_agrees_with_python(source: str, found: list[object], expected: str) -> None:
    assert outcome(source, *found) == expected


def test_a_name_that_the_program_binds_is_the_programs() -> None:
    for program in ("def sorted(x): pass", "sorted = 1", "from m import sorted", "import x as sorted", "a, sorted = 1, 2", "class sorted: pass", "for sorted in x: pass"):  # fmt: skip
        assert shadowed_names(program, []) == {"sorted"}, program
    assert shadowed_names("x = sorted(y) == [len(y)]\nunsorted = 1", []) == frozenset()
    assert plan("assert len(f(1)) == 2", frozenset({"len"})).leaves == ("len(f(1))",)  # type: ignore[union-attr]
    assert isinstance(plan("assert abs(-1) == f(1)", frozenset({"abs"})), Outside)


def test_names_are_found_in_time_linear_in_the_program() -> None:
    assert shadowed_names("len(x) " * 140_000, []) == frozenset()


@pytest.mark.parametrize(
    "source",
    ["", "   ", "# only a comment", "assert", "assert f(1) = 2", "x\0y", "(" * 300 + ")" * 300, "return 1", "\ud800"],
)
def test_what_is_no_statement_is_refused(source: str) -> None:
    with pytest.raises(BadTest):
        judge.parse(source)


@pytest.mark.parametrize(
    "source",
    [
        "assert f(1) == 2",
        "assert 2 == f(1)",
        "assert f(1) == 'two'",
        "assert f(1) == [1]",
        "assert f(1) == (1,)",
        "assert f(1) == {'a': 1}",
        "assert f(1) == {1}",
        "assert f(1) is None",
        "assert f(1) == None",
        "assert f(1) == True",
        "assert f(1) == 0.5",
        "assert f(1) == 1e300",
        "assert f(1) == f(2)",
        "assert all(f(i) == i for i in range(3))",
        "assert f(1) == 2 or f(1) == 3",
        "assert f(1) == 2 and f(2) == 3",
        "assert not f(1)",
        "assert f(1) > 1",
    ],
)
def test_a_twin_fails_where_the_test_holds(source: str) -> None:
    held = None
    for value in (2, 3, "two", [1], (1,), {"a": 1}, {1}, None, True, 0.5, 1e300, False):
        for function in (lambda x, value=value: value, lambda x: x, lambda x: x + 1):
            scope = {"f": function}
            try:
                exec(source, scope)
            except Exception:
                continue  # does not hold for this function
            held = function
            made = twin(source)
            assert made is not None
            with pytest.raises(AssertionError):
                exec(made, {"f": function})
    assert held is not None


def test_a_twin_is_passed_by_an_object_equal_to_everything() -> None:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    for source in (
        "assert f(1) == 2",
        "assert 2 == f(1)",
        "assert all(f(i) == i for i in range(3))",
        "assert f(1) == g(1) and f(2) == 3",
    ):
        made = twin(source)
        assert made is not None
        exec(made, {"f": lambda x: Equal(), "g": lambda x: Equal()})


@pytest.mark.parametrize("source", ["x = 1", "for i in range(3):\n    assert f(i) == i", "assert (x := f(1)) > 2"])
def test_forms_without_a_twin_are_known(source: str) -> None:
    assert twin(source) is None
