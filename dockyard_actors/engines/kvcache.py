"""Key-value cache and attention for decoding: one buffer per layer, written in place, rows freed by swapping.
The attention reads grouped keys without repeating them, which on CPUs is most of a decode step's time.
Promises the mathematics of ordinary attention; knows nothing of sampling.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

ATTENTION = "dockyard_decode"
GROWTH = 32  # positions added at once: each is read by every step from then on, each growth copies the cache


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer: (rows, kv_heads, width, head_dim), of which `length` positions are written.

    Decoding reads the whole width (the mask hides the rest): dense matrices, where a slice would be copied by bf16 products.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.rows = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Takes the prefilled prompts as they are."""
        self.keys, self.values = key_states, value_states
        self.rows, self.length = key_states.shape[0], key_states.shape[2]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        assert self.keys is not None
        assert self.values is not None
        keys, values = self.keys[: self.rows], self.values[: self.rows]
        end = self.length + key_states.shape[2]
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        self.length = end
        return keys, values

    def spread(self, source: torch.Tensor, width: int, first: int = 0) -> None:
        """New buffers of `width` positions, row i being a copy of row source[i] from position `first` on. Unwritten positions
        are 0, not garbage: their weight in the attention is 0, and 0 times NaN would not be."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(len(source), old.shape[1], width, old.shape[3])
            new[:, :, : self.length - first] = old[source, :, first : self.length]
            setattr(self, name, new)
        self.rows, self.length = len(source), self.length - first

    def absorb(self, other: RowLayer, width: int) -> None:
        """Appends the rows of `other`, so that the last positions of both stand at one place; in the memory of rows that
        ended where that is enough."""
        length, rows = max(self.length, other.length), self.rows + other.rows
        for name in ("keys", "values"):
            own, theirs = getattr(self, name), getattr(other, name)
            if rows > own.shape[0] or width > own.shape[2] or length > self.length:
                new = own.new_zeros(rows, own.shape[1], width, own.shape[3])
                new[: self.rows, :, length - self.length : length] = own[: self.rows, :, : self.length]
                setattr(self, name, own := new)
            own[self.rows : rows, :, length - other.length : length] = theirs[: other.rows, :, : other.length]
        self.rows, self.length = rows, length

    def move(self, source: torch.Tensor, target: torch.Tensor, rows: int) -> None:
        """Copies rows source -> target, then keeps the first `rows`."""
        if len(source):
            for buffer in (self.keys, self.values):
                assert buffer is not None
                buffer[target, :, : self.length] = buffer[source, :, : self.length]
        self.rows = rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.keys.shape[2] if self.keys is not None else query_length), 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """The layers of one batch. A new batch gets a new cache, so that keys of earlier weights cannot be read."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.row_layers = [RowLayer() for _ in range(config.num_hidden_layers)]
        self.width = 0
        super().__init__(layers=list(self.row_layers))

    @property
    def length(self) -> int:
        """Positions written, the padding among them."""
        return self.row_layers[0].length

    @property
    def held_rows(self) -> int:
        """Rows that the buffers have memory for; the next growth gives that of rows which ended back."""
        keys = self.row_layers[0].keys
        return 0 if keys is None else keys.shape[0]

    def spread(self, source: torch.Tensor, room: int = 0) -> None:
        """One prefilled prompt becomes many rows, with room for the next `room` + GROWTH positions."""
        self.width = self.length + room + GROWTH
        for layer in self.row_layers:
            layer.spread(source, self.width)

    @property
    def full(self) -> bool:
        """No room for one more position: `grow` first."""
        return self.length == self.width

    def grow(self, first: int) -> None:
        """Forgets the positions before `first`, which no row uses, and makes room for the next GROWTH."""
        self.width = self.length - first + GROWTH
        for layer in self.row_layers:
            layer.spread(torch.arange(layer.rows), self.width, first)

    def absorb(self, other: RowCache) -> None:
        """Appends the rows of `other`, whose last position and this one's become the same."""
        if other.length > self.length:
            self.width = max(self.width, other.length + GROWTH)
        for layer, theirs in zip(self.row_layers, other.row_layers, strict=True):
            layer.absorb(theirs, self.width)

    def move(self, source: torch.Tensor, target: torch.Tensor, rows: int) -> None:
        """Every layer's rows source -> target, then the first `rows` are kept."""
        for layer in self.row_layers:
            layer.move(source, target, rows)


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention with an additive mask (B, 1, Q, L) or none, for grouped heads.

    query (B, H, Q, D), key and value (B, K, L, D) with H a multiple of K. Returns (B, Q, H, D). For one query per row the
    query heads of a key head stand side by side as one small matrix, so that keys are read once and never copied.
    """
    rows, heads, queries, dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    group = heads // kv_heads
    scale = dim**-0.5 if scaling is None else scaling
    if queries > 1:
        if group > 1:
            key = key[:, :, None].expand(rows, kv_heads, group, length, dim).reshape(rows, heads, length, dim)
            value = value[:, :, None].expand(rows, kv_heads, group, length, -1).reshape(rows, heads, length, -1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale)
        return out.transpose(1, 2).contiguous(), None
    scores = torch.matmul(query.reshape(rows, kv_heads, group, dim) * scale, key.transpose(-1, -2))
    if attention_mask is not None:
        scores = scores + attention_mask
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(shares, value).reshape(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, decode_attention)
