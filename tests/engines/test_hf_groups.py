"""Groups that are taken back from the HF engine and resumed, refusals, and questions asked beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.engines.base import FinishReason, GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.engines.hf import HFEngineConfig
from tests.engines.hf_run import CLOSE, SAMPLING, Run, clean, undisturbed
from tests.policy.models import requests_of, sharp_model

# ---- abort and resume


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 15), max_size=6), st.sampled_from([None, {0, 2}]))
def test_a_group_that_was_aborted_and_resumed_is_the_undisturbed_one(cuts: list[int], keys: set[int] | None):
    run, stop = Run(), ("e", "~~")
    run.submit(*requests_of(stop=stop))
    for steps in cuts:
        run.step(steps)
        stopped = run.engine.abort(keys)
        for result in stopped:
            lengths = run.outputs[result.key].lengths
            cut = [reason is FinishReason.CUT for reason in result.finish_reasons]
            assert any(cut)
            assert result.new_tokens == lengths.sum()
        run.step(3)
        run.resume(*reversed(stopped))
    run.finish()
    run.same_as(*undisturbed(stop=stop))


def test_a_resumed_group_goes_on_with_the_weights_it_finds():
    run = Run()
    run.submit(*requests_of())
    run.step(6)
    stopped = run.engine.abort()
    assert run.engine.unfinished == 0
    run.update(seed=5, version=2)
    run.resume(*stopped)
    run.step(4)
    run.update(seed=6, version=3)
    run.finish()
    seen = set()
    for key, row, versions in run.rows():
        at = np.arange(versions.size)
        np.testing.assert_array_equal(versions, np.where(at < 6, 0, np.where(at < 10, 2, 3)))
        for version, seed in ((0, 0), (2, 5), (3, 6)):
            assert run.errors(key, row, clean(seed))[versions == version].max(initial=0.0) < CLOSE
        seen |= set(versions.tolist())
    assert seen == {0, 2, 3}


def test_completions_that_had_ended_stay_as_they_are_when_their_group_is_resumed():
    run = Run()
    run.submit(*requests_of(n=8, stop=("e",)))
    while not any(0 < result_ended(output) < 8 for output in run.outputs.values()):
        run.step()
    stopped = run.engine.abort()
    before = {result.key: [array.copy() for array in vars(run.outputs[result.key]).values()] for result in stopped}
    run.update(seed=5, version=1)
    run.resume(*stopped)
    run.finish()
    ended = 0
    for result in stopped:
        output, after = run.outputs[result.key], run.done[result.key]
        for row, reason in enumerate(result.finish_reasons):
            if reason is not FinishReason.CUT:
                ended += 1
                assert after.finish_reasons[row] is reason
                for old, new in zip(before[result.key], vars(output).values(), strict=True):
                    np.testing.assert_array_equal(new[row], old[row])
            else:
                assert output.versions[row, output.lengths[row] - 1] == 1
    assert ended > 0


def result_ended(output: GroupOutput) -> int:
    """Completions that stopped before the longest of the group."""
    return int((output.lengths < output.lengths.max()).sum())


def test_aborting_what_is_unknown_or_ended_returns_nothing_and_disturbs_nobody():
    run = Run()
    run.submit(*requests_of())
    run.submit(GroupRequest(50, requests_of()[2].prompt_ids, 1, (1,), max_new_tokens=1))
    run.step()
    assert run.done.keys() == {50}
    assert run.engine.abort([77, 50]) == []
    run.finish()
    assert run.engine.abort([0, 1]) == run.engine.abort() == []
    run.done.pop(50)
    run.outputs.pop(50)
    run.same_as(*undisturbed())


def test_a_queued_group_can_be_aborted_before_its_first_token_and_resumed():
    run = Run(engine=HFEngineConfig(max_batch_rows=4))
    run.submit(*requests_of())
    run.step(2)
    (waiting,) = run.engine.abort([3])
    assert (waiting.new_tokens, set(waiting.finish_reasons)) == (0, {FinishReason.CUT})
    run.resume(waiting)
    run.finish()
    run.same_as(*undisturbed())


def test_a_resumed_completion_without_room_is_full_at_once():
    run = Run()
    request = requests_of(n=4)[0]
    run.submit(request)
    run.step(5)
    (stopped,) = run.engine.abort()
    shorter = SamplingConfig(max_new_tokens=5)
    run.resume(stopped, sampling=shorter)
    assert run.engine.unfinished == 1
    run.step()
    ended = run.done[request.key]
    assert run.engine.unfinished == 0
    assert FinishReason.LENGTH in ended.finish_reasons
    assert FinishReason.CUT not in ended.finish_reasons
    assert ended.new_tokens == stopped.new_tokens
    run.done.clear()
    run.resume(stopped, sampling=shorter)
    assert run.engine.abort() == [ended]


# ---- refusals and questions


def test_a_key_in_use_and_a_result_of_something_else_are_refused():
    run = Run()
    request = requests_of()[0]
    run.submit(request)
    with pytest.raises(ValueError, match="not finished"):
        run.submit(request)
    run.submit(requests_of()[1])
    run.step(3)
    mine, other = run.engine.abort()
    output = GroupOutput.allocate(4, 40)
    output.tokens.fill(5)
    for wrong in (other, replace(mine, finish_reasons=mine.finish_reasons[:1]), replace(mine, prompt_tokens=1), mine):
        with pytest.raises(ValueError, match="resumes a result"):
            run.engine.submit(request, output, SAMPLING, resume=wrong)
    assert (output.tokens == 5).all()
    assert run.engine.unfinished == 0


def test_next_token_is_the_mode_of_the_live_weights_and_agrees_with_score():
    run = Run()
    run.submit(*requests_of())
    run.step(3)
    for seed, version in ((0, 0), (5, 1)):
        run.update(seed, version)
        model = sharp_model(seed=seed)
        for request in requests_of():
            for ids in (request.prompt_ids, request.prompt_ids[:1], request.prompt_ids[:2]):
                for temperature in (1.0, 0.5):
                    token, logprob = run.engine.next_token(ids, temperature)
                    scored = clean(seed).score(np.append(ids, token), temperature)[-1]
                    assert abs(logprob - scored) < CLOSE
                logits = model(torch.from_numpy(ids).long()[None]).logits[0, -1]
                assert token == int(logits.argmax())
    run.finish()


@pytest.mark.parametrize("update", [None, True, False], ids=["no update", "keys anew", "keys stay"])
def test_score_and_next_token_advance_no_group_and_take_nothing_from_it(update: bool | None):
    run, version = Run(), 0
    ids = requests_of()[0].prompt_ids
    run.submit(*requests_of())
    while run.engine.unfinished:
        run.step()
        if update is not None:
            version += 1
            run.update(0, version, recompute=update)
        lengths, unfinished = [output.lengths.copy() for output in run.outputs.values()], run.engine.unfinished
        np.testing.assert_allclose(run.engine.score(ids), clean(0).score(ids), atol=CLOSE)
        run.engine.next_token(ids)
        for output, before in zip(run.outputs.values(), lengths, strict=True):
            np.testing.assert_array_equal(output.lengths, before)
        assert run.engine.unfinished == unfinished
    run.same_as(*undisturbed())


def test_a_closed_engine_has_forgotten_its_groups():
    run = Run()
    run.submit(*requests_of())
    run.step()
    assert run.engine.unfinished == 4
    run.engine.close()
    assert run.engine.unfinished == 0
    assert run.engine.step() == []
