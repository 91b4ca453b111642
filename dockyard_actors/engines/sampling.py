"""Draws tokens so that a completion's randomness depends on its own seed and token position alone.
Uniforms come from a counter (no generator state, no order), tokens from the inverse CDF. Knows no model.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 256  # vocabulary entries summed at once: two short searches instead of one cumulative sum over V


def uniforms(seeds: np.ndarray, position: int | np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, from (seed, position) by two rounds of the SplitMix64 mixer.

    seeds: (B,) uint64. position: index of the token in its completion, one for all or (B,). Returns (B,) float64 with 53 random bits.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        state = _mix(seeds + golden)
        state = _mix(state + golden * (np.asarray(position).astype(np.uint64) + np.uint64(1)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: torch.Tensor, temperature: float, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sample of softmax(logits / temperature).

    logits: (B, V) float32, overwritten. draws: (B,) float64 in [0, 1).
    Returns tokens (B,) int64 and their logprobs (B,) float32. A token of probability 0 is never drawn.
    """
    scaled = logits if temperature == 1.0 else logits.div_(temperature)
    weights = scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()
    rows, vocabulary = weights.shape
    pad = -vocabulary % BLOCK
    blocks = (torch.nn.functional.pad(weights, (0, pad)) if pad else weights).view(rows, -1, BLOCK)
    block_ends = blocks.sum(-1).double().cumsum(-1)
    total = block_ends[:, -1:]
    block, share = _pick(block_ends, draws[:, None])
    inside_ends = blocks[torch.arange(rows), block].double().cumsum(-1)
    inside, _ = _pick(inside_ends, share)
    tokens = block * BLOCK + inside
    drawn = weights.gather(-1, tokens[:, None])[:, 0].double()
    return tokens, (drawn.log() - total[:, 0].log()).float()


def greedy(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row (the first of equals) and its logprob at `temperature`."""
    scaled = logits if temperature == 1.0 else logits.div_(temperature)
    best, tokens = scaled.max(-1)
    return tokens, best - scaled.logsumexp(-1)


def _pick(ends: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index (B,) of the interval that holds share x total, and the share (B, 1) of that interval below the point.

    ends: (B, N) float64 ascending interval ends; share: (B, 1) in [0, 1). Empty intervals are never picked.
    """
    total = ends[:, -1:]
    point = torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(ends, point, right=True)
    end = ends.gather(-1, index)
    start = torch.where(index > 0, ends.gather(-1, (index - 1).clamp(min=0)), 0.0)
    inner = ((point - start) / (end - start)).clamp(0.0, 1.0 - 2.0**-53)
    return index[:, 0], inner
