"""Off-policy corrections: a detached weight per token for the distance between the policy that sampled it and the
policy at the moment the batch was taken. It multiplies the token's whole loss and never changes a denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dockyard_actors.algorithms.types import CorrectionConfig


@dataclass(frozen=True)
class Correction:
    """weights: the factor on each token's loss; low, high: bool, where the lower or the upper bound was hit."""

    weights: Tensor
    low: Tensor
    high: Tensor


def correction_weights(log_ratio: Tensor, config: CorrectionConfig) -> Correction:
    """Weights from log_ratio = log proximal - log behaviour, clamped, any shape; detached, same dtype.

    `none`: 1. `tis`: exp(log_ratio) clamped to [tis_min, tis_max], truncated importance sampling.
    """
    ratio = log_ratio.detach().exp()
    match config.kind:
        case "none":
            nowhere = torch.zeros_like(ratio, dtype=torch.bool)
            return Correction(torch.ones_like(ratio), nowhere, nowhere)
        case "tis":
            return Correction(
                ratio.clamp(config.tis_min, config.tis_max), ratio < config.tis_min, ratio > config.tis_max
            )
        case _:
            raise ValueError(f"unknown off-policy correction {config.kind!r}")
