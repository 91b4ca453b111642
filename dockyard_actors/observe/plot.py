"""reward.png: the learning curve of a run and its evaluations before and after, drawn from metrics.jsonl alone.
Promises a picture for any run, also one of a single step or a crashed one. Does not touch matplotlib's global state, so any
process or thread may call it; matplotlib loads on the first call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dockyard_actors.observe.metrics import MetricsLog, read_metrics
from dockyard_actors.observe.rundir import RunDir, replacing
from dockyard_actors.observe.summary import Summary, read_summary
from dockyard_actors.observe.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: told apart by most colour-blind readers.
_PASS, _REWARD = "#0072B2", "#D55E00"
_EVALS = (
    ("heldout", "t1", "held-out T=1", "#009E73", "-", "o"),
    ("heldout", "greedy", "held-out greedy", "#009E73", "--", "s"),
    ("train", "t1", "train T=1", "#0072B2", "-", "o"),
    ("train", "greedy", "train greedy", "#0072B2", "--", "s"),
)
_LABEL_GAP = 0.052  # of the axis: two labels of 9 pt closer than this would overlap


def reward_png(run_dir: RunDir | Path | str) -> Path:
    """Draws the run's `reward.png`, replacing an older one. Returns its path. Raises FileNotFoundError without the directory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    if not run.path.is_dir():
        raise FileNotFoundError(f"{run.path} is no directory")
    log = read_metrics(run.metrics)
    figure = Figure(figsize=(11, 4.9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2.6, 1))
    _curves(left, log)
    _before_after(right, log)
    figure.suptitle(_title(run, log), fontsize=11.5, parse_math=False)
    with replacing(run.plot) as temporary:
        figure.savefig(temporary, format="png")
    return run.plot


def smoothed(values: Sequence[float | None], window: int) -> list[float]:
    """Centred mean over `window` steps (shorter at both ends), skipping missing values; NaN where all are missing."""
    array = np.array([math.nan if v is None else v for v in values], dtype=np.float64)
    half = window // 2
    means: list[float] = []
    for i in range(len(array)):
        near = array[max(0, i - half) : i + half + 1]
        known = near[~np.isnan(near)]
        means.append(float(known.mean()) if len(known) else math.nan)
    return means


