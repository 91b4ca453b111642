from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.algorithms.m2po import m2po_mask, m2po_masks, trust_region
from tests.algorithms import reference

steps = st.integers(-8, 8).map(lambda i: i / 8)  # a coarse grid: ties happen


@st.composite
def batches(draw):
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    size = rows * width
    log_ratio = draw(st.lists(steps, min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    advantages = draw(st.lists(st.sampled_from([-1.5, 0.0, 2.0]), min_size=rows, max_size=rows))
    shape = (rows, width)
    return (
        torch.tensor(log_ratio, dtype=torch.float64).reshape(shape),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(mask).reshape(shape),
    )


thresholds = st.sampled_from([1e-3, 0.04, 0.11, 0.3, 5.0])


@given(batches(), thresholds)
@settings(max_examples=300, deadline=None)
def test_the_mask_is_that_of_the_papers_loop(batch, threshold):
    log_ratio, advantages, mask = batch
    want = reference.m2po_keep(log_ratio, advantages.unsqueeze(-1).expand_as(log_ratio), mask, threshold)
    assert (m2po_mask(log_ratio, advantages, mask, threshold).numpy().ravel() == want).all()


@given(batches(), thresholds)
@settings(max_examples=100, deadline=None)
def test_what_remains_is_within_the_threshold_and_nothing_outside_the_region_is_dropped(batch, threshold):
    log_ratio, advantages, mask = batch
    keep = m2po_mask(log_ratio, advantages, mask, threshold)
    region = trust_region(log_ratio, advantages.unsqueeze(-1).expand_as(log_ratio), mask)
    assert (keep[mask & ~region]).all()
    assert not keep[~mask].any()
    rest = log_ratio[region & keep].square()
    assert rest.numel() == 0 or rest.mean() <= threshold + 1e-12
    dropped = log_ratio[region & ~keep].square()
    assert dropped.numel() == 0 or rest.numel() == 0 or dropped.min() > rest.max()


@given(batches(), thresholds, st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_micro_batches_of_any_shape_get_the_mask_of_the_whole_batch(batch, threshold, cut):
    log_ratio, advantages, mask = batch
    cut = min(cut, log_ratio.shape[0] - 1) or log_ratio.shape[0]
    whole = m2po_mask(log_ratio, advantages, mask, threshold)
    pad = torch.nn.functional.pad
    parts = [slice(0, cut), slice(cut, None)] if cut < log_ratio.shape[0] else [slice(None)]
    got = m2po_masks(
        [pad(log_ratio[p], (0, i), value=float("nan")) for i, p in enumerate(parts)],
        [advantages[p] for p in parts],
        [pad(mask[p], (0, i)) for i, p in enumerate(parts)],
        threshold,
    )
    assert torch.equal(torch.cat([k[:, : mask.shape[1]] for k in got]), whole)


@given(batches(), thresholds, st.lists(st.integers(0, 3), min_size=5, max_size=5))
@settings(max_examples=100, deadline=None)
def test_a_weighted_row_counts_as_its_copies(batch, threshold, counts):
    log_ratio, advantages, mask = batch
    weights = torch.tensor(counts[: mask.shape[0]], dtype=torch.float64)
    merged = m2po_mask(log_ratio, advantages, mask, threshold, weights)
    copies = torch.repeat_interleave(torch.arange(mask.shape[0]), weights.long())
    unmerged = m2po_mask(log_ratio[copies], advantages[copies], mask[copies], threshold)
    assert torch.equal(merged[copies], unmerged)


def test_on_policy_and_improbable_direction_tokens_are_all_kept():
    log_ratio = torch.tensor([[0.0, -3.0], [0.0, 3.0]])
    keep = m2po_mask(log_ratio, torch.tensor([1.0, -1.0]), torch.ones(2, 2, dtype=torch.bool), 0.04)
    assert keep.all()


def test_one_outlier_is_dropped_and_the_rest_stay():
    log_ratio = torch.tensor([[0.1, 0.1, 0.1, 2.0]])
    keep = m2po_mask(log_ratio, torch.tensor([1.0]), torch.ones(1, 4, dtype=torch.bool), 0.04)
    assert keep.tolist() == [[True, True, True, False]]


def test_infinite_ratios_are_dropped_and_nan_is_left_to_be_seen():
    log_ratio = torch.tensor([[0.1, float("inf"), float("nan")]])
    keep = m2po_mask(log_ratio, torch.tensor([1.0]), torch.ones(1, 3, dtype=torch.bool), 0.04)
    assert keep.tolist() == [[True, False, True]]


def test_a_batch_without_tokens_has_nothing_to_keep():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert not m2po_mask(torch.zeros(2, 3), torch.ones(2), nothing, 0.04).any()


def test_the_work_grows_like_a_sort_not_like_a_search_per_token():
    n = 1_000_000  # the paper's loop would scan this once per dropped token, half a million times
    log_ratio = torch.linspace(-1, 1, n, dtype=torch.float64).unsqueeze(0)
    keep = m2po_mask(log_ratio, torch.tensor([1.0]), torch.ones(1, n, dtype=torch.bool), 0.04)
    kept = log_ratio[keep & (log_ratio > 0)]
    assert np.isclose(kept.square().mean().item(), 0.04, rtol=1e-4)
