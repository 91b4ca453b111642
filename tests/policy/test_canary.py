from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from dockyard_actors.policy.batch import GroupRows, TrainBatch
from dockyard_actors.policy.types import PolicyConfig
from tests.policy.models import grouped_config, policy_of, sharp_model


def plain_logprobs(model: PreTrainedModel, ids: np.ndarray, temperature: float) -> np.ndarray:
    tokens = torch.from_numpy(ids)
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("config", [None, grouped_config()], ids=["tied", "grouped"])
def test_a_canary_in_float32_is_the_plain_forward_pass(config, temperature: float):
    policy = policy_of(sharp_model(config), PolicyConfig(autocast_bf16=True))
    ids = np.random.default_rng(0).integers(3, 99, 40)
    found = policy.canary(ids, temperature, "float32")
    expected = plain_logprobs(sharp_model(config), ids, temperature)
    assert (found.dtype, found.shape) == (np.float32, (39,))
    assert np.abs(found - expected).max() <= 1e-5
    assert all(p.grad is None for p in policy.parameters.values())


def test_a_canary_in_bfloat16_is_that_of_the_rounded_weights_as_training_computes_it():
    policy, rounded = policy_of(sharp_model(grouped_config())), sharp_model(grouped_config())
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    ids = np.random.default_rng(0).integers(3, 99, 40)
    found = policy.canary(ids, 1.0, "bfloat16")
    assert np.array_equal(found, policy_of(rounded).canary(ids, 1.0, "bfloat16"))
    group = GroupRows(
        prompt_ids=ids[:1].astype(np.int32),
        tokens=ids[None, 1:].astype(np.int32),
        behaviour_logprobs=np.zeros((1, 39), np.float32),
        versions=np.zeros((1, 39), np.int32),
        lengths=np.array([39], np.int32),
        advantages=np.ones(1, np.float32),
    )
    trained = policy_of(rounded, PolicyConfig(autocast_bf16=True)).score(TrainBatch.build([group], 1000))[0].numpy()
    exact = policy.canary(ids, 1.0, "float32")
    assert np.abs(found - trained).mean() <= 0.25 * np.abs(trained - exact).mean()


@pytest.mark.parametrize(("ids", "dtype", "words"), [([5], "float32", "T >= 2"), ([5, 6], "float16", "choose one of")])
def test_a_canary_that_cannot_be_computed_says_why(ids, dtype: str, words: str):
    with pytest.raises(ValueError, match=words):
        policy_of().canary(np.array(ids), 1.0, dtype)
