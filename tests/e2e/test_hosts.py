"""Real processes of one run on two hosts, which are network namespaces joined by a veth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.toy import launch, write_config
from tests.transport.test_pull_netns import Net, wire

__all__ = ["wire"]  # fixture
pytestmark = pytest.mark.netns

STEPS = 3


def said(out: str, what: str) -> list[str]:
    return [line.split(": ", 1)[1] for line in out.splitlines() if line.startswith(f"{what}: ")]


def test_a_buffer_on_another_host_holds_groups_and_weights_stay_on_one(tmp_path: Path, wire: Net) -> None:
    config, within = write_config(tmp_path), ("ip", "netns", "exec", wire.namespace)
    controller = launch(
        tmp_path / "run", "--role", "controller", "--config", str(config), "--listen", f"tcp://{wire.subnet}.1:0",
        "--set", f"run.dir={tmp_path / 'run'}", "--set", f"grpo.max_num_steps={STEPS}", "--set", "eval.before=false",
        "--set", "eval.after=false",
    )  # fmt: skip
    started = [controller]
    try:
        (address,) = controller.wait_for("rendezvous", lambda: said(controller.output(), "rendezvous"))
        (keys,) = controller.wait_for("key file", lambda: said(controller.output(), "key file"))
        join = ("--rendezvous", address, "--key-file", keys)
        refused = launch(tmp_path / "far", "--role", "inference", *join, within=within)
        started.append(refused)
        assert refused.process.wait(60) == 1
        assert "trainer and engines of one run share a host for now" in refused.output()
        buffer = launch(tmp_path / "buffer", "--role", "buffer", *join, within=within)
        started.append(buffer)
        for role in ("sandbox", "trainer", "inference"):
            started.append(launch(tmp_path / role, "--role", role, *join))
        summary = controller.finish()
        assert summary["status"] == "completed", controller.output()
        assert summary["ledger"]["trained"] + summary["ledger"]["filtered"] == 4 * STEPS
        for role in started[2:]:
            assert role.process.wait(60) == 0, role.output()
        assert "pull server at 10." in buffer.output(), buffer.output()
        log = (tmp_path / "run" / "logs" / "buffer.log").read_text()
        assert "blocks of other hosts come by" in log
        assert "was not released" not in log
    finally:
        for role in started:
            role.end()
