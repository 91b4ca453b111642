"""The HF engine gives its memory back and takes it again."""

from __future__ import annotations

import pytest

from dockyard_actors.engines.base import EngineError
from tests.engines.sleeping import MIB, bytes_of, large_config, sleeps_and_wakes
from tests.engines.vllm_bench import Run, same
from tests.policy.models import engine_of, grouped_config, policy_of, requests_of, sharp_model, weights_of


def test_its_weights_leave_memory_and_it_generates_what_it_did_once_they_are_back() -> None:
    weights = weights_of(policy_of(sharp_model(large_config(), 0)))
    engine = engine_of(large_config(), 1)
    engine.update_weights(*weights, 1)
    size = bytes_of(engine.model)
    assert size > 64 * MIB
    slept = sleeps_and_wakes(engine, weights)
    assert slept.awake - slept.asleep > 0.95 * size
    assert abs(slept.again - slept.awake) < 0.1 * size


@pytest.mark.parametrize("config", [None, grouped_config])
def test_after_sleep_it_is_like_an_engine_that_never_slept(config) -> None:
    structure = config() if config else None
    slept, fresh = engine_of(structure, 0), engine_of(structure, 5)
    Run(slept, requests_of(n=2)).end()
    slept.sleep()
    slept.prepare_for_generation()
    slept.update_weights(*weights_of(policy_of(sharp_model(structure, 5))), 3)
    same(Run(slept, requests_of(n=3)).end(), Run(fresh, requests_of(n=3)).end())


def test_it_does_not_sleep_while_groups_run() -> None:
    engine = engine_of()
    run = Run(engine, requests_of(n=2)).steps(3)
    with pytest.raises(EngineError, match="4 groups are not finished"):
        engine.sleep()
    run.end()
