"""A run that learns within seconds from random weights: real roles, real executor, a task set made for it.

The answer is right when it ends at once: half of all characters are stop strings, so that a random model passes about half of the time
and a few steps teach it to always pass.
"""

from __future__ import annotations

import json
import os
import signal
import string
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

STOPS = list(string.ascii_lowercase + string.digits + " \n")
DEADLINE_S = 240.0  # a hang guard, far above what a run takes


def write_tasks(path: Path, train: int = 12, heldout: int = 6) -> Path:
    lines = [
        {
            "id": f"{split}-{i}",
            "split": split,
            "prompt": f"def f(a): return a + {i}",
            "prefix": f"def f(a):\n    return a + {i}",
            "stop": STOPS,
            "tests": [f"assert f(1) == {i + 1}"],
            "hidden_tests": [f"assert f(5) == {i + 5}"],
        }
        for split, n in (("train", train), ("heldout", heldout))
        for i in range(n)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_config(directory: Path, **overrides: Any) -> Path:
    tasks = write_tasks(directory / "tasks.jsonl")
    config: dict[str, Any] = {
        "run": {"name": "toy"},
        "model": {"source": "tiny"},
        "tasks": {"path": str(tasks)},
        "grpo": {"max_num_steps": 8, "num_prompts_per_step": 4, "num_generations_per_prompt": 8},
        "correction": {"kind": "tis"},
        "advantage": {"estimator": "rloo"},
        "optimizer": {"lr": 3e-3, "warmup_steps": 1},
        "generation": {"max_new_tokens": 6, "engine": "hf"},
        "eval": {"train_tasks": 6, "samples": 4},
        "checkpoint": {"every": 3},
        "data_plane": {"blocks": 24, "block_bytes": 16384},
        "observe": {"refresh_s": 0.2},
    }
    path = directory / "toy.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


@dataclass
class Launched:
    """A `dockyard-launch` process and its run directory."""

    process: subprocess.Popen[str]
    run: Path

    def role_pid(self, role: str) -> int:
        """Pid of a role process, or of the executor. Raises LookupError when it is not running."""
        marks = ["dockyard_executor", "--socket"] if role == "executor" else ["dockyard_actors.roles.main", role]
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = child.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if all(mark in line for mark in marks):
                return child.pid
        raise LookupError(f"{role} is not running")

    def wait_for(self, what: str, seen: Any, deadline_s: float = DEADLINE_S) -> Any:
        """Polls files and processes of another program until `seen()` is truthy. Fails when the launcher ended or time is up."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            try:
                value = seen()
            except (LookupError, FileNotFoundError):
                value = None
            if value:
                return value
            if self.process.poll() is not None:
                raise AssertionError(
                    f"the run ended (code {self.process.returncode}) while waiting for {what}:\n{self.output()}"
                )
            time.sleep(0.02)  # another process's files: nothing to await
        raise AssertionError(f"no {what} within {deadline_s} s:\n{self.output()}")

    def output(self) -> str:
        return (self.run.parent / f"{self.run.name}.out").read_text()

    def steps(self) -> int:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines[:-1] if '"kind":"step"' in line), default=0)

    def finish(self) -> dict[str, Any]:
        self.process.wait(DEADLINE_S)
        return json.loads((self.run / "summary.json").read_text())

    def kill(self, role: str, number: int = signal.SIGKILL) -> int:
        pid = self.wait_for(f"a running {role}", lambda: self.role_pid(role))
        os.kill(pid, number)
        return pid

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)


def launch(run: Path, *arguments: str, within: tuple[str, ...] = ()) -> Launched:
    """within: a command to run it by."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (run.parent / f"{run.name}.out").open("w") as out:
        process = subprocess.Popen(
            [*within, sys.executable, "-m", "dockyard_actors.cli", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
            start_new_session=True,
        )
    return Launched(process, run)


def up(directory: Path, *overrides: str, name: str = "run") -> Launched:
    config = directory / "toy.yaml"
    if not config.exists():
        write_config(directory)
    return launch(directory / name, "up", str(config), f"run.dir={directory / name}", *overrides)


def inspect_ledger(run: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "dockyard_actors.cli", "inspect", str(run), "--ledger", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)
