"""The task: one prompt together with the tests that judge an answer to it.

A `Task` is a plain frozen value: it comes from one line of a task file (see docs/tasks.md) and travels unchanged to the
roles. It knows nothing about models, tokens or sandboxes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Split = Literal["train", "heldout"]
AnswerKind = Literal["append", "patch"]


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One problem. The program that is executed is made from `prefix` and the model's answer by `answer.build_program`."""

    id: str
    """Unique within a task file; names the task in the ledger, in rollouts and in sample seeds."""
    split: Split
    """`train` tasks are trained on, `heldout` tasks only evaluated."""
    prompt: str
    """What the model reads, verbatim: no chat template is added."""
    prefix: str
    """`append`: what the program starts with, the answer is put right behind it. `patch`: the source to be patched."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings; empty: it ends at the end-of-sequence token or the token limit."""
    tests: tuple[str, ...]
    """Test code, each item ending in an `assert`; the ones that the prompt shows belong here."""
    hidden_tests: tuple[str, ...] = ()
    """Tests that no prompt shows. Reward 1 needs these too."""
    family: str = ""
    """A label for per-family figures; no other meaning."""
    answer: AnswerKind = "append"
    """`append`: program = prefix + answer. `patch`: the answer is a two-line -/+ hunk for `prefix`."""
    target: str = ""
    """A right answer, stop string not included. Read by the supervised warm-up and by the data set's own tests, never by a reward."""
    max_new_tokens: int | None = None
    """Token limit of this task's answers; None: the run's."""


class TaskSet(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one source, in file order."""

    source: str
    """The name or path they were loaded from."""
    train: tuple[Task, ...]
    heldout: tuple[Task, ...]
    sha: str
    """sha256 (hex) over the tasks' canonical encoding: equal tasks, equal sha, whatever the file's spacing."""
    notes: tuple[str, ...] = ()
    """What a person should know, such as a missing held-out split; printed by `check` and in the summary."""

    @property
    def all(self) -> tuple[Task, ...]:
        return self.train + self.heldout

    def by_id(self) -> dict[str, Task]:
        return {task.id: task for task in self.all}
