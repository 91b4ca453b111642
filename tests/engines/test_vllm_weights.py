"""Weights that change while the vLLM engine generates."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dockyard_actors.engines.base import EngineError, GroupOutput, WeightsMismatch
from tests.engines.vllm_bench import CLOSE, NEEDS_VLLM, SAMPLING, Run, same
from tests.policy.models import policy_of, requests_of, sharp_model, weights_of

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize(("at", "gloo"), [(1, False), (7, False), (20, False), (7, True)])
def test_tokens_before_an_update_are_the_old_weights_and_those_after_it_the_new_ones(
    bench, engine, at: int, gloo: bool
):
    run = Run(engine, requests_of(n=6)).steps(at)
    old = engine.version
    new = bench.put(5, gloo=gloo)
    run.end()
    after = 0
    for ids, prompt, logprobs, versions in run.rows():
        assert versions[:at].tolist() == [old] * min(at, versions.size)
        assert versions[at:].tolist() == [new] * max(versions.size - at, 0)
        for seed, part in ((0, slice(0, at)), (5, slice(at, None))):
            expected = bench.logprobs(seed, ids)[prompt - 1 :]
            np.testing.assert_allclose(logprobs[part], expected[part], atol=CLOSE)
        after += max(versions.size - at, 0)
    assert after > 100


def test_old_keys_that_stay_give_logprobs_of_no_clean_forward_pass(bench, engine):
    run = Run(engine, requests_of(n=6)).steps(5)
    new = bench.put(5, recompute=False)
    run.end()
    apart = []
    for ids, prompt, logprobs, versions in run.rows():
        assert set(versions[5:].tolist()) <= {new}
        apart.append(np.abs(logprobs[5:] - bench.logprobs(5, ids)[prompt - 1 :][5:]))
    assert np.concatenate(apart).mean() > 100 * CLOSE


def test_an_update_of_the_same_weights_changes_nothing_but_versions(bench, engine):
    undisturbed = Run(engine, requests_of(n=6)).end()
    run = Run(engine, requests_of(n=6)).steps(4)
    bench.put(0)
    run.steps(6)
    bench.put(0, recompute=False)
    same(run.end(), undisturbed)


def test_an_update_finds_what_waits_for_a_place(bench, engine):
    run = Run(engine, requests_of(n=30)).steps(3)  # 40 of 120 run
    begun = sum(versions.size > 0 for *_, versions in run.rows())
    assert 40 <= begun < 60
    new = bench.put(5)
    run.end()
    for ids, prompt, logprobs, versions in run.rows():
        fresh = versions == new
        np.testing.assert_allclose(logprobs[fresh], bench.logprobs(5, ids)[prompt - 1 :][fresh], atol=CLOSE)
    assert sum((versions == new).all() for *_, versions in run.rows()) == 120 - begun


def test_bfloat16_bytes_reach_a_float32_engine(bench, engine):
    bench.put(5, "bfloat16")
    rounded, ids = sharp_model(bench.config(), 5), requests_of()[0].prompt_ids
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
        logits = rounded(torch.from_numpy(ids).long()[None]).logits[0]
    expected = torch.log_softmax(logits, -1)[:-1].gather(-1, torch.from_numpy(ids).long()[1:, None])[:, 0]
    np.testing.assert_allclose(engine.score(ids), expected.numpy(), atol=CLOSE)


def test_a_manifest_that_does_not_fit_or_an_older_version_changes_nothing(bench, engine):
    undisturbed = Run(engine, requests_of()).end()
    run = Run(engine, requests_of()).steps(5)
    views, manifest = weights_of(policy_of(sharp_model(bench.config(), 5)))
    with pytest.raises(WeightsMismatch, match="is missing"):
        engine.update_weights(views, SimpleNamespace(entries=manifest.entries[:-1]), version=bench.version + 1)
    with pytest.raises(EngineError, match="older than the live one"):
        engine.update_weights(views, manifest, version=bench.version - 1)
    assert engine.version == bench.version
    same(run.end(), undisturbed)


class Torn(dict):
    """Views of which one is gone when it is read."""

    def __getitem__(self, name: str) -> np.ndarray:
        if name == "model.norm.weight":
            raise OSError("gone")
        return super().__getitem__(name)


def test_a_failure_half_way_makes_the_engine_unusable_until_it_is_started_again(bench, engine):
    request, output = requests_of()[0], GroupOutput.allocate(4, 40)
    views, manifest = weights_of(policy_of(sharp_model(bench.config(), 5)))
    with pytest.raises(EngineError, match="half-way"):
        engine.update_weights(Torn(views), manifest, version=bench.version + 1)
    for call in (
        engine.step,
        engine.abort,
        lambda: engine.submit(request, output, SAMPLING),
        lambda: engine.update_weights(views, manifest, version=bench.version + 1),
        lambda: engine.score(request.prompt_ids),
        lambda: engine.next_token(request.prompt_ids),
    ):
        with pytest.raises(EngineError, match=r"gone.*restart"):
            call()
    engine.close()
    with pytest.raises(EngineError, match="start"):
        engine.step()
    bench.open()
    with pytest.raises(EngineError, match="update_weights"):
        engine.submit(request, output, SAMPLING)
    bench.put(5)
    for ids, prompt, logprobs, _ in Run(engine, requests_of()).end().rows():
        np.testing.assert_allclose(logprobs, bench.logprobs(5, ids)[prompt - 1 :], atol=CLOSE)


def test_a_completion_that_vllm_says_came_from_other_weights_is_an_error(bench, engine):
    run = Run(engine, requests_of(n=2)).steps(5)
    engine.llm.set_weight_version("77")
    with pytest.raises(EngineError, match=r"weight versions .*77.*restart"):
        run.end()
    engine.close()
    bench.open()
    bench.put(0)
    Run(engine, requests_of(n=2)).end()
