"""Reading task files: every kind of bad line is named, nothing but TaskFileError comes out."""

import json
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.tasks.answer import build_program
from dockyard_actors.tasks.dataset import NAMES, TaskFileError, encode_tasks, load_tasks, parse_tasks
from dockyard_actors.tasks.types import Task, TaskSet

GOOD = {
    "id": "double",
    "split": "train",
    "prompt": "def double(x):\n    return",
    "prefix": "def double(x):\n    return",
    "stop": ["\n"],
    "tests": ["assert double(2) == 4"],
    "hidden_tests": ["assert double(0) == 0"],
    "target": " x * 2",
}


def lines(*changes: dict) -> bytes:
    return "".join(json.dumps(GOOD | change) + "\n" for change in changes).encode()


def without(field: str) -> bytes:
    return json.dumps({key: value for key, value in GOOD.items() if key != field}).encode()


def refused(raw: bytes) -> TaskFileError:
    with pytest.raises(TaskFileError) as caught:
        parse_tasks(raw, "mine.jsonl")
    assert str(caught.value).startswith("mine.jsonl")
    assert caught.value.remedy
    return caught.value


def test_a_file_is_read_in_order_and_split():
    tasks = parse_tasks(lines({}, {"id": "held", "split": "heldout"}, {"id": "third"}), "mine.jsonl")
    assert [task.id for task in tasks.train] == ["double", "third"]
    assert [task.id for task in tasks.heldout] == ["held"]
    assert tasks.train[0].stop == ("\n",)
    assert tasks.train[0].max_new_tokens is None
    assert tasks.notes == ()


def test_the_sha_depends_on_the_tasks_and_not_on_spacing():
    spaced = b"\r\n\n" + json.dumps(dict(reversed(GOOD.items())), indent=None).encode() + b"\r\n\n"
    assert parse_tasks(spaced, "a").sha == parse_tasks(lines({}), "b").sha
    assert parse_tasks(lines({"target": " 2 * x"}), "b").sha != parse_tasks(lines({}), "b").sha


def test_encoding_and_reading_again_gives_the_same_tasks():
    first = parse_tasks(lines({}, {"id": "held", "split": "heldout", "max_new_tokens": 9}), "a")
    assert parse_tasks(encode_tasks(first.all), "a") == first


def test_only_training_tasks_is_fine_with_a_note():
    assert "no held-out tasks" in parse_tasks(lines({}), "mine.jsonl").notes[0]


@pytest.mark.parametrize("field", ["id", "split", "prompt", "prefix", "tests"])
def test_a_missing_field_is_named(field):
    error = refused(without(field))
    assert (error.line, error.field) == (1, field)
    assert "missing" in str(error)


