"""inspect reads every run: running, crashed, finished, damaged."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from dockyard_actors.observe.inspect import inspect_run, last_errors, render_inspection, render_rollouts
from dockyard_actors.observe.metrics import EvalRecord, MetricsWriter
from dockyard_actors.observe.rollouts import RolloutWriter
from dockyard_actors.observe.rundir import RunDir, RunDirError
from dockyard_actors.observe.summary import write_summary
from tests.observe.samples import rollout_sample, step_record, summary


@pytest.fixture
def run(tmp_path: Path):
    with RunDir.create(tmp_path / "r") as run:
        with MetricsWriter(run.metrics) as writer:
            writer.started(model="tiny", mode="async", isolation="weak")
            writer.write(EvalRecord(step=0, split="train", mode="t1", pass_rate=0.25, samples=8, tasks=4, seconds=1.0))
            writer.write(step_record(1))
            writer.write(step_record(2, loss=float("inf")))
        with RolloutWriter(run.rollouts) as writer:
            writer.write(rollout_sample(completion="\x1b[2J```"))
        yield run


def shown(report: dict) -> str:
    out = io.StringIO()
    render_inspection(report, Console(file=out, width=200))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out.getvalue())
    return out.getvalue()


def test_a_held_run_is_running_even_with_a_summary_from_before(run: RunDir):
    write_summary(run.summary, summary())
    report = inspect_run(run.path)
    assert report["state"] == "running"
    assert isinstance(report["pid"], int)
    assert "running (process" in shown(report)


def test_a_run_let_go_without_a_summary_is_crashed_and_known_from_its_metrics(run: RunDir):
    run.close()
    with run.metrics.open("ab") as file:
        file.write(b'{"kind":"st')
    report = inspect_run(run.path)
    assert (report["state"], report["step"], report["rollouts"]) == ("crashed", 2, 1)
    assert report["last_step"]["loss"] is None
    assert report["last_step"]["not_finite"] == {"loss": "inf"}
    assert report["pass_rate"]["train_t1"] == (0.25, None)
    assert report["ledger"] is None
    assert "torn" in report["problems"][-1]
    text = shown(report)
    assert "WEAK ISOLATION" in text
    assert "model=tiny" in text


def test_evaluations_beside_training_are_shown_by_step(run: RunDir):
    with MetricsWriter(run.metrics) as writer:
        for step, rate in ((10, 0.3125), (20, 0.4375), (30, 0.5625)):
            writer.write(
                EvalRecord(step=step, split="heldout", mode="t1", pass_rate=rate, samples=8, tasks=4, seconds=1.0)
            )
    report = inspect_run(run.path)
    assert [(point["step"], point["pass_rate"]) for point in report["evaluations"]] == [(10, 0.3125), (20, 0.4375)]
    text = shown(report)
    assert "beside training" in text
    assert re.search(r"^10 +0.3125", text, re.MULTILINE)


def test_a_finished_run_shows_its_summary(run: RunDir):
    write_summary(run.summary, summary(status="failed", cause="trainer: gave up"))
    run.close()
    report = inspect_run(run.path)
    assert report["state"] == "failed"
    assert report["ledger"]["issued"] == 10
    assert shown(report).rstrip().endswith("cause: trainer: gave up")


def test_a_paired_gain_is_shown_beside_the_rates(run: RunDir):
    with MetricsWriter(run.metrics) as writer:
        for step, rates in ((0, {"a": 0.0, "b": 0.5}), (2, {"a": 0.5, "b": 0.75})):
            writer.write(
                EvalRecord(
                    step=step, split="heldout", mode="t1", pass_rate=0.1, samples=8, tasks=2, seconds=1.0, by_task=rates
                )
            )
    report = inspect_run(run.path)
    assert report["gain"]["heldout_t1"]["gain"] == 0.375
    assert report["gain"]["train_t1"] is None
    assert re.search(r"heldout_t1 .*\+0\.375 +-0\.414 to \+1\.000 +2 *\n", shown(report))


def test_a_recounted_ledger_handed_in_is_what_is_shown(run: RunDir):
    report = inspect_run(run.path, ledger={"issued": 99, "balanced": False})
    assert "issued 99, balanced False" in shown(report)


def test_the_report_is_json(run: RunDir):
    write_summary(run.summary, summary())
    assert json.loads(json.dumps(inspect_run(run.path)))["facts"]["model"] == "tiny"


def test_a_damaged_summary_is_a_named_problem(run: RunDir):
    run.summary.write_text('{"status": "fine"}')
    run.close()
    report = inspect_run(run.path)
    assert report["state"] == "crashed"
    assert "summary.json" in report["problems"][0]


def test_a_run_that_died_before_its_first_line_is_still_readable(tmp_path: Path):
    RunDir.create(tmp_path / "r").close()
    report = inspect_run(tmp_path / "r")
    assert report["state"] == "crashed"
    assert "no training step recorded" in shown(report)


def test_something_else_than_a_run_is_refused(tmp_path: Path):
    with pytest.raises(RunDirError):
        inspect_run(tmp_path)


def test_reading_changes_nothing(run: RunDir):
    run.close()
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.path.rglob("*")}
    inspect_run(run.path)
    render_rollouts(run.path, Console(file=io.StringIO()))
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.path.rglob("*")} == before


def test_last_errors_are_error_records_and_the_raw_words_of_a_dying_process(run: RunDir):
    log = run.logs / "trainer.log"
    stamp = "2025-01-01T00:00:00.000Z"
    log.write_bytes(
        b"ValueError: long ago\n" * 5
        + f"{stamp} INFO trainer[7] a.b: an Error: that is none\n".encode()
        + f"{stamp} ERROR trainer[7] a.b: failed\\nTraceback\\nKeyError: 1\n".encode()
        + b"Traceback (most recent call last):\n  File x\n\x1b[31mtorch.OutOfMemoryError: no\n"
        + b"torch.OutOfMemoryError: \xff\n"
    )
    first, second, third = last_errors(log)
    assert first == "ValueError: long ago"
    assert "KeyError" in second
    assert third == "torch.OutOfMemoryError: \\xff"
    (run.logs / "quiet.log").write_text(f"{stamp} INFO quiet[8] a: fine\n")
    report = inspect_run(run.path)
    assert list(report["errors"]) == ["trainer"]
    assert "last errors of trainer" in shown(report)


def test_rollouts_are_printed_without_control_codes(run: RunDir):
    out = io.StringIO()
    assert render_rollouts(run.path, Console(file=out, width=100)) == 1
    assert "\\x1b[2J```" in out.getvalue()
    assert "\x1b" not in out.getvalue()
