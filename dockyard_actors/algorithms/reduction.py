"""From token losses to one number, with denominators of the *global* batch: the sum over micro-batches (and ranks)
of loss and gradient is the same however the batch is split, as long as no sequence is split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dockyard_actors.algorithms.types import LossConfig


@dataclass(frozen=True)
class Denominators:
    """Sizes of the global batch, counted once before its first backward pass.

    tokens: sum of loss_mask x row weight. sequences: sum of the row weights of rows with at least one loss token.
    Whoever averages gradients over ranks (as DDP does) must multiply the loss by the number of ranks.
    """

    tokens: float
    sequences: float

    @classmethod
    def of(cls, loss_mask: Tensor, row_weights: Tensor | None = None) -> Denominators:
        """Counts one (micro-)batch: loss_mask (B, S) bool or 0/1, row_weights (B,) >= 0. Add them up with `total`."""
        lengths = loss_mask.bool().sum(-1).to(torch.float64)
        weights = torch.ones_like(lengths) if row_weights is None else row_weights.to(lengths)
        if weights.shape != lengths.shape or (weights < 0).any():
            raise ValueError(f"row_weights must be {tuple(lengths.shape)} and >= 0, got {row_weights}")
        return cls(tokens=(lengths * weights).sum().item(), sequences=weights[lengths > 0].sum().item())

    @classmethod
    def total(cls, parts: Iterable[Denominators]) -> Denominators:
        """The sum over micro-batches or ranks."""
        return sum(parts, cls(0.0, 0.0))

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences)


def token_weights(
    loss_mask: Tensor, row_weights: Tensor, config: LossConfig, denominators: Denominators, dtype: torch.dtype
) -> Tensor:
    """(B, S): the weight with which each token's loss enters the sum that is this micro-batch's share of the loss.

    loss_mask (B, S) bool, row_weights (B,). 0 outside the mask. An empty global batch gives zeros.
    """
    weights = (row_weights.unsqueeze(-1) * loss_mask).to(torch.float64)
    match config.reduction:
        case "token":
            weights = weights / _or_one(denominators.tokens)
        case "sequence":
            lengths = loss_mask.sum(-1, keepdim=True).clamp(min=1)
            weights = weights / lengths / _or_one(denominators.sequences)
        case "constant":
            if config.constant_length is None:
                raise ValueError("reduction 'constant' needs constant_length")
            weights = weights / (config.constant_length * _or_one(denominators.sequences))
        case _:
            raise ValueError(f"unknown reduction {config.reduction!r}")
    return weights.to(dtype)


def _or_one(denominator: float) -> float:
    return denominator if denominator > 0 else 1.0
