"""`dockyard-launch top` on a real run: while it trains, and when it has ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.toy import up


def top(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dockyard_actors.cli", "top", str(run), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_running_run_can_be_looked_at_and_an_ended_one_says_so(tmp_path: Path) -> None:
    launched = up(tmp_path, "grpo.max_num_steps=400", "eval.before=false")
    try:
        launched.wait_for("a step", lambda: launched.steps() >= 1)
        looked = top(launched.run, "--once", "--json")
        assert looked.returncode == 0, looked.stderr
        view = json.loads(looked.stdout)
        roles = {"controller", "buffer", "broker", "trainer", "rollout-0"}
        assert roles <= set(view["processes"]) | set(view["silent"])
        assert roles <= {process["name"] for process in view["supervised"]}
        assert "controller" in top(launched.run, "--once").stdout
        launched.process.terminate()
        launched.finish()
    finally:
        launched.end()
    ended = top(launched.run, "--once")
    assert ended.returncode == 1
    assert "does not run now" in ended.stderr
