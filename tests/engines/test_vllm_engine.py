"""The vLLM engine on the tiny models, in this process: vLLM takes one engine a process, so one is open at a time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dockyard_actors.engines import base
from dockyard_actors.engines.base import (
    EngineError,
    FinishReason,
    GroupOutput,
    GroupRequest,
    GroupResult,
    SamplingConfig,
    WeightsMismatch,
)
from dockyard_actors.engines.choose import installed_vllm
from dockyard_actors.engines.vllm import VLLMEngine, VLLMEngineConfig
from dockyard_actors.policy.tiny import tiny_config, tiny_tokenizer
from tests.policy.models import EOS, engine_of, grouped_config, policy_of, requests_of, sharp_model, weights_of

PROBLEM = installed_vllm()[1]
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")]

SAMPLING = SamplingConfig(max_new_tokens=40)
CONFIGS = {"tied": tiny_config, "grouped": grouped_config}
CLOSE = 1e-4  # of float32 logprobs
BLOCK = 32  # tokens that vLLM shares on a CPU


class Bench:
    """One engine, and the weights and reference models that tests put into it by seed."""

    def __init__(self, config: Callable) -> None:
        self.config = config
        settings = VLLMEngineConfig(max_batch_rows=40, kv_cache_bytes=8 << 20)
        self.engine = VLLMEngine(lambda: (config(), tiny_tokenizer(), [EOS]), settings)
        self.version = -1

    def open(self) -> None:
        self.engine.start()
        self.version = -1

    def put(self, seed: int, dtype: str = "float32", recompute: bool = True) -> int:
        """Weights of `seed` under the next version, which is returned."""
        views, manifest = weights_of(policy_of(sharp_model(self.config(), seed)), dtype)
        for view in views.values():
            view.flags.writeable = False  # as sealed shared memory is
        self.version += 1
        self.engine.update_weights(views, manifest, self.version, recompute)
        return self.version

    def logprobs(self, seed: int, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """(T-1,) of ids[1:], from a plain forward pass."""
        return self.distribution(seed, ids, temperature)[np.arange(ids.size - 1), ids[1:]]

    def distribution(self, seed: int, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        with torch.no_grad():
            logits = sharp_model(self.config(), seed)(torch.from_numpy(ids).long()[None]).logits[0]
        return torch.log_softmax(logits.double() / temperature, -1).numpy()


@pytest.fixture(scope="module", params=list(CONFIGS))
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    environment, threads = dict(os.environ), torch.get_num_threads()
    made = Bench(CONFIGS[request.param])
    made.open()
    yield made
    made.engine.close()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


@pytest.fixture
def engine(bench: Bench) -> Iterator[VLLMEngine]:
    """With the weights of seed 0 and nothing cached or running."""
    bench.put(0)
    yield bench.engine
    bench.engine.abort()


class Run:
    """Groups on their way through an engine."""

    def __init__(self, engine: base.Engine, requests: list[GroupRequest], sampling: SamplingConfig = SAMPLING) -> None:
        self.engine, self.requests, self.sampling = engine, requests, sampling
        self.outputs = [GroupOutput.allocate(r.n, sampling.max_new_tokens) for r in requests]
        self.results: dict[int, GroupResult] = {}
        for request, output in zip(requests, self.outputs, strict=True):
            engine.submit(request, output, sampling)

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.take(self.engine.step())
        return self

    def end(self) -> Run:
        while self.engine.unfinished:
            self.take(self.engine.step())
        assert set(self.results) == {request.key for request in self.requests}
        return self

    def take(self, results: list[GroupResult]) -> None:
        for result in results:
            assert result.key not in self.results
            self.results[result.key] = result

    def rows(self) -> Iterator[tuple[np.ndarray, int, np.ndarray, np.ndarray]]:
        """(prompt and tokens, length of the prompt, logprobs, versions) of every completion."""
        for request, output in zip(self.requests, self.outputs, strict=True):
            for i, length in enumerate(output.lengths):
                ids = np.concatenate([request.prompt_ids, output.tokens[i, :length]])
                yield ids, request.prompt_ids.size, output.logprobs[i, :length], output.versions[i, :length]


def same(one: Run, other: Run) -> None:
    for a, b in zip(one.outputs, other.outputs, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=CLOSE)
    assert {k: r.finish_reasons for k, r in one.results.items()} == {
        k: r.finish_reasons for k, r in other.results.items()
    }


# Tokens and logprobs.


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingConfig(0.7, 40), SamplingConfig(1.6, 40, greedy=True)])
def test_logprobs_are_those_of_the_distribution_sampled_from(bench, engine, sampling: SamplingConfig):
    for ids, prompt, logprobs, _ in Run(engine, requests_of(), sampling).end().rows():
        expected = bench.logprobs(0, ids, sampling.temperature)[prompt - 1 :]
        np.testing.assert_allclose(logprobs, expected, atol=CLOSE)


def test_it_draws_the_tokens_that_the_hf_engine_draws(bench, engine):
    other = Run(engine_of(bench.config(), seed=0), requests_of(n=6)).end()
    same(Run(engine, requests_of(n=6)).end(), other)


def test_a_completion_depends_on_prompt_seed_and_weights_whatever_shares_the_batch(engine):
    together = Run(engine, requests_of(n=12)).end()  # 48 rows where 40 run at once
    for request, output in zip(together.requests, together.outputs, strict=True):
        for i in (0, 11):
            alone = Run(engine, [GroupRequest(0, request.prompt_ids, 1, request.seeds[i : i + 1])]).end()
            np.testing.assert_array_equal(alone.outputs[0].tokens[0], output.tokens[i])


def test_other_seeds_give_other_completions(engine):
    first, second = (Run(engine, requests_of(seed=seed)).end() for seed in (0, 7))
    assert all((a.tokens != b.tokens).any() for a, b in zip(first.outputs, second.outputs, strict=True))


def test_greedy_takes_the_mode_beside_groups_that_do_not(bench, engine):
    requests = requests_of(n=1)
    outputs = [GroupOutput.allocate(1, 40) for _ in requests]
    for k, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        engine.submit(request, output, SamplingConfig(0.7, 40, greedy=k < 2))
    while engine.unfinished:
        engine.step()
    for k, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        ids = np.concatenate([request.prompt_ids, output.tokens[0, : output.lengths[0]]])
        modes = bench.distribution(0, ids)[request.prompt_ids.size - 1 : -1].argmax(-1)
        assert (modes == ids[request.prompt_ids.size :]).all() == (k < 2)


@pytest.mark.parametrize("prompt", [*range(BLOCK - 2, BLOCK + 3), 2 * BLOCK, 2 * BLOCK + 7])
def test_prompts_around_the_size_of_a_block_are_shared_rightly(bench, engine, prompt: int):
    ids = np.array(tiny_tokenizer().encode("def f(a,b): # sum of a and b\n return a-b\n@@\n" * 2), dtype=np.int32)[
        :prompt
    ]
    request = GroupRequest(0, ids, 8, tuple(range(8)))
    for row, start, logprobs, _ in Run(engine, [request]).end().rows():
        np.testing.assert_allclose(logprobs, bench.logprobs(0, row)[start - 1 :], atol=CLOSE)


@pytest.fixture
def scheduled(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens computed in each step from here on."""
    scheduler, counts = engine.llm.engine_core.engine_core.scheduler, []
    schedule = scheduler.schedule

    def count(*args):
        plan = schedule(*args)
        counts.append(plan.total_num_scheduled_tokens)
        return plan

    monkeypatch.setattr(scheduler, "schedule", count)
    return counts


