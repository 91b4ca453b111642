"""What an engine promises to those that submit, abort, resume and change weights while others run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from dockyard_actors.engines.base import FinishReason, GroupOutput, GroupRequest, GroupResult, SamplingConfig
from dockyard_actors.engines.hf import HFEngine, HFEngineConfig
from dockyard_actors.engines.kvcache import GROWTH
from tests.policy.models import engine_of, generate, grouped_config, policy_of, requests_of, sharp_model, weights_of

SAMPLING = SamplingConfig(max_new_tokens=40)
CLOSE = 1e-4


@cache
def weights(seed: int, grouped: bool = False):
    return weights_of(policy_of(sharp_model(grouped_config() if grouped else None, seed)))


@cache
def clean(seed: int, grouped: bool = False) -> HFEngine:
    """An engine that only ever had these weights."""
    return engine_of(grouped_config() if grouped else None, seed)


class Gauge:
    """Rows decoded, and cache positions used, in every step; the last entry is of the step to come."""

    def __init__(self, engine: HFEngine) -> None:
        self.rows, self.tokens = [0], [0]
        engine.model.register_forward_hook(self._seen, with_kwargs=True)

    def _seen(self, module: object, args: object, kwargs: dict, output: object) -> None:
        rows, columns = kwargs["input_ids"].shape
        if columns == 1:  # a decode step, not a prefill
            self.rows[-1] += rows
            self.tokens[-1] += rows * kwargs["past_key_values"].length

    def next(self) -> None:
        self.rows.append(0)
        self.tokens.append(0)


class Run:
    """An engine with the groups of a test: submits them, steps, and keeps what comes back."""

    def __init__(self, config: LlamaConfig | None = None, engine: HFEngineConfig | None = None) -> None:
        self.engine = engine_of(config, engine=engine)
        self.gauge = Gauge(self.engine)
        self.requests: dict[int, GroupRequest] = {}
        self.outputs: dict[int, GroupOutput] = {}
        self.done: dict[int, GroupResult] = {}

    def submit(self, *requests: GroupRequest, sampling: SamplingConfig = SAMPLING) -> None:
        for request in requests:
            self.requests[request.key] = request
            self.outputs[request.key] = GroupOutput.allocate(request.n, sampling.max_new_tokens)
            self.engine.submit(request, self.outputs[request.key], sampling)

    def resume(self, *results: GroupResult, sampling: SamplingConfig = SAMPLING) -> None:
        for result in results:
            self.engine.submit(self.requests[result.key], self.outputs[result.key], sampling, resume=result)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for result in self.engine.step():
                assert result.key not in self.done
                self.done[result.key] = result
            self.gauge.next()

    def finish(self) -> None:
        while self.engine.unfinished:
            self.step()

    def update(self, seed: int, version: int, recompute: bool = True, grouped: bool = False) -> None:
        self.engine.update_weights(*weights(seed, grouped), version, recompute_kv_cache=recompute)

    def errors(self, key: int, row: int, engine: HFEngine) -> np.ndarray:
        """Per token: how far its logprob is from a full forward pass of `engine`."""
        request, output = self.requests[key], self.outputs[key]
        length = output.lengths[row]
        scored = engine.score(np.concatenate([request.prompt_ids, output.tokens[row, :length]]))
        return np.abs(output.logprobs[row, :length] - scored[request.prompt_ids.size - 1 :])

    def rows(self):
        """(key, row, versions of its tokens) of everything."""
        for key, output in self.outputs.items():
            for row, length in enumerate(output.lengths):
                yield key, row, output.versions[row, :length]

    def same_as(self, requests: list[GroupRequest], outputs: list[GroupOutput]) -> None:
        for request, expected in zip(requests, outputs, strict=True):
            output = self.outputs[request.key]
            np.testing.assert_array_equal(output.tokens, expected.tokens)
            np.testing.assert_array_equal(output.lengths, expected.lengths)
            np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=CLOSE)


@cache
def undisturbed(n: int = 4, stop: tuple[str, ...] = ()):
    return generate(clean(0), requests_of(n=n, stop=stop), SAMPLING)


# ---- weights in flight


@pytest.mark.parametrize("grouped", [False, True], ids=["tied", "grouped"])
def test_tokens_before_an_update_are_the_old_weights_and_those_after_it_the_new_ones(grouped: bool):
    run = Run(grouped_config() if grouped else None)
    run.submit(*requests_of())
    run.step(7)
    run.update(seed=5, version=9, grouped=grouped)
    run.finish()
    assert {key for key, _, versions in run.rows() if versions[-1] == 9} == set(run.requests)
    for key, row, versions in run.rows():
        np.testing.assert_array_equal(versions, np.where(np.arange(versions.size) < 7, 0, 9))
        assert run.errors(key, row, clean(0, grouped))[versions == 0].max() < CLOSE
        if (versions == 9).any():
            assert run.errors(key, row, clean(5, grouped))[versions == 9].max() < CLOSE


def test_old_keys_that_stay_give_logprobs_of_no_clean_forward_pass():
    run = Run()
    run.submit(*requests_of())
    run.step(7)
    run.update(seed=5, version=9, recompute=False)
    run.finish()
    off = {0: 0.0, 5: 0.0}
    for key, row, versions in run.rows():
        np.testing.assert_array_equal(versions, np.where(np.arange(versions.size) < 7, 0, 9))
        assert run.errors(key, row, clean(0))[versions == 0].max() < CLOSE
        for seed in off:
            off[seed] = max(off[seed], run.errors(key, row, clean(seed))[versions == 9].max(initial=0.0))
    assert min(off.values()) > 100 * CLOSE


def test_an_update_of_the_same_weights_changes_only_the_version():
    run = Run()
    run.submit(*requests_of())
    for version in range(1, 40):
        run.step()
        run.update(seed=0, version=version)
    run.finish()
    run.same_as(*undisturbed())
    for _, _, versions in run.rows():
        np.testing.assert_array_equal(versions, np.arange(versions.size))


STEP = st.tuples(st.just("step"), st.integers(1, 12))
UPDATE = st.tuples(st.just("update"), st.sampled_from([0, 5, 6]))
SUBMIT = st.tuples(st.just("submit"), st.integers(1, 5))
ABORT = st.tuples(st.just("abort"), st.sets(st.integers(0, 5)))
RESUME = st.tuples(st.just("resume"), st.just(0))
EVENTS = st.lists(st.one_of(STEP, STEP, UPDATE, SUBMIT, SUBMIT, ABORT, RESUME), min_size=4, max_size=20)
TIGHT = HFEngineConfig(max_batch_rows=9, max_batch_tokens=700)


@settings(max_examples=30, deadline=None)
@given(EVENTS)
def test_whatever_happens_every_token_is_that_of_its_version_and_no_group_is_lost(events: list):
    run = Run(engine=TIGHT)
    weights_at, aborted = {0: 0}, {}
    for what, value in [("submit", 3), *events]:
        if what == "step":
            run.step(value)
        elif what == "update":
            weights_at[len(weights_at)] = value
            run.update(value, version=len(weights_at) - 1)
        elif what == "submit":
            key = len(run.requests)
            run.submit(replace(requests_of(n=value, seed=key)[key % 4], key=key))
        elif what == "abort":
            stopped = run.engine.abort(value)
            assert {result.key for result in stopped} == (
                value & run.requests.keys()
            ) - run.done.keys() - aborted.keys()
            aborted |= {result.key: result for result in stopped}
        else:
            run.resume(*aborted.values())
            aborted = {}
        assert run.engine.unfinished == len(run.requests) - len(run.done) - len(aborted)
    run.resume(*aborted.values())
    run.finish()
    assert run.done.keys() == run.requests.keys()
    assert max(run.gauge.rows) <= TIGHT.max_batch_rows
    assert max(run.gauge.tokens) <= TIGHT.max_batch_tokens
    for result in run.done.values():
        lengths = run.outputs[result.key].lengths
        assert result.new_tokens == lengths.sum()
        assert FinishReason.CUT not in result.finish_reasons
        for reason, length in zip(result.finish_reasons, lengths, strict=True):
            assert length == 40 or reason is not FinishReason.LENGTH
    for key, row, versions in run.rows():
        assert (np.diff(versions) >= 0).all()
        for version in np.unique(versions):
            assert run.errors(key, row, clean(weights_at[version]))[versions == version].max() < CLOSE


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


# ---- groups beside each other


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 25), min_size=4, max_size=4), st.permutations(range(4)), st.sampled_from([None, 9, 6, 3])
)
def test_groups_that_join_while_others_run_are_what_they_are_alone(delays, order, rows):
    requests, expected = undisturbed()
    run = Run(engine=HFEngineConfig(max_batch_rows=rows) if rows else None)
    for delay, index in zip(delays, order, strict=True):
        run.step(delay)
        run.submit(requests[index])
    run.finish()
    run.same_as(requests, expected)


def test_groups_of_other_sampling_run_beside_each_other_and_keep_their_own():
    greedy = SamplingConfig(temperature=0.7, max_new_tokens=40, greedy=True)
    requests, expected = undisturbed()
    others = generate(clean(0), requests, greedy).outputs
    run = Run()
    for request in requests:
        run.submit(request)
        run.submit(replace(request, key=request.key + 10), sampling=greedy)
        run.step(3)
    run.finish()
    run.same_as([*requests, *(replace(r, key=r.key + 10) for r in requests)], [*expected, *others])


def test_the_first_in_the_queue_is_not_overtaken_by_smaller_ones():
    run = Run(engine=HFEngineConfig(max_batch_rows=6))
    first, large, small = requests_of(n=4)[:3]
    run.submit(first)
    run.step()
    run.submit(large, replace(small, n=1, seeds=small.seeds[:1]))
    while first.key not in run.done:
        run.step()
        lengths = [run.outputs[request.key].lengths.max() for request in (large, small)]
        assert lengths[1] <= lengths[0]
    run.finish()


def test_rows_that_follow_one_another_for_long_do_not_widen_the_cache():
    run = Run()
    widest, sampling = 0, SamplingConfig(max_new_tokens=20)
    requests = requests_of(n=2)
    need = max(request.prompt_ids.size for request in requests) + 20
    for key in range(40):
        run.submit(replace(requests[key % 4], key=key), sampling=sampling)
        run.step(5)
        widest = max(widest, *(batch.cache.width for batch in run.engine._batches))
        assert len(run.engine._batches) == 1
    assert widest <= need + 2 * GROWTH


def test_what_runs_fits_the_memory_and_uses_it():
    requests, expected = undisturbed(n=12)
    room = 7 * (max(request.prompt_ids.size for request in requests) + 40)
    run = Run(engine=HFEngineConfig(max_batch_tokens=room))
    run.submit(*requests)
    run.finish()
    assert room * 0.6 < max(run.gauge.tokens) <= room
    run.same_as(requests, expected)


def test_short_rows_stay_apart_from_a_long_one_where_its_width_would_be_too_much_for_all():
    short = requests_of(n=8)[2]
    long = GroupRequest(9, np.resize(short.prompt_ids, 300), 1, (4,))
    for room, together in ((800, False), (4000, True)):
        run = Run(engine=HFEngineConfig(max_batch_tokens=room))
        run.submit(long)
        run.step()
        run.submit(short)
        run.step(3)
        joined = int((run.outputs[short.key].lengths == 3).sum())
        assert joined > 4
        assert run.gauge.rows[3] == joined + 1
        assert (run.gauge.tokens[3] > 800) == together
        run.finish()
        assert max(run.gauge.tokens) <= room


def test_a_group_that_no_empty_engine_could_hold_runs_in_parts():
    requests, expected = undisturbed(n=12)
    run = Run(engine=HFEngineConfig(max_batch_rows=5))
    run.submit(*requests)
    run.finish()
    assert max(run.gauge.rows) == 5
    run.same_as(requests, expected)


# ---- refusals and probes


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


def test_a_closed_engine_has_forgotten_its_groups():
    run = Run()
    run.submit(*requests_of())
    run.step()
    assert run.engine.unfinished == 4
    run.engine.close()
    assert run.engine.unfinished == 0
    assert run.engine.step() == []


def test_token_capacity_is_what_was_configured():
    assert engine_of(engine=TIGHT).token_capacity == TIGHT.max_batch_tokens


def test_a_prompt_is_prefilled_once_for_its_group_also_after_an_update():
    run = Run()
    seen: dict[int, int] = {}  # rows by positions of a forward pass

    def count(module: object, args: object, kwargs: dict, output: object) -> None:
        rows, positions = kwargs["input_ids"].shape
        seen[positions] = rows

    run.engine.model.register_forward_hook(count, with_kwargs=True)
    requests = requests_of(n=6)
    run.submit(*requests)
    run.step(3)
    longest = max(request.prompt_ids.size for request in requests)
    assert seen.keys() == {longest, 1}
    assert seen[longest] == 4
    alive = sum(int((output.lengths == 3).sum()) for output in run.outputs.values())
    seen.clear()
    run.update(seed=5, version=1)
    run.step()
    assert seen.keys() == {longest, 3}
    assert seen[longest] == 4
    assert 4 < seen[3] <= alive
