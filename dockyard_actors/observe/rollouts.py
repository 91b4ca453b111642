"""Readable samples of what the model wrote: `rollouts/step-00012.md` for people, `rollouts/rollouts.jsonl` for programs.
Promises that no completion, however hostile, breaks the markdown around it or reaches a terminal as a control code, and that
a step writes a bounded number of bounded samples. Does not know how a verdict came about.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from dockyard_actors.observe.metrics import cut_torn_tail, write_all
from dockyard_actors.observe.rundir import plain_scalar
from dockyard_actors.observe.text import encodable, fenced, inline_code, one_line, shorten

JSONL_NAME = "rollouts.jsonl"


class TestLine(msgspec.Struct, frozen=True, kw_only=True):
    """One test's outcome as the executor reported it."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    name: str
    outcome: str  # "passed" | "failed" | "error" | "not_run"
    hidden: bool = False
    message: str = ""


class RolloutSample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion with what became of it."""

    step: int  # training step that used it, or at which it was scored
    lease: str
    task: str
    sample: int  # index within its group
    prompt: str
    completion: str
    verdict: str  # "ok" | "timeout" | "untrusted" | "integrity_failure" | "infra" | "malformed"
    reward: float | None  # None: masked
    split: str = "train"
    program: str | None = None  # what ran, without the tests; None when no program could be built
    tests: tuple[TestLine, ...] = ()
    error: str = ""  # of the verdict, or why the answer was malformed
    stdout: str = ""
    stderr: str = ""
    advantage: float | None = None
    versions: tuple[int, ...] = ()  # distinct weight versions of its tokens, in order
    tokens: int | None = None
    finish: str = ""  # "stop" | "length"
    seconds: float | None = None  # execution
    cut: dict[str, int] = {}  # field → characters left out of this record

    @property
    def verdict_line(self) -> str:
        passed = sum(test.outcome == "passed" for test in self.tests)
        counts = f", {passed} of {len(self.tests)} tests passed" if self.tests else ""
        return f"{one_line(self.verdict, 40)}{counts}, reward {number_text(self.reward)}"


class RolloutWriter:
    """Appends samples below `directory`, at most `per_step` for each step, each text cut at `max_chars` characters.

    A new writer on an old directory (a resumed run) goes on counting where the last one stopped.
    """

    _LONG = ("prompt", "completion", "program", "error", "stdout", "stderr")

    def __init__(self, directory: Path, *, per_step: int = 8, max_chars: int = 20_000) -> None:
        self.directory = directory
        self.per_step = per_step
        self.max_chars = max_chars
        directory.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(directory / JSONL_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        cut_torn_tail(self._fd)
        samples, _ = read_rollouts(directory)
        self._written = Counter(sample.step for sample in samples)
        self.left_out = 0

    def room(self, step: int) -> int:
        """How many more samples of `step` would be written; lets a caller choose which to offer."""
        return max(0, self.per_step - self._written[step])

    def write(self, sample: RolloutSample) -> bool:
        """Writes one sample. Returns False, having counted it in `left_out`, when its step has enough already."""
        if self.room(sample.step) == 0:
            self.left_out += 1
            return False
        sample = self._bounded(sample)
        line = msgspec.json.encode(sample, enc_hook=plain_scalar)
        self._written[sample.step] += 1
        path = self.directory / f"step-{sample.step:05d}.md"
        head = "" if path.exists() else f"# Step {sample.step}: at most {self.per_step} samples\n\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(head + markdown(sample))
        write_all(self._fd, line + b"\n")
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bounded(self, sample: RolloutSample) -> RolloutSample:
        changed: dict[str, Any] = {
            name: encodable(getattr(sample, name)) for name in ("lease", "task", "split", "verdict", "finish")
        }
        cut: dict[str, int] = {}
        for name in self._LONG:
            text = getattr(sample, name)
            if text is None:
                continue
            changed[name], left_out = shorten(encodable(text), self.max_chars)
            if left_out:
                cut[name] = left_out
        changed["tests"] = tuple(
            TestLine(
                name=encodable(shorten(test.name, self.max_chars)[0]),
                outcome=encodable(test.outcome),
                hidden=test.hidden,
                message=encodable(shorten(test.message, self.max_chars)[0]),
            )
            for test in sample.tests
        )
        return msgspec.structs.replace(sample, **changed, cut=cut)


def markdown(sample: RolloutSample) -> str:
    """`sample` as one section of a markdown page; everything foreign sits in fences or code spans that it cannot leave."""
    versions = ", ".join(map(str, sample.versions)) or "unknown"
    facts = [
        f"verdict: {inline_code(sample.verdict)}",
        f"reward: {number_text(sample.reward)}, advantage: {number_text(sample.advantage)}",
        f"lease: {inline_code(sample.lease)}, sample {sample.sample}, split {inline_code(sample.split)}",
        f"weight versions: {versions}",
    ]
    if sample.tokens is not None:
        facts.append(f"tokens: {sample.tokens}" + (f", ended by {inline_code(sample.finish)}" if sample.finish else ""))
    if sample.seconds is not None:
        facts.append(f"ran for {sample.seconds:.3f} s")
    if sample.error:
        facts.append(f"error: {inline_code(sample.error)}")
    parts = [f"## Task {inline_code(sample.task)}\n\n", "".join(f"* {fact}\n" for fact in facts), "\n"]
    parts.append(_block("Prompt", "prompt", sample.prompt, sample))
    parts.append(_block("Completion", "completion", sample.completion, sample))
    if sample.program is None:
        parts.append("No program could be built from this completion.\n\n")
    else:
        parts.append(_block("Program", "program", sample.program, sample, language="python"))
    if sample.tests:
        parts.append("Tests\n\n")
        for test in sample.tests:
            hidden = " (hidden)" if test.hidden else ""
            message = f": {inline_code(test.message)}" if test.message else ""
            parts.append(f"* {inline_code(test.outcome)} {inline_code(test.name)}{hidden}{message}\n")
        parts.append("\n")
    for title, name in (("Standard output", "stdout"), ("Standard error", "stderr")):
        if text := getattr(sample, name):
            parts.append(_block(title, name, text, sample))
    return "".join(parts)


def read_rollouts(directory: Path) -> tuple[list[RolloutSample], list[str]]:
    """All samples of a run, and a text for each line that could not be read (a crash tears the last one)."""
    samples: list[RolloutSample] = []
    problems: list[str] = []
    try:
        data = (directory / JSONL_NAME).read_bytes()
    except FileNotFoundError:
        return [], []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            problems.append(f"{JSONL_NAME} line {number} is torn ({len(line)} bytes)")
            continue
        try:
            samples.append(msgspec.json.decode(line, type=RolloutSample))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(f"{JSONL_NAME} line {number} cannot be read: {error}")
    return samples, problems


def number_text(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _block(title: str, name: str, text: str, sample: RolloutSample, language: str = "") -> str:
    left_out = sample.cut.get(name, 0)
    note = f" (cut, {left_out} more characters)" if left_out else ""
    return f"{title}{note}\n\n{fenced(text, language)}\n"
