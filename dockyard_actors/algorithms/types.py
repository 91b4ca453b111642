"""What an algorithm is, as configuration: advantage estimator, policy loss, off-policy correction.
Torch-free, so that any process can read and refuse a configuration before a model is loaded.
`validate` says why a combination would train wrongly; it knows nothing of models, engines or tasks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Estimator = Literal["grpo", "rloo", "dr_grpo"]
Std = Literal["population", "sample"]
LossKind = Literal["ppo", "grpo", "reinforce", "m2po"]
Reduction = Literal["token", "sequence", "constant"]
KLKind = Literal["k1", "k2", "k3"]
CorrectionKind = Literal["none", "tis"]
Mode = Literal["sync", "async"]


@dataclass(frozen=True)
class AdvantageConfig:
    """How the rewards of one prompt's responses become advantages.

    estimator: `grpo` (R - mean) / (std + eps), DeepSeekMath 2402.03300; `rloo` R - mean of the others, 2402.14740;
        `dr_grpo` R - mean, 2503.20783 (the paper pairs it with reduction `constant`).
    std: divisor of the variance: `population` n, `sample` n - 1. n counts valid responses.
    eps: added to the std; > 0.
    normalize_by_std: `rloo` only: divide by the group's (not the leave-one-out) std + eps.
    """

    estimator: Estimator = "grpo"
    std: Std = "population"
    eps: float = 1e-6
    normalize_by_std: bool = False


@dataclass(frozen=True)
class LossConfig:
    """The loss of one token and how tokens are averaged.

    kind: `ppo` (`grpo` is the same loss under its other name), `reinforce`, `m2po` (2510.01161).
    ratio_clip_low, ratio_clip_high: the ratio is clipped to [1 - low, 1 + high]; high > low is DAPO's clip-higher
        (2503.14476). Used by `ppo` only.
    dual_clip: c > 1 bounds the loss of a token with A < 0 by -c A (1912.09729); None is off. `ppo` only.
    m2_threshold: bound on the mean squared log-ratio of the tokens that `m2po` keeps.
    reduction: `token` mean over the global batch's tokens, `sequence` mean of per-sequence token means, `constant`
        token sum over sequences x constant_length (Dr.GRPO).
    constant_length: tokens; usually the longest completion allowed. Required by, and only for, `constant`.
    kl_coef: weight of the KL to the frozen reference; 0 is off and needs no reference.
    kl_kind: estimator of that KL.
    """

    kind: LossKind = "ppo"
    ratio_clip_low: float = 0.2
    ratio_clip_high: float = 0.28
    dual_clip: float | None = None
    m2_threshold: float = 0.04
    reduction: Reduction = "token"
    constant_length: int | None = None
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"


@dataclass(frozen=True)
class CorrectionConfig:
    """Weight for the distance between the policy that sampled and the policy that trains.

    kind: `none`, or `tis`: truncated importance sampling, exp(log prox - log mu) clamped to [tis_min, tis_max].
    """

    kind: CorrectionKind = "none"
    tis_max: float = 2.0
    tis_min: float = 0.0


def validate(
    advantage: AdvantageConfig,
    loss: LossConfig,
    correction: CorrectionConfig,
    mode: Mode,
    group_size: int | None = None,
) -> list[str]:
    """Reasons to refuse this combination, empty when it is sound.

    Each reason starts with the field it is about (`loss.dual_clip: ...`) and says the way out. `group_size` is the
    number of responses per prompt, when known.
    """
    return [
        *_choices(advantage, loss, correction, mode),
        *_ranges(advantage, loss, correction),
        *_combinations(advantage, loss, correction, mode, group_size),
    ]


def _choices(advantage: AdvantageConfig, loss: LossConfig, correction: CorrectionConfig, mode: str) -> list[str]:
    chosen = [
        ("advantage.estimator", advantage.estimator, Estimator),
        ("advantage.std", advantage.std, Std),
        ("loss.kind", loss.kind, LossKind),
        ("loss.reduction", loss.reduction, Reduction),
        ("loss.kl_kind", loss.kl_kind, KLKind),
        ("correction.kind", correction.kind, CorrectionKind),
        ("mode", mode, Mode),
    ]
    return [
        f"{field}: {value!r} is unknown; choose one of {', '.join(get_args(kinds))}"
        for field, value, kinds in chosen
        if value not in get_args(kinds)
    ]


def _ranges(advantage: AdvantageConfig, loss: LossConfig, correction: CorrectionConfig) -> list[str]:
    rules = [
        ("advantage.eps", advantage.eps, advantage.eps > 0, "must be > 0, it is what keeps a tiny std divisible"),
        ("loss.ratio_clip_low", loss.ratio_clip_low, 0 < loss.ratio_clip_low <= 1, "must be in (0, 1]"),
        ("loss.ratio_clip_high", loss.ratio_clip_high, loss.ratio_clip_high > 0, "must be > 0"),
        ("loss.m2_threshold", loss.m2_threshold, loss.m2_threshold > 0, "must be > 0"),
        ("loss.kl_coef", loss.kl_coef, loss.kl_coef >= 0, "must be >= 0; a negative one rewards leaving the reference"),
        ("correction.tis_min", correction.tis_min, correction.tis_min >= 0, "must be >= 0"),
        ("correction.tis_max", correction.tis_max, correction.tis_max > 0, "must be > 0"),
    ]
    reasons = [
        f"{field}: {value!r} {rule}" for field, value, holds, rule in rules if not (holds and math.isfinite(value))
    ]
    if loss.dual_clip is not None and not (loss.dual_clip > 1 and math.isfinite(loss.dual_clip)):
        reasons.append(f"loss.dual_clip: {loss.dual_clip!r} must be > 1; at 1 or below it cuts on-policy tokens")
    if loss.constant_length is not None and loss.constant_length < 1:
        reasons.append(f"loss.constant_length: {loss.constant_length!r} must be >= 1 token")
    if correction.tis_min > correction.tis_max:
        reasons.append(f"correction.tis_min: {correction.tis_min!r} is above tis_max {correction.tis_max!r}")
    return reasons


def _combinations(
    advantage: AdvantageConfig, loss: LossConfig, correction: CorrectionConfig, mode: str, group_size: int | None
) -> list[str]:
    reasons = []
    if mode == "async" and correction.kind == "none" and loss.kind != "m2po":
        reasons.append(
            "correction.kind: 'none' in async mode trains stale samples as if the current policy had drawn them; "
            "use correction.kind 'tis' or loss.kind 'm2po'"
        )
    if loss.kind == "m2po" and correction.kind != "none":
        reasons.append(
            f"correction.kind: {correction.kind!r} with loss.kind 'm2po' would count the ratio to the behaviour policy "
            "twice; use correction.kind 'none'"
        )
    if loss.reduction == "constant" and loss.constant_length is None:
        reasons.append(
            "loss.constant_length: reduction 'constant' needs it; the longest completion allowed, in tokens, is usual"
        )
    if loss.reduction != "constant" and loss.constant_length is not None:
        reasons.append(
            f"loss.constant_length: has no effect with reduction {loss.reduction!r}; remove it or use reduction 'constant'"
        )
    if loss.dual_clip is not None and loss.kind not in ("ppo", "grpo"):
        reasons.append(f"loss.dual_clip: has no effect with loss.kind {loss.kind!r}; remove it or use 'ppo'")
    if advantage.normalize_by_std and advantage.estimator != "rloo":
        reasons.append(
            f"advantage.normalize_by_std: has no effect with estimator {advantage.estimator!r} (grpo always divides by "
            "the std, dr_grpo never); remove it or use estimator 'rloo'"
        )
    if group_size is not None and group_size < 2:
        reasons.append(
            f"advantage.estimator: {advantage.estimator!r} compares the responses of one prompt and has no signal with "
            f"group size {group_size}; sample at least 2 per prompt"
        )
    return reasons
