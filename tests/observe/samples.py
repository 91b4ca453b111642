"""Records that the tests of observe share."""

from typing import Any

from dockyard_actors.observe.metrics import StepRecord
from dockyard_actors.observe.rollouts import RolloutSample
from dockyard_actors.observe.summary import LedgerCounts, PassRates, Summary, TokenCounts, Transports


def step_record(step: int = 1, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step": step,
        "version": step,
        "reward_mean": 0.5,
        "pass_rate": 0.4,
        "loss": 0.01,
        "grad_norm": 1.0,
        "lr": 1e-5,
        "entropy": 0.7,
        "age_mean": 0.5,
        "age_max": 1,
        "tokens_trained": 100,
        "groups": 8,
        "groups_no_signal": 2,
        "tokens_per_s": 50.0,
        "seconds": {"train": 1.0},
    }
    return StepRecord(**(fields | changes))


def rollout_sample(**changes: Any) -> RolloutSample:
    fields: dict[str, Any] = {
        "step": 1,
        "lease": "lease-1",
        "task": "add_two",
        "sample": 0,
        "prompt": "def add(a, b):\n",
        "completion": "    return a + b\n",
        "program": "def add(a, b):\n    return a + b\n",
        "verdict": "ok",
        "reward": 1.0,
    }
    return RolloutSample(**(fields | changes))


def summary(**changes: Any) -> Summary:
    fields: dict[str, Any] = {
        "status": "completed",
        "cause": None,
        "steps": 3,
        "wall_s": 12.5,
        "engine": "hf",
        "transports": Transports(control="zmq+ipc", data="slab", weights="shm"),
        "isolation": "strong",
        "seed": 7,
        "mode": "async",
        "model": "tiny",
        "pass_rate": PassRates(train_t1=(0.2, 0.5), heldout_t1=(0.1, None)),
        "ledger": LedgerCounts(issued=10, trained=7, expired=1, filtered=2),
        "filtered_by_cause": {"no_signal": 2},
        "failed_by_cause": {},
        "restarts": {"rollout-0": 0},
        "tokens": TokenCounts(generated=1000, trained=700),
    }
    return Summary(**(fields | changes))
