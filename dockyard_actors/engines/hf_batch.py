"""The rows that decode together: their key-value cache, their place in it, and the end of each of them.
A prompt is prefilled once for its group, tokens that a row has already follow as its own; the same way a batch is built
anew after a weight update. Knows one model and its tokenizer; nothing of queues or where weights come from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from dockyard_actors.engines.base import FinishReason
from dockyard_actors.engines.groups import LiveGroup
from dockyard_actors.engines.kvcache import RowCache
from dockyard_actors.engines.sampling import greedy, sample, uniforms
from dockyard_actors.engines.stops import StopTable

EXTEND_TOKENS = 8192  # rows x positions of one forward pass over tokens that rows have already: bounds its memory


Row = tuple[LiveGroup, int]  # completion i of a group


def columns(rows: Sequence[Row]) -> int:
    """Positions of the cache that these rows need together: prompts end at one, the tokens they have at another."""
    prompt = max(group.request.prompt_ids.size for group, _ in rows)
    lengths = [int(group.output.lengths[i]) for group, i in rows]
    left = max(group.limit - length for (group, _), length in zip(rows, lengths, strict=True))
    return prompt + max(lengths) + left


class LiveModel:
    """What all batches share: the model, where completions end, and one buffer to draw in (fresh pages cost more than the
    softmax)."""

    def __init__(self, model: PreTrainedModel, stops: StopTable) -> None:
        self.model, self.stops = model, stops
        self.forget()

    def forget(self) -> None:
        """Frees the buffer."""
        self._scratch = torch.empty(0, 0, dtype=torch.float32)

    def wide(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, V) float32 copy that the caller may overwrite; the next call does."""
        if self._scratch.shape[0] < len(logits):
            self._scratch = torch.empty(logits.shape, dtype=torch.float32)
        return self._scratch[: len(logits)].copy_(logits)


