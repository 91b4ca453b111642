"""Logprobs of given tokens from hidden states, without ever holding (N, V) in float32.
The head is projected in blocks; the backward pass projects again instead of keeping logits. Knows one linear head.
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
    of hidden[owner[n]]; owner (N,) int64, ascending. Logits exist for `chunk` rows at once, or for a block
    of the vocabulary going backward.
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
        count, (vocabulary, _) = len(hidden), weight.shape
        head = weight.to(hidden.dtype)
        logprobs = torch.empty(len(targets), dtype=torch.float32)
        norms = torch.empty(count, dtype=torch.float32)
        entropies = torch.zeros(count, dtype=torch.float32)
        edges = [*range(0, count, chunk), count]
        owned_edges = torch.searchsorted(owner, torch.tensor(edges)).tolist()
        scratch = _Scratch(min(chunk, count) * vocabulary, hidden.dtype)
        weights_buffer = torch.empty(min(chunk, count) * vocabulary)
        for k in range(len(edges) - 1):
            rows, owned = slice(edges[k], edges[k + 1]), slice(owned_edges[k], owned_edges[k + 1])
            logits = scratch.logits(hidden[rows], head, temperature)
            chosen = logits[owner[owned] - rows.start, targets[owned]]
            top = logits.amax(-1, keepdim=True)
            shifted = logits.sub_(top)
            weights = torch.exp(shifted, out=weights_buffer[: shifted.numel()].view_as(shifted))
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
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32)
        grad_weight = torch.empty_like(weight)
        columns = max(1, ctx.chunk * len(head) // len(hidden))
        scratch = _Scratch(min(columns, len(head)) * len(hidden), hidden.dtype)
        for start in range(0, len(head), columns):  # by vocabulary: every row of the large grad_weight is written once
            part = slice(start, min(start + columns, len(head)))
            scores = scratch.logits(hidden, head[part], ctx.temperature)
            scores.sub_(norms[:, None]).exp_().mul_(-steep[:, None])
            here = ((targets >= part.start) & (targets < part.stop)).nonzero()[:, 0]
            scores.index_put_((owner[here], targets[here] - part.start), slope[here], accumulate=True)
            scores = scratch.rounded(scores)
            grad_hidden += scores @ head[part]
            grad_weight[part] = scores.t() @ hidden
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None


class _Scratch:
    """Memory for one block of logits, written again for every block: fresh pages cost more than what is done with them."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._product = torch.empty(size, dtype=dtype)
        self._exact = self._product if dtype == torch.float32 else torch.empty(size, dtype=torch.float32)

    def logits(self, hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
        """(rows, columns) float32, valid until the next call."""
        shape = (len(hidden), len(head))
        count = shape[0] * shape[1]
        product = torch.mm(hidden, head.t(), out=self._product[:count].view(shape))
        logits = product if self._exact is self._product else self._exact[:count].view(shape).copy_(product)
        return logits if temperature == 1.0 else logits.div_(temperature)

    def rounded(self, scores: Tensor) -> Tensor:
        """`scores`, which are of `logits`, in the dtype of the products."""
        if self._exact is self._product:
            return scores
        return self._product[: scores.numel()].view_as(scores).copy_(scores)
