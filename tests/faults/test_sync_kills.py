"""SIGKILL of the engine's process before, during and after every phase of a weight sync: nothing hangs, nothing is lost, the run ends.

The rollout's own log says which phase it is in; the kill follows as fast as another process can read it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from dockyard_actors.observe.idle import read_trace
from tests.e2e.toy import DEADLINE_S, Launched, inspect_ledger, up

PHASES = ("copy", "canary", "done", "between")
SYNC_TIMEOUT_S = 90


def kill_in_phase(run: Launched, phase: str, rng: random.Random, role: str = "rollout") -> None:
    """Waits for the next time that a rollout enters `phase` ('between': is anywhere) and kills it, or the process of `role`, there."""
    log = run.run / "logs" / "rollout-0.log"
    offset = log.stat().st_size
    until = time.monotonic() + DEADLINE_S
    mark = b"sync phase " if phase == "between" else f"sync phase {phase}".encode()
    while True:
        with log.open("rb") as file:
            file.seek(offset)
            if mark in file.read():
                break
        assert run.process.poll() is None, f"the run ended while waiting for phase {phase}:\n{run.output()}"
        assert time.monotonic() < until, f"no phase {phase} any more:\n{run.output()}"
        time.sleep(0.0005)  # another process's file: nothing to await
    if phase == "between":
        time.sleep(rng.uniform(0.0, 0.2))  # anywhere between this sync and the next
    pid = run.wait_for(f"a running {role}", lambda: run.role_pid(role))
    os.kill(pid, signal.SIGKILL)


def survives(directory: Path, kills: int, seed: int, *overrides: str) -> None:
    rng = random.Random(seed)
    steps = 4 * kills + 4
    run = up(
        directory,
        f"grpo.max_num_steps={steps}",
        "eval.before=false",
        "eval.after=false",
        "observe.log_level=DEBUG",
        f"supervision.max_restarts={kills + 1}",
        "supervision.window_s=36000",
        "group.max_attempts=100",
        f"weight_sync.timeout_s={SYNC_TIMEOUT_S}",
        *overrides,
    )
    try:
        run.wait_for("step 1", lambda: run.steps() >= 1)
        for number in range(kills):
            kill_in_phase(run, PHASES[number % 4] if number < 4 else rng.choice(PHASES), rng)
        summary = run.finish()
        assert run.process.returncode == 0, run.output()
        assert (summary["status"], summary["steps"]) == ("completed", steps)
        assert summary["restarts"]["rollout-0"] == kills, "and nobody else was restarted"
        assert sum(summary["restarts"].values()) == kills
        code, audit = inspect_ledger(run.run)
        assert code == 0
        assert audit["counts"] == summary["ledger"]
        assert summary["ledger"]["in_flight"] == summary["ledger"]["failed"] == 0
        trainer = [own.span for own in read_trace(run.run / "trace.json").own if own.role == "trainer"]
        waits = [span.duration_us for span in trainer if span.name == "sync"]
        assert max(waits, default=0) < SYNC_TIMEOUT_S * 1e6
        versions = [
            json.loads(line)["version"]
            for line in (run.run / "metrics.jsonl").read_text().splitlines()
            if '"kind":"step"' in line
        ]
        assert len(set(versions)) == len(versions) == steps
    finally:
        run.end()


@pytest.mark.parametrize("mode", ["keep", pytest.param("abort", marks=pytest.mark.slow)])
def test_an_engine_killed_in_each_phase_of_a_sync(tmp_path: Path, mode: str) -> None:
    survives(tmp_path, 4, 0, f"weight_sync.pause={mode}")


@pytest.mark.slow
def test_an_engine_killed_in_each_phase_of_a_collective_sync(tmp_path: Path) -> None:
    survives(tmp_path, 4, 0, "weight_sync.transport=collective")


@pytest.mark.slow
def test_a_trainer_killed_while_it_sends_its_weights(tmp_path: Path) -> None:
    """The engine's side of a delivery ends at once, and the next trainer delivers to it."""
    run = up(
        tmp_path,
        "grpo.max_num_steps=10",
        "eval.before=false",
        "eval.after=false",
        "observe.log_level=DEBUG",
        "weight_sync.transport=collective",
        f"weight_sync.timeout_s={SYNC_TIMEOUT_S}",
    )
    try:
        for number in range(2):
            run.wait_for("a step", lambda number=number: run.steps() > 3 * number)
            kill_in_phase(run, "copy", random.Random(number), "trainer")
        summary = run.finish()
        assert run.process.returncode == 0, run.output()
        assert (summary["status"], summary["steps"]) == ("completed", 10)
        assert summary["restarts"]["trainer"] == 2
        assert inspect_ledger(run.run)[0] == 0
        assert summary["ledger"]["in_flight"] == summary["ledger"]["failed"] == 0
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [("grpo.mode=async",), ("grpo.mode=sync",), ("weight_sync.transport=collective",)],
    ids=["async", "sync", "collective"],
)
def test_an_engine_killed_twenty_times_at_random(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    survives(tmp_path, 20, 1, *overrides)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_vllm_engine_killed_twenty_times_at_random(tmp_path: Path) -> None:
    survives(tmp_path, 20, 2, "generation.engine=vllm", "generation.kv_cache_mib=32")
