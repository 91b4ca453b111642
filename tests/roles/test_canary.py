"""Weights are used only after the engine scored one sequence as the trainer did, through its caches too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from dockyard_actors.roles import messages as m
from dockyard_actors.roles.canary import LIMITS, CanaryFailed, canary_of, check_canary
from dockyard_actors.runtime.errors import RemoteError
from tests.roles.test_rollout import passes_when_one, ref_of, rolling
from tests.roles.world import ScriptedEngine, eventually


def canary_for(version: int, offset: float = 0.0) -> m.Canary:
    """What a trainer whose weights are `version` sends to a `ScriptedEngine`."""
    return canary_of(np.arange(5), np.full(4, -(version + 1.0) + offset), 1.0)


class Cached(ScriptedEngine):
    """Test only: its caches answer with what other weights had computed."""

    def next_token(self, ids: np.ndarray, temperature: float = 1.0) -> tuple[int, float]:
        return 1, -9.0


def test_an_engine_that_agrees_passes_and_says_by_how_much() -> None:
    assert check_canary(ScriptedEngine(version=3), canary_for(3), 1e-3, True) == 0.0
    assert check_canary(ScriptedEngine(version=3), canary_for(3, 0.5e-3), 1e-3, True) == pytest.approx(0.5e-3, rel=1e-3)


@pytest.mark.parametrize("offset", [2e-3, -2e-3, float("nan"), float("inf")])
def test_an_engine_that_disagrees_fails_with_both_figures(offset: float) -> None:
    with pytest.raises(CanaryFailed, match=r"trainer and engine disagree.*allowed 0\.001"):
        check_canary(ScriptedEngine(version=3), canary_for(3, offset), 1e-3, True)


def test_a_cache_that_outlived_its_weights_fails_unless_it_is_kept_on_purpose() -> None:
    with pytest.raises(CanaryFailed, match="cache disagrees"):
        check_canary(Cached(version=3), canary_for(3), 1e-3, True)
    assert check_canary(Cached(version=3), canary_for(3), 1e-3, False) == 0.0


def test_precision_has_its_own_limit() -> None:
    assert LIMITS["float32"] < LIMITS["bfloat16"]


async def test_a_rollout_acknowledges_what_its_canary_measured(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, open=False) as run:
        applied = await run.world.ask("rollout-0", m.UpdateWeights(offer=ref_of(3), canary=canary_for(3, 0.25e-3)))
        assert applied.mismatch == pytest.approx(0.25e-3, rel=1e-2)


async def test_nothing_is_generated_with_weights_whose_canary_failed(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, open=False) as run:
        with pytest.raises(RemoteError, match="trainer and engine disagree"):
            await run.world.ask("rollout-0", m.UpdateWeights(offer=ref_of(1), canary=canary_for(7)))
        await run.world.publish()
        await eventually(lambda: run.rollout.generating == 4)
        evaluation = m.Evaluate(prompts=("heldout-0",), samples=2, greedy=False, seed=0, version=1, step=0)
        waiting = asyncio.ensure_future(run.world.ask("rollout-0", evaluation))
        await run.rollout.driver.call(lambda: None)  # whatever it would have done before, it had the time for
        assert not run.engine.requests, "the engine did not even get one"
        assert not run.world.buffer.groups
        await run.world.ask("rollout-0", m.UpdateWeights(offer=ref_of(2), canary=canary_for(2)))
        await eventually(lambda: len(run.world.buffer.groups) == 4)
        assert {held.meta.oldest_version for held in run.world.buffer.groups.values()} == {2}
        with pytest.raises(RemoteError, match="holds weights 2, asked to evaluate 1"):
            await waiting
