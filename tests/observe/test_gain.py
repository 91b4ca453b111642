"""Gains are paired by task, and their interval is Student's."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard_actors.observe.gain import Gains, paired_gain, t_cdf, t_quantile
from dockyard_actors.observe.metrics import EvalRecord, MetricsLog

RATES = st.floats(0, 1)


def record(step: int, by_task: dict[str, float | None], split: str = "heldout", mode: str = "t1") -> EvalRecord:
    rates = [rate for rate in by_task.values() if rate is not None]
    return EvalRecord(
        step=step,
        split=split,  # type: ignore[arg-type]
        mode=mode,  # type: ignore[arg-type]
        pass_rate=sum(rates) / len(rates) if rates else None,
        samples=8 * len(rates),
        tasks=len(rates),
        seconds=1.0,
        by_task=by_task,
    )


def density(x: np.ndarray, degrees: int) -> np.ndarray:
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return np.exp(log_scale - (degrees + 1) / 2 * np.log1p(x * x / degrees))


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 15, 31, 63, 200])
@pytest.mark.parametrize("t", [0.1, 1.0, 1.7, 6.0])
def test_the_distribution_is_the_integral_of_its_density(t: float, degrees: int):
    x = np.linspace(0, t, 20_001)
    assert t_cdf(t, degrees) == pytest.approx(0.5 + np.trapezoid(density(x, degrees), x), abs=1e-8)
    assert t_cdf(-t, degrees) == pytest.approx(1 - t_cdf(t, degrees), abs=1e-12)


# NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2: upper critical values of Student's t, 0.95.
@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 6.314), (2, 2.920), (3, 2.353), (9, 1.833), (30, 1.697), (63, 1.669), (100, 1.660)]
)
def test_quantiles_are_those_of_the_tables(degrees: int, value: float):
    assert t_quantile(0.95, degrees) == pytest.approx(value, abs=5e-4)


@given(st.floats(0.5, 0.999), st.integers(1, 100))
def test_a_quantile_is_where_the_distribution_reaches_p(p: float, degrees: int):
    assert t_cdf(t_quantile(p, degrees), degrees) == pytest.approx(p, abs=1e-9)


@pytest.mark.parametrize(("p", "degrees"), [(0.4, 3), (1.0, 3), (0.95, 0)])
def test_a_quantile_of_nothing_is_refused(p: float, degrees: int):
    with pytest.raises(ValueError, match="t_quantile"):
        t_quantile(p, degrees)


@given(st.lists(st.tuples(RATES, RATES), min_size=2, max_size=40), st.randoms())
def test_the_interval_is_the_t_interval_of_the_differences_in_any_order(pairs, rng):
    before = {f"t{i}": a for i, (a, _) in enumerate(pairs)}
    names = list(before)
    rng.shuffle(names)
    gain = paired_gain(before, {name: pairs[int(name[1:])][1] for name in names})
    assert gain is not None
    d = np.array([b - a for a, b in pairs])
    half = t_quantile(0.95, len(d) - 1) * d.std(ddof=1) / math.sqrt(len(d))
    assert gain.gain == pytest.approx(d.mean(), abs=1e-12)
    assert gain.low == pytest.approx(max(-1, d.mean() - half), abs=1e-9)
    assert gain.high == pytest.approx(min(1, d.mean() + half), abs=1e-9)
    assert gain.after - gain.before == pytest.approx(gain.gain, abs=1e-12)
    assert gain.low - 1e-12 <= gain.gain <= gain.high + 1e-12


def test_nine_of_ten_intervals_hold_the_true_change():
    rng = np.random.default_rng(5)
    trials, n, truth = 2000, 12, 0.05
    held = 0
    for _ in range(trials):
        hard = rng.uniform(0.2, 0.8, n)  # how hard a task is differs far more than what training changes
        gain = paired_gain(dict(enumerate(hard)), dict(enumerate(hard + rng.normal(truth, 0.1, n))))  # type: ignore[arg-type]
        assert gain is not None
        assert gain.low is not None
        assert gain.high is not None
        held += gain.low <= truth <= gain.high
    assert 0.87 < held / trials < 0.93


def test_only_tasks_judged_on_both_sides_count():
    gain = paired_gain({"a": 0.0, "b": 0.5, "c": 1.0, "d": None}, {"a": 0.5, "b": 0.5, "d": 1.0, "e": 0.0})
    assert gain is not None
    assert (gain.tasks, gain.unpaired) == (2, 3)
    assert (gain.before, gain.after, gain.gain) == (0.25, 0.5, 0.25)


def test_one_task_has_a_gain_and_no_interval():
    gain = paired_gain({"a": 0.25}, {"a": 1.0})
    assert gain is not None
    assert (gain.gain, gain.low, gain.high, gain.interval()) == (0.75, None, None, "–")


@pytest.mark.parametrize(
    ("before", "after"), [({}, {}), ({"a": 0.5}, {}), ({"a": 0.5}, {"b": 0.5}), ({"a": None}, {"a": 1.0})]
)
def test_no_common_task_is_no_gain(before, after):
    assert paired_gain(before, after) is None


def test_gains_compare_the_last_evaluation_before_with_the_last_one_after():
    log = MetricsLog(
        evals=(
            record(0, {"a": 0.9, "b": 0.9}),
            record(0, {"a": 0.0, "b": 0.5}),
            record(5, {"a": 0.9, "b": 0.9}),
            record(9, {"a": 0.5, "b": 0.5}),
            record(0, {"x": 0.5}, split="train"),
            record(9, {"x": 0.5}, mode="greedy"),
        )
    )
    gains = Gains.of(log)
    assert gains.heldout_t1 is not None
    assert (gains.heldout_t1.gain, gains.heldout_t1.tasks) == (0.25, 2)
    assert gains.train_t1 is None
    assert gains.heldout_greedy is None
    assert gains.train_greedy is None


def test_evaluations_without_rates_by_task_have_no_gain():
    log = MetricsLog(evals=(record(0, {}), record(9, {"a": 1.0})))
    assert Gains.of(log) == Gains()
