"""Second-moment trust region of M2PO (2510.01161): which tokens of the global batch take part in the loss.
The rule compares tokens of the whole batch, so the trainer applies it once, before the first backward pass; the loss
only takes the result. Knows nothing of micro-batches beyond cutting its answer to their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dockyard_actors.algorithms.ratios import clamp_log_ratio


def trust_region(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Bool: the tokens whose ratio already moved the way their advantage pushes, (A > 0, r > 1) or (A < 0, r < 1).

    Three tensors of one shape; log_ratio = log policy - log behaviour.
    """
    return mask & (((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0)))


def m2po_mask(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, threshold: float, row_weights: Tensor | None = None
) -> Tensor:
    """Keep mask, bool (B, S), of a whole batch: False outside `mask` and where the trust region is left.

    log_ratio (B, S): log policy - log behaviour, taken from one forward pass of the policy at the start of the step
    (the proximal logprobs). advantages (B,) or (B, S). mask (B, S) bool. row_weights (B,): a row counts so many times.

    Within `trust_region`, the tokens with the largest squared log-ratio are dropped until the mean of the rest is at
    most `threshold`. Sorted once, prefix means: O(n log n). Tokens with equal values are dropped together, so the
    answer depends neither on the order of rows nor on whether identical rows were merged.
    """
    return m2po_masks([log_ratio], [advantages], [mask], threshold, None if row_weights is None else [row_weights])[0]


def m2po_masks(
    log_ratios: Sequence[Tensor],
    advantages: Sequence[Tensor],
    masks: Sequence[Tensor],
    threshold: float,
    row_weights: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """`m2po_mask` of one batch that is held as micro-batches of different shapes: one keep mask for each."""
    weights = row_weights or [log_ratio.new_ones(log_ratio.shape[0]) for log_ratio in log_ratios]
    squares, regions, counts = [], [], []
    for log_ratio, advantage, mask, weight in zip(log_ratios, advantages, masks, weights, strict=True):
        advantage = advantage if advantage.dim() == 2 else advantage.unsqueeze(-1)
        region = trust_region(log_ratio, advantage.expand_as(log_ratio), mask.bool()) & (weight > 0).unsqueeze(-1)
        regions.append(region)
        squares.append(clamp_log_ratio(log_ratio.detach().to(torch.float64))[0].square())
        counts.append(weight.to(torch.float64).unsqueeze(-1).expand_as(log_ratio)[region])
    cut = _cut(torch.cat([square[region] for square, region in zip(squares, regions, strict=True)]), counts, threshold)
    return [
        mask.bool() & ~(region & (square >= cut)) for mask, region, square in zip(masks, regions, squares, strict=True)
    ]


def _cut(values: Tensor, counts: Sequence[Tensor], threshold: float) -> Tensor:
    """The smallest value that has to go; inf when all may stay."""
    values, order = values.sort()
    count = torch.cat(list(counts))[order]
    # Ascending values have ascending prefix means: the longest good prefix ends before the first bad one.
    over = (values * count).cumsum(0) / count.cumsum(0) > threshold
    return torch.where(over, values, torch.inf).amin() if values.numel() else values.new_tensor(torch.inf)
