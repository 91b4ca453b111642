"""What a step tells about itself. Every quantity is kept as a sum, a minimum or a maximum over tokens until the end,
so that the figures of a batch are exact however it was split over micro-batches and ranks.

Keys of such partial statistics end in how they combine: `name:sum`, `name:mean` (a sum, to be divided by `tokens:sum`),
`name:num` and `name:den` (sums, to be divided), `name:min`, `name:max`, and `name:first`, `name:second` (sums of the
weights and of their squares, which become an effective sample size). Values are detached float64 scalars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dockyard_actors.algorithms.advantages import has_signal
from dockyard_actors.algorithms.ratios import fill_masked

Stats = dict[str, Tensor]


class TokenStats:
    """Collects statistics of one micro-batch. mask (B, S) bool; row_weights (B,): a row counts so many times."""

    def __init__(self, mask: Tensor, row_weights: Tensor):
        self._mask = mask
        self._weights = mask * row_weights.to(torch.float64).unsqueeze(-1)
        self.values: Stats = {
            "tokens:sum": self._weights.sum(),
            "sequences:sum": self._weights.amax(-1).sum(),
        }

    def mean(self, name: str, per_token: Tensor) -> None:
        """Mean over the loss tokens of a (B, S) value; of a bool, the fraction where it holds."""
        self.values[f"{name}:mean"] = self._sum(per_token)

    def count(self, name: str, where: Tensor) -> None:
        """Number of loss tokens where a (B, S) bool holds."""
        self.values[f"{name}:sum"] = self._sum(where)

    def total(self, name: str, value: Tensor) -> None:
        """A scalar that adds up over micro-batches."""
        self.values[f"{name}:sum"] = value.detach().to(torch.float64)

    def lowest(self, name: str, per_token: Tensor) -> None:
        self.values[f"{name}:min"] = self._selected(per_token, torch.inf).amin()

    def highest(self, name: str, per_token: Tensor) -> None:
        self.values[f"{name}:max"] = self._selected(per_token, -torch.inf).amax()

    def mean_where(self, name: str, per_token: Tensor, where: Tensor) -> None:
        """Mean over the loss tokens where the bool holds; left out of the summary when there are none."""
        self.values[f"{name}:num"] = self._sum(fill_masked(per_token.detach(), where))
        self.values[f"{name}:den"] = self._sum(where)

    def effective_sample_size(self, name: str, per_token: Tensor) -> None:
        """(sum w)^2 / (n sum w^2) in (0, 1] of importance weights (B, S) >= 0 (Kish)."""
        weights = per_token.detach().to(torch.float64)
        self.values[f"{name}:first"] = self._sum(weights)
        self.values[f"{name}:second"] = self._sum(weights.square())

    def _sum(self, per_token: Tensor) -> Tensor:
        return (fill_masked(per_token.detach().to(torch.float64), self._mask) * self._weights).sum()

    def _selected(self, per_token: Tensor, otherwise: float) -> Tensor:
        return torch.where(self._mask, per_token.detach().to(torch.float64), otherwise)


def merge_stats(parts: Iterable[Mapping[str, Tensor]]) -> Stats:
    """Partial statistics of a batch from those of its micro-batches (or ranks): still partial, same keys."""
    merged: Stats = {}
    for part in parts:
        for key, value in part.items():
            if key not in merged:
                merged[key] = value
            elif key.endswith(":min"):
                merged[key] = torch.minimum(merged[key], value)
            elif key.endswith(":max"):
                merged[key] = torch.maximum(merged[key], value)
            else:
                merged[key] = merged[key] + value
    return merged


def summarise(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Figures of a batch by name (`ratio/mean`, `ess`, `clip_fraction/high`, ...) from its partial statistics.

    One transfer from the device. Means and extremes of nothing are left out rather than made up.
    """
    merged = merge_stats(parts)
    if not merged:
        return {}
    raw = dict(zip(merged, torch.stack(list(merged.values())).tolist(), strict=True))
    tokens = raw.get("tokens:sum", 0.0)
    figures: dict[str, float] = {}
    for key, value in raw.items():
        name, _, how = key.rpartition(":")
        if how == "sum":
            figures[name] = value
        elif how == "num" and raw[f"{name}:den"] > 0:
            figures[name] = value / raw[f"{name}:den"]
        elif tokens > 0 and how == "mean":
            figures[name] = value / tokens
        elif tokens > 0 and how in ("min", "max"):
            figures[name] = value
        elif how == "first" and raw[f"{name}:second"] > 0:
            figures[name] = value**2 / (tokens * raw[f"{name}:second"])
    return figures


def group_stats(rewards: Tensor, valid: Tensor | None, advantages: Tensor) -> dict[str, float]:
    """Moments of a batch of groups: rewards (B, G), valid (B, G) bool or None, advantages (B, G).

    `reward/*` and `advantage/*`: mean, std (population), min, max over valid responses. `groups/zero_variance`: share
    of groups whose valid rewards are all equal, among those with at least two valid; `groups/too_few_valid`: share of
    groups with fewer; `masked/invalid_sample`: share of responses without a reward; `groups/with_signal`: a count.
    """
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    groups, enough = rewards.shape[0], valid.sum(-1) >= 2
    signal, usable = has_signal(rewards, valid), int(enough.sum())
    figures = {
        "groups": float(groups),
        "groups/with_signal": float(signal.sum()),
        "groups/zero_variance": float((enough & ~signal).sum()) / max(usable, 1),
        "groups/too_few_valid": float((~enough).sum()) / max(groups, 1),
        "masked/invalid_sample": float((~valid).sum()) / max(valid.numel(), 1),
    }
    if valid.any():
        for name, values in (("reward", rewards), ("advantage", advantages)):
            chosen = values[valid].to(torch.float64)
            figures |= {
                f"{name}/mean": chosen.mean().item(),
                f"{name}/std": chosen.std(correction=0).item(),
                f"{name}/min": chosen.min().item(),
                f"{name}/max": chosen.max().item(),
            }
    return figures


@dataclass(frozen=True)
class AgeHistogram:
    """Tokens by age in optimizer steps. counts: age -> tokens (sums of row weights); mean and max are 0 when empty."""

    counts: dict[int, float]
    mean: float
    max: int


def age_histogram(
    policy_version: Tensor, loss_mask: Tensor, trainer_version: int, row_weights: Tensor | None = None
) -> AgeHistogram:
    """Age = trainer_version - the version that sampled the token: policy_version (B, S) int, loss_mask (B, S).

    row_weights (B,): a row counts so many times. Raises ValueError for a token from a version not trained yet.
    """
    mask = loss_mask.bool()
    weights = torch.ones(mask.shape[0]) if row_weights is None else row_weights
    per_token = weights.to(device=mask.device, dtype=torch.float64).unsqueeze(-1).expand(mask.shape)[mask]
    ages, place = (trainer_version - policy_version[mask].to(torch.int64)).unique(return_inverse=True)
    if ages.numel() == 0:
        return AgeHistogram({}, 0.0, 0)
    if ages[0] < 0:
        raise ValueError(
            f"a token was sampled by version {trainer_version - int(ages[0])}, the trainer is at {trainer_version}"
        )
    counts = torch.zeros(ages.shape, dtype=torch.float64, device=mask.device).index_add(0, place, per_token)
    return AgeHistogram(
        counts=dict(zip(ages.tolist(), counts.tolist(), strict=True)),
        mean=((ages * counts).sum() / counts.sum()).item(),
        max=int(ages[-1]),
    )
