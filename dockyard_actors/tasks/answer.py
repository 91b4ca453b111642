"""From the model's text to the program that is executed.

Promises a program or a `MalformedAnswer` with the reason, never an exception, whatever the text: it is untrusted. The
program is not compiled or looked into here; that happens inside the sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass

from dockyard_actors.tasks.types import Task


@dataclass(frozen=True)
class MalformedAnswer:
    """No program can be built from the answer. Reward 0 without executing anything."""

    reason: str


def completion_text(task: Task, text: str) -> str:
    """`text` up to the earliest of the task's stop strings, which is not included."""
    cuts = [at for stop in task.stop if (at := text.find(stop)) >= 0]
    return text[: min(cuts)] if cuts else text


def build_program(task: Task, text: str) -> str | MalformedAnswer:
    """The program for one answer, tests not included.

    `append`: prefix + answer. `patch`: the answer must be exactly a line `-OLD` and a line `+NEW` (a last newline is
    optional), where OLD is, character for character, one line of `prefix` and only one.
    """
    answer = completion_text(task, text)
    if task.answer == "patch":
        return _patched(task.prefix, answer)
    return f"{task.prefix}{answer}\n"


def _patched(source: str, hunk: str) -> str | MalformedAnswer:
    lines = hunk.removesuffix("\n").split("\n")
    if len(lines) != 2:
        return MalformedAnswer(
            f"a hunk has two lines, one starting with '-' and one with '+'; got {len(lines)} line(s)"
        )
    removed, added = lines
    if not removed.startswith("-"):
        return MalformedAnswer("the first line of the hunk does not start with '-'")
    if not added.startswith("+"):
        return MalformedAnswer("the second line of the hunk does not start with '+'")
    body = source.removesuffix("\n").split("\n")
    places = body.count(removed[1:])
    if places != 1:
        found = "is not a line" if places == 0 else f"is {places} lines"
        return MalformedAnswer(f"the hunk does not apply: {removed[1:]!r} {found} of the source")
    body[body.index(removed[1:])] = added[1:]
    return "\n".join(body) + "\n"
