"""Log-ratios between policies, made safe: masked places are replaced before any arithmetic, log-ratios are clamped
before `exp`. Knows nothing of losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Nats. exp(20) is about 5e8: far outside every trust region, far inside fp32, also when squared."""


def fill_masked(values: Tensor, mask: Tensor) -> Tensor:
    """values where mask, else 0, by selection: a product would turn NaN under the mask into NaN (NaN * 0 = NaN)."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def clamp_log_ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(log_ratio clamped to +-LOG_RATIO_LIMIT, bool: where it was outside). NaN stays NaN, so that it is seen."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), log_ratio.abs() > LOG_RATIO_LIMIT
