"""Per-token estimators of KL(policy || reference) from x = log policy - log reference, tokens drawn from the policy
(Schulman, "Approximating KL Divergence"), and the same as loss terms whose gradient is that of the KL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dockyard_actors.algorithms.types import KLKind


def kl_estimate(x: Tensor, kind: KLKind) -> Tensor:
    """k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x. Any shape; clamp x before (`ratios.clamp_log_ratio`)."""
    match kind:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(-x) + x
        case _:
            raise ValueError(f"unknown KL estimator {kind!r}")


def kl_loss_term(logprobs: Tensor, x: Tensor, ratio: Tensor, kind: KLKind) -> Tensor:
    """What a token adds to the loss per unit of kl_coef; differentiable in logprobs only.

    logprobs: log policy, with gradient. x: clamped log policy - log reference. ratio: policy over the policy that the
    tokens are weighted to. All the same shape. k1 and k3 are multiplied by the ratio: then the expected gradient is
    E[x grad log policy], the gradient of the KL (k1 alone has mean zero, k3 alone that of KL(reference || policy)).
    k2 is not: its own gradient is x grad log policy.

    The derivative is written out instead of left to autograd. It is the same inside the clamp. Outside, autograd sees
    only the ratio's part and pushes k3 the wrong way with weight exp(20); and within, it subtracts two numbers of size
    exp(-x), which leaves nothing of x in fp32 below x = -17.
    """
    x, ratio = x.detach(), ratio.detach()
    value = kl_estimate(x, kind)
    if kind == "k2":
        slope = x
    else:
        value = ratio * value
        slope = ratio * (x + 1) if kind == "k1" else ratio * x
    return value + slope * (logprobs - logprobs.detach())
