"""What new weights cost an engine that generates: for how long it stands still, and how much it generates over a run.

SmolLM2-135M in bfloat16 from a trainer's shared memory into an engine in another process, everything that a run does included: checksums of all
bytes, the copy, keys and values computed anew, the canary. Publishing is the trainer's work and not counted.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.harness import Figures, Options, figure, note
from bench.peers import across_hosts, generating
from bench.peers.driven import Driven
from dockyard_actors.config import Config, load_config
from dockyard_actors.plan import with_engine
from dockyard_actors.policy.policy import Policy
from dockyard_actors.roles.canary import MOST_TOKENS, canary_of
from dockyard_actors.roles.messages import Canary
from dockyard_actors.transport.fdclient import FdClient
from dockyard_actors.transport.weights_shm import WeightPublisher, WeightRef

CONFIGS = Path(__file__).parents[1] / "launch" / "configs"
CONFIG = {"full": CONFIGS / "functions_smollm2.yaml", "tiny": CONFIGS / "repair_tiny.yaml"}
OVERRIDES = {"full": (), "tiny": ("generation.engine=hf", "weight_sync.dtype=bfloat16")}
UPDATES = {"full": 5, "tiny": 2}  # a round
RUN_MS = {"full": 12_000, "tiny": 300}
GROUPS, SAMPLES = 8, 8  # sequences that are generated together
LIMIT_S = 0.03  # what a pause may cost beside the copy


def run(options: Options) -> Figures:
    config, why = with_engine(load_config(CONFIG[options.size], list(OVERRIDES[options.size]), {}))
    note(f"engine {config.generation.engine}, because {why}")
    with tempfile.TemporaryDirectory(prefix="dy-w-") as path:
        os.chmod(path, 0o700)
        with across_hosts.served(Path(path)) as server:
            published = _published(config, server.path)
            nbytes = sum(entry.nbytes for entry in published.manifest.entries)
            with Driven(
                "engine", generating.opened, config, server.path, published.versions, GROUPS, SAMPLES
            ) as engine:
                pauses, rates = [], []
                for number in range(options.rounds):
                    pauses.append(engine.call("pauses", UPDATES[options.size]))
                    rates.append(engine.call("rates", RUN_MS[options.size]))
                    note(f"  round {number + 1}: {pauses[-1]}, {rates[-1]}")
                notes = engine.call("notes")
            published.publisher.close()
    pause, bare, copy = (statistics.median(p[name] for p in pauses) for name in ("canary", "bare", "memcpy"))
    over = statistics.median((p["canary"] - LIMIT_S) / p["memcpy"] for p in pauses)
    few = GROUPS // 4 * SAMPLES
    details = {"bytes": nbytes, "memcpy_ms": round(copy * 1e3, 1), **notes}
    return {
        "pause_ms": figure(pause * 1e3, "ms", without_canary_ms=round(bare * 1e3, 1), **details),
        "pause_minus_30ms_over_memcpy": figure(
            over, "x", without_canary=round((bare - LIMIT_S) / copy, 2), wanted="at most 3"
        ),
        "throughput_with_sync_ratio": figure(
            _ratio(rates, "synced", few),
            "x",
            **{
                f"{name}, {n} sequences": round(_ratio(rates, side, n), 3)
                for n in (few, GROUPS * SAMPLES)
                for side, name in (("synced", "keys anew"), ("kept", "old keys kept"))
            },
            tokens_per_s={n: round(statistics.median(r["alone"][n] for r in rates)) for n in (few, GROUPS * SAMPLES)},
            every_s=generating.EVERY_S,
            new_tokens=config.generation.max_new_tokens,
        ),
    }


def _ratio(rates: list[dict[str, dict[int, float]]], side: str, sequences: int) -> float:
    return statistics.median(found[side][sequences] / found["alone"][sequences] for found in rates)


class _Published:
    """Two versions that differ, each in its slot for as long as the benchmark runs."""

    def __init__(self, publisher: WeightPublisher, versions: list[tuple[WeightRef, Canary]]) -> None:
        self.publisher, self.versions, self.manifest = publisher, versions, publisher.manifest


def _published(config: Config, fd_path: str) -> _Published:
    policy = Policy.open(config.model, config.policy, config.optimizer, config.generation.temperature, note)
    publisher = WeightPublisher(FdClient(fd_path), policy.manifest(config.weight_sync.dtype))
    ids = np.asarray(policy.tokenizer.encode("def f(a, b):\n    return a + b\n" * 8)[:MOST_TOKENS], np.int32)
    versions = []
    for version in range(2):
        policy.write_weights(publisher.slot(version))
        logprobs = policy.canary(ids, config.generation.temperature, config.weight_sync.dtype)
        versions.append((publisher.publish(version), canary_of(ids, logprobs, config.generation.temperature)))
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter.mul_(1.01)
    return _Published(publisher, versions)
