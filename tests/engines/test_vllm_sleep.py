"""The vLLM engine gives its memory back and takes it again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dockyard_actors.engines import vllm_boot
from dockyard_actors.engines.base import EngineError, GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.engines.vllm import VLLMEngine, VLLMEngineConfig
from dockyard_actors.policy.tiny import tiny_tokenizer
from tests.engines.sleeping import MIB, large_config, sleeps_and_wakes
from tests.engines.vllm_bench import NEEDS_VLLM, SAMPLING, Run, same
from tests.policy.models import EOS, policy_of, requests_of, sharp_model, weights_of

pytestmark = NEEDS_VLLM
CACHE_BYTES = 64 * MIB


@pytest.fixture  # its tests come first: a process has one engine, and that of `bench` stays open
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


def test_one_that_fails_to_wake_is_unusable_and_says_so(large: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def wake_up(llm: Any) -> None:
        raise MemoryError("no room")

    large.update_weights(*weights_of(policy_of(sharp_model(large_config(), 0))), 0)
    large.sleep()
    monkeypatch.setattr(vllm_boot, "wake_up", wake_up)
    for question in (large.prepare_for_generation, lambda: large.submit(*submission()), large.sleep):
        with pytest.raises(EngineError, match=r"unusable since wake_up failed half-way .*no room.*restart"):
            question()


def submission() -> tuple[GroupRequest, GroupOutput, SamplingConfig]:
    return requests_of(n=1)[0], GroupOutput.allocate(1, 40), SAMPLING


@pytest.mark.parametrize("recompute", [True, False])  # the caches are gone, whether or not the update would keep them
def test_after_sleep_it_is_like_an_engine_that_never_slept(bench, engine, recompute: bool) -> None:
    Run(engine, requests_of(n=3)).end()
    bench.put(5)
    never = Run(engine, requests_of(n=3)).end()
    bench.put(0)
    Run(engine, requests_of(n=3)).end()  # what the cache must not remember
    engine.sleep()
    engine.prepare_for_generation()
    bench.put(5, recompute=recompute)
    same(Run(engine, requests_of(n=3)).end(), never)


def test_it_does_not_sleep_while_groups_run(engine) -> None:
    run = Run(engine, requests_of(n=2)).steps(3)
    with pytest.raises(EngineError, match="groups are not finished"):
        engine.sleep()
    run.end()
