"""A run over two hosts, in network namespaces joined by a veth: real roles on the planes that the real code builds for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.roles.host_peer import STEPS
from tests.transport.pull_peer import MIB
from tests.transport.test_pull import BACKENDS
from tests.transport.test_pull_netns import Net, wire

__all__ = ["wire"]  # fixture
pytestmark = pytest.mark.netns

WAIT_S = 60.0  # a hang guard
FETCH_S = 20.0
PROMPTS = 2  # of a step
LARGE = (  # a group takes seconds over a slow link, and a message next to nothing
    "generation.max_new_tokens=200000",
    f"data_plane.block_bytes={8 * MIB}",
    f"data_plane.fetch_timeout_s={FETCH_S}",
)


class Peer:
    """See `host_peer`. Its lines are read one by one."""

    def __init__(self, kind: str, namespace: str = "", **options: Any) -> None:
        self.process = subprocess.Popen(
            [
                *(("ip", "netns", "exec", namespace) if namespace else ()),
                *(sys.executable, "-m", "tests.roles.host_peer", kind, json.dumps(options)),
            ],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )

    def hear(self, key: str) -> dict[str, Any]:
        """The next line that has this key."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if key in (said := json.loads(line)):
                return said
        raise AssertionError(f"the host ended (code {self.process.wait()}) without a word on {key!r}")

    def ended(self) -> bool:
        return self.process.wait(WAIT_S) == 0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


StartPeer = Callable[..., Peer]


@pytest.fixture
def start(wire: Net) -> Iterator[StartPeer]:
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory(
        prefix="dy"
    ) as runtime:  # a killed host leaves its own behind; short, for socket paths

        def start(kind: str, **options: Any) -> Peer:
            peers.append(Peer(kind, runtime=runtime, **options))
            return peers[-1]

        yield start
        for peer in peers:
            peer.end()
    wire.fast()


def begin(start: StartPeer, wire: Net, run: Path, backend: str, *overrides: str) -> tuple[Peer, Peer, dict[str, Any]]:
    near = start("consumer", directory=str(run), listen=f"{wire.subnet}.1", backend=backend, overrides=overrides)
    said = near.hear("rendezvous")
    there = {**said, "backend": backend, "overrides": overrides, "namespace": wire.namespace}
    far = start("producer", **there)
    far.hear("ready")
    return near, far, there


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trainer_has_the_groups_of_a_rollout_on_another_host_by_the_chosen_transport(
    start: StartPeer, wire: Net, tmp_path: Path, backend: str
) -> None:
    before = wire.received()
    near, far, _ = begin(start, wire, tmp_path / "run", backend)
    sent = far.hear("sent")["sent"]
    end = near.hear("status")
    assert (end["status"], end["exact"], end["failed"]) == ("completed", True, {})
    assert end["counts"]["trained"] + end["counts"]["filtered"] == STEPS * PROMPTS
    assert end["counts"]["filtered"] > 0
    assert end["looked_at"] > 0
    assert end["received"] == {backend: end["looked_at"]}, "groups without signal stay where they are"
    assert sent == end["received"]
    assert end["sent"] == {}
    assert end["copies"] == 0
    assert wire.received() - before >= end["looked_at"]
    assert far.ended()
    assert near.ended()


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_that_are_lost_with_their_host_are_failed_and_generated_anew(
    start: StartPeer, wire: Net, tmp_path: Path, backend: str
) -> None:
    near, far, there = begin(start, wire, tmp_path / "run", backend, *LARGE)
    wire.slow()
    near.hear("fetching")
    before = wire.received()
    while wire.received() - before < MIB:  # counters of the kernel ring no bell
        time.sleep(0.01)
    os.kill(far.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    wire.fast()
    near.hear("lost")
    assert time.monotonic() - killed < FETCH_S
    far = start("producer", **there)
    far.hear("ready")
    end = near.hear("status")
    assert (end["status"], end["exact"]) == ("completed", True)
    assert end["failed"]["host_lost"] >= 1
    assert set(end["failed"]) == {"host_lost"}
    assert end["counts"]["trained"] + end["counts"]["filtered"] == STEPS * PROMPTS
    assert any("lost with their host" in warning for warning in end["warnings"])
    assert end["received"] == {backend: end["looked_at"]}
    assert far.ended()
    assert near.ended()
