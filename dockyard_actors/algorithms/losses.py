"""Policy losses of one micro-batch: ratio, surrogate, off-policy correction, reference KL, reduction, statistics.
Promises that summing over micro-batches gives the loss and the gradient of the whole batch, and that whatever stands
under the mask (NaN, inf) reaches neither. Knows nothing of models: it starts from logprobs.

Shapes: B sequences, S tokens; entry t of a logprob tensor scores token t. Formulas: docs/maths.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dockyard_actors.algorithms.corrections import Correction, correction_weights
from dockyard_actors.algorithms.diagnostics import Stats, TokenStats
from dockyard_actors.algorithms.kl import kl_estimate, kl_loss_term
from dockyard_actors.algorithms.m2po import trust_region
from dockyard_actors.algorithms.ratios import clamp_log_ratio, fill_masked
from dockyard_actors.algorithms.reduction import Denominators, token_weights
from dockyard_actors.algorithms.types import CorrectionConfig, LossConfig


@dataclass(frozen=True)
class LossResult:
    """loss: scalar, to call backward on; this micro-batch's share of the batch's loss.

    stats: partial statistics; `diagnostics.summarise` turns those of all micro-batches into figures:
    `tokens`, `sequences`, `loss/policy`, `loss/kl` (without kl_coef), `ratio/mean|min|max` (the loss's own ratio),
    `clip_fraction/low|high|dual`, `kl_reference/mean|max` (by kl_kind), `kl_behaviour_proximal/mean|max` (k3),
    `correction/mean|max`, `ess` (of policy / behaviour), `m2` and, for m2po, `m2_kept`,
    `masked/m2po` and `truncated/low|high` (fractions), `clamped/ratio|behaviour|reference` and `nonfinite` (counts).
    """

    loss: Tensor
    stats: Stats


def policy_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    reference_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    loss: LossConfig,
    correction: CorrectionConfig,
    denominators: Denominators,
    *,
    row_weights: Tensor | None = None,
    keep_mask: Tensor | None = None,
) -> LossResult:
    """The loss of one micro-batch as its share of the global batch's loss: add gradients, do not average them.

    logprobs, behaviour_logprobs, proximal_logprobs, reference_logprobs: (B, S); computed in fp32 (or float64 if
    given), differentiable in `logprobs` only. proximal None means the policy has not moved since the batch was taken
    (the first optimizer step on it): the ratio is 1, its gradient is not. reference None needs kl_coef 0.
    advantages (B,) or (B, S). loss_mask (B, S) bool or 0/1. denominators: of the global batch.
    row_weights (B,) >= 0: how many identical rows this one stands for; default 1.
    keep_mask (B, S) bool: required by, and only for, `m2po`: the tokens that `m2po.m2po_masks` keeps, computed on the
    global batch. A token that is dropped has no loss at all, KL included, and still counts in the denominators.

    Raises ValueError naming the tensor for shapes that do not fit, and for a missing reference, keep_mask or
    constant_length.
    """
    _check_shapes(
        logprobs,
        behaviour_logprobs=behaviour_logprobs,
        proximal_logprobs=proximal_logprobs,
        reference_logprobs=reference_logprobs,
        loss_mask=loss_mask,
        keep_mask=keep_mask,
    )
    _check_needs(loss, reference_logprobs, keep_mask)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    row_weights = _row_weights(logprobs, row_weights)
    mask = loss_mask.bool() & (row_weights > 0).unsqueeze(-1)

    current = fill_masked(logprobs.to(dtype), mask)
    frozen = current.detach()
    behaviour = fill_masked(behaviour_logprobs.detach().to(dtype), mask)
    proximal = frozen if proximal_logprobs is None else fill_masked(proximal_logprobs.detach().to(dtype), mask)
    advantage = fill_masked(_per_token(advantages, logprobs).detach().to(dtype), mask)

    log_ratio, ratio_clamped = clamp_log_ratio(current - (behaviour if loss.kind == "m2po" else proximal))
    ratio = log_ratio.exp()
    log_shift, shift_clamped = clamp_log_ratio(proximal - behaviour)
    off_policy = correction_weights(log_shift, correction)
    keep = mask if keep_mask is None else mask & keep_mask.bool()

    stats = TokenStats(mask, row_weights)
    surrogate = _surrogate(loss, current, ratio, advantage, stats)
    weights = token_weights(mask, row_weights, loss, denominators, dtype)
    policy_term = (weights * fill_masked(off_policy.weights * surrogate, keep)).sum()
    total, token_loss = policy_term, surrogate
    stats.total("loss/policy", policy_term)

    if reference_logprobs is not None:
        reference = fill_masked(reference_logprobs.detach().to(dtype), mask)
        x, reference_clamped = clamp_log_ratio(frozen - reference)
        divergence = kl_estimate(x, loss.kl_kind)
        stats.mean("kl_reference/mean", divergence)
        stats.highest("kl_reference/max", divergence)
        stats.count("clamped/reference", reference_clamped)
        if loss.kl_coef > 0:
            kl_token = kl_loss_term(current, x, ratio, loss.kl_kind)
            kl_term = (weights * fill_masked(off_policy.weights * kl_token, keep)).sum()
            total, token_loss = total + loss.kl_coef * kl_term, token_loss + kl_token
            stats.total("loss/kl", kl_term)

    stats.count("clamped/ratio", ratio_clamped)
    stats.count("clamped/behaviour", shift_clamped)
    stats.count("nonfinite", ~torch.isfinite(token_loss * off_policy.weights))
    _measure(stats, loss, ratio, frozen, behaviour, log_shift, advantage, off_policy, keep)
    return LossResult(total, stats.values)


def _surrogate(loss: LossConfig, current: Tensor, ratio: Tensor, advantage: Tensor, stats: TokenStats) -> Tensor:
    """Loss per token before correction and mask, (B, S)."""
    match loss.kind:
        case "ppo" | "grpo":
            low, high = 1 - loss.ratio_clip_low, 1 + loss.ratio_clip_high
            per_token = torch.maximum(-ratio * advantage, -ratio.clamp(low, high) * advantage)
            stats.mean("clip_fraction/low", (advantage < 0) & (ratio < low))
            stats.mean("clip_fraction/high", (advantage > 0) & (ratio > high))
            if loss.dual_clip is not None:
                ceiling = -loss.dual_clip * advantage
                stats.mean("clip_fraction/dual", (advantage < 0) & (per_token > ceiling))
                per_token = torch.where(advantage < 0, torch.minimum(per_token, ceiling), per_token)
            return per_token
        case "reinforce":
            return -advantage * current
        case "m2po":
            return -ratio * advantage
        case _:
            raise ValueError(f"unknown policy loss {loss.kind!r}")


def _measure(
    stats: TokenStats,
    loss: LossConfig,
    ratio: Tensor,
    frozen: Tensor,
    behaviour: Tensor,
    log_shift: Tensor,
    advantage: Tensor,
    off_policy: Correction,
    keep: Tensor,
) -> None:
    """The statistics that do not depend on how the loss was put together."""
    stats.mean("ratio/mean", ratio)
    stats.lowest("ratio/min", ratio)
    stats.highest("ratio/max", ratio)
    # Tokens were drawn from mu, so k3 of log mu - log prox estimates KL(mu || prox), and is never negative.
    shift = kl_estimate(-log_shift, "k3")
    stats.mean("kl_behaviour_proximal/mean", shift)
    stats.highest("kl_behaviour_proximal/max", shift)
    stats.mean("correction/mean", off_policy.weights)
    stats.highest("correction/max", off_policy.weights)
    stats.mean("truncated/low", off_policy.low)
    stats.mean("truncated/high", off_policy.high)
    log_drift, _ = clamp_log_ratio(frozen - behaviour)
    stats.effective_sample_size("ess", log_drift.exp())
    region = trust_region(log_drift, advantage, torch.ones_like(keep))
    stats.mean_where("m2", log_drift.square(), region)
    if loss.kind == "m2po":
        stats.mean_where("m2_kept", log_drift.square(), region & keep)
        stats.mean("masked/m2po", ~keep)


def _check_needs(loss: LossConfig, reference_logprobs: Tensor | None, keep_mask: Tensor | None) -> None:
    if loss.kl_coef > 0 and reference_logprobs is None:
        raise ValueError(f"kl_coef {loss.kl_coef} needs reference_logprobs")
    if loss.kind == "m2po" and keep_mask is None:
        raise ValueError("m2po needs keep_mask, computed on the global batch before its first backward: see m2po_masks")
    if loss.kind != "m2po" and keep_mask is not None:
        raise ValueError(f"keep_mask is for m2po; loss kind {loss.kind!r} masks nothing")


def _check_shapes(logprobs: Tensor, **others: Tensor | None) -> None:
    if logprobs.dim() != 2 or logprobs.numel() == 0:
        raise ValueError(f"logprobs must have shape (B >= 1, S >= 1), got {tuple(logprobs.shape)}")
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, logprobs have {tuple(logprobs.shape)}")


def _per_token(advantages: Tensor, logprobs: Tensor) -> Tensor:
    if advantages.shape == logprobs.shape:
        return advantages
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape)}, need {tuple(logprobs.shape[:1])} or {tuple(logprobs.shape)}"
        )
    return advantages.unsqueeze(-1).expand_as(logprobs)


def _row_weights(logprobs: Tensor, row_weights: Tensor | None) -> Tensor:
    if row_weights is None:
        return torch.ones(logprobs.shape[0], dtype=torch.float64, device=logprobs.device)
    if row_weights.shape != logprobs.shape[:1]:
        raise ValueError(f"row_weights have shape {tuple(row_weights.shape)}, need {tuple(logprobs.shape[:1])}")
    return row_weights.detach()
