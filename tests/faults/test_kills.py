"""SIGKILL of any role in mid-run: the run reaches its end with an exact ledger and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dockyard_actors.runtime.rundir import RuntimeDir
from tests.e2e.toy import inspect_ledger, up, write_config

STEPS = 10


@pytest.mark.parametrize(
    "role",
    [
        "rollout",
        "buffer",
        "trainer",
        "controller",
        *(pytest.param(r, marks=pytest.mark.slow) for r in ("broker", "executor")),
    ],
)
def test_a_killed_role_costs_nothing_but_time(tmp_path: Path, role: str) -> None:
    run = up(tmp_path, f"grpo.max_num_steps={STEPS}", "eval.before=false", "eval.after=false", "eval.samples=1")
    try:
        run.wait_for("step 4", lambda: run.steps() >= 4)
        pid = run.kill(role)
        summary = run.finish()
        assert run.process.returncode == 0, run.output()
        assert (summary["status"], summary["steps"]) == ("completed", STEPS)
        assert sum(summary["restarts"].values()) == 1, summary["restarts"]
        code, audit = inspect_ledger(run.run)
        assert code == 0
        assert audit["counts"] == summary["ledger"]
        assert summary["ledger"]["in_flight"] == 0
        assert summary["ledger"]["issued"] == STEPS * 4 + summary["ledger"]["failed"] + summary["ledger"]["expired"]
        assert not Path(f"/proc/{pid}").exists()
    finally:
        run.end()


def test_a_trainer_killed_after_its_checkpoint_rolls_back_only_what_came_later(tmp_path: Path) -> None:
    run = up(tmp_path, f"grpo.max_num_steps={STEPS}", "checkpoint.every=4", "eval.before=false", "eval.after=false")
    try:
        run.wait_for("step 6", lambda: run.steps() >= 6)
        run.kill("trainer")
        summary = run.finish()
        assert summary["status"] == "completed", run.output()
        events = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
        resumed = [event for event in events if event["kind"] == "event" and event["name"] == "resumed"]
        assert [event["fields"]["step"] for event in resumed] == [4]
        versions = [event["version"] for event in events if event["kind"] == "step"]
        assert len(versions) == len(set(versions)), "a weight version never repeats, across a restart too"
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_a_role_that_somebody_else_terminates_is_restarted_like_one_that_crashed(tmp_path: Path, role: str) -> None:
    run = up(tmp_path, f"grpo.max_num_steps={STEPS}", "eval.before=false", "eval.after=false")
    try:
        run.wait_for("step 3", lambda: run.steps() >= 3)
        run.kill(role, signal.SIGTERM)
        summary = run.finish()
        assert (summary["status"], summary["steps"]) == ("completed", STEPS), run.output()
        assert sum(summary["restarts"].values()) == 1, summary["restarts"]
        assert inspect_ledger(run.run)[0] == 0
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["rollout", "executor", "trainer"])
def test_a_role_killed_during_an_evaluation_costs_only_time(tmp_path: Path, role: str) -> None:
    run = up(tmp_path, "grpo.max_num_steps=3", "eval.samples=64")
    try:
        run.wait_for("the evaluation", lambda: "evaluating before: train t1" in run.output())
        run.kill(role)
        summary = run.finish()
        assert summary["status"] == "completed", run.output()
        assert all(rate is not None for pair in summary["pass_rate"].values() for rate in pair)
        assert inspect_ledger(run.run)[0] == 0
    finally:
        run.end()


def test_a_stopped_role_is_found_hung_and_replaced(tmp_path: Path) -> None:
    run = up(tmp_path, f"grpo.max_num_steps={STEPS}", "supervision.hang_s=3", "eval.before=false", "eval.after=false")
    try:
        run.wait_for("step 3", lambda: run.steps() >= 3)
        run.kill("buffer", signal.SIGSTOP)
        summary = run.finish()
        assert summary["status"] == "completed", run.output()
        assert summary["restarts"]["buffer"] == 1
        assert inspect_ledger(run.run)[0] == 0
    finally:
        run.end()


@pytest.mark.slow
def test_a_stopped_executor_is_found_hung_and_replaced(tmp_path: Path) -> None:
    run = up(tmp_path, f"grpo.max_num_steps={STEPS}", "supervision.hang_s=3", "eval.before=false", "eval.after=false")
    try:
        run.wait_for("step 3", lambda: run.steps() >= 3)
        run.kill("executor", signal.SIGSTOP)
        summary = run.finish()
        assert summary["status"] == "completed", run.output()
        assert summary["restarts"]["executor"] == 1
        assert inspect_ledger(run.run)[0] == 0
    finally:
        run.end()


def test_a_closed_terminal_drains_and_leaves_a_run_that_resumes(tmp_path: Path) -> None:
    run = up(tmp_path, "grpo.max_num_steps=500", "eval.before=false")
    try:
        run.wait_for("step 2", lambda: run.steps() >= 2)
        run.process.send_signal(signal.SIGHUP)
        summary = run.finish()
        assert (run.process.returncode, summary["status"]) == (130, "interrupted"), run.output()
        assert inspect_ledger(run.run)[0] == 0
    finally:
        run.end()


def test_a_run_whose_reader_is_gone_goes_on_to_its_end(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    command = ["up", str(config), f"run.dir={tmp_path / 'run'}", "eval.before=false", "eval.after=false"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dockyard_actors.cli", *command], stdout=writing, timeout=240, check=False
        )
    finally:
        os.close(writing)
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
    assert "nobody reads the output" in (tmp_path / "run" / "logs" / "agent.log").read_text()


def test_a_second_ctrl_c_cuts_at_once_and_leaves_a_run_that_resumes(tmp_path: Path) -> None:
    run = up(tmp_path, "grpo.max_num_steps=500", "eval.before=false")
    try:
        run.wait_for("step 2", lambda: run.steps() >= 2)
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGINT)
        summary = run.finish()
        assert run.process.returncode == 130, run.output()
        assert summary["status"] == "interrupted"
        assert inspect_ledger(run.run)[0] == 0
    finally:
        run.end()


def test_killing_the_agent_itself_leaves_no_role_behind(tmp_path: Path) -> None:
    run = up(tmp_path, "grpo.max_num_steps=500", "eval.before=false")
    run.wait_for("step 1", lambda: run.steps() >= 1)
    pids = [run.role_pid(role) for role in ("controller", "trainer", "rollout", "buffer", "broker", "executor")]
    run.process.kill()
    run.process.wait(30)
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=15)
    assert not alive
    RuntimeDir().close()  # as the next agent does: sweeps the directory that a killed one could not remove
    assert inspect_ledger(run.run)[0] == 0
