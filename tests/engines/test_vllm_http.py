"""A vLLM server as a rollout engine: it draws as the engines in process do, and every token is under the version it says."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dockyard_actors.engines.base import EngineError, FinishReason, SamplingConfig, WeightsMismatch
from dockyard_actors.engines.vllm_client import GENERATE, ServerRefused, VLLMHTTPConfig
from dockyard_actors.engines.vllm_http import VLLMHTTPEngine
from dockyard_actors.transport.fdserver import FdClient
from dockyard_actors.transport.torch_views import as_torch
from dockyard_actors.transport.weights_shm import WeightManifest, WeightPublisher
from tests.engines.vllm_bench import CLOSE, NEEDS_VLLM, Run, same
from tests.engines.vllm_server import ServedBench, Server
from tests.policy.models import EOS, engine_of, policy_of, requests_of, sharp_model, weights_of
from tests.transport.slab_peer import serving

pytestmark = NEEDS_VLLM
LONG = SamplingConfig(max_new_tokens=200)  # still running when a test does something to it


@pytest.fixture(scope="module")
def fd_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("fd")) as server:
        yield server.path


@pytest.fixture(scope="module")
def server(fd_path: str) -> Iterator[Server]:
    server = Server(fd_path)
    yield server
    server.close()


@pytest.fixture(scope="module")
def bench(server: Server) -> Iterator[ServedBench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the server computes too
    bench = ServedBench(server)
    bench.reopen()
    yield bench
    bench.engine.close()
    torch.set_num_threads(threads)


@pytest.fixture
def engine(bench: ServedBench) -> Iterator[VLLMHTTPEngine]:
    """With the weights of seed 0 and nothing running."""
    if bench.server.runs:
        bench.put(0)
    else:
        bench.reopen()
    yield bench.engine
    if bench.server.runs:
        bench.engine.abort()


@pytest.fixture
def ending(bench: ServedBench) -> Iterator[VLLMHTTPEngine]:
    """One that knows which token ends a completion."""
    yield bench.reopen(eos=[EOS])
    bench.reopen()


@pytest.fixture
def reopened(bench: ServedBench) -> Iterator[None]:
    """For a test that leaves the engine unusable."""
    yield
    bench.reopen()


def until(run: Run, tokens: int) -> Run:
    """Steps until so many have come; some run on."""
    while sum(output.lengths.sum() for output in run.outputs) < tokens:
        run.steps(1)
    assert run.engine.unfinished
    return run


def proved(bench: ServedBench, run: Run, seeds: dict[int, int]) -> dict[int, int]:
    """Every token's logprob is that of the weights its version says. seeds: by version. Returns tokens by version."""
    counts = dict.fromkeys(seeds, 0)
    for ids, prompt, logprobs, versions in run.rows():
        assert (np.diff(versions) >= 0).all()
        for version, seed in seeds.items():
            drawn = versions == version
            np.testing.assert_allclose(
                logprobs[drawn], bench.logprobs(seed, ids, run.sampling.temperature)[prompt - 1 :][drawn], atol=CLOSE
            )
            counts[version] += int(drawn.sum())
        assert np.isin(versions, list(seeds)).all()
    return counts


# ---- tokens


def test_it_draws_the_tokens_that_the_hf_engine_draws(bench, ending):
    other = Run(engine_of(bench.config(), seed=0), requests_of(n=12)).end()
    run = Run(ending, requests_of(n=12)).end()  # 48 rows where 40 run at once
    same(run, other)
    assert FinishReason.EOS in {reason for result in run.results.values() for reason in result.finish_reasons}


def test_stop_strings_of_one_and_of_several_tokens_end_completions_as_in_the_hf_engine(bench, ending):
    requests = requests_of(n=6, stop=("e", "~~"))
    run = Run(ending, requests).end()
    same(run, Run(engine_of(bench.config(), seed=0), requests).end())
    assert FinishReason.STOP in {reason for result in run.results.values() for reason in result.finish_reasons}


@pytest.mark.parametrize("sampling", [SamplingConfig(0.7, 40), SamplingConfig(1.6, 40, greedy=True)])
def test_logprobs_are_those_of_the_distribution_sampled_from(bench, engine, sampling: SamplingConfig):
    run = Run(engine, requests_of(), sampling).end()
    assert proved(bench, run, {engine.version: 0})[engine.version] > 100


