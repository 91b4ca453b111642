"""Task files: JSON Lines, one task a line, read strictly.

Promises either tasks that are complete, typed, unique and compile, or one `TaskFileError` that names file, line, field,
value and remedy; no other exception comes out of reading a file, whatever its bytes. Knows the two task sets shipped with
the package by name. Executes nothing: whether a right answer passes its tests is for the sandbox to say.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from dockyard_actors.runtime.errors import PermanentError
from dockyard_actors.tasks import pycheck, repair
from dockyard_actors.tasks.answer import MalformedAnswer, build_program
from dockyard_actors.tasks.types import Task, TaskSet

NAMES = ("functions", "repair")
"""Task sets of the package; any other source is a path."""
REQUIRED = ("id", "split", "prompt", "prefix", "tests")
FIELDS = Task.__struct_fields__
_SHOWN_VALUE = 80
"""Characters of an offending value that an error shows."""


class TaskFileError(PermanentError, ValueError):
    """A task source cannot be used. Attributes: `source`, `line` (from 1, or None), `field` (or None), `reason`, `remedy`."""

    def __init__(
        self, source: str, reason: str, remedy: str, *, line: int | None = None, field: str | None = None
    ) -> None:
        self.source, self.line, self.field, self.reason, self.remedy = source, line, field, reason, remedy
        place = "".join([source, f", line {line}" if line else "", f", field `{field}`" if field else ""])
        super().__init__(f"{place}: {reason}. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.source, self.reason, self.remedy, self.line, self.field))


def _rebuild(source: str, reason: str, remedy: str, line: int | None, field: str | None) -> TaskFileError:
    return TaskFileError(source, reason, remedy, line=line, field=field)


def load_tasks(source: str | Path) -> TaskSet:
    """The tasks of `source`: `"functions"`, `"repair"` or the path of a task file. Raises TaskFileError."""
    name = str(source)
    if name == "repair":
        return _task_set(name, repair.shipped_tasks())
    if name == "functions":
        return parse_tasks(resources.files("dockyard_actors.tasks").joinpath("data/functions.jsonl").read_bytes(), name)
    try:
        raw = Path(source).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        nearest = difflib.get_close_matches(name, NAMES, n=1)
        hint = (
            f"Did you mean the task set `{nearest[0]}`?" if nearest else "Give the path of a JSON Lines file or a name"
        )
        raise TaskFileError(name, f"cannot be read: {reason}", f"{hint} (names: {', '.join(NAMES)})") from error
    return parse_tasks(raw, name)


def parse_tasks(raw: bytes, source: str) -> TaskSet:
    """The tasks in a task file's bytes; `source` is what errors call it. Raises TaskFileError."""
    if raw.startswith(b"\xef\xbb\xbf"):
        raise TaskFileError(source, "starts with a byte-order mark", "Save it as UTF-8 without BOM", line=1)
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(raw.split(b"\n"), start=1):  # not splitlines: U+2028 may stand inside a JSON string
        if not line.strip():
            continue
        task = _parse_line(line, source, number)
        if task.id in lines:
            raise TaskFileError(
                source,
                f"{_shown(task.id)} was already used on line {lines[task.id]}",
                "Give every task an id of its own",
                line=number,
                field="id",
            )
        lines[task.id] = number
        tasks.append(task)
    return _task_set(source, tasks)


def encode_tasks(tasks: list[Task] | tuple[Task, ...]) -> bytes:
    """A task file's bytes: one JSON object a line, fields in the order of `Task`, defaults left out."""
    return b"".join(msgspec.json.encode(task) + b"\n" for task in tasks)


def _task_set(source: str, tasks: list[Task] | tuple[Task, ...]) -> TaskSet:
    train = tuple(task for task in tasks if task.split == "train")
    heldout = tuple(task for task in tasks if task.split == "heldout")
    if not tasks:
        raise TaskFileError(source, "holds no task", "Put one JSON object on each line; docs/tasks.md shows one")
    if not train:
        raise TaskFileError(
            source,
            f"all {len(heldout)} tasks are held out, there is nothing to train on",
            'Mark some tasks with "split": "train"',
            field="split",
        )
    notes = ()
    if not heldout:
        notes = (f"{source} has no held-out tasks: nothing shows whether the model learns more than these tasks.",)
    sha = hashlib.sha256(encode_tasks(tasks)).hexdigest()
    return TaskSet(source=source, train=train, heldout=heldout, sha=sha, notes=notes)


