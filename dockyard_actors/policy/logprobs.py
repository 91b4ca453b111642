"""Logprobs of given tokens from hidden states, without ever holding (N, V) in float32.
The head is projected in chunks; the backward pass projects again instead of keeping logits. Knows one linear head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature) at the targets, and the entropy of that distribution.

    hidden (N, H), differentiable; weight (V, H), differentiable; targets (N,) int64. At most `chunk` rows of logits
    exist at once. Products run in hidden.dtype, softmax in float32.
    Returns logprobs (N,) and entropy (N,), detached, in nats (zeros unless asked for), both float32.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk, entropy)  # type: ignore[no-any-return]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        head = weight.to(hidden.dtype)
        logprobs = torch.empty(count, dtype=torch.float32)
        norms = torch.empty(count, dtype=torch.float32)
        entropies = torch.zeros(count, dtype=torch.float32)
        for rows in _chunks(count, chunk):
            logits = _logits(hidden[rows], head, temperature)
            chosen = logits.gather(-1, targets[rows, None])[:, 0]
            top = logits.amax(-1, keepdim=True)
            shifted = logits.sub_(top)
            weights = shifted.exp()
            total = weights.sum(-1)
            norms[rows] = top[:, 0] + total.log()
            logprobs[rows] = chosen - norms[rows]
            if entropy:  # log Z - E[shifted logit]
                entropies[rows] = total.log() - weights.mul_(shifted).sum(-1) / total
        ctx.save_for_backward(hidden, weight, targets, norms)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / d logit = (one-hot - softmax) / temperature."""
        hidden, weight, targets, norms = ctx.saved_tensors
        slope = gradients[0] / ctx.temperature
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for rows in _chunks(hidden.shape[0], ctx.chunk):
            scores = _logits(hidden[rows], head, ctx.temperature)
            scores.sub_(norms[rows, None]).exp_().mul_(-slope[rows, None])
            scores.scatter_add_(-1, targets[rows, None], slope[rows, None])
            scores = scores.to(hidden.dtype)
            torch.mm(scores, head, out=grad_hidden[rows])
            grad_weight += scores.t() @ hidden[rows]
        return grad_hidden, grad_weight, None, None, None, None


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ head.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]
