"""What runs beside training: evaluations of pinned versions, weights that come in mid-generation, and a timeline that shows it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from dockyard_actors.observe.idle import idle_report, read_trace
from tests.e2e.toy import Launched, inspect_ledger, up

WAY = {"lease", "generate", "score", "push", "buffered", "train", "sync"}


def records(run: Launched, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def finished(run: Launched) -> dict:
    try:
        summary = run.finish()
        assert run.process.returncode == 0, run.output()
        assert inspect_ledger(run.run)[0] == 0
        return summary
    finally:
        run.end()


def test_pinned_versions_are_evaluated_while_training_goes_on(tmp_path: Path) -> None:
    run = up(tmp_path, "grpo.max_num_steps=16", "eval.every=4", "eval.before=false", "eval.after=false")
    summary = finished(run)
    assert summary["restarts"] == {} or sum(summary["restarts"].values()) == 0
    evals = records(run, "eval")
    steps = {record["step"] for record in evals}
    assert steps, "something was evaluated"
    assert all(0 < step < 16 for step in steps)
    for step in steps:
        assert {(r["split"], r["mode"]) for r in evals if r["step"] == step} == {
            (split, mode) for split in ("train", "heldout") for mode in ("t1", "greedy")
        }
    assert summary["ledger"]["issued"] == 16 * 4 + summary["ledger"]["expired"], "no evaluation is a lease"


@pytest.mark.parametrize("pause", ["wait", pytest.param("abort", marks=pytest.mark.slow)])  # every other test keeps
def test_every_pause_mode_trains_to_the_end_with_ages_within_bounds(tmp_path: Path, pause: str) -> None:
    run = up(
        tmp_path,
        "grpo.max_num_steps=12",
        f"weight_sync.pause={pause}",
        "weight_sync.timeout_s=400",
        "async_grpo.max_trajectory_age_steps=2",
        "eval.before=false",
        "eval.after=false",
    )
    finished(run)
    ages = [record["age_max"] for record in records(run, "step")]
    assert len(ages) == 12
    assert 0 < max(ages) <= 2


def test_the_timeline_shows_the_whole_way_of_every_trained_group(tmp_path: Path) -> None:
    run = up(tmp_path, "grpo.max_num_steps=6", "eval.before=false", "eval.after=false")
    summary = finished(run)
    trace = read_trace(run.run / "trace.json")
    assert trace.complete
    assert json.loads((run.run / "trace.json").read_text()), "strict JSON after the end"
    ways: dict[int, set[str]] = {}
    for own in trace.groups:
        ways.setdefault(own.span.lease, set()).add(own.span.name)
    whole = [lease for lease, names in ways.items() if names >= WAY]
    assert len(whole) >= summary["ledger"]["trained"] + summary["ledger"]["filtered"] - 4, (
        "all but those of the last step"
    )
    report = idle_report(run.run / "trace.json")
    assert report.training is not None
    assert {"trainer", "rollout-0", "broker"} <= set(report.training.roles)


@pytest.mark.vllm
def test_a_run_on_vllm_learns_as_one_on_hf(tmp_path: Path) -> None:
    run = up(tmp_path, "grpo.max_num_steps=25", "generation.engine=vllm", "generation.kv_cache_mib=32")
    summary = finished(run)
    before, after = summary["pass_rate"]["heldout_t1"]
    assert after > before + 0.15, summary["pass_rate"]
    assert summary["engine"] == "vllm"


@pytest.mark.vllm
def test_a_killed_vllm_engine_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as temporary:  # a short path, as sockets need
        monkeypatch.setenv("TMPDIR", temporary)
        run = up(
            tmp_path, "grpo.max_num_steps=12", "generation.engine=vllm", "generation.kv_cache_mib=32",
            "eval.before=false", "eval.after=false",
        )  # fmt: skip
        try:
            for name in ("vllm-model-*", "vllm_dist_*"):
                run.wait_for(f"an engine being opened ({name})", lambda name=name: list(Path(temporary).rglob(name)))
            run.kill("rollout")
            run.wait_for("step 2", lambda: run.steps() >= 2)
            run.kill("rollout")
        except BaseException:
            run.end()
            raise
        summary = finished(run)
        assert summary["restarts"]["rollout-0"] == 2
        assert summary["steps"] == 12
        assert not list(Path(temporary).rglob("*vllm*"))
