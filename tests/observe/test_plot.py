"""reward.png exists and shows something for every run, however it ended."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from dockyard_actors.observe.metrics import EvalRecord, MetricsWriter
from dockyard_actors.observe.plot import _spread, reward_png, smoothed
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.observe.summary import write_summary
from tests.observe.samples import step_record, summary


def evaluations(writer: MetricsWriter, step: int, rate: float | None) -> None:
    for split in ("train", "heldout"):
        for mode in ("t1", "greedy"):
            writer.write(EvalRecord(step=step, split=split, mode=mode, pass_rate=rate, samples=8, tasks=4, seconds=1.0))


@pytest.mark.parametrize("steps", [0, 1, 2, 30])
@pytest.mark.parametrize("evaluated", [False, True])
def test_any_number_of_steps_makes_a_picture(tmp_path: Path, steps: int, evaluated: bool):
    with RunDir.create(tmp_path / "r") as run, MetricsWriter(run.metrics) as writer:
        if evaluated:
            evaluations(writer, 0, 1.0)
        for step in range(1, steps + 1):
            writer.write(step_record(step, reward_mean=float("nan") if step % 7 == 0 else step / 30))
        if evaluated and steps:
            evaluations(writer, steps, 1.0)
        assert reward_png(run) == run.plot
        pixels = imread(run.plot)
        assert pixels.shape[0] * pixels.shape[1] > 300_000
        assert np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0).shape[0] > 20
        assert not [p for p in run.path.iterdir() if p.name.startswith(".")]


def test_a_crashed_run_with_torn_metrics_and_a_hostile_cause_is_drawn(tmp_path: Path):
    with RunDir.create(tmp_path / "r") as run, MetricsWriter(run.metrics) as writer:
        writer.started(model="$\\frac{", mode="\x1b[31m")
        writer.write(step_record(1, reward_mean=None, pass_rate=None))
        writer.write(step_record(2, reward_mean=-3.0))
        evaluations(writer, 0, None)
    with run.metrics.open("ab") as file:
        file.write(b'{"kind"')
    write_summary(run.summary, summary(status="failed", cause="$\\x{" * 50, model="$", isolation="weak"))
    assert reward_png(tmp_path / "r").stat().st_size > 10_000
    run.summary.write_text("{")
    reward_png(tmp_path / "r")


def test_a_missing_run_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        reward_png(tmp_path / "none")


def test_smoothing_keeps_length_and_constants_and_skips_gaps():
    assert smoothed([0.5] * 9, 5) == [0.5] * 9
    assert smoothed([0.0, None, 1.0], 3) == [0.0, 0.5, 1.0]
    assert np.isnan(smoothed([None], 3)).all()


@pytest.mark.parametrize("places", [[1.0] * 4, [0.0] * 4, [0.2, 0.21, 0.9, 0.95], [0.5], [], [0.66, 0.6, 0.43, 0.41]])
def test_labels_keep_their_distance_their_order_and_stay_below_the_title(places: list[float]):
    spread = _spread(places, 0.1)
    assert all(place <= 1.0 + 1e-9 for place in spread)
    ordered = [spread[i] for i in sorted(range(len(places)), key=lambda i: places[i])]
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(ordered))
