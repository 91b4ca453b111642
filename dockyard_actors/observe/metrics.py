"""metrics.jsonl: one JSON object a line, for every training step, evaluation and event of a run.
Promises lines that stay readable after a crash: each is written at once, a torn last one is cut on the next start and
reported by readers, and a number that is not finite becomes null with its reason. Does not know how a number was made.
"""

from __future__ import annotations

import math
import numbers
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from dockyard_actors.observe.text import encodable

PHASES = ("wait_batch", "logprobs", "train", "sync", "checkpoint")
"""Keys of `StepRecord.seconds`: where the trainer's wall time of a step went."""

Number = float | None
NotFinite = dict[str, str]
"""Path of a field (`loss`, `diagnostics.kl`) → "nan", "inf" or "-inf": why that field is null."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One optimizer step."""

    step: int  # 1 is the first
    version: int  # weight version that this step made
    reward_mean: Number  # over all scored samples of the batch's groups
    pass_rate: Number  # share of them that passed every test
    loss: Number
    grad_norm: Number  # before clipping
    lr: Number
    entropy: Number  # nats per token, of the sampled distribution
    age_mean: Number  # trainer version − oldest token version, over groups
    age_max: int | None
    tokens_trained: int  # completion tokens that entered the loss
    groups: int
    groups_no_signal: int  # of them, filtered because all rewards were equal
    tokens_per_s: Number  # trained, per second of the whole step
    seconds: dict[str, Number] = {}  # by phase, see PHASES
    diagnostics: dict[str, Any] = {}
    not_finite: NotFinite = {}
    time: float = 0.0  # seconds since the epoch; set by the writer


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="eval"):
    """One evaluation of one split in one sampling mode, after `step` steps (0: before training)."""

    step: int
    split: Literal["train", "heldout"]
    mode: Literal["t1", "greedy"]
    pass_rate: Number
    samples: int
    tasks: int
    seconds: Number
    by_task: dict[str, Number] = {}
    masked: int = 0  # samples without a verdict (infrastructure), left out of the rates
    not_finite: NotFinite = {}
    time: float = 0.0


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="event"):
    """Something that happened: a restart, a warning, the start. `name` is for programs, `text` for people."""

    name: str
    text: str = ""
    fields: dict[str, Any] = {}
    not_finite: NotFinite = {}
    time: float = 0.0


Record = StepRecord | EvalRecord | EventRecord
RESUMED = "resumed"
STARTED = "started"
TORN = "torn_line_cut"


