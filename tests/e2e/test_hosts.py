"""Real processes of one run on two hosts, which are network namespaces joined by a veth."""

from __future__ import annotations

from pathlib import Path

import pytest

from dockyard_actors.observe.idle import read_trace
from tests.e2e.toy import launch, write_config
from tests.transport.test_pull_netns import Net, wire

__all__ = ["wire"]  # fixture
pytestmark = pytest.mark.netns

STEPS = 3


def said(out: str, what: str) -> list[str]:
    return [line.split(": ", 1)[1] for line in out.splitlines() if line.startswith(f"{what}: ")]


def test_a_buffer_and_an_engine_on_another_host(tmp_path: Path, wire: Net) -> None:
    """Groups are pulled from host to host, in both directions; weights go to one engine by shared memory and are sent to the other."""
    config, within = write_config(tmp_path), ("ip", "netns", "exec", wire.namespace)
    controller = launch(
        tmp_path / "run", "--role", "controller", "--config", str(config), "--listen", f"tcp://{wire.subnet}.1:0",
        "--set", f"run.dir={tmp_path / 'run'}", "--set", f"grpo.max_num_steps={STEPS}", "--set", "eval.before=false",
        "--set", "eval.after=false", "--set", "rollout.count=2",
    )  # fmt: skip
    started = [controller]
    try:
        (address,) = controller.wait_for("rendezvous", lambda: said(controller.output(), "rendezvous"))
        (keys,) = controller.wait_for("key file", lambda: said(controller.output(), "key file"))
        join = ("--rendezvous", address, "--key-file", keys)
        buffer = launch(tmp_path / "buffer", "--role", "buffer", *join, within=within)
        started.append(buffer)
        buffer.wait_for(
            "the far host's memory", lambda: "pull server at 10." in buffer.output()
        )  # held by who comes first
        started.append(launch(tmp_path / "far", "--role", "inference", "--index", "1", *join, within=within))
        for role in ("sandbox", "trainer", "inference"):
            started.append(launch(tmp_path / role, "--role", role, *join))
        summary = controller.finish()
        assert summary["status"] == "completed", controller.output()
        assert summary["ledger"]["trained"] + summary["ledger"]["filtered"] == 4 * STEPS
        assert sum(summary["restarts"].values()) == 0
        for role in started[1:]:
            assert role.process.wait(60) == 0, role.output()
        logs = tmp_path / "run" / "logs"
        assert "blocks of other hosts come by" in (logs / "buffer.log").read_text()
        assert "was not released" not in (logs / "buffer.log").read_text()
        trainer = (logs / "trainer.log").read_text()
        assert "weights go to rollout-0 by shm, because it shares the trainer's host" in trainer
        assert "weights go to rollout-1 by collective, because it is on another host" in trainer
        assert "did not take weights" not in trainer
        generated = [span for span in read_trace(tmp_path / "run" / "trace.json").own if span.span.name == "generate"]
        assert {span.role for span in generated} == {"rollout-0", "rollout-1"}
    finally:
        for role in started:
            role.end()
