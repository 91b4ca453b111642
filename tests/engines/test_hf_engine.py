"""What the HF engine draws, where completions end, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dockyard_actors.engines import base
from dockyard_actors.engines.base import (
    EngineError,
    FinishReason,
    GroupOutput,
    GroupRequest,
    SamplingConfig,
)
from dockyard_actors.engines.hf import HFEngine, HFEngineConfig
from dockyard_actors.policy.tiny import tiny_tokenizer
from tests.policy.models import (
    EOS,
    engine_of,
    generate,
    grouped_config,
    requests_of,
    sharp_model,
)

SAMPLING = SamplingConfig(max_new_tokens=40)


@pytest.fixture(scope="module")
def engine() -> HFEngine:
    return engine_of()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("config", [None, grouped_config()], ids=["tied", "grouped"])
def test_logprobs_are_those_of_the_distribution_sampled_from(config, temperature: float):
    engine = engine_of(config)
    requests, outputs = generate(engine, requests_of(), SamplingConfig(temperature=temperature, max_new_tokens=40))
    for request, output in zip(requests, outputs, strict=True):
        for i, length in enumerate(output.lengths):
            ids = np.concatenate([request.prompt_ids, output.tokens[i, :length]])
            expected = engine.score(ids, temperature)[request.prompt_ids.size - 1 :]
            np.testing.assert_allclose(output.logprobs[i, :length], expected, atol=1e-4)


def test_a_completion_depends_on_prompt_seed_and_weights_whatever_shares_the_batch(engine):
    requests = requests_of(n=6)
    together = generate(engine, requests, SAMPLING).outputs
    for narrow in (HFEngineConfig(max_batch_rows=7), HFEngineConfig(max_batch_tokens=600)):
        split = generate(engine_of(engine=narrow), requests, SAMPLING).outputs
        for a, b in zip(together, split, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    for request, output in zip(requests, together, strict=True):
        for i in range(2):
            alone = GroupRequest(0, request.prompt_ids, 1, request.seeds[i : i + 1])
            np.testing.assert_array_equal(generate(engine, [alone], SAMPLING).outputs[0].tokens[0], output.tokens[i])


def test_other_seeds_give_other_completions(engine):
    first, second = (generate(engine, requests_of(seed=seed), SAMPLING).outputs for seed in (0, 7))
    assert all((a.tokens != b.tokens).any() for a, b in zip(first, second, strict=True))


def test_greedy_is_what_transformers_generates_greedily(engine):
    requests, outputs = generate(engine, requests_of(n=1), SamplingConfig(max_new_tokens=40, greedy=True))
    model = sharp_model()
    for request, output in zip(requests, outputs, strict=True):
        ids = torch.from_numpy(request.prompt_ids).long()[None]
        expected = model.generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=EOS, pad_token_id=0)
        length = output.lengths[0]
        assert output.tokens[0, :length].tolist() == expected[0, ids.shape[1] :][:length].tolist()


def test_a_stop_string_ends_its_completion_only_and_its_token_is_kept(engine):
    tokenizer = engine.tokenizer
    free = generate(engine, requests_of(n=6), SAMPLING).outputs
    stopped = requests_of(n=6, stop=("e", "~~"))
    outputs = [GroupOutput.allocate(6, 40) for _ in stopped]
    results = base.generate(engine, stopped, outputs, SAMPLING)
    seen = set()
    for result, output, whole in zip(results, outputs, free, strict=True):
        for i, reason in enumerate(result.finish_reasons):
            length = output.lengths[i]
            np.testing.assert_array_equal(output.tokens[i, :length], whole.tokens[i, :length])
            text = tokenizer.decode(output.tokens[i, :length], skip_special_tokens=True)
            assert text.endswith("e") == (reason is FinishReason.STOP)
            assert text.count("e") == (reason is FinishReason.STOP)
            seen.add(reason)
    assert {FinishReason.STOP, FinishReason.LENGTH} <= seen


def test_what_lies_beyond_a_completion_is_cleared_in_recycled_buffers(engine):
    request = requests_of(n=8)[0]
    output = GroupOutput.allocate(8, 60)
    for name in ("tokens", "logprobs", "versions", "lengths"):
        getattr(output, name).fill(77)
    base.generate(engine, [request], [output], SAMPLING)
    beyond = np.arange(60) >= output.lengths[:, None]
    assert (output.tokens[beyond] == 0).all()
    assert (output.logprobs[beyond] == 0).all()
    assert (output.versions[beyond] == -1).all()
    assert (output.versions[~beyond] == 0).all()


def test_each_group_has_its_own_limit(engine):
    requests = requests_of(n=2)
    short = [
        GroupRequest(r.key, r.prompt_ids, r.n, r.seeds, max_new_tokens=5 * (k + 1)) for k, r in enumerate(requests)
    ]
    outputs = [GroupOutput.allocate(2, 40) for _ in short]
    results = base.generate(engine, short, outputs, SAMPLING)
    for k, (result, output) in enumerate(zip(results, outputs, strict=True)):
        assert output.lengths.max() <= 5 * (k + 1)
        assert result.new_tokens == output.lengths.sum()


def test_should_stop_cuts_between_steps_and_keeps_what_there_is(engine):
    steps = iter([False, False, False, True])  # asked before each step
    requests, outputs = requests_of(n=2), [GroupOutput.allocate(2, 40) for _ in range(4)]
    results = base.generate(engine, requests, outputs, SAMPLING, lambda: next(steps))
    for result, output in zip(results, outputs, strict=True):
        for reason, length in zip(result.finish_reasons, output.lengths, strict=True):
            assert (reason, length) == (FinishReason.CUT, 3) or (reason is FinishReason.EOS and length <= 3)
    assert sum(result.finish_reasons.count(FinishReason.CUT) for result in results) > 4


def test_an_engine_without_weights_refuses_to_generate():
    engine = HFEngine(lambda: (sharp_model(), tiny_tokenizer(), [EOS]))
    with pytest.raises(EngineError, match="start"):
        generate(engine, requests_of(), SAMPLING)
    engine.start()
    with pytest.raises(EngineError, match="update_weights"):
        generate(engine, requests_of(), SAMPLING)


def test_a_request_that_cannot_fit_is_refused_before_anything_is_written(engine):
    request = requests_of(n=2)[0]
    for output in (
        GroupOutput.allocate(2, 39),
        GroupOutput.allocate(3, 40),
        GroupOutput(**{**vars(GroupOutput.allocate(2, 40)), "logprobs": np.zeros((2, 40))}),
    ):
        output.tokens.fill(5)
        with pytest.raises(ValueError, match="output"):
            base.generate(engine, [request], [output], SAMPLING)
        assert (output.tokens == 5).all()
    endless = SamplingConfig(max_new_tokens=10_000)
    with pytest.raises(ValueError, match="positions"):
        generate(engine, [request], endless)


def test_layers_that_are_not_full_attention_are_refused():
    def load():
        model = sharp_model()
        model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
        return model, tiny_tokenizer(), [EOS]

    with pytest.raises(EngineError, match="sliding_attention"):
        HFEngine(load, version=0).start()
