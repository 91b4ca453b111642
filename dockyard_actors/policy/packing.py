"""Attention for packed rows: several prompts with their completions side by side, each seeing only its own.
Linear layers then work on exactly the tokens there are: no padding, and a prompt once for all its completions.
Promises the result of separate, unpacked rows up to floating point. Registered with transformers under ATTENTION.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AttentionInterface

from dockyard_actors.policy.batch import Segment

ATTENTION = "dockyard_packed"
DENSE_LENGTH = 512  # up to here scores are kept: its bf16 backward pass takes a third of flash attention's time on CPUs


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: Sequence[Segment] | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """query (1, H, T, D), key and value (1, K, T, D) -> (1, T, H, D), one product per segment.

    segments must cover [0, T) in order; without any, the row is one causal sequence.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings leave autocast's precision
    dim, length = query.shape[-1], query.shape[2]
    scale = dim**-0.5 if scaling is None else scaling
    if segments is None:
        repeat = query.shape[1] // key.shape[1]
        key, value = (kv.repeat_interleave(repeat, dim=1) for kv in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=length > 1, scale=scale)
        return out.transpose(1, 2), None
    sizes = [segment.end - segment.start for segment in segments]
    parts = zip(*(x[0].split(sizes, dim=1) for x in (query, key, value)), segments, strict=True)
    outs = [_attend(q, k, v, segment.barrier, scale) for q, k, v, segment in parts]
    return torch.cat(outs, dim=1).transpose(0, 1)[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, barrier: Tensor, scale: float) -> Tensor:
    """query (H, n, D), key and value (K, n, D), barrier (n, n) -> (H, n, D); query heads of one key head stacked as rows."""
    heads, length, dim = query.shape
    kv_heads = key.shape[0]
    stacked = query.reshape(kv_heads, heads // kv_heads * length, dim)
    if length > DENSE_LENGTH:
        mask = barrier.to(query.dtype).repeat(heads // kv_heads, 1)
        out = torch.nn.functional.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scale)
        return out.view(heads, length, dim)
    scores = torch.bmm(stacked, key.transpose(1, 2)).view(kv_heads, heads // kv_heads, length, length)
    shares = torch.softmax(torch.add(barrier, scores, alpha=scale), dim=-1).to(value.dtype)
    return torch.bmm(shares.view(kv_heads, -1, length), value).view(heads, length, dim)


AttentionInterface.register(ATTENTION, packed_attention)
