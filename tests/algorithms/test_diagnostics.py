from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dockyard_actors.algorithms.advantages import group_advantages
from dockyard_actors.algorithms.diagnostics import age_histogram, group_stats, merge_stats, summarise
from dockyard_actors.algorithms.types import AdvantageConfig, CorrectionConfig, LossConfig
from tests.algorithms import reference
from tests.algorithms.reference import Batch, make_batch
from tests.algorithms.test_losses import NONE, TIS, keep_of, run


def chosen(batch: Batch) -> dict[str, np.ndarray]:
    """Flat float64 arrays of the loss tokens."""
    rows = {
        "pi": batch.logprobs,
        "mu": batch.behaviour,
        "prox": batch.proximal,
        "ref": batch.reference,
        "a": batch.advantages.unsqueeze(-1).expand_as(batch.logprobs),
    }
    return {name: tensor[batch.mask].numpy() for name, tensor in rows.items() if tensor is not None}


def test_figures_of_a_ppo_step_equal_their_definitions():
    batch = make_batch(3, rows=16, width=12)
    loss = LossConfig(dual_clip=1.5, kl_coef=0.1)
    got, t = summarise([run(batch, loss, TIS).stats]), chosen(batch)
    ratio, rho = np.exp(t["pi"] - t["prox"]), np.exp(t["pi"] - t["mu"])
    shift, k = t["mu"] - t["prox"], np.exp(t["prox"] - t["mu"])
    to_ref = [reference.kl(x, "k3") for x in t["pi"] - t["ref"]]
    region = ((t["a"] > 0) & (rho > 1)) | ((t["a"] < 0) & (rho < 1))
    want = {
        "tokens": len(ratio),
        "sequences": 16,
        "ratio/mean": ratio.mean(),
        "ratio/min": ratio.min(),
        "ratio/max": ratio.max(),
        "clip_fraction/low": ((t["a"] < 0) & (ratio < 0.8)).mean(),
        "clip_fraction/high": ((t["a"] > 0) & (ratio > 1.28)).mean(),
        "clip_fraction/dual": ((t["a"] < 0) & (ratio > 1.5)).mean(),
        "kl_reference/mean": np.mean(to_ref),
        "kl_reference/max": np.max(to_ref),
        "kl_behaviour_proximal/mean": np.mean([reference.kl(x, "k3") for x in shift]),
        "kl_behaviour_proximal/max": np.max([reference.kl(x, "k3") for x in shift]),
        "correction/mean": np.clip(k, 0.8, 1.3).mean(),
        "correction/max": np.clip(k, 0.8, 1.3).max(),
        "truncated/low": (k < 0.8).mean(),
        "truncated/high": (k > 1.3).mean(),
        "ess": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
        "m2": (np.log(rho) ** 2)[region].mean(),
        "clamped/ratio": 0,
        "clamped/behaviour": 0,
        "clamped/reference": 0,
        "nonfinite": 0,
    }
    parts = {name: got.pop(name) for name in ("loss/policy", "loss/kl")}
    assert got == pytest.approx(want)
    assert min(want["clip_fraction/low"], want["clip_fraction/high"], want["clip_fraction/dual"]) > 0
    assert parts["loss/policy"] + 0.1 * parts["loss/kl"] == pytest.approx(run(batch, loss, TIS).loss.item())


def test_m2po_says_how_much_it_masked_and_what_second_moment_is_left():
    batch = make_batch(3, rows=16, width=12)
    loss = LossConfig(kind="m2po")
    got, keep = summarise([run(batch, loss, NONE).stats]), keep_of(batch, loss)
    assert keep is not None
    assert got["masked/m2po"] == pytest.approx(1 - keep[batch.mask].double().mean().item())
    assert got["m2"] > loss.m2_threshold >= got["m2_kept"] > 0
    assert "clip_fraction/low" not in got


