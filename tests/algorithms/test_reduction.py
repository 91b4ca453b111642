from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.algorithms.diagnostics import summarise
from dockyard_actors.algorithms.m2po import m2po_masks
from dockyard_actors.algorithms.reduction import Denominators
from dockyard_actors.algorithms.types import LossConfig
from tests.algorithms.reference import Batch, make_batch
from tests.algorithms.test_losses import LOSSES, run

WEIGHTS = torch.tensor([1.0, 3, 1, 0, 2, 1])


def micro_batches(batch: Batch, cuts: list[int]) -> list[Batch]:
    """Rows between the cuts, each cut to its own longest row."""
    edges = [0, *cuts, batch.mask.shape[0]]
    parts = [(a, b) for a, b in itertools.pairwise(edges) if a < b]
    widths = [int(batch.mask[a:b].any(0).nonzero().max()) + 1 for a, b in parts]
    return [batch.rows(a, b, width) for (a, b), width in zip(parts, widths, strict=True)]


def step(policy: torch.nn.Module, batch: Batch, cuts: list[int], loss, correction):
    """Loss, flat parameter gradient and figures of one step in micro-batches, with fp32 or float64 parameters."""
    parts = micro_batches(batch, cuts)
    total = Denominators.total(Denominators.of(p.mask, p.row_weights) for p in parts)
    keeps = m2po_masks(
        [p.logprobs - p.behaviour for p in parts],
        [p.advantages for p in parts],
        [p.mask for p in parts],
        loss.m2_threshold,
        None if batch.row_weights is None else [p.row_weights for p in parts],  # type: ignore[misc]
    )
    policy.zero_grad()
    value, stats = 0.0, []
    for part, keep in zip(parts, keeps, strict=True):
        logprobs = policy(part.logprobs.unsqueeze(-1)).squeeze(-1) + part.logprobs
        moved = replace(part, logprobs=logprobs)
        result = run(moved, loss, correction, total, keep if loss.kind == "m2po" else None)
        result.loss.backward()
        value += result.loss.item()
        stats.append(result.stats)
    return value, torch.cat([p.grad.ravel() for p in policy.parameters()]), summarise(stats)  # type: ignore[union-attr]


def small_policy(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.2)
    return policy


@pytest.mark.parametrize(("loss", "correction"), LOSSES, ids=str)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_gradient_and_figures_do_not_depend_on_the_micro_batches(loss, correction, weights, dtype):
    batch = replace(make_batch(5, dtype=dtype), row_weights=weights)
    policy = small_policy(dtype)
    value, gradient, figures = step(policy, batch, [], loss, correction)
    assert gradient.abs().max() > 1e-3
    for cuts in ([3], [1, 2, 5], [1, 2, 3, 4, 5]):
        other_value, other_gradient, other_figures = step(policy, batch, cuts, loss, correction)
        assert other_value == pytest.approx(value, abs=1e-6)
        assert (other_gradient - gradient).abs().max() < 1e-6
        assert other_figures == pytest.approx(figures, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("loss", "correction"), LOSSES, ids=str)
@given(counts=st.lists(st.integers(0, 4), min_size=6, max_size=6), seed=st.integers(0, 999))
@settings(max_examples=10, deadline=None)
def test_merged_identical_rows_give_the_loss_gradient_and_figures_of_the_unmerged(loss, correction, counts, seed):
    merged = replace(make_batch(seed), row_weights=torch.tensor(counts))
    copies = torch.repeat_interleave(torch.arange(6), torch.tensor(counts))
    if copies.numel() == 0:
        return
    fields = (merged.logprobs, merged.behaviour, merged.proximal, merged.reference, merged.advantages, merged.mask)
    unmerged = Batch(*(tensor[copies] for tensor in fields if tensor is not None))
    policy = small_policy(torch.float64)
    value, gradient, figures = step(policy, merged, [], loss, correction)
    other_value, other_gradient, other_figures = step(policy, unmerged, [], loss, correction)
    assert value == pytest.approx(other_value, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-11, atol=1e-14)
    assert figures == pytest.approx(other_figures, rel=1e-10, abs=1e-12)


def test_rows_without_a_loss_token_and_padding_rows_do_not_change_the_mean_over_sequences():
    loss, correction = LossConfig(reduction="sequence"), LOSSES[0][1]
    batch = make_batch(1)
    padded = replace(batch, mask=batch.mask.clone())
    padded.mask[2] = False
    rest = [0, 1, 3, 4, 5]
    fields = (batch.logprobs, batch.behaviour, batch.proximal, batch.reference, batch.advantages, batch.mask)
    without = Batch(*(tensor[rest] for tensor in fields if tensor is not None))
    assert run(padded, loss, correction).loss.item() == pytest.approx(run(without, loss, correction).loss.item())
    assert Denominators.of(padded.mask).sequences == 5


def test_denominators_add_up_over_micro_batches_and_ranks():
    batch = replace(make_batch(1), row_weights=WEIGHTS)
    whole = Denominators.of(batch.mask, WEIGHTS)
    assert whole == Denominators.total(Denominators.of(p.mask, p.row_weights) for p in micro_batches(batch, [2, 5]))
    assert whole.tokens == (batch.mask.sum(-1) * WEIGHTS).sum().item()
    assert whole.sequences == WEIGHTS.sum().item()
    assert Denominators.total([]) == Denominators(0.0, 0.0)


def test_negative_row_weights_are_refused():
    with pytest.raises(ValueError, match="row_weights must be"):
        Denominators.of(torch.ones(2, 3), torch.tensor([1.0, -1.0]))


def test_the_three_reductions_weigh_tokens_as_their_names_say():
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    old = torch.full((2, 4), -1.0, dtype=torch.float64)
    batch = Batch(old, old, None, None, torch.tensor([1.0, 2.0], dtype=torch.float64), mask)
    correction = LOSSES[0][1]
    assert run(batch, LossConfig(reduction="token"), correction).loss.item() == pytest.approx(-(4 + 2) / 5)
    assert run(batch, LossConfig(reduction="sequence"), correction).loss.item() == pytest.approx(-(1 + 2) / 2)
    constant = LossConfig(reduction="constant", constant_length=10)
    assert run(batch, constant, correction).loss.item() == pytest.approx(-(4 + 2) / (10 * 2))