def test_the_prompt_of_a_group_is_computed_once(engine, scheduled: list[int]):
    request = requests_of(n=10)[0]
    Run(engine, [request]).steps(2)
    assert scheduled == [request.prompt_ids.size + 9, 10]  # the last token of the prompt for each of the other nine


def test_the_prompt_of_a_group_is_computed_once_after_an_update_and_a_break(bench, engine, scheduled: list[int]):
    request = requests_of(n=10)[0]
    run = Run(engine, [request]).steps(3)
    bench.put(5)
    run.steps(3)
    (cut,) = engine.abort()
    bench.put(0)
    engine.submit(request, run.outputs[0], SAMPLING, resume=cut)
    run.steps(2)
    assert set(run.outputs[0].lengths.tolist()) == {6, 8}  # none has ended
    size = request.prompt_ids.size
    assert scheduled[3:] == [size + 3, 1 + 9 * 3, 10, size + 6, 1 + 9 * 5]


# Ends.


def test_a_stop_string_ends_its_completion_only_and_its_token_is_kept(engine):
    free = Run(engine, requests_of(n=6)).end()
    texts = [engine.tokenizer.decode(row, skip_special_tokens=True) for o in free.outputs for row in o.tokens]
    heads = [text.split("e")[0] for text in texts]
    pairs = Counter(head[i : i + 2] for head in heads for i in range(len(head) - 1))
    stop = ("e", pairs.most_common(1)[0][0])  # no token of this vocabulary holds the second alone
    stopped = Run(engine, requests_of(n=6, stop=stop)).end()
    seen = set()
    for result in stopped.results.values():
        output, whole = stopped.outputs[result.key], free.outputs[result.key]
        for i, reason in enumerate(result.finish_reasons):
            length = output.lengths[i]
            np.testing.assert_array_equal(output.tokens[i, :length], whole.tokens[i, :length])
            text = engine.tokenizer.decode(output.tokens[i, :length], skip_special_tokens=True)
            assert text.endswith(stop) == (reason is FinishReason.STOP)
            assert not any(s in text[:-1] for s in stop)
            assert (output.tokens[i, length:] == 0).all()
            assert (output.versions[i, length:] == -1).all()
            seen.add(reason if reason is not FinishReason.STOP else text[-1] == "e")
    assert {True, False} <= seen
    assert engine.llm.get_num_unfinished_requests() == 0


