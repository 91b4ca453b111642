"""The formulas of docs/maths.md once more, in float64 numpy and plain loops: slow, obvious and independent of the code
under test. Also the makers of batches that the tests share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dockyard_actors.algorithms.types import CorrectionConfig, LossConfig

LIMIT = 20.0


def clamped(x: float) -> float:
    return min(max(x, -LIMIT), LIMIT)


def advantages(rewards, valid, estimator: str, std: str = "population", eps: float = 1e-6, normalize: bool = False):
    """One group at a time, leave-one-out written as what it says."""
    out = np.zeros(np.shape(rewards))
    for g, row in enumerate(rewards):
        alive = [i for i in range(len(row)) if valid[g][i]]
        chosen = [float(row[i]) for i in alive]
        if len(chosen) < 2 or max(chosen) == min(chosen):
            continue
        mean = sum(chosen) / len(chosen)
        spread = np.std(np.array(chosen), ddof=0 if std == "population" else 1)
        for place, i in enumerate(alive):
            if estimator == "rloo":
                others = chosen[:place] + chosen[place + 1 :]
                value = chosen[place] - sum(others) / len(others)
                out[g, i] = value / (spread + eps) if normalize else value
            else:
                out[g, i] = (chosen[place] - mean) / ((spread + eps) if estimator == "grpo" else 1.0)
    return out


def kl(x: float, kind: str) -> float:
    return {"k1": x, "k2": x * x / 2, "k3": np.exp(-x) - 1 + x}[kind]


def m2po_keep(log_ratio, advantage, mask, threshold: float):
    """The paper's loop on one flat batch: while the mean is too large, drop the largest (all of its equals)."""
    log_ratio, advantage, mask = (np.asarray(a).ravel() for a in (log_ratio, advantage, mask))
    keep = mask.astype(bool).copy()
    region = {
        i: clamped(log_ratio[i]) ** 2
        for i in range(len(keep))
        if keep[i] and ((advantage[i] > 0 and log_ratio[i] > 0) or (advantage[i] < 0 and log_ratio[i] < 0))
    }
    while region and sum(region.values()) / len(region) > threshold:
        worst = max(region.values())
        for i in [i for i, value in region.items() if value == worst]:
            keep[i] = False
            del region[i]
    return keep


def token_loss(pi, prox, mu, ref, a, loss: LossConfig, correction: CorrectionConfig, keep: bool):
    """(policy part, KL part) of one token, both already weighted by the correction."""
    ratio = np.exp(clamped(pi - (mu if loss.kind == "m2po" else prox)))
    if loss.kind in ("ppo", "grpo"):
        clipped = min(max(ratio, 1 - loss.ratio_clip_low), 1 + loss.ratio_clip_high)
        policy = max(-ratio * a, -clipped * a)
        if loss.dual_clip is not None and a < 0:
            policy = min(policy, -loss.dual_clip * a)
    elif loss.kind == "reinforce":
        policy = -a * pi
    else:
        policy = -ratio * a
    k = 1.0
    if correction.kind == "tis":
        k = min(max(np.exp(clamped(prox - mu)), correction.tis_min), correction.tis_max)
    divergence = 0.0
    if ref is not None:
        divergence = kl(clamped(pi - ref), loss.kl_kind) * (1.0 if loss.kl_kind == "k2" else ratio)
    return (k * policy, k * divergence) if keep else (0.0, 0.0)


def batch_loss(batch: Batch, loss: LossConfig, correction: CorrectionConfig, keep=None) -> float:
    """The loss of a whole batch; rows of weight w are written out w times (w integer)."""
    rows = []
    for b in range(batch.logprobs.shape[0]):
        tokens = []
        for t in range(batch.logprobs.shape[1]):
            if not batch.mask[b, t]:
                continue
            pi = float(batch.logprobs[b, t])
            prox = pi if batch.proximal is None else float(batch.proximal[b, t])
            ref = None if batch.reference is None or loss.kl_coef == 0 else float(batch.reference[b, t])
            kept = True if keep is None else bool(keep[b, t])
            a = float(batch.advantages[b] if batch.advantages.dim() == 1 else batch.advantages[b, t])
            policy, divergence = token_loss(pi, prox, float(batch.behaviour[b, t]), ref, a, loss, correction, kept)
            tokens.append(policy + loss.kl_coef * divergence)
        if tokens:
            rows += [tokens] * (1 if batch.row_weights is None else int(batch.row_weights[b]))
    if not rows:
        return 0.0
    if loss.reduction == "token":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if loss.reduction == "sequence":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    assert loss.constant_length is not None
    return sum(map(sum, rows)) / (loss.constant_length * len(rows))


@dataclass
class Batch:
    logprobs: Tensor
    behaviour: Tensor
    proximal: Tensor | None
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor
    row_weights: Tensor | None = None

    def rows(self, start: int, stop: int, width: int | None = None) -> Batch:
        """A micro-batch, optionally cut to another width (only padding may fall off)."""

        def cut(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return tensor[start:stop] if tensor.dim() == 1 else tensor[start:stop, :width]

        return Batch(*(cut(getattr(self, name)) for name in self.__dataclass_fields__))  # type: ignore[arg-type]


def make_batch(
    seed: int, rows: int = 6, width: int = 9, spread: float = 0.4, dtype=torch.float64, per_token: bool = False
) -> Batch:
    """Policies a few tenths of a nat apart, ragged lengths in ascending order, a hole in one row, mixed advantages."""
    g = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return spread * torch.randn(rows, width, generator=g, dtype=torch.float64)

    base = -3 * torch.rand(rows, width, generator=g, dtype=torch.float64) - 0.1
    lengths = torch.linspace(2, width, rows).round().long()
    mask = torch.arange(width) < lengths.unsqueeze(-1)
    mask[-1, 1] = False
    shape = (rows, width) if per_token else (rows,)
    return Batch(
        logprobs=(base + noise()).to(dtype),
        behaviour=(base + noise()).to(dtype),
        proximal=(base + noise()).to(dtype),
        reference=(base + noise()).to(dtype),
        advantages=torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype),
        mask=mask,
    )
