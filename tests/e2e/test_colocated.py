"""Trainer and engine by turns in real processes: the run learns exactly what it would have learnt otherwise, and survives a kill of either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dockyard_actors.observe.idle import read_trace
from tests.e2e.toy import Launched, inspect_ledger, up

SYNC = ("grpo.mode=sync", "correction.kind=none", "eval.before=false")
CALLS = {"trainer": ("optimizer.onload", "optimizer.offload"), "rollout-0": ("sync.sleep", "sync.wake up")}


def finished(run: Launched, steps: int) -> dict:
    """The summary of a run that completed with an exact ledger."""
    try:
        summary = run.finish()
        assert run.process.returncode == 0, run.output()
        assert (summary["status"], summary["steps"]) == ("completed", steps)
        code, audit = inspect_ledger(run.run)
        assert code == 0
        assert audit["exact"]
        assert audit["counts"]["in_flight"] == 0
        return summary
    finally:
        run.end()


def learnt(run: Launched) -> list[tuple[float, float, float]]:
    lines = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"], line["reward_mean"]) for line in lines if line["kind"] == "step"]


@pytest.mark.slow
def test_by_turns_a_run_learns_bit_for_bit_what_it_learns_side_by_side(tmp_path: Path) -> None:
    by_turns, beside = (
        up(tmp_path, *SYNC, f"weight_sync.colocated={on}", f"eval.after={on}", name=name)
        for on, name in (("true", "turns"), ("false", "beside"))
    )
    finished(by_turns, 8)
    finished(beside, 8)
    assert learnt(by_turns) == learnt(beside)
    assert any(norm > 0 for _, norm, _ in learnt(by_turns))
    assert json.loads((by_turns.run / "summary.json").read_text())["pass_rate"], (
        "it was evaluated by an engine that had slept"
    )


def test_nothing_is_generated_while_the_trainer_steps_and_every_turn_is_measured(tmp_path: Path) -> None:
    run = up(tmp_path, *SYNC, "weight_sync.colocated=true", "eval.after=false", "grpo.max_num_steps=20")
    finished(run, 20)
    own = read_trace(run.run / "trace.json").own
    spans = {
        name: [span.span for span in own if (span.role, span.span.name) == (role, name) and span.span.busy]
        for role, name in (("trainer", "train"), ("rollout-0", "generate"), *((r, c) for r in CALLS for c in CALLS[r]))
    }
    for calls in CALLS.values():
        for call in calls:
            assert all(span.args["bytes_before"] > 0 and span.args["bytes_after"] > 0 for span in spans[call]), call
    for asleep, step, awake in zip(spans["sync.sleep"], spans["train"], spans["sync.wake up"], strict=False):
        assert asleep.end_us <= step.start_us
        assert step.end_us <= awake.start_us
        assert not [g for g in spans["generate"] if g.end_us > asleep.end_us and g.start_us < awake.start_us]
    assert len(spans["optimizer.onload"]) == len(spans["train"]) == 20
    assert len(spans["optimizer.offload"]) == 20 + 1, "and once when it had loaded"
    assert min(len(spans[name]) for name in ("generate", *CALLS["rollout-0"])) >= 5, "what it did last it cannot tell"


@pytest.mark.slow
def test_a_kill_of_the_sleeping_engine_or_of_the_trainer_it_sleeps_for_costs_no_lease(tmp_path: Path) -> None:
    run = up(
        tmp_path,
        *SYNC,
        "weight_sync.colocated=true",
        "eval.after=false",
        "grpo.max_num_steps=16",
        "observe.log_level=DEBUG",
    )
    log = run.run / "logs" / "rollout-0.log"
    for role in ("rollout", "trainer"):
        steps = run.wait_for("a step", run.steps)
        turns = log.read_bytes().count(b"sync phase sleep")
        run.wait_for("a sleeping engine", lambda turns=turns: log.read_bytes().count(b"sync phase sleep") > turns)
        run.kill(role)
        if role == "rollout":
            run.wait_for("steps behind the kill", lambda steps=steps: run.steps() > steps + 2)
    summary = finished(run, 16)
    assert (summary["restarts"]["rollout-0"], summary["restarts"]["trainer"]) == (1, 1)
    assert summary["ledger"]["trained"] + summary["ledger"]["filtered"] == 16 * 4