def _parse_line(line: bytes, source: str, number: int) -> Task:
    def error(reason: str, remedy: str, field: str | None = None) -> TaskFileError:
        return TaskFileError(source, reason, remedy, line=number, field=field)

    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as cause:
        reason = f"is not UTF-8: byte 0x{line[cause.start]:02x} at column {cause.start + 1}"
        raise error(reason, "Save the file as UTF-8") from cause
    try:
        value = json.loads(text, object_pairs_hook=_unique_object)
    except _DuplicateKey as cause:
        raise error("is given twice on one line", "Keep one of them", cause.key) from cause
    except RecursionError as cause:
        raise error("is nested too deeply", "A task is a flat object of strings and lists of strings") from cause
    except ValueError as cause:  # JSONDecodeError, and integers beyond the interpreter's digit limit
        raise error(
            f"is not JSON: {cause}", "One whole JSON object a line; a newline inside a string is \\n"
        ) from cause
    if not isinstance(value, dict):
        raise error(f"holds {_kind(value)} instead of an object", "Each line is one JSON object in braces")
    for key in value:
        if key not in FIELDS:
            nearest = difflib.get_close_matches(key, FIELDS, n=1)
            remedy = f"Did you mean `{nearest[0]}`?" if nearest else f"Known fields: {', '.join(FIELDS)}"
            raise error("is not a field of a task", remedy, _shown(key).strip("'\""))
    for key in REQUIRED:
        if key not in value:
            raise error("is missing", f"Every task needs {', '.join(REQUIRED)}", key)
    for key, item in value.items():
        problem = _type_problem(key, item)
        if problem:
            raise error(*problem, key)
    try:
        task = msgspec.convert(value, Task)
    except msgspec.ValidationError as cause:  # not expected after the checks above; a bad line must still be named
        raise error(str(cause), "docs/tasks.md describes every field") from cause
    for problem in _code_problems(task):
        raise error(*problem)
    return task


class _DuplicateKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKey(key)
        found[key] = value
    return found


_CHOICES = {"split": ("train", "heldout"), "answer": ("append", "patch")}
_LISTS = ("stop", "tests", "hidden_tests")
_NOT_EMPTY = ("id", "prompt", "prefix", "tests")


def _type_problem(field: str, value: Any) -> tuple[str, str] | None:
    """(reason, remedy) when the value of one field has the wrong type or cannot be meant."""
    if field == "max_new_tokens":
        if value is None or (type(value) is int and 1 <= value < 2**31):
            return None
        return f"is {_shown(value)}", "Give a whole number of tokens, 1 or more, or leave the field out"
    if field in _LISTS:
        if not isinstance(value, list):
            return f"is {_kind(value)} instead of a list of strings", 'Write ["..."], also for a single item'
        for index, item in enumerate(value):
            if not isinstance(item, str):
                return f"item {index} is {_kind(item)} instead of a string", "Put the item in quotes"
            if not item:
                return f"item {index} is empty", "Remove the item"
    elif not isinstance(value, str):
        return f"is {_kind(value)} instead of a string", "Put the value in quotes"
    for item in value if isinstance(value, list) else [value]:
        if not item.isprintable() and any("\ud800" <= char <= "\udfff" for char in item):
            return f"has half of a surrogate pair in {_shown(item)}", "Write the whole character"
    if field in _CHOICES and value not in _CHOICES[field]:
        return f"is {_shown(value)}", f"Use one of: {', '.join(_CHOICES[field])}"
    if field in _NOT_EMPTY and not value:
        return "is empty", "It needs at least one item" if field in _LISTS else "It needs some text"
    return None


def _code_problems(task: Task) -> list[tuple[str, str, str]]:
    """(reason, remedy, field) for code that does not compile, most basic first."""
    problems = []
    if task.answer == "append" and (reason := pycheck.prefix_problem(task.prefix)):
        remedy = "Nothing the model adds can make this a Python program; give the beginning of one"
        problems.append((f"{_shown(task.prefix)} has {reason}", remedy, "prefix"))
    for field, tests in (("tests", task.tests), ("hidden_tests", task.hidden_tests)):
        for index, test in enumerate(tests):
            if reason := pycheck.test_problem(test):
                remedy = "A test is Python statements that end in an assert"
                problems.append((f"item {index}, {_shown(test)}: {reason}", remedy, field))
    if not problems and task.target:
        program = build_program(task, task.target)
        if isinstance(program, MalformedAnswer):
            problems.append((f"{_shown(task.target)}: {program.reason}", "The target must be a right answer", "target"))
        elif reason := pycheck.program_problem(program):
            problems.append((f"{_shown(task.target)}: {reason}", "The target must be a right answer", "target"))
    return problems


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {_shown(value)}")


def _shown(value: Any) -> str:
    try:
        text = ascii(value)
    except ValueError:  # an integer with more digits than the interpreter prints
        text = "a huge number"
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 3] + "..."