def test_on_policy_everything_says_so():
    batch = make_batch(3)
    batch = replace(batch, behaviour=batch.logprobs, proximal=None, reference=batch.logprobs)
    got = summarise([run(batch, LossConfig(), CorrectionConfig(kind="tis")).stats])
    assert got["ess"] == pytest.approx(1)
    assert got["ratio/min"] == got["ratio/max"] == got["correction/mean"] == 1
    assert got["kl_reference/max"] == got["kl_behaviour_proximal/max"] == got["clip_fraction/high"] == 0
    assert "m2" not in got  # no token in the trust region: no mean to report


def test_clamped_log_ratios_are_counted_by_cause():
    batch = make_batch(3)
    assert batch.proximal is not None
    assert batch.reference is not None
    batch.reference[0, 0] = -60
    batch.reference[1, 0] = -60
    batch.behaviour[0, 0] = float("-inf")
    got = summarise([run(batch, LossConfig(kl_coef=0.1), TIS).stats])
    assert (got["clamped/ratio"], got["clamped/behaviour"], got["clamped/reference"]) == (0, 1, 2)
    assert got["nonfinite"] == 0


def test_a_batch_without_tokens_reports_counts_and_invents_no_means():
    batch = replace(make_batch(3), mask=torch.zeros(6, 9, dtype=torch.bool))
    got = summarise([run(batch, LossConfig(kl_coef=0.1), TIS).stats])
    assert set(got) == {
        *("tokens", "sequences", "loss/policy", "loss/kl"),
        *("clamped/ratio", "clamped/behaviour", "clamped/reference", "nonfinite"),
    }
    assert set(got.values()) == {0.0}
    assert summarise([]) == {}


def test_merging_statistics_in_any_grouping_gives_the_same_figures():
    batch = make_batch(3)
    parts = [run(batch.rows(i, i + 1), LossConfig(), TIS).stats for i in range(6)]
    nested = [merge_stats(parts[:2]), merge_stats([merge_stats(parts[2:3]), merge_stats(parts[3:])])]
    assert summarise(nested) == pytest.approx(summarise(parts))


def test_group_statistics_count_groups_without_signal_by_cause():
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.1, 0.1, 0.1], [1.0, float("nan"), 0.0], [1.0, 0.0, 0.0]])
    valid = torch.tensor([[True] * 3, [True] * 3, [True, False, True], [True, False, False]])
    advantages = group_advantages(rewards, valid, AdvantageConfig(estimator="dr_grpo"))
    got = group_stats(rewards, valid, advantages)
    assert got["groups"] == 4
    assert got["groups/with_signal"] == 2
    assert got["groups/zero_variance"] == pytest.approx(1 / 3)
    assert got["groups/too_few_valid"] == pytest.approx(1 / 4)
    assert got["masked/invalid_sample"] == pytest.approx(3 / 12)
    seen = np.array([1, 0, 0, 0.1, 0.1, 0.1, 1, 0, 1])
    assert got["reward/mean"] == pytest.approx(seen.mean())
    assert got["reward/std"] == pytest.approx(seen.std())
    assert (got["reward/min"], got["reward/max"]) == (0, 1)
    assert got["advantage/mean"] == pytest.approx(0, abs=1e-7)
    assert got["advantage/max"] == pytest.approx(2 / 3)


def test_group_statistics_of_nothing_valid_have_no_moments():
    got = group_stats(torch.zeros(2, 2), torch.zeros(2, 2).bool(), torch.zeros(2, 2))
    assert "reward/mean" not in got
    assert got["groups/too_few_valid"] == 1


def test_token_ages_are_counted_under_the_mask_and_by_row_weight():
    versions = torch.tensor([[4, 4, 2, 99], [3, 99, 99, 99]], dtype=torch.int32)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    plain = age_histogram(versions, mask, 4)
    assert plain.counts == {0: 2.0, 1: 1.0, 2: 1.0}
    assert (plain.mean, plain.max) == (0.75, 2)
    weighted = age_histogram(versions, mask, 4, torch.tensor([1, 3]))
    assert weighted.counts == {0: 2.0, 1: 3.0, 2: 1.0}
    assert weighted.mean == pytest.approx(5 / 6)
    assert age_histogram(versions, torch.zeros(2, 4), 4).counts == {}
    with pytest.raises(ValueError, match="sampled by version 4, the trainer is at 3"):
        age_histogram(versions, mask, 3)
