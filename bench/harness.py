"""What every benchmark shares: options, alternating rounds, medians, and the form of a result.
Promises that both sides of a comparison ran in turn in the same process, so that a ratio means something on a busy machine.
Knows no benchmark.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict


@dataclass(frozen=True)
class Options:
    """rounds: of each side, in turn. size: `tiny` only shows that the benchmark runs. threads: of both sides.
    peers: `none` leaves other software out, which may take long to start."""

    rounds: int = 5
    size: Literal["full", "tiny"] = "full"
    threads: int = 1
    peers: Literal["all", "none"] = "all"

    def __post_init__(self) -> None:
        for name in ("rounds", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)!r} must be >= 1")


class Figure(TypedDict):
    """value: None when it could not be measured; `detail` then says why under "reason"."""

    value: float | None
    unit: str
    detail: dict[str, Any]


Figures = dict[str, Figure]


@dataclass(frozen=True)
class Span:
    """Seconds of one round: on the clock, and of this process on all cores."""

    wall: float
    cpu: float


def figure(value: float, unit: str, **detail: Any) -> Figure:
    return {"value": float(f"{value:.4g}"), "unit": unit, "detail": detail}


def absent(unit: str, reason: str) -> Figure:
    return {"value": None, "unit": unit, "detail": {"reason": reason}}


def missing_peer(module: str) -> str | None:
    """Why a peer cannot be measured, or None when it is installed."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"{module} is not installed: make setup EXTRAS=bench"


def note(text: str) -> None:
    """Progress, for people; results alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


def timed(work: Callable[[], object]) -> Span:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Span(time.perf_counter() - wall, time.process_time() - cpu)


def alternate(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[Span]]:
    """Each side once untimed, then `rounds` times A B A B. Returns the spans of each side, one per round."""
    for name, work in sides.items():
        note(f"  warming {name}: {timed(work).wall:.2f} s")
    spans: dict[str, list[Span]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, work in sides.items():
            spans[name].append(timed(work))
        note(f"  round {number + 1}: " + ", ".join(f"{name} {spans[name][-1].wall:.2f} s" for name in sides))
    return spans


def ratio(slow: Sequence[Span], fast: Sequence[Span], clock: Literal["wall", "cpu"] = "wall") -> float:
    """Median over the rounds of slow / fast, each pair of the same round."""
    return statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in zip(slow, fast, strict=True))


def median(spans: Sequence[Span], clock: Literal["wall", "cpu"] = "wall") -> float:
    return statistics.median(getattr(span, clock) for span in spans)
