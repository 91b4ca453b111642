"""How much training changed pass@1, and how sure that is: the mean change over tasks with its two-sided 90 % interval.
Promises a paired comparison: only tasks judged both before and after count, each against itself. Does not know where rates come from.

The interval is Student's t on the per-task differences d: mean(d) ± t(0.95, n - 1)·sd(d)/√n. Pairing the questions is what E. Miller, "Adding
Error Bars to Evals" (arXiv 2411.00640), advises for two models on the same questions. It says how the change would vary over other tasks drawn
like these, not over other seeds of training. With tens of tasks it is approximate, and rather too narrow than too wide (Bowyer et al.,
arXiv 2503.01747).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from dockyard_actors.observe.metrics import MetricsLog

CONFIDENCE = 0.9


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Change of pass@1 over the tasks that were judged before and after, as a share (0.1: ten points)."""

    tasks: int  # paired ones
    unpaired: int  # tasks judged only once: left out
    before: float  # mean over the paired tasks
    after: float
    gain: float
    low: float | None  # two-sided interval of CONFIDENCE; None with fewer than two tasks
    high: float | None

    def interval(self) -> str:
        """`+0.031 to +0.209`; a dash when there is none."""
        return "–" if self.low is None or self.high is None else f"{self.low:+.3f} to {self.high:+.3f}"


class Gains(msgspec.Struct, frozen=True, kw_only=True):
    """By split and sampling mode, as `PassRates`; None where a side or its rates by task are missing."""

    train_t1: Gain | None = None
    train_greedy: Gain | None = None
    heldout_t1: Gain | None = None
    heldout_greedy: Gain | None = None

    @classmethod
    def of(cls, log: MetricsLog) -> Gains:
        """Of the evaluations that `MetricsLog.eval_pair` compares: the last at step 0 and the last after a step."""
        found: dict[str, Gain | None] = {}
        for name in cls.__struct_fields__:
            before, after = log.eval_records(*name.split("_"))
            found[name] = paired_gain(before.by_task, after.by_task) if before and after else None
        return cls(**found)


def paired_gain(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> Gain | None:
    """The gain from rates by task (in 0 … 1, None: no verdict). None when no task has both.

    When every difference is the same the interval has no width: the tasks then say nothing of how others would differ.
    """
    old = {task: rate for task, rate in before.items() if rate is not None}
    new = {task: rate for task, rate in after.items() if rate is not None}
    tasks = sorted(old.keys() & new.keys())
    if not tasks:
        return None
    n = len(tasks)
    differences = [new[task] - old[task] for task in tasks]
    gain = math.fsum(differences) / n
    low = high = None
    if n > 1:
        variance = math.fsum((d - gain) ** 2 for d in differences) / (n - 1)
        half = t_quantile((1 + CONFIDENCE) / 2, n - 1) * math.sqrt(variance / n)
        low, high = max(-1.0, gain - half), min(1.0, gain + half)
    return Gain(
        tasks=n,
        unpaired=len(old.keys() ^ new.keys()),
        before=math.fsum(old[task] for task in tasks) / n,
        after=math.fsum(new[task] for task in tasks) / n,
        gain=gain,
        low=low,
        high=high,
    )


def t_cdf(t: float, degrees: int) -> float:
    """P(T ≤ t) of Student's t with `degrees` ≥ 1 degrees of freedom.

    The finite sums of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 (odd) and 26.7.4 (even).
    """
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = total = cosine if odd else 1.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if odd:
        total = 2 / math.pi * (angle + (sine * total if degrees > 1 else 0.0))
        return 0.5 + total / 2
    return 0.5 + sine * total / 2


def t_quantile(p: float, degrees: int) -> float:
    """The t with P(T ≤ t) = `p`, for 0.5 ≤ p < 1. Raises ValueError for other p or degrees < 1."""
    if not 0.5 <= p < 1 or degrees < 1:
        raise ValueError(f"t_quantile: p = {p} must be in [0.5, 1) and degrees = {degrees} at least 1")
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < p:
        high *= 2
    for _ in range(60):  # halves to the last bit of a double
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < p else (low, middle)
    return high
