"""Groups that are taken back from the vLLM engine, and questions asked beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dockyard_actors.engines import base
from dockyard_actors.engines.base import FinishReason, GroupOutput, SamplingConfig
from tests.engines.vllm_bench import CLOSE, NEEDS_VLLM, SAMPLING, Run, same
from tests.policy.models import requests_of

pytestmark = NEEDS_VLLM


# ---- abort and resume


@pytest.mark.parametrize("cuts", [[0], [1], [9], [3, 0, 11]])
@pytest.mark.parametrize("keys", [None, {1, 3, 99}])
def test_a_group_that_was_aborted_and_resumed_is_the_undisturbed_one(engine, cuts: list[int], keys: set[int] | None):
    undisturbed = Run(engine, requests_of(n=12)).end()
    run = Run(engine, requests_of(n=12))
    for count in cuts:
        run.steps(count)
        for result in engine.abort(keys):
            output = run.outputs[result.key]
            assert keys is None or result.key in keys
            assert FinishReason.CUT in result.finish_reasons
            assert result.new_tokens == output.lengths.sum()
            engine.submit(run.requests[result.key], output, SAMPLING, resume=result)
    same(run.end(), undisturbed)


def test_completions_that_had_ended_stay_as_they_are_when_their_group_is_resumed(bench, engine):
    run = Run(engine, requests_of(n=10, stop=("e",))).steps(25)
    (cut,) = engine.abort({0})
    ended = [i for i, reason in enumerate(cut.finish_reasons) if reason is not FinishReason.CUT]
    assert 0 < len(ended) < 10
    before = {i: run.outputs[0].tokens[i].copy() for i in ended}
    new = bench.put(5)
    engine.submit(run.requests[0], run.outputs[0], SAMPLING, resume=cut)
    run.end()
    for i, reason in enumerate(run.results[0].finish_reasons):
        versions = run.outputs[0].versions[i, : run.outputs[0].lengths[i]]
        if i in ended:
            assert reason is cut.finish_reasons[i]
            np.testing.assert_array_equal(run.outputs[0].tokens[i], before[i])
            assert new not in versions
        else:
            assert (versions[25:] == new).all()


def test_a_resumed_completion_without_room_is_full_at_once(engine):
    run = Run(engine, requests_of(n=3)[:1]).steps(6)
    (cut,) = engine.abort()
    assert engine.unfinished == 0
    short = SamplingConfig(max_new_tokens=6)
    engine.submit(run.requests[0], run.outputs[0], short, resume=cut)
    assert engine.unfinished == 1
    assert [set(result.finish_reasons) for result in engine.step()] == [{FinishReason.LENGTH}]
    assert engine.unfinished == 0


def test_aborting_what_is_unknown_or_ended_returns_nothing_and_disturbs_nobody(engine):
    undisturbed = Run(engine, requests_of()).end()
    assert engine.abort() == engine.abort({0, 1, 17}) == []
    run = Run(engine, requests_of()).steps(3)
    assert engine.abort({17}) == []
    same(run.end(), undisturbed)


def test_should_stop_cuts_between_steps_and_keeps_what_there_is(engine):
    answers = iter([False, False, False, True])
    requests = requests_of(n=2)
    outputs = [GroupOutput.allocate(2, 40) for _ in requests]
    results = base.generate(engine, requests, outputs, SAMPLING, lambda: next(answers))
    for result, output in zip(results, outputs, strict=True):
        for reason, length in zip(result.finish_reasons, output.lengths, strict=True):
            assert (reason, length) == (FinishReason.CUT, 3) or (reason is FinishReason.EOS and length <= 3)


def test_a_result_of_something_else_is_refused_and_nothing_is_queued(engine):
    run = Run(engine, requests_of()[:2]).steps(3)
    mine, other = engine.abort()
    output = GroupOutput.allocate(4, 40)
    output.tokens.fill(5)
    for wrong in (other, replace(mine, prompt_tokens=1), mine):
        with pytest.raises(ValueError, match="resumes a result"):
            engine.submit(run.requests[0], output, SAMPLING, resume=wrong)
    assert (output.tokens == 5).all()
    assert engine.unfinished == 0


# ---- single questions


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_a_plain_forward_pass(bench, engine, temperature: float):
    ids = np.concatenate([request.prompt_ids for request in requests_of()])
    expected = bench.logprobs(0, ids, temperature)
    for _ in range(2):  # what the first one left in the cache is not read
        np.testing.assert_allclose(engine.score(ids, temperature), expected, atol=CLOSE)
    assert engine.score(ids[:1]).size == 0


def test_next_token_and_score_agree_after_an_update_and_tell_of_keys_that_outlived_their_weights(bench, engine):
    ids = np.concatenate([request.prompt_ids for request in requests_of()])

    def apart() -> float:
        token, logprob = engine.next_token(ids, 1.3)
        return abs(float(engine.score(np.append(ids, token), 1.3)[-1]) - logprob)

    assert apart() < CLOSE
    assert engine.next_token(ids)[0] == bench.distribution(0, ids)[-1].argmax()
    bench.put(5)
    assert apart() < CLOSE
    assert engine.next_token(ids)[0] == bench.distribution(5, ids)[-1].argmax()
    bench.put(9, recompute=False)
    assert apart() > 100 * CLOSE
    bench.put(9)
    assert apart() < CLOSE


@pytest.mark.parametrize("update", [None, True, False], ids=["no update", "keys anew", "keys stay"])
def test_score_and_next_token_advance_no_group_and_take_nothing_from_it(bench, engine, update: bool | None):
    undisturbed = Run(engine, requests_of(n=30)).end()
    run = Run(engine, requests_of(n=30))  # 40 of 120 run
    ids = undisturbed.requests[0].prompt_ids
    expected = bench.logprobs(0, ids)
    while engine.unfinished:
        run.steps(5)
        if update is not None:
            bench.put(0, recompute=update)
        lengths, unfinished = [output.lengths.copy() for output in run.outputs], engine.unfinished
        np.testing.assert_allclose(engine.score(ids), expected, atol=CLOSE)
        engine.next_token(ids)
        for output, before in zip(run.outputs, lengths, strict=True):
            np.testing.assert_array_equal(output.lengths, before)
        assert engine.unfinished == unfinished
    same(run.end(), undisturbed)


def test_a_question_for_which_the_cache_has_no_room_is_answered_and_the_groups_go_on(bench):
    with bench.small(9) as engine:
        undisturbed = Run(engine, requests_of(n=1)).end()
        run = Run(engine, requests_of(n=1))
        ids = np.resize(run.requests[0].prompt_ids, engine.max_tokens - 1)  # takes all of the cache
        run.steps(3)
        assert engine.llm.engine_core.engine_core.scheduler.running
        np.testing.assert_allclose(engine.score(ids), bench.logprobs(0, ids), atol=CLOSE)
        assert engine.next_token(ids)[0] == bench.distribution(0, ids)[-1].argmax()
        assert [output.lengths.tolist() for output in run.outputs] == [[3]] * 4
        same(run.end(), undisturbed)