def test_aborted_completions_go_on_behind_their_tokens(engine):
    undisturbed = Run(engine, requests_of(n=6), LONG).end()
    run = until(Run(engine, requests_of(n=6), LONG), 100)
    had = [output.lengths.copy() for output in run.outputs]
    cut = engine.abort()
    assert FinishReason.CUT in {reason for result in cut for reason in result.finish_reasons}
    assert all((output.lengths >= before).all() for output, before in zip(run.outputs, had, strict=True))
    assert engine.unfinished == 0
    for result in cut:
        engine.submit(run.requests[result.key], run.outputs[result.key], LONG, resume=result)
    same(run.end(), undisturbed)


# ---- weights


def test_tokens_before_an_update_are_the_old_weights_and_those_after_it_the_new_ones(bench, engine):
    old = engine.version
    run = until(Run(engine, requests_of(n=11), SamplingConfig(max_new_tokens=60)), 400)  # 40 of 44 run
    new = bench.put(5)
    counts = proved(bench, run.end(), {old: 0, new: 5})
    assert min(counts.values()) >= 100, counts


def test_an_update_of_the_same_weights_changes_nothing_but_versions(bench, engine):
    undisturbed = Run(engine, requests_of(n=6), LONG).end()
    run = until(Run(engine, requests_of(n=6), LONG), 100)
    bench.put(0)
    until(run, 300)
    bench.put(0)
    same(run.end(), undisturbed)