def test_an_end_token_ends_a_completion_and_a_full_one_is_told_apart(engine):
    run = Run(engine, requests_of(n=40)).end()
    seen = set()
    for request, output in zip(run.requests, run.outputs, strict=True):
        for i, reason in enumerate(run.results[request.key].finish_reasons):
            tokens = output.tokens[i, : output.lengths[i]]
            assert (tokens[-1] == EOS) == (reason is FinishReason.EOS)
            assert (tokens == EOS).sum() == (reason is FinishReason.EOS)
            assert (tokens.size == 40) or reason is FinishReason.EOS
            seen.add(reason)
        assert run.results[request.key].new_tokens == output.lengths.sum()
        assert run.results[request.key].prompt_tokens == request.prompt_ids.size
    assert seen == {FinishReason.EOS, FinishReason.LENGTH}


def test_each_group_has_its_own_limit(engine):
    requests = [
        GroupRequest(r.key, r.prompt_ids, r.n, r.seeds, max_new_tokens=5 * (r.key + 1)) for r in requests_of(n=2)
    ]
    run = Run(engine, requests).end()
    for k, output in enumerate(run.outputs):
        assert output.lengths.max() == 5 * (k + 1)


# Weights that change while tokens are made.


@pytest.mark.parametrize("at", [1, 7, 20])
def test_tokens_before_an_update_are_the_old_weights_and_those_after_it_the_new_ones(bench, engine, at: int):
    run = Run(engine, requests_of(n=6)).steps(at)
    old = engine.version
    new = bench.put(5)
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


def entry(name: str, dtype: str, shape: tuple[int, ...]):
    return SimpleNamespace(name=name, dtype=dtype, shape=shape)