class MetricsWriter:
    """Appends records to `path`, each with one write so that a crash tears at most the last line. One writer per file.

    A torn last line left by an earlier crash is cut when the writer opens, and an event says so.
    """

    def __init__(self, path: Path | str, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        cut = cut_torn_tail(self._fd)
        if cut:
            self.event(TORN, f"the last line was torn by a crash; {cut} bytes were cut", bytes=cut)

    def write(self, record: Record) -> None:
        """Writes one record. Raises TypeError, naming the field, for a value of a wrong type; nothing is written then."""
        fields = {key: value for key, value in msgspec.structs.asdict(record).items() if key != "not_finite"}
        if not record.time:
            fields["time"] = self._clock()
        not_finite: NotFinite = dict(record.not_finite)
        clean = {key: _clean(value, key, not_finite) for key, value in fields.items()}
        line = msgspec.json.encode(type(record)(**clean, not_finite=not_finite))
        try:
            msgspec.json.decode(line, type=Record)
        except msgspec.ValidationError as error:  # structs do not check their fields; an unreadable line helps nobody
            raise TypeError(f"metrics record {type(record).__name__}: {error}") from error
        write_all(self._fd, line + b"\n")

    def event(self, name: str, text: str = "", **fields: Any) -> None:
        self.write(EventRecord(name=name, text=text, fields=fields))

    def started(self, **facts: Any) -> None:
        """Says what runs (`model`, `mode`, `engine`, `isolation`, `seed`, `steps`): plot and inspect show these facts."""
        self.event(STARTED, fields_text(facts), **facts)

    def resumed(self, step: int) -> None:
        """Says that training goes on after `step`; readers drop what was recorded of later steps before this line."""
        self.event(RESUMED, f"training goes on after step {step}", step=step)

    def close(self) -> None:
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MetricsLog(msgspec.Struct, frozen=True, kw_only=True):
    """What metrics.jsonl says, in order of writing; of a step trained twice (after a rollback) the later record counts."""

    steps: tuple[StepRecord, ...] = ()
    evals: tuple[EvalRecord, ...] = ()
    events: tuple[EventRecord, ...] = ()
    problems: tuple[str, ...] = ()  # one text per line that could not be read
    torn: bool = False  # the last line lacks its end: a crash, or a write going on
    rolled_back: int = 0  # records dropped because a rollback made them void

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of the newest `started` event, empty when there is none."""
        started = [event.fields for event in self.events if event.name == STARTED]
        return started[-1] if started else {}

    def eval_pair(self, split: str, mode: str) -> tuple[Number, Number]:
        """(before, after): pass rates of the last evaluation at step 0 and of the last one after a step; None if absent."""
        before, after = self.eval_records(split, mode)
        return (before.pass_rate if before else None, after.pass_rate if after else None)

    def eval_records(self, split: str, mode: str) -> tuple[EvalRecord | None, EvalRecord | None]:
        """(before, after): the evaluations that `eval_pair` compares."""
        found: list[EvalRecord | None] = [None, None]
        for record in self.evals:
            if record.split == split and record.mode == mode:
                found[record.step > 0] = record
        return (found[0], found[1])


def read_metrics(path: Path | str) -> MetricsLog:
    """Reads the metrics of any run, also a running or crashed one. A missing file reads as empty with a problem named.

    Lines that cannot be decoded are skipped and listed in `problems`; a torn last line also sets `torn`.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return MetricsLog(problems=(f"{path} does not exist",))
    steps: dict[int, StepRecord] = {}
    evals: list[EvalRecord] = []
    events: list[EventRecord] = []
    problems: list[str] = []
    rolled_back = 0
    lines = data.split(b"\n")
    tail = lines.pop()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line, type=Record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(f"line {number} cannot be read: {error}")
            continue
        if isinstance(record, StepRecord):
            rolled_back += record.step in steps
            steps.pop(record.step, None)
            steps[record.step] = record
        elif isinstance(record, EvalRecord):
            evals.append(record)
        else:
            events.append(record)
            if record.name == RESUMED and isinstance(after := record.fields.get("step"), int):
                kept = [e for e in evals if e.step <= after]
                void = [step for step in steps if step > after]
                rolled_back += len(void) + len(evals) - len(kept)
                evals = kept
                for step in void:
                    del steps[step]
    if tail:
        problems.append(f"the last line is torn ({len(tail)} bytes without a line end)")
    return MetricsLog(
        steps=tuple(steps.values()),
        evals=tuple(evals),
        events=tuple(events),
        problems=tuple(problems),
        torn=bool(tail),
        rolled_back=rolled_back,
    )


def cut_torn_tail(fd: int) -> int:
    """Cuts what follows the last line end of an open file. Returns how many bytes that was."""
    size = os.fstat(fd).st_size
    end, chunk = size, 1 << 16
    while end > 0:
        start = max(0, end - chunk)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return size - end


def write_all(fd: int, data: bytes) -> None:
    """Writes all of `data`; the system writes it in one piece unless the disk is full or a signal cuts in."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def fields_text(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in fields.items())


def _clean(value: Any, path: str, not_finite: NotFinite) -> Any:
    """`value` as plain JSON data. NumPy and torch scalars become numbers; what is not finite becomes None with its reason."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {encodable(str(k)): _clean(v, f"{path}.{encodable(str(k))}", not_finite) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v, f"{path}[{i}]", not_finite) for i, v in enumerate(value)]
    if isinstance(value, numbers.Integral):
        return int(value)
    item = getattr(value, "item", None)  # NumPy bool and torch scalars
    if item is not None and not isinstance(value, numbers.Real):
        try:
            return _clean(item(), path, not_finite)
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"metrics field {path}: {type(value).__name__} is not a single number ({error})") from error
    if not isinstance(value, numbers.Real):
        raise TypeError(f"metrics field {path}: {type(value).__name__} is not JSON data or a number")
    number = float(value)
    if math.isfinite(number):
        return number
    not_finite[path] = "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    return None
