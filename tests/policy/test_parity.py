from __future__ import annotations

import numpy as np
import pytest
import torch

from dockyard_actors.engines import base
from dockyard_actors.engines.base import GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.engines.hf import HFEngine
from dockyard_actors.policy.batch import TrainBatch
from dockyard_actors.policy.model import build_empty, load_tokenizer
from dockyard_actors.policy.policy import Policy
from dockyard_actors.policy.types import ModelConfig, PolicyConfig
from tests.policy.models import (
    Sampled,
    engine_of,
    generate,
    group_rows,
    grouped_config,
    policy_of,
    requests_of,
    sharp_model,
)


def unpacked_logprobs(policy: Policy, prompt: np.ndarray, completion: np.ndarray) -> torch.Tensor:
    """One row by the ordinary forward pass with transformers' own attention."""
    policy.model.set_attn_implementation("eager")
    ids = torch.from_numpy(np.concatenate([prompt, completion])).long()
    with torch.no_grad():
        logits = policy.model(ids[None], use_cache=False).logits[0, prompt.size - 1 : -1] / policy.temperature
    policy.model.set_attn_implementation("dockyard_packed")
    return torch.log_softmax(logits.double(), -1).gather(-1, ids[prompt.size :, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("config", [None, grouped_config()], ids=["tied", "grouped"])
def test_engine_and_policy_agree_and_packing_changes_nothing(config, temperature: float):
    policy = policy_of(sharp_model(config), temperature=temperature)
    sampled = generate(engine_of(config), requests_of(n=5), SamplingConfig(temperature=temperature, max_new_tokens=30))
    groups = group_rows(sampled)
    for budget in (100_000, 120, 1):
        batch = TrainBatch.build(groups, budget)
        logprobs = policy.score(batch)
        assert (logprobs - batch.behaviour_logprobs).abs().max() <= 1e-4
        row = 0
        for group in groups:
            for i, length in enumerate(group.lengths):
                expected = unpacked_logprobs(policy, group.prompt_ids, group.tokens[i, :length])
                assert (logprobs[row, :length].double() - expected).abs().max() <= 1e-5
                row += 1
        assert row == len(batch.advantages)


def test_segments_beyond_the_dense_length_give_the_same_logprobs(monkeypatch: pytest.MonkeyPatch):
    policy = policy_of(sharp_model(grouped_config()))
    batch = TrainBatch.build(group_rows(generate(engine_of(grouped_config()), requests_of(), SamplingConfig())), 10_000)
    dense = policy.score(batch)
    monkeypatch.setattr("dockyard_actors.policy.packing.DENSE_LENGTH", 0)
    assert (policy.score(batch) - dense).abs().max() <= 1e-5


@pytest.mark.slow
def test_engine_and_policy_agree_on_smollm2():
    source = "smollm2-135m"
    policy = Policy.open(ModelConfig(source), PolicyConfig())
    engine = HFEngine(lambda: (build_empty(source), load_tokenizer(source), policy.eos_ids))
    engine.start()
    manifest = policy.manifest()
    views = {e.name: np.zeros(e.shape, np.float32) for e in manifest.entries}
    policy.write_weights(views)
    engine.update_weights(views, manifest, version=1)
    prompts = ["def add(a, b):\n    return", "# sorts a list\ndef sort(values):\n    return"]
    ids = [np.array(policy.tokenizer.encode(prompt), dtype=np.int32) for prompt in prompts]
    requests = [GroupRequest(k, p, 4, tuple(range(4 * k, 4 * k + 4)), ("\n",)) for k, p in enumerate(ids)]
    outputs = [GroupOutput.allocate(4, 24) for _ in requests]
    base.generate(engine, requests, outputs, SamplingConfig(max_new_tokens=24))
    batch = TrainBatch.build(group_rows(Sampled(requests, outputs)), 4096)
    assert (policy.score(batch) - batch.behaviour_logprobs).abs().max() <= 1e-4
