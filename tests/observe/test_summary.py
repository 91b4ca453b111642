"""summary.json has exactly the documented keys."""

import json
from pathlib import Path

import pytest

from dockyard_actors.observe.metrics import EvalRecord, MetricsLog
from dockyard_actors.observe.summary import EvalPoint, LedgerCounts, PassRates, read_summary, write_summary
from tests.observe.samples import summary

KEYS = [
    "status",
    "cause",
    "steps",
    "wall_s",
    "engine",
    "transports",
    "isolation",
    "seed",
    "mode",
    "model",
    "pass_rate",
    "gain",
    "evaluations",
    "ledger",
    "filtered_by_cause",
    "failed_by_cause",
    "restarts",
    "tokens",
    "warnings",
]


def test_the_file_has_exactly_the_documented_keys(tmp_path: Path):
    data = json.loads(write_summary(tmp_path / "summary.json", summary()).read_text())
    assert list(data) == KEYS
    assert list(data["transports"]) == ["control", "data", "weights"]
    assert data["pass_rate"] == {
        "train_t1": [0.2, 0.5],
        "train_greedy": [None, None],
        "heldout_t1": [0.1, None],
        "heldout_greedy": [None, None],
    }
    assert data["gain"] == dict.fromkeys(data["pass_rate"])
    assert list(data["ledger"]) == ["issued", "trained", "expired", "filtered", "failed", "in_flight"]
    assert list(data["tokens"]) == ["generated", "trained"]


def test_what_is_written_is_read_back_and_a_missing_file_is_none(tmp_path: Path):
    written = summary(status="failed", cause="trainer: killed by signal 9", warnings=("weak",))
    assert read_summary(write_summary(tmp_path / "summary.json", written)) == written
    assert read_summary(tmp_path / "other.json") is None


def test_a_summary_of_before_gains_were_known_is_read_as_having_none(tmp_path: Path):
    path = write_summary(tmp_path / "summary.json", summary())
    data = json.loads(path.read_text())
    del data["gain"]
    path.write_text(json.dumps(data))
    assert read_summary(path) == summary()


@pytest.mark.parametrize(("failed", "balanced"), [(0, True), (1, False)])
def test_an_unbalanced_ledger_says_so(failed: int, balanced: bool):
    counts = LedgerCounts(issued=5, trained=3, expired=1, in_flight=1, failed=failed)
    assert counts.balanced == balanced
    assert ("NOT BALANCED" in counts.text()) != balanced


def test_pass_rates_come_from_the_evaluations_of_the_metrics():
    def rate(step: int, value: float) -> EvalRecord:
        return EvalRecord(step=step, split="heldout", mode="greedy", pass_rate=value, samples=1, tasks=1, seconds=1.0)

    log = MetricsLog(evals=(rate(0, 0.1), rate(4, 0.2), rate(8, 0.3)))
    assert PassRates.of(log) == PassRates(heldout_greedy=(0.1, 0.3))
    assert [(point.step, point.pass_rate) for point in EvalPoint.beside(log)] == [(4, 0.2)]
