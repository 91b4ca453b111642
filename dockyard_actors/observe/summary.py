"""summary.json: how a run ended, in fixed keys that scripts may rely on.
Promises an atomic file with exactly the documented keys. Does not compute anything but before/after pairs from metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from dockyard_actors.observe.gain import Gains
from dockyard_actors.observe.metrics import MetricsLog
from dockyard_actors.observe.rundir import json_bytes, write_atomic

Pair = tuple[float | None, float | None]
"""(before, after) training; None where not measured."""

PAIRS = ("train_t1", "train_greedy", "heldout_t1", "heldout_greedy")


class Transports(msgspec.Struct, frozen=True, kw_only=True):
    control: str  # "zmq+ipc", "zmq+tcp"
    data: str  # "slab", "none"
    weights: str  # "shm"


class PassRates(msgspec.Struct, frozen=True, kw_only=True):
    """Pass@1 by split and sampling mode; `t1` is temperature 1 over several samples a task."""

    train_t1: Pair = (None, None)
    train_greedy: Pair = (None, None)
    heldout_t1: Pair = (None, None)
    heldout_greedy: Pair = (None, None)

    @classmethod
    def of(cls, log: MetricsLog) -> PassRates:
        return cls(**{name: log.eval_pair(*name.split("_")) for name in PAIRS})


class EvalPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation beside training: the pass rate of the weights that `step` made."""

    step: int
    split: str
    mode: str
    pass_rate: float | None
    tasks: int

    @staticmethod
    def beside(log: MetricsLog) -> tuple[EvalPoint, ...]:
        """Every evaluation that is neither the first one nor the last of its kind."""
        pairs = {name: log.eval_records(*name.split("_")) for name in PAIRS}
        return tuple(
            EvalPoint(step=e.step, split=e.split, mode=e.mode, pass_rate=e.pass_rate, tasks=e.tasks)
            for e in log.evals
            if e.step > 0 and e is not pairs[f"{e.split}_{e.mode}"][1]
        )


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt leases by class. Balanced: issued = trained + expired + filtered + failed + in_flight."""

    issued: int = 0
    trained: int = 0
    expired: int = 0
    filtered: int = 0
    failed: int = 0
    in_flight: int = 0

    @property
    def balanced(self) -> bool:
        return self.issued == self.trained + self.expired + self.filtered + self.failed + self.in_flight

    def text(self) -> str:
        """`issued 40 = trained 33 + expired 2 + …`; an unbalanced ledger says so."""
        line = (
            f"issued {self.issued} = trained {self.trained} + expired {self.expired} + filtered {self.filtered}"
            f" + failed {self.failed} + in flight {self.in_flight}"
        )
        return line if self.balanced else line.replace(" = ", " ≠ ", 1) + " (NOT BALANCED)"


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    generated: int = 0
    trained: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    status: Literal["completed", "interrupted", "failed"]
    cause: str | None  # the first cause of a failure, or why it was interrupted
    steps: int
    wall_s: float  # from start to exit, evaluations included
    engine: str
    transports: Transports
    isolation: str  # what the executor reported: "strong", "weak" …
    seed: int
    mode: str  # "sync" | "async"
    model: str
    pass_rate: PassRates
    gain: Gains = Gains()  # after − before with its paired 90 % interval
    evaluations: tuple[EvalPoint, ...] = ()  # those between `pass_rate`'s two
    ledger: LedgerCounts
    filtered_by_cause: dict[str, int]
    failed_by_cause: dict[str, int]
    restarts: dict[str, int]  # by role
    tokens: TokenCounts
    warnings: tuple[str, ...] = ()


def write_summary(path: Path, summary: Summary) -> Path:
    """Writes `summary` to `path` atomically. Returns the path."""
    return write_atomic(path, json_bytes(summary))


def read_summary(path: Path) -> Summary | None:
    """The summary at `path`, None when there is none. Raises msgspec.ValidationError for a file of another shape."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except FileNotFoundError:
        return None