@pytest.mark.parametrize(
    ("change", "field", "part"),
    [
        ({"hiden_tests": []}, "hiden_tests", "Did you mean `hidden_tests`?"),
        ({"colour": "red"}, "colour", "Known fields: id, split"),
        ({"id": 7}, "id", "the number 7 instead of a string"),
        ({"id": ""}, "id", "is empty"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": None}, "prompt", "null instead of a string"),
        ({"split": "test"}, "split", "'test'. Use one of: train, heldout"),
        ({"answer": "diff"}, "answer", "Use one of: append, patch"),
        ({"tests": []}, "tests", "is empty"),
        ({"tests": "assert True"}, "tests", "a string instead of a list"),
        ({"tests": ["assert True", 3]}, "tests", "item 1 is the number 3"),
        ({"stop": [""]}, "stop", "item 0 is empty"),
        ({"stop": True}, "stop", "true or false instead of a list"),
        ({"tests": ["assert double(2) = 4"]}, "tests", "does not compile"),
        ({"tests": ["assert double(2) == 4\x00"]}, "tests", "does not compile"),
        ({"tests": ["double(2) == 4"]}, "tests", "not an assert"),
        ({"tests": ["# nothing"]}, "tests", "not an assert"),
        ({"tests": ["return 3\nassert True"]}, "tests", "outside function"),
        ({"hidden_tests": ["assert ("]}, "hidden_tests", "does not compile"),
        ({"prefix": "def double(x)) :\n    return"}, "prefix", "Nothing the model adds"),
        ({"prefix": "def double(x):\nreturn"}, "prefix", "Nothing the model adds"),
        ({"prefix": "def double(x):\n    return )"}, "prefix", "Nothing the model adds"),
        ({"target": " x *"}, "target", "must be a right answer"),
        ({"answer": "patch"}, "target", "must be a right answer"),
        ({"max_new_tokens": 0}, "max_new_tokens", "1 or more"),
        ({"max_new_tokens": True}, "max_new_tokens", "1 or more"),
        ({"max_new_tokens": 1.5}, "max_new_tokens", "1 or more"),
        ({"prompt": "a\ud800"}, "prompt", "surrogate"),
    ],
)
def test_a_bad_value_is_named_with_line_field_and_remedy(change, field, part):
    error = refused(lines({}) + lines({"id": "second", **change}))
    assert (error.line, error.field) == (2, field)
    assert part in str(error)


@pytest.mark.parametrize(
    ("raw", "line", "part"),
    [
        (b"", None, "holds no task"),
        (b"\n \n", None, "holds no task"),
        (b"{", 1, "not JSON"),
        (b"[]", 1, "a list instead of an object"),
        (b"3", 1, "the number 3 instead of an object"),
        (b"[" * 100_000, 1, "nested too deeply"),
        (b"9" * 10_000, 1, "not JSON"),
        (lines({}) + b"\xff\n", 2, "not UTF-8: byte 0xff at column 1"),
        (b"\xef\xbb\xbf" + lines({}), 1, "byte-order mark"),
        (lines({}).decode().encode("utf-16"), 1, "not UTF-8"),
        (b'{"id": "a", "id": "b"}', 1, "twice"),
        (lines({}, {"id": "b"}, {}), 3, "already used on line 1"),
        (lines({"split": "heldout"}), None, "nothing to train on"),
    ],
)
def test_a_bad_file_is_named_with_line_and_reason(raw, line, part):
    error = refused(raw)
    assert error.line == line
    assert part in str(error)


@pytest.mark.parametrize(
    "prefix",
    [
        "def f(x):\n    return",
        "def f(x):\n",
        "def f(x):\n    retu",
        "def f(x):\n    if x",
        "x = [1,",
        "x = 'abc",
        "f(f'{x",
        '"""doc',
        "try:\n    pass\n",
        "@decor",
        "import os\n\nclass A:\n    def b(self):\n        x = {1: 2,\n",
        "a i",
        "if 'abc",
        "for x",
        "x = 1 if y",
        "async",
        "def f",
        "with open('a') a",
        "x = [lambda",
        "x = \\",
        "from x im",
        "def f(x):\n    return x if x else",
    ],
)
def test_a_prefix_may_end_anywhere(prefix):
    assert parse_tasks(lines({"prefix": prefix, "target": ""}), "a").train[0].prefix == prefix


def test_a_missing_file_or_misspelt_name_says_so(tmp_path):
    with pytest.raises(TaskFileError, match="Did you mean the task set `functions`"):
        load_tasks("function")
    with pytest.raises(TaskFileError, match="No such file"):
        load_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskFileError, match="cannot be read"):
        load_tasks(tmp_path)
    with pytest.raises(TaskFileError, match="cannot be read"):
        load_tasks("a\x00b")


def test_a_file_on_disk_is_read(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(lines({}))
    assert load_tasks(path) == load_tasks(str(path))


def test_an_error_survives_a_copy_between_processes():
    error = refused(lines({"id": ""}))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.line, again.field) == (str(error), error.line, error.field)


@given(st.binary())
def test_arbitrary_bytes_never_cause_another_error(raw):
    tolerated(raw)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_CODE = st.text(alphabet="ab1 \n\t:='\"()[]{}#\\,@*\x00\ud800é", max_size=24)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*GOOD, "answer", "max_new_tokens", "x"]), _JSON | _CODE | st.lists(_CODE)))
def test_arbitrary_fields_in_a_good_line_never_cause_another_error(change):
    tolerated(lines(change))


@given(st.integers(0, len(lines({}, {"id": "b"}))), st.binary(max_size=3))
def test_a_damaged_file_never_causes_another_error(at, damage):
    raw = lines({}, {"id": "b"})
    tolerated(raw[:at] + damage + raw[at + len(damage) :])


def tolerated(raw: bytes) -> None:
    try:
        assert isinstance(parse_tasks(raw, "mine.jsonl"), TaskSet)
    except TaskFileError as error:
        assert str(error).startswith("mine.jsonl")  # noqa: PT017 - a file that can be read is as good


def test_the_names_are_those_of_the_package():
    assert NAMES == ("functions", "repair")


def test_the_example_and_the_figures_of_the_documentation_are_true():
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)\n```", page, re.DOTALL)
    task = parse_tasks(example.encode(), "docs/tasks.md").train[0]
    assert build_program(task, " x * 2\n\nprint(1)") == "def double(x):\n    return x * 2\n"
    functions, repair = load_tasks("functions"), load_tasks("repair")
    families = len({task.family for task in functions.all})
    assert f"{len(functions.all)} one-line Python functions with a bug, in {families} families" in page
    assert f"{len(functions.heldout)} are held out" in page
    assert f"{len(repair.train):,} training tasks and {len(repair.heldout)} held out" in page
    assert all(f"| `{field}` |" in page for field in Task.__struct_fields__)