def test_a_manifest_that_does_not_fit_changes_nothing_and_generation_goes_on(bench, engine):
    undisturbed = Run(engine, requests_of()).end()
    run = Run(engine, requests_of()).steps(5)
    views, manifest = weights_of(policy_of(sharp_model(bench.config(), 5)))
    entries = [entry(e.name, e.dtype, tuple(e.shape)) for e in manifest.entries]
    last = entries[-1]
    misfits = {
        "is missing": (entries[:-1], views),
        "is unknown": ([*entries, entry("model.extra.weight", "float32", (99, 96))], views),
        "twice": ([*entries, last], views),
        "has shape": ([*entries[:-1], entry(last.name, "float32", (1, 2))], views),
        "has dtype": ([*entries[:-1], entry(last.name, "int8", last.shape)], views),
        "has no view": (entries, {n: v for n, v in views.items() if n != last.name}),
        "the view of": (entries, {**views, last.name: views[last.name].astype(np.float64)}),
    }
    for reason, (some, given) in misfits.items():
        with pytest.raises(WeightsMismatch, match=reason):
            engine.update_weights(given, SimpleNamespace(entries=some), version=bench.version + 1)
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


# Groups that are taken back.


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


# Single questions.


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


def test_a_question_takes_nothing_from_groups_that_run_and_needs_no_free_place(engine):
    undisturbed = Run(engine, requests_of(n=30)).end()
    run = Run(engine, requests_of(n=30))
    ids = undisturbed.requests[0].prompt_ids
    before = engine.score(ids)
    while engine.unfinished:
        np.testing.assert_allclose(engine.score(ids), before, atol=CLOSE)
        engine.next_token(ids)
        run.steps(1)
    same(run.end(), undisturbed)


# Room.


def test_more_groups_than_the_cache_holds_wait_and_are_what_they_are_alone(bench, engine):
    prompt = np.concatenate([request.prompt_ids for request in requests_of()])
    requests = [GroupRequest(k, prompt[k : k + 120], 10, tuple(range(10 * k, 10 * k + 10))) for k in range(6)]
    sampling = SamplingConfig(max_new_tokens=200)
    needed = sum(10 * (request.prompt_ids.size + 200) for request in requests)
    assert needed > engine.token_capacity > 0
    run = Run(engine, requests, sampling).end()
    for ids, start, logprobs, _ in run.rows():
        np.testing.assert_allclose(logprobs, bench.logprobs(0, ids)[start - 1 :], atol=CLOSE)


def test_what_can_never_fit_or_is_in_use_is_refused_before_anything_is_written(engine):
    request = requests_of(n=2)[0]
    assert engine.max_tokens == 512
    room = engine.max_tokens - request.prompt_ids.size
    output = GroupOutput.allocate(2, room + 1)
    output.tokens.fill(5)
    with pytest.raises(ValueError, match="positions"):
        engine.submit(request, output, SamplingConfig(max_new_tokens=room + 1))
    with pytest.raises(ValueError, match="positions"):
        engine.score(np.ones(512, dtype=np.int32))
    for misfit in (GroupOutput.allocate(2, 39), GroupOutput.allocate(3, 40)):
        with pytest.raises(ValueError, match="output"):
            engine.submit(request, misfit, SAMPLING)
    assert (output.tokens == 5).all()
    engine.submit(request, output, SAMPLING)
    with pytest.raises(ValueError, match="not finished"):
        engine.submit(request, output, SAMPLING)
    (cut,) = engine.abort()
    with pytest.raises(ValueError, match="resume"):
        engine.submit(requests_of(n=2)[1], output, SAMPLING, resume=cut)


def test_a_second_engine_in_the_process_is_refused(bench, engine):
    other = VLLMEngine(lambda: (bench.config(), tiny_tokenizer(), [EOS]))
    with pytest.raises(EngineError, match="already has"):
        other.start()
    assert engine.score(requests_of()[0].prompt_ids).size


def test_a_model_with_heads_that_vllm_cannot_run_is_refused_before_anything_is_built():
    config = grouped_config(head_dim=16)
    with pytest.raises(EngineError, match="this model has 16"):
        VLLMEngine(lambda: (config, tiny_tokenizer(), [EOS])).start()
