from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import bench
from bench import harness
from tests.bench.test_bench import tiny

PEER_KEYS = {
    "ray": {"ask_p50_speedup_vs_ray", "asks64_speedup_vs_ray", "tells_speedup_vs_ray"},
    "xoscar": {"ask_p50_speedup_vs_xoscar", "asks64_speedup_vs_xoscar"},
}
OWN_KEYS = {
    "ask_p50_over_pair_floor",
    "curve_ask_ratio",
    "spawn_per_s",
    "mb_per_10k_idle_actors",
    "idle_cpu_pct_100_links",
}


@pytest.mark.slow
def test_peers_are_measured_beside_ours_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    installed = {peer for peer in PEER_KEYS if harness.missing_peer(peer) is None}
    if not installed:
        pytest.skip(str(harness.missing_peer("ray")))
    usual = Path("/tmp/ray")  # where Ray writes when it is not told otherwise
    before = usual.exists()
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as path:  # a socket's path has 107 bytes
        monkeypatch.setenv("TMPDIR", path)
        figures = tiny("control")
        assert os.listdir(path) == []
    assert usual.exists() == before
    assert set(figures) == OWN_KEYS | PEER_KEYS["ray"] | PEER_KEYS["xoscar"]
    for peer, keys in PEER_KEYS.items():
        for key in keys:
            assert (figures[key]["value"] is not None) == (peer in installed)


def test_a_side_runs_in_a_process_of_its_own_and_says_why_it_failed():
    command = [sys.executable, "-m", "tests.bench.sides"]
    done = subprocess.run(command, cwd=Path(bench.__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "0.25",
        "ZeroDivisionError: division by zero",
        "quick: its process died",
        "LookupError: no cluster anywhere",
    ]
