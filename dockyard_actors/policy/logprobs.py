"""Logprobs of given tokens from hidden states, without ever holding (N, V) in float32.
The head is projected in chunks; the backward pass projects again instead of keeping logits. Knows one linear head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden: Tensor, weight: Tensor, owner: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature) at the targets, and the entropy of that distribution.

    hidden (U, H), differentiable; weight (V, H), differentiable; targets (N,) int64, target n scored by the distribution
    of hidden[owner[n]]; owner (N,) int64, ascending. At most `chunk` rows of logits exist at once.
    Products run in hidden.dtype, softmax in float32.
    Returns logprobs (N,) and entropy (N,), detached, in nats (zeros unless asked for), both float32.
    """
    return _TokenLogprobs.apply(hidden, weight, owner, targets, temperature, chunk, entropy)  # type: ignore[no-any-return]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        owner: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        head = weight.to(hidden.dtype)
        logprobs = torch.empty(len(targets), dtype=torch.float32)
        norms = torch.empty(len(hidden), dtype=torch.float32)
        entropies = torch.zeros(len(hidden), dtype=torch.float32)
        for rows, owned in _chunks(owner, len(hidden), chunk):
            logits = _logits(hidden[rows], head, temperature)
            chosen = logits[owner[owned] - rows.start, targets[owned]]
            top = logits.amax(-1, keepdim=True)
            shifted = logits.sub_(top)
            weights = shifted.exp()
            total = weights.sum(-1)
            norms[rows] = top[:, 0] + total.log()
            logprobs[owned] = chosen - norms[owner[owned]]
            if entropy:  # log Z - E[shifted logit]
                entropies[rows] = total.log() - weights.mul_(shifted).sum(-1) / total
        ctx.save_for_backward(hidden, weight, owner, targets, norms)
        ctx.temperature, ctx.chunk = temperature, chunk
        entropies = entropies[owner]
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / d logit = (one-hot - softmax) / temperature, summed over the targets of a row."""
        hidden, weight, owner, targets, norms = ctx.saved_tensors
        slope = gradients[0] / ctx.temperature
        steep = torch.zeros(len(hidden), dtype=slope.dtype).index_add_(0, owner, slope)
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for rows, owned in _chunks(owner, len(hidden), ctx.chunk):
            scores = _logits(hidden[rows], head, ctx.temperature)
            scores.sub_(norms[rows, None]).exp_().mul_(-steep[rows, None])
            scores.index_put_((owner[owned] - rows.start, targets[owned]), slope[owned], accumulate=True)
            scores = scores.to(hidden.dtype)
            torch.mm(scores, head, out=grad_hidden[rows])
            grad_weight += scores.t() @ hidden[rows]
        return grad_hidden, grad_weight, None, None, None, None, None


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ head.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(owner: Tensor, count: int, chunk: int) -> list[tuple[slice, slice]]:
    """At most `chunk` rows each, and which targets they own."""
    edges = [*range(0, count, chunk), count]
    owned = torch.searchsorted(owner, torch.tensor(edges)).tolist()
    return [(slice(edges[k], edges[k + 1]), slice(owned[k], owned[k + 1])) for k in range(len(edges) - 1)]
