"""The second proof after a weight update: one fixed sequence scored by trainer and engine.

Scored from scratch it finds wrong mappings and lost precision; the token behind it, once through the caches that generation uses and once
from scratch, finds keys and values that outlived their weights. Small changes drown in bfloat16 noise here: the digest of the delivered
bytes covers those.
"""

from __future__ import annotations

import numpy as np

from dockyard_actors.engines.base import Engine, EngineError
from dockyard_actors.roles.messages import Canary

# Mean |Δ log p| in nats. fp32 engines agree to 4e-5; bf16 ones differ by 0.026 on average, by 0.23 at worst.
LIMITS = {"float32": 1e-3, "bfloat16": 0.2}
MOST_TOKENS = 40  # one whole cache block of vLLM (32 on a CPU) and a few behind it; more would only cost time


class CanaryFailed(EngineError):
    """The engine computes something else than the trainer with the same weights."""


def canary_of(ids: np.ndarray, logprobs: np.ndarray, temperature: float) -> Canary:
    """ids: (T,) integers, T >= 2; logprobs: (T-1,) of ids[1:] as the trainer computes them."""
    return Canary(ids.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes(), temperature)


def check_canary(engine: Engine, canary: Canary, limit: float, through_cache: bool) -> float:
    """Returns the mean |Δ| between trainer and engine in nats. Raises CanaryFailed when it, or that between the engine's cached and fresh
    computation (skipped unless `through_cache`: who keeps old keys on purpose knows), is above `limit` or no number."""
    ids = np.frombuffer(canary.ids, "<i4").astype(np.int32)
    expected = np.frombuffer(canary.logprobs, "<f4")
    if not through_cache:
        return _within(np.abs(engine.score(ids, canary.temperature) - expected), limit, "trainer and engine disagree")
    token, cached = engine.next_token(ids, canary.temperature)
    scored = engine.score(np.append(ids, np.int32(token)), canary.temperature)
    mismatch = _within(np.abs(scored[:-1] - expected), limit, "trainer and engine disagree")
    _within(np.abs(scored[-1:] - cached), limit, "the engine's cache disagrees with its weights")
    return mismatch


def _within(difference: np.ndarray, limit: float, what: str) -> float:
    mean = float(difference.mean())
    if not mean <= limit:  # NaN is not within anything
        raise CanaryFailed(
            f"canary: {what}: mean |Δ log p| is {mean:.3g} over {difference.size} tokens, allowed {limit:g} "
            "(weight_sync.canary_limit). Usual causes: another dtype or temperature, a wrong name mapping, a stale cache"
        )
    return mean
