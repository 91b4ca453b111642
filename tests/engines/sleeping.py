"""What sleeping must be, whichever the engine: memory really falls, nothing is computed meanwhile, and what comes after is unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from dockyard_actors.engines.base import Engine, EngineError, GroupOutput
from dockyard_actors.policy.tiny import tiny_config
from dockyard_actors.runtime import memory
from tests.engines.vllm_bench import Run, same
from tests.policy.models import requests_of

MIB = 1 << 20


def large_config() -> LlamaConfig:
    """The tiny model, wide enough for its weights to be seen in the memory of a process: above 64 MiB in float32."""
    config = tiny_config()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 512, 2048, 5
    config.num_attention_heads = config.num_key_value_heads = 8
    config.head_dim = 64
    return config


@dataclass(frozen=True)
class Slept:
    """Bytes of the process awake, asleep and awake again."""

    awake: int
    asleep: int
    again: int


def sleeps_and_wakes(engine: Engine, weights: Any) -> Slept:
    """Tokens before and after are compared; what an engine must refuse meanwhile is asked of it."""
    before = Run(engine, requests_of(n=2)).end()
    memory.trim()
    awake = memory.resident()
    engine.sleep()
    asleep = memory.resident()
    engine.sleep()  # as a repeated request has it
    ids = requests_of()[0].prompt_ids
    for question in (
        lambda: engine.submit(requests_of(n=1)[0], GroupOutput.allocate(1, 40), before.sampling),
        lambda: engine.score(ids),
        lambda: engine.next_token(ids),
    ):
        with pytest.raises(EngineError, match="slept"):
            question()
    version = engine.version
    with pytest.raises(EngineError, match="sleeps"):
        engine.update_weights(*weights, version)
    engine.prepare_for_generation()
    engine.prepare_for_generation()
    with pytest.raises(EngineError, match="slept"):
        engine.score(ids)
    engine.update_weights(*weights, version)
    after = Run(engine, requests_of(n=2)).end()
    same(after, before)
    for one, other in zip(after.outputs, before.outputs, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    memory.trim()
    return Slept(awake, asleep, memory.resident())


def bytes_of(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