class Batch:
    """Slot b of the model's batch decodes completion rows[b]; all rows have one SamplingConfig.

    Left to right a row's positions are its prompt, the tokens it had when the cache was built, and those drawn since. The
    first two are padded on the left, so that every row writes its next key at one place; positions that it does not use lie
    before and between them.
    """

    def __init__(self, live: LiveModel, rows: Sequence[Row]) -> None:
        self.live, self.sampling = live, rows[0][0].sampling
        self.cache: RowCache | None = None
        self.barrier = torch.empty(0, 0)  # (B, width of the cache) additive: -inf hides a position from its row
        self.last = torch.empty(0, dtype=torch.int64)  # (B,) drawn, not yet in the cache
        self._seat(rows)

    def _seat(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.seeds = np.array([group.seed(i) for group, i in rows], dtype=np.uint64)
        self.limit = np.array([group.limit for group, _ in rows])
        self.done = np.array([int(group.output.lengths[i]) for group, i in rows])
        self.prompt_sizes = torch.tensor([group.request.prompt_ids.size for group, _ in rows])
        self.kinds = list(dict.fromkeys(group.request.stop for group, _ in rows))
        self.kind = np.array([self.kinds.index(group.request.stop) for group, _ in rows])
        self.suspects = np.stack([self.live.stops.suspects(stop) for stop in self.kinds])

    @property
    def held_tokens(self) -> int:
        """Rows x positions of the cache when it has grown to its end, built anew or not."""
        return max(len(self.rows), self.cache.held_rows if self.cache else 0) * sum(self._extent())

    def held_tokens_with(self, other: Batch) -> int:
        """The same after `absorb`."""
        rows = max(len(self.rows) + len(other.rows), self.cache.held_rows if self.cache else 0)
        return rows * sum(map(max, self._extent(), other._extent()))

    def _extent(self) -> tuple[int, int, int]:
        """Positions that are used at most for prompts, for tokens so far, and for tokens to come."""
        prompt, done = int(self.prompt_sizes.max()), int(self.done.max())
        written = self.cache.length if self.cache else 0
        return max(prompt, written - done), done, int((self.limit - self.done).max())

    def absorb(self, other: Batch) -> None:
        """Takes the rows of `other`; both have a cache. Two small batches take nearly twice the time of one."""
        assert self.cache is not None
        assert other.cache is not None
        lengths = self.cache.length, other.cache.length
        self.cache.absorb(other.cache)
        barrier = self.barrier.new_full((len(self.rows) + len(other.rows), self.cache.width), -torch.inf)
        end, rows = self.cache.length, len(self.rows)
        barrier[:rows, end - lengths[0] : end] = self.barrier[:, : lengths[0]]
        barrier[rows:, end - lengths[1] : end] = other.barrier[:, : lengths[1]]
        self.barrier, self.last = barrier, torch.cat([self.last, other.last])
        self._seat([*self.rows, *other.rows])

    def forget(self) -> None:
        """The next step computes all keys and values anew."""
        self.cache = None

    def step(self, version: int) -> None:
        """One token of every row, drawn from the logits of the weights as they are now; rows that ended leave."""
        tokens, logprobs = self._draw(self.forward())
        self.last = tokens
        self._keep(self._record(tokens.numpy(), logprobs.numpy(), version))

    def forward(self) -> torch.Tensor:
        """Logits (B, V) of every row's next token."""
        return self._build() if self.cache is None else self._decode(self.cache)

    def force(self, token: int) -> None:
        """Makes `token` the one that every row drew."""
        self.last = torch.full((len(self.rows),), token)
        self.done += 1

    def drop(self, groups: Collection[LiveGroup]) -> None:
        """The rows of these groups leave."""
        self._keep(np.array([group not in groups for group, _ in self.rows], dtype=bool))

    def _decode(self, cache: RowCache) -> torch.Tensor:
        if cache.full:
            first = int((self.barrier == 0).any(0).nonzero()[0])
            cache.grow(first)
            self.barrier = torch.nn.functional.pad(
                self.barrier[:, first:], (0, cache.width - self.barrier.shape[1] + first), value=-torch.inf
            )
        self.barrier[:, cache.length] = 0.0
        return self.live.model(
            input_ids=self.last[:, None],
            attention_mask=self.barrier[:, None, None],
            position_ids=self.prompt_sizes[:, None] + torch.from_numpy(self.done)[:, None] - 1,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _build(self) -> torch.Tensor:
        """A new cache from prompts and the tokens so far; logits (B, V) of what follows."""
        model, groups = self.live.model, list(dict.fromkeys(group for group, _ in self.rows))
        source = torch.tensor([groups.index(group) for group, _ in self.rows])
        ids, known = _left_padded([group.request.prompt_ids for group in groups])
        cache = RowCache(model.config)
        logits = model(
            input_ids=ids,
            attention_mask=causal(known, model.dtype),
            position_ids=(known.long().cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1][source]
        tokens, had = _left_padded(
            [group.output.tokens[i, :n] for (group, i), n in zip(self.rows, self.done, strict=True)]
        )
        cache.spread(source, room=tokens.shape[1])
        known = torch.cat([known[source], had], dim=1)
        if tokens.shape[1]:
            logits = torch.where(had[:, -1:], self._extend(cache, tokens, known), logits)
        self.barrier = torch.full((len(self.rows), cache.width), -torch.inf, dtype=model.dtype)
        self.barrier[:, : known.shape[1]].masked_fill_(known, 0.0)
        self.cache = cache
        return logits

    def _extend(self, cache: RowCache, tokens: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Appends tokens (B, T), the last columns of known (B, prompt + T), to the cache; logits (B, V) behind the last."""
        rows, total = tokens.shape
        prompt = known.shape[1] - total
        seen = torch.nn.functional.pad(known, (0, cache.width - known.shape[1]))
        had = known[:, prompt:].long()
        positions = self.prompt_sizes[:, None] + (had.cumsum(-1) - 1).clamp(min=0)
        logits = tokens.new_empty(0)
        stride = max(1, EXTEND_TOKENS // rows)
        for first in range(0, total, stride):
            last = min(first + stride, total)
            logits = self.live.model(
                input_ids=tokens[:, first:last],
                attention_mask=causal(seen, self.live.model.dtype, prompt + first, prompt + last),
                position_ids=positions[:, first:last],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        return logits

    def _draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = self.live.wide(logits)
        if self.sampling.greedy:
            return greedy(wide, self.sampling.temperature)
        return sample(wide, self.sampling.temperature, torch.from_numpy(uniforms(self.seeds, self.done)))

    def _record(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> np.ndarray:
        """Writes one token of every row; returns (B,) bool, which rows go on."""
        drawn = zip(self.rows, self.done.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)
        for (group, i), position, token, logprob in drawn:
            output = group.output
            output.tokens[i, position] = token
            output.logprobs[i, position] = logprob
            output.versions[i, position] = version
            output.lengths[i] = position + 1
        self.done += 1
        ended = self.live.stops.eos[tokens]
        full = self.done >= self.limit
        suspect = self.suspects[self.kind, tokens]
        alive = ~(ended | full)
        for slot in np.flatnonzero(ended | full | suspect):
            group, i = self.rows[slot]
            text = group.output.tokens[i, : self.done[slot]]
            if ended[slot]:
                group.reasons[i] = FinishReason.EOS
            elif suspect[slot] and self.live.stops.stopped(text, self.kinds[self.kind[slot]]):
                group.reasons[i] = FinishReason.STOP
                alive[slot] = False
            elif full[slot]:
                group.reasons[i] = FinishReason.LENGTH
        return alive

    def _keep(self, alive: np.ndarray) -> None:
        """Fills the slots of rows that leave with the last living ones: copies as few rows of the cache as leave."""
        rows = int(alive.sum())
        if rows == len(alive):
            return
        order = np.arange(rows)
        holes = np.flatnonzero(~alive[:rows])
        order[holes] = movers = rows + np.flatnonzero(alive[rows:])
        kept = torch.from_numpy(order)
        if self.cache is not None:
            self.cache.move(torch.from_numpy(movers), torch.from_numpy(holes), rows)
            self.barrier, self.last = self.barrier[kept], self.last[kept]
        self.rows = [self.rows[slot] for slot in order]
        self.seeds, self.limit, self.done, self.kind = (
            array[order] for array in (self.seeds, self.limit, self.done, self.kind)
        )
        self.prompt_sizes = self.prompt_sizes[kept]


def causal(known: torch.Tensor, dtype: torch.dtype, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Additive causal mask (B, 1, Q, T) of the queries at columns [first, last) of rows padded where `known` (B, T) is False;
    padding sees itself only."""
    column = torch.arange(known.shape[1])
    query = column[first:last, None]
    seen = ((column <= query) & known[:, None, None, :]) | (column == query)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _left_padded(sequences: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) int64 with padding on the left, and (B, T) bool: where there is a token."""
    longest = max(sequence.size for sequence in sequences)
    ids = np.zeros((len(sequences), longest), dtype=np.int64)
    known = np.zeros(ids.shape, dtype=bool)
    for row, sequence in enumerate(sequences):
        start = longest - sequence.size
        ids[row, start:] = sequence
        known[row, start:] = True
    return torch.from_numpy(ids), torch.from_numpy(known)
