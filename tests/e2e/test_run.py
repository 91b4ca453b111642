"""A whole run through the command line: real processes, real test runs, a model that learns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.toy import Launched, inspect_ledger, launch, up, write_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    directory = tmp_path_factory.mktemp("toy")
    write_config(directory)
    run = up(directory, "grpo.max_num_steps=25")
    run.finish()
    yield run
    run.end()


def summary_of(run: Launched) -> dict:
    return json.loads((run.run / "summary.json").read_text())


def test_a_run_completes_and_the_model_learns_from_real_verdicts(finished: Launched) -> None:
    summary = summary_of(finished)
    assert finished.process.returncode == 0, finished.output()
    assert (summary["status"], summary["steps"]) == ("completed", 25)
    before, after = summary["pass_rate"]["heldout_t1"]
    assert after > before + 0.15, summary["pass_rate"]
    assert summary["transports"] == {"control": "zmq+ipc", "data": "slab", "weights": "shm"}


def test_the_ledger_of_a_clean_end_is_exact_and_empty(finished: Launched) -> None:
    code, audit = inspect_ledger(finished.run)
    ledger = summary_of(finished)["ledger"]
    assert code == 0
    assert audit["exact"]
    assert audit["counts"] == ledger
    assert ledger["in_flight"] == 0
    made_again = ledger["expired"] + ledger["failed"]  # a straggler may grow too old while younger groups are taken
    assert ledger["issued"] == 25 * 4 + made_again, "every step took its groups, and nothing else was made"


def test_async_overlaps_and_never_exceeds_its_age(finished: Launched) -> None:
    steps = [json.loads(line) for line in (finished.run / "metrics.jsonl").read_text().splitlines()]
    ages = [step["age_max"] for step in steps if step["kind"] == "step"]
    assert max(ages) == 1, "some batch was made while another was trained, and none was older than allowed"


def test_the_run_directory_is_readable(finished: Launched) -> None:
    run = finished.run
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "rollouts").glob("step-*.md"))
    assert (run / "config.resolved.yaml").exists()
    assert (run / "checkpoints" / "step-00025" / "model.safetensors").exists()
    report = json.loads(_cli("inspect", str(run), "--json").stdout)
    assert report["state"] == "completed"
    assert report["step"] == 25


def test_the_output_ends_with_rates_examples_and_where_things_lie(finished: Launched) -> None:
    output = finished.output()
    for text in ("held-out T=1", "Example 3", "Ledger: issued", str(finished.run), "reward.png", "Status: completed"):
        assert text in output


def test_a_checkpoint_can_be_evaluated_through_the_same_executor(finished: Launched) -> None:
    checkpoint = finished.run / "checkpoints" / "step-00025"
    done = _cli("eval", str(checkpoint), "--tasks", str(finished.run.parent / "tasks.jsonl"), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    after = summary_of(finished)["pass_rate"]["heldout_t1"][1]
    assert report["heldout"]["tasks"] == 6
    assert abs(report["heldout"]["t1"] - after) < 0.35
    assert set(report["heldout"]["by_task"]) == {f"heldout-{i}" for i in range(6)}


def test_an_interrupted_run_drains_and_resume_takes_up_every_prompt(tmp_path: Path) -> None:
    run = up(tmp_path, "grpo.max_num_steps=14", "checkpoint.every=4", "eval.before=false")
    try:
        run.wait_for("step 5", lambda: run.steps() >= 5)
        run.process.send_signal(signal.SIGINT)
        summary = run.finish()
        assert run.process.returncode == 130, run.output()
        assert summary["status"] == "interrupted"
        assert 5 <= summary["steps"] < 14
        assert inspect_ledger(run.run)[0] == 0
        again = launch(run.run, "resume", str(run.run))
        summary = again.finish()
        assert again.process.returncode == 0, again.output()
        assert (summary["status"], summary["steps"]) == ("completed", 14)
        code, audit = inspect_ledger(run.run)
        assert code == 0
        assert audit["counts"]["in_flight"] == 0
        assert audit["counts"]["issued"] == 14 * 4 + audit["counts"]["expired"] + audit["counts"]["failed"]
    finally:
        run.end()


def test_sync_mode_is_bit_reproducible(tmp_path: Path) -> None:
    write_config(tmp_path)
    curves = []
    for name in ("a", "b"):
        run = up(tmp_path, "grpo.mode=sync", "grpo.max_num_steps=5", "eval.before=false", "eval.after=false", name=name)
        run.finish()
        assert run.process.returncode == 0, run.output()
        lines = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
        curves.append(
            [(s["reward_mean"], s["loss"], s["grad_norm"], s["age_max"]) for s in lines if s["kind"] == "step"]
        )
    assert curves[0] == curves[1]
    assert {age for *_, age in curves[0]} == {0}


def test_roles_started_one_by_one_join_and_finish_together(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    controller = launch(
        tmp_path / "run", "--role", "controller", "--config", str(config), "--set", f"run.dir={tmp_path / 'run'}",
        "--set", "grpo.max_num_steps=3", "--set", "eval.before=false",
    )  # fmt: skip
    started = [controller]
    try:
        line = controller.wait_for(
            "rendezvous", lambda: [x for x in controller.output().splitlines() if x.startswith("rendezvous: ")]
        )
        address = line[0].split()[1]
        for role in ("buffer", "sandbox", "trainer", "inference"):
            started.append(launch(tmp_path / role, "--role", role, "--rendezvous", address))
        summary = controller.finish()
        assert summary["status"] == "completed", controller.output()
        assert summary["ledger"]["trained"] + summary["ledger"]["filtered"] == 12
        for role in started[1:]:
            assert role.process.wait(60) == 0, role.output()
    finally:
        for role in started:
            role.end()


def test_a_role_that_cannot_start_ends_the_run_with_the_first_cause_last(tmp_path: Path) -> None:
    write_config(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"no model")
    run = up(tmp_path, f"model.source={model}", "supervision.max_restarts=1", "supervision.backoff_s=0.01")
    summary = run.finish()
    assert run.process.returncode == 1
    assert summary["status"] == "failed"
    assert "config.json" in summary["cause"]
    assert "Cause:" in run.output().rsplit("Status: failed", 1)[1]
    assert "config.json" in run.output().rstrip().splitlines()[-1], "the first cause is printed last"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["up", "nowhere.yaml"], "no such file"),
        (["inspect", "nowhere"], "not a run directory"),
        (["resume", "nowhere"], "no run to resume"),
        (["--role", "trainer"], "--rendezvous"),
        (["--role", "controller"], "--config"),
        (["eval", "nowhere", "--tasks", "functions"], "config.json is missing"),
    ],
)
def test_wrong_usage_is_told_in_one_line_with_exit_code_2(arguments: list[str], told: str) -> None:
    done = _cli(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_check_prints_the_plan_without_torch(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    done = _cli("check", str(config), "--json")
    plan = json.loads(done.stdout)
    assert done.returncode == 0
    assert {p["name"] for p in plan["processes"]} >= {
        "controller",
        "trainer",
        "rollout-0",
        "buffer",
        "broker",
        "executor",
    }


def _cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dockyard_actors.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
