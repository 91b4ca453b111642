"""What asynchronous training gains: real runs of the tiny configuration, asynchronous against synchronous, on the same cores.

Every run is a `dockyard-launch up` of its own: engine, trainer, sandbox and all. Both modes start from one warmed-up model and train the
same number of groups. The synchronous side is the better of one and two threads per phase. Times are of whole training steps in trace.json.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Figures, Options, figure, note
from dockyard_actors.config import ENV_PREFIX, load_config
from dockyard_actors.observe.idle import idle_report
from dockyard_actors.observe.metrics import read_metrics
from dockyard_actors.plan import with_engine

CONFIG = Path(__file__).parents[1] / "launch" / "configs" / "repair_tiny.yaml"
STEPS = {"full": 30, "tiny": 4}
WARMUP = {"full": 900, "tiny": 2}
SHAPE = {"full": (), "tiny": ("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2")}
LAST = 3  # the reward at the end is the mean over the last third of the steps
RUN_S = 900.0  # a hang guard
LAUNCH = (sys.executable, "-m", "dockyard_actors.cli", "up", str(CONFIG))
BOUNDING = ("trainer", "rollout-0")  # the broker's busy time is that of programs waiting for each other as well
SIDES = {
    "async": ("grpo.mode=async",),
    "sync, 1 thread": ("grpo.mode=sync",),
    "sync, 2 threads": ("grpo.mode=sync", "policy.threads=2", "generation.threads=2"),
}


@dataclass(frozen=True)
class Measured:
    """One run. busy_s: by role, of a mean step; step_s: wall time of a mean step; reward: mean over the last third."""

    step_s: float
    busy_s: dict[str, float]
    reward: float


def run(options: Options) -> Figures:
    """`sync_over_async` and `overlap_efficiency`; a round is one run of each side with the same seed."""
    engine, why = with_engine(load_config(CONFIG, [], {}))
    kind = engine.generation.engine
    note(f"engine {kind}, because {why}")
    with tempfile.TemporaryDirectory(prefix="dockyard-bench-") as scratch:
        model = _warm(Path(scratch), options.size)
        measured: dict[str, list[Measured]] = {side: [] for side in SIDES}
        for number in range(options.rounds):
            for side, overrides in SIDES.items():
                directory = Path(scratch) / f"{number}-{side.replace(', ', '-').replace(' ', '-')}"
                measured[side].append(_train(directory, model, kind, number, options.size, overrides))
                note(f"  round {number + 1}, {side}: {measured[side][-1].step_s:.3f} s a step")
    steps = {side: [one.step_s for one in runs] for side, runs in measured.items()}
    best = min((side for side in SIDES if side != "async"), key=lambda side: statistics.median(steps[side]))
    gains = [sync / asynchronous for sync, asynchronous in zip(steps[best], steps["async"], strict=True)]
    efficiencies = [max(one.busy_s[role] for role in BOUNDING) / one.step_s for one in measured["async"]]
    rewards = {side: [one.reward for one in runs] for side, runs in measured.items()}
    return {
        "sync_over_async": figure(
            statistics.median(gains),
            "x",
            engine=kind,
            sync_side=best,
            rounds=[round(gain, 3) for gain in gains],
            **{f"step_s {side}": [round(s, 3) for s in values] for side, values in steps.items()},
            **{f"reward {side}": [round(r, 3) for r in values] for side, values in rewards.items()},
            reward_difference=round(statistics.mean(rewards["async"]) - statistics.mean(rewards[best]), 3),
        ),
        "overlap_efficiency": figure(
            statistics.median(efficiencies),
            "of the bound",
            bound="the busier of trainer and rollout, its own time in the same run",
            rounds=[round(e, 3) for e in efficiencies],
            **{
                f"busy_s {role}": round(statistics.median(one.busy_s.get(role, 0.0) for one in measured["async"]), 3)
                for role in (*BOUNDING, "broker")
            },
        ),
    }


def _warm(scratch: Path, size: str) -> Path:
    """The model that every run starts from."""
    note(f"warming up the model: {WARMUP[size]} supervised steps")
    directory = scratch / "warm"
    _launch(directory, [f"warmup.steps={WARMUP[size]}", "grpo.max_num_steps=0", "generation.engine=hf", *SHAPE[size]])
    return directory / "checkpoints" / "step-00000"


def _train(directory: Path, model: Path, engine: str, seed: int, size: str, overrides: Sequence[str]) -> Measured:
    _launch(
        directory,
        [
            f"model.source={model}",
            "warmup.steps=0",
            f"grpo.max_num_steps={STEPS[size]}",
            f"checkpoint.every={STEPS[size]}",
            f"run.seed={seed}",
            f"generation.engine={engine}",
            *SHAPE[size],
            *overrides,
        ],
    )
    report = idle_report(directory / "trace.json")
    if report.training is None:
        raise RuntimeError(f"{directory}: the trace holds no two training steps")
    steps = report.steps - 1
    rewards = [record.reward_mean or 0.0 for record in read_metrics(directory / "metrics.jsonl").steps]
    tail = rewards[-max(1, len(rewards) // LAST) :]
    return Measured(
        step_s=report.training.wall_s / steps,
        # The broker's programs run in the executor's processes: its busy time is theirs, side by side.
        busy_s={role: time.busy_s / steps for role, time in report.training.roles.items()},
        reward=statistics.mean(tail),
    )


def _launch(directory: Path, overrides: Sequence[str]) -> None:
    done = subprocess.run(
        [*LAUNCH, f"run.dir={directory}", "eval.before=false", "eval.after=false", *overrides],
        # Keys of ours in the environment would configure another run than the one that is described.
        env={k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{directory} ended with code {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
        )