def test_updates_and_aborts_in_any_order_leave_every_token_under_its_version(bench, engine):
    seeds, resumed, after = {engine.version: 0}, 0, 0
    run = Run(engine, requests_of(n=3), LONG)
    while engine.unfinished:
        run.steps(1)
        if sum(int(output.lengths.sum()) for output in run.outputs) < after + 100 or not engine.unfinished:
            continue
        after += 100
        if after % 200:
            seed = (0, 5, 6)[after // 200 % 3]
            seeds[bench.put(seed)] = seed
            continue
        for result in engine.abort((after // 200 % 4, after // 400 % 4)):
            engine.submit(run.requests[result.key], run.outputs[result.key], LONG, resume=result)
            resumed += 1
    counts = proved(bench, run, seeds)
    assert sum(counts.values()) == 4 * 3 * LONG.max_new_tokens
    assert len(seeds) > 2
    assert resumed > 1


def test_no_token_comes_from_new_weights_before_the_next_step(bench, engine):
    run = until(Run(engine, requests_of(n=6), LONG), 100)
    bench.put(5)
    lengths = [output.lengths.copy() for output in run.outputs]
    ids = requests_of()[0].prompt_ids
    token, cached = engine.next_token(ids)
    scored = engine.score(np.append(ids, np.int32(token)))
    np.testing.assert_allclose(scored, bench.logprobs(5, np.append(ids, token)), atol=CLOSE)
    assert cached == pytest.approx(scored[-1], abs=CLOSE)
    for output, before in zip(run.outputs, lengths, strict=True):
        np.testing.assert_array_equal(output.lengths, before)
    run.end()


def test_scores_are_those_of_a_forward_pass_while_groups_run(bench, engine):
    run = until(Run(engine, requests_of(n=6), LONG), 100)
    for temperature in (1.0, 0.7):
        for request in requests_of():
            ids = request.prompt_ids
            np.testing.assert_allclose(engine.score(ids, temperature), bench.logprobs(0, ids, temperature), atol=CLOSE)
    assert engine.score(ids[:1]).size == 0
    run.end()


def test_what_does_not_fit_or_is_older_changes_nothing(bench, engine):
    undisturbed = Run(engine, requests_of(), LONG).end()
    run = until(Run(engine, requests_of(), LONG), 50)
    views, manifest = weights_of(policy_of(sharp_model(bench.config(), 5)))
    with pytest.raises(WeightsMismatch, match="is missing"):
        engine.update_weights(views, SimpleNamespace(entries=manifest.entries[:-1]), version=bench.version + 1)
    with pytest.raises(EngineError, match="older than the live one"):
        engine.update_weights(views, manifest, version=bench.version - 1)
    with pytest.raises(EngineError, match="recompute_kv_cache"):
        engine.update_weights(views, manifest, bench.version + 1, recompute_kv_cache=False)
    with pytest.raises(EngineError, match="is next and the end came"):
        engine.update_weights(iter(list(views.items())[:3]), manifest, bench.version + 1)
    assert engine.version == bench.version
    same(run.end(), undisturbed)


def test_weights_that_lie_in_shared_memory_are_read_there(bench, engine, reopened, fd_path: str):
    views, manifest = weights_of(policy_of(sharp_model(bench.config(), 5)))
    shapes = {entry.name: (entry.dtype, tuple(entry.shape)) for entry in manifest.entries}
    publisher = WeightPublisher(FdClient(fd_path), WeightManifest.of(shapes))
    bench.version += 1
    slot = publisher.slot(bench.version)
    for name, array in slot.items():
        array[...] = views[name]
    late = as_torch(slot["model.norm.weight"])
    ref = publisher.publish(bench.version)
    engine.update_shared(ref, publisher.manifest)
    ids = requests_of()[0].prompt_ids
    np.testing.assert_allclose(engine.score(ids), bench.logprobs(5, ids), atol=CLOSE)
    late[0] += 1
    with pytest.raises(EngineError, match=r"half-way.*model\.norm\.weight has xxh3"):
        engine.update_shared(ref, publisher.manifest)
    publisher.close()
    for call in (engine.step, engine.abort, lambda: engine.score(ids), lambda: bench.put(5)):
        with pytest.raises(EngineError, match=r"half-way.*restart"):
            call()
    engine.close()
    engine.start()
    bench.version = -1
    with pytest.raises(EngineError, match="update_weights"):
        engine.score(ids)
    bench.put(5)
    np.testing.assert_allclose(engine.score(ids), bench.logprobs(5, ids), atol=CLOSE)


# ---- the server


def test_weights_that_somebody_else_changes_are_noticed(engine, reopened):
    run = until(Run(engine, requests_of(n=2), LONG), 20)
    engine.http.call("/update_weight_version", {"new_version": "77"}, timeout_s=10)
    with pytest.raises(EngineError, match=r"weight versions .*77.*restart"):
        run.end()


def test_a_request_of_somebody_else_and_a_refused_one_leave_the_engine_as_it_is(engine):
    theirs = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "logprobs": 0, "seed": 3}}
    answers = [engine.http.generate(theirs, 10).choices[0].token_ids for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3
    with pytest.raises(ServerRefused, match=r"(?s)generate answered 40\d: .*token_ids"):
        engine.http.generate({"sampling_params": {}}, 10)
    Run(engine, requests_of()).end()


def test_a_server_that_refuses_the_key_or_serves_another_model_is_an_error_at_the_start(server, tmp_path):
    wrong = tmp_path / "key"
    wrong.write_text("not-the-secret")
    engine = server.engine(api_key_file=str(wrong))
    with pytest.raises(EngineError, match="answered 401") as caught:
        engine.start()
    assert "not-the-secret" not in str(caught.value)
    with pytest.raises(EngineError, match="serves tiny; set the model"):
        server.engine(model="large").start()


@pytest.mark.parametrize("url", ["localhost:8000", "unix:server", "http:///"])
def test_a_url_of_no_server_is_refused(url: str):
    with pytest.raises(ValueError, match=r"engine\.url"):
        VLLMHTTPConfig(url, "fd")


@pytest.fixture
def stopped(server: Server, bench: ServedBench, reopened) -> Iterator[Run]:
    """Groups in a server whose processes stand still."""
    run = until(Run(bench.reopen(silence_s=1.0, call_s=3.0), requests_of(), LONG), 20)
    server.signal(signal.SIGSTOP)
    yield run
    server.signal(signal.SIGCONT)


def test_a_server_that_stands_still_is_an_error_after_the_silence_allowed(stopped):
    with pytest.raises(EngineError, match=r"unix:.* sent no token for 1 s with \d+ requests open"):
        stopped.end()


def test_a_server_that_does_not_answer_is_an_error_after_the_seconds_allowed(bench, stopped):
    with pytest.raises(EngineError, match=r"unix:.*/pause.* did not answer within 3 s.*restart"):
        bench.put(5)


def test_a_server_that_is_killed_is_an_error_at_once_and_at_the_next_start(server, engine):
    run = until(Run(engine, requests_of(), LONG), 20)
    server.kill()
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"unix:.*{GENERATE}.*restart"):
        run.end()
    assert time.monotonic() - began < engine.config.silence_s
    with pytest.raises(EngineError, match=r"unix:.* did not become ready within 0\.5 s: .*health is gone"):
        server.engine(connect_s=0.5).start()