def _curves(axes: Axes, log: MetricsLog) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("training step")
    axes.set_title("Training samples, each step", fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not log.steps:
        axes.text(0.5, 0.5, "no training step was recorded", ha="center", va="center", transform=axes.transAxes)
        axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[])
        return
    records = sorted(log.steps, key=lambda r: r.step)
    steps = [r.step for r in records]
    window = _window(len(steps))
    drawn: list[float] = []
    for name, values, colour in (
        ("mean reward", [r.reward_mean for r in records], _REWARD),
        ("pass rate", [r.pass_rate for r in records], _PASS),
    ):
        raw = [math.nan if v is None else v for v in values]
        drawn += [v for v in raw if not math.isnan(v)]
        if window > 1:
            axes.plot(steps, raw, color=colour, alpha=0.3, linewidth=1, marker=".", markersize=4)
            label = f"{name} (mean of {window} steps; dots: each step)"
            axes.plot(steps, smoothed(values, window), color=colour, linewidth=2.4, label=label)
        else:
            axes.plot(steps, raw, color=colour, linewidth=1.6, marker="o", markersize=5, label=name)
    _between(axes, log)
    low, high = min(drawn, default=0.0), max(drawn, default=1.0)
    if low >= 0.0 and high <= 1.0:
        axes.set_ylim(-0.02, 1.02)
        axes.set_ylabel("pass rate, mean reward")
    else:
        axes.set_ylabel("pass rate, mean reward (reward leaves 0–1)")
    axes.set_xlim(steps[0] - 0.5, max(steps[-1], steps[0] + 1) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.legend(loc="best", fontsize=8.5, framealpha=0.9)


def _between(axes: Axes, log: MetricsLog) -> None:
    """Evaluations taken while training went on; the first and the last stand in the other panel."""
    last = log.steps[-1].step
    for split, mode, name, colour, _, marker in _EVALS:
        points = [e for e in log.evals if e.split == split and e.mode == mode and 0 < e.step < last]
        points = [e for e in points if e.pass_rate is not None]
        if points:
            xs, ys = [e.step for e in points], [e.pass_rate or 0.0 for e in points]
            axes.plot(xs, ys, color=colour, marker=marker, linestyle="none", mfc="white", label=f"evaluation: {name}")


def _before_after(axes: Axes, log: MetricsLog) -> None:
    axes.set_title("Evaluations", fontsize=10, loc="left")
    axes.set(xlim=(-0.35, 2.75), ylim=(-0.02, 1.02), xticks=[0, 1], ylabel="pass rate")
    axes.set_xticklabels(["before", "after"])
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    ends: list[tuple[int, float, str, str]] = []
    missing: list[str] = []
    for split, mode, name, colour, line, marker in _EVALS:
        before, after = log.eval_pair(split, mode)
        if before is None and after is None:
            missing.append(name)
            continue
        points = [(x, y) for x, y in ((0, before), (1, after)) if y is not None]
        filled = colour if mode == "t1" else "white"
        style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 2, "marker": marker, "mfc": filled}
        axes.plot([x for x, _ in points], [y for _, y in points], **style, clip_on=False, zorder=3)
        if before is not None and after is not None:
            text = f"{name}\n{before:.2f} → {after:.2f} ({after - before:+.2f})"
        else:
            text = f"{name}\n{points[0][1]:.2f} ({'after' if before is None else 'before'} only)"
        ends.append((*points[-1], text, colour))
    column = max((x for x, *_ in ends), default=1) + 0.13  # beside the markers, also when only "before" is known
    places = _spread([y for _, y, _, _ in ends], 2 * _LABEL_GAP)
    for (_, _, text, colour), place in zip(ends, places, strict=True):
        axes.text(column, place, text, color=colour, fontsize=8, va="center", clip_on=False, linespacing=1.05)
    if not ends:
        axes.text(0.5, 0.5, "none recorded", ha="center", va="center", transform=axes.transAxes)
    elif missing:
        axes.set_xlabel(f"not measured: {', '.join(missing)}", fontsize=7.5)


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """`places` moved apart until every two are `gap` from each other: each crowd is spread evenly about its own middle.

    None ends above 1, where the panel's title is.
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    crowds: list[list[int]] = []
    for i in order:
        crowds.append([i])
        while (
            len(crowds) > 1
            and _middle(crowds[-1], places) - _middle(crowds[-2], places)
            < gap * (len(crowds[-1]) + len(crowds[-2])) / 2
        ):
            crowds[-2:] = [crowds[-2] + crowds[-1]]
    result = list(places)
    for crowd in crowds:
        lowest = _middle(crowd, places) - gap * (len(crowd) - 1) / 2
        for rank, i in enumerate(crowd):
            result[i] = lowest + gap * rank
    ceiling = 1.0
    for i in reversed(order):
        result[i] = min(result[i], ceiling)
        ceiling = result[i] - gap
    return result


def _middle(crowd: Sequence[int], places: Sequence[float]) -> float:
    return sum(places[i] for i in crowd) / len(crowd)


def _window(steps: int) -> int:
    """Steps to average over: an eighth of the run, odd, at most 15; 1 (no smoothing) for fewer than 6 steps."""
    return 1 if steps < 6 else min(15, max(3, steps // 8 | 1))


def _title(run: RunDir, log: MetricsLog) -> str:
    parts = [run.id]
    facts = log.facts
    summary = _summary(run)
    if summary is not None:
        facts = {**facts, "model": summary.model, "mode": summary.mode, "isolation": summary.isolation}
    parts += [str(facts[key]) for key in ("model", "algorithm", "mode") if facts.get(key)]
    last = log.steps[-1].step if log.steps else 0
    parts.append(f"{last} step" if last == 1 else f"{last} steps")
    if facts.get("isolation") == "weak":
        parts.append("WEAK ISOLATION")
    if summary is not None and summary.status != "completed":
        parts.append(summary.status + (f": {summary.cause}" if summary.cause else ""))
    elif summary is None:
        parts.append("running" if run.is_held() else "ended without a summary")
    return one_line(" · ".join(parts), 130)


def _summary(run: RunDir) -> Summary | None:
    try:
        return read_summary(run.summary)
    except (msgspec.DecodeError, UnicodeDecodeError):  # of another version; the picture needs only the metrics
        return None
