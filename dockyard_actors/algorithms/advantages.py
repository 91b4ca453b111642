"""Group-relative advantages: rewards of one prompt's responses to one number each.
Promises an exact zero wherever a group carries no signal (equal rewards, or fewer than two valid responses).
Knows nothing of tokens or policies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dockyard_actors.algorithms.types import AdvantageConfig


def group_advantages(rewards: Tensor, valid: Tensor | None, config: AdvantageConfig) -> Tensor:
    """Advantages (B, G) float32 of rewards (B, G), any real dtype; computed in float64.

    valid (B, G) bool: False is a response without a reward (it failed for a reason of ours); its reward may be NaN,
    its advantage is 0 and its group is estimated from the others. None means all valid.
    Formulas: docs/maths.md; `AdvantageConfig` names the papers. Raises ValueError for wrong shapes, or a
    valid reward that is not finite.
    """
    values, valid = _checked(rewards, valid)
    count = valid.sum(-1, keepdim=True)
    mean = values.sum(-1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(valid, values - mean, 0.0)
    # Two passes: E[x^2] - E[x]^2 cancels to garbage for near-equal rewards.
    divisor = count if config.std == "population" else count - 1
    std = (centred.square().sum(-1, keepdim=True) / divisor.clamp(min=1)).sqrt()

    match config.estimator:
        case "grpo":
            advantages = centred / (std + config.eps)
        case "dr_grpo":
            advantages = centred
        case "rloo":
            advantages = centred * (count / (count - 1).clamp(min=1))
            if config.normalize_by_std:
                advantages = advantages / (std + config.eps)
        case _:
            raise ValueError(f"unknown advantage estimator {config.estimator!r}")
    keep = valid & _signal(values, valid).unsqueeze(-1)
    return torch.where(keep, advantages, 0.0).to(torch.float32)


def has_signal(rewards: Tensor, valid: Tensor | None) -> Tensor:
    """Which groups can teach: (B,) bool, at least two valid rewards that are not all equal. Shapes as above.

    Equality is exact (max == min): a tolerance on a computed std turns rounding noise into advantages.
    """
    return _signal(*_checked(rewards, valid))


def _signal(values: Tensor, valid: Tensor) -> Tensor:
    highest = torch.where(valid, values, -torch.inf).amax(-1)
    lowest = torch.where(valid, values, torch.inf).amin(-1)
    return highest > lowest  # false too for one valid reward (equal to itself) and for none (-inf, inf)


def _checked(rewards: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards as float64 with 0 on invalid places, and the mask."""
    if rewards.dim() != 2 or rewards.shape[1] == 0:
        raise ValueError(f"rewards must have shape (groups, responses >= 1), got {tuple(rewards.shape)}")
    if valid is None:
        valid = torch.ones_like(rewards, dtype=torch.bool)
    if valid.shape != rewards.shape:
        raise ValueError(f"valid has shape {tuple(valid.shape)}, rewards have {tuple(rewards.shape)}")
    valid = valid.bool()
    values = torch.where(valid, rewards.to(torch.float64), 0.0)
    bad = ~torch.isfinite(values)
    if bad.any():
        group, response = torch.nonzero(bad)[0].tolist()
        raise ValueError(
            f"reward of group {group}, response {response} is {values[group, response].item()}; "
            "mark a response without a reward as not valid"
        )
    return values, valid
