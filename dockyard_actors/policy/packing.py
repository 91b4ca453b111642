"""Attention for packed rows: several prompts with their completions side by side, each seeing only its own.
Linear layers then work on exactly the tokens there are: no padding, and a prompt once for all its completions.
Promises the result of separate, unpacked rows up to floating point. Registered with transformers under ATTENTION.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AttentionInterface

from dockyard_actors.policy.batch import Segment

ATTENTION = "dockyard_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    segments: Sequence[Segment] | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query (1, H, T, D), key and value (1, K, T, D) -> (1, T, H, D), one product per segment.

    segments must cover [0, T) in order; without any, the row is one causal sequence.
    """
    heads, length = query.shape[1:3]
    group = heads // key.shape[1]
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings leave autocast's precision
    if group > 1:
        key, value = (kv.repeat_interleave(group, dim=1) for kv in (key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    if segments is None:
        out = attend(query, key, value, is_causal=length > 1, scale=scaling)
        return out.transpose(1, 2), None
    parts = [
        attend(*(x[:, :, s.start : s.end] for x in (query, key, value)), attn_mask=s.seen, scale=scaling)
        for s in segments
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, packed_attention)
