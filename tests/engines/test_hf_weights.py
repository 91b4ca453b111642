"""Weights of the HF engine: swapped, refused, and changed while it generates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.engines.base import EngineError, FinishReason, WeightsMismatch
from dockyard_actors.engines.hf import HFEngineConfig
from tests.engines.hf_run import CLOSE, SAMPLING, Run, clean, undisturbed
from tests.policy.models import engine_of, generate, grouped_config, policy_of, requests_of, sharp_model, weights_of


def test_swapped_weights_generate_as_if_they_had_been_loaded():
    engine, policy = engine_of(seed=0), policy_of(sharp_model(seed=5))
    generate(engine, requests_of(), SAMPLING)  # whatever is cached of the old weights must not matter
    views, manifest = weights_of(policy)
    for view in views.values():
        view.flags.writeable = False  # as sealed shared memory is
    engine.update_weights(views, manifest, version=9)
    swapped = generate(engine, requests_of(), SAMPLING).outputs
    fresh = generate(engine_of(seed=5), requests_of(), SAMPLING).outputs
    for a, b in zip(swapped, fresh, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        assert set(a.versions[a.versions >= 0].tolist()) == {9}


def test_bfloat16_bytes_reach_a_float32_engine():
    engine, policy = engine_of(seed=0), policy_of(sharp_model(seed=5))
    views, manifest = weights_of(policy, "bfloat16")
    engine.update_weights(views, manifest, version=1)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, policy.parameters[name].to(torch.bfloat16).float())


def test_a_manifest_that_does_not_fit_or_an_older_version_changes_nothing():
    engine = engine_of()
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    views, manifest = weights_of(policy_of(sharp_model(seed=5)))
    with pytest.raises(WeightsMismatch, match="is missing"):
        engine.update_weights(views, SimpleNamespace(entries=manifest.entries[:-1]), version=3)
    with pytest.raises(EngineError, match="older than the live one"):
        engine.update_weights(views, manifest, version=-1)
    assert engine.version == 0
    assert all(torch.equal(p, before[name]) for name, p in engine.model.named_parameters())


# ---- in flight


@pytest.mark.parametrize("gloo", [False, True], ids=["arrays", "gloo"])
@pytest.mark.parametrize("grouped", [False, True], ids=["tied", "grouped"])
def test_tokens_before_an_update_are_the_old_weights_and_those_after_it_the_new_ones(grouped: bool, gloo: bool):
    run = Run(grouped_config() if grouped else None)
    run.submit(*requests_of())
    run.step(7)
    run.update(seed=5, version=9, grouped=grouped, gloo=gloo)
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
