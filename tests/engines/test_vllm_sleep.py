"""The vLLM engine gives its memory back and takes it again."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from dockyard_actors.engines.base import EngineError
from dockyard_actors.engines.vllm import VLLMEngine, VLLMEngineConfig
from dockyard_actors.policy.tiny import tiny_tokenizer
from tests.engines.sleeping import MIB, large_config, sleeps_and_wakes
from tests.engines.vllm_bench import NEEDS_VLLM, Run, same
from tests.policy.models import EOS, policy_of, requests_of, sharp_model, weights_of

pytestmark = NEEDS_VLLM
CACHE_BYTES = 64 * MIB


@pytest.fixture
def large() -> Iterator[VLLMEngine]:
    environment, threads = dict(os.environ), torch.get_num_threads()
    settings = VLLMEngineConfig(max_batch_rows=16, kv_cache_bytes=CACHE_BYTES)
    engine = VLLMEngine(lambda: (large_config(), tiny_tokenizer(), [EOS]), settings)
    engine.start()
    yield engine
    engine.close()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


def test_weights_their_packed_copies_and_the_cache_leave_memory(large: VLLMEngine) -> None:
    weights = weights_of(policy_of(sharp_model(large_config(), 0)))
    large.update_weights(*weights, 0)
    size = sum(view.nbytes for view in weights[0].values())
    assert size > 64 * MIB
    slept = sleeps_and_wakes(large, weights)
    assert slept.awake - slept.asleep > 0.9 * (2 * size + CACHE_BYTES)
    assert abs(slept.again - slept.awake) < 0.1 * (2 * size + CACHE_BYTES)


def test_after_sleep_it_is_like_an_engine_that_never_slept(bench, engine) -> None:
    Run(engine, requests_of(n=3)).end()
    bench.put(5)
    never = Run(engine, requests_of(n=3)).end()
    bench.put(0)
    Run(engine, requests_of(n=3)).end()  # what the cache must not remember
    engine.sleep()
    engine.prepare_for_generation()
    bench.put(5)
    same(Run(engine, requests_of(n=3)).end(), never)


def test_it_does_not_sleep_while_groups_run(engine) -> None:
    run = Run(engine, requests_of(n=2)).steps(3)
    with pytest.raises(EngineError, match="groups are not finished"):
        engine.sleep()
    run.end()
