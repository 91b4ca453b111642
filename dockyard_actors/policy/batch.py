"""From groups of completions to packed micro-batches: what the policy computes on.
Identical completions of a group become one row with a weight, and a prompt is computed once for all its completions.
Promises that every trained token appears in exactly one micro-batch. Knows no model.

Legend: G completions of a group, S their width, B rows after merging, T packed tokens and N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class GroupRows:
    """One prompt and its completions, as views of what the rollout wrote; read-only arrays are fine.

    prompt_ids (P,) int32; tokens (G, S) int32; behaviour_logprobs (G, S) float32; versions (G, S) int32;
    lengths (G,) int32; advantages (G,) float32; valid (G,) bool or None: completions with a verdict. Others are left out.
    """

    prompt_ids: np.ndarray
    tokens: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray
    lengths: np.ndarray
    advantages: np.ndarray
    valid: np.ndarray | None = None

    def check(self, index: int) -> None:
        """Raises ValueError naming the group and the field that does not fit."""
        shape = self.tokens.shape
        expected = {
            "behaviour_logprobs": shape,
            "versions": shape,
            "lengths": shape[:1],
            "advantages": shape[:1],
            "valid": shape[:1],
        }
        if self.prompt_ids.ndim != 1 or self.prompt_ids.size == 0 or self.tokens.ndim != 2:
            raise ValueError(
                f"group {index}: prompt_ids {self.prompt_ids.shape}, tokens {shape}; expected (P>=1,), (G, S)"
            )
        for name, want in expected.items():
            array = getattr(self, name)
            if array is not None and array.shape != want:
                raise ValueError(f"group {index}: {name} has shape {array.shape}, expected {want}")
        if self.lengths.size and (self.lengths.min() < 0 or self.lengths.max() > shape[1]):
            raise ValueError(f"group {index}: lengths {self.lengths.tolist()} do not fit tokens of width {shape[1]}")


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of a packed row: one prompt, then completions that see the prompt and themselves only.

    barrier: (end-start, end-start) float32, added to attention scores: 0 where row sees column, -inf elsewhere.
    """

    start: int
    end: int
    barrier: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. input_ids, position_ids (T,) int64. For each of the N trained tokens: source, the packed position
    whose hidden state predicts it; target, its id; row (within [first_row, last_row)) and column, its place in (B, S)."""

    first_row: int
    last_row: int
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: tuple[Segment, ...]
    source: torch.Tensor
    target: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.last_row)


@dataclass(frozen=True)
class TrainBatch:
    """The rows of one optimizer step, padded to (B, S), and the micro-batches that cover them in order.

    behaviour_logprobs (B, S) float32; loss_mask (B, S) bool; versions (B, S) int32, -1 outside the mask;
    advantages (B,) float32; row_weights (B,) float32: how many sampled completions the row stands for.
    groups: trained; skipped_groups: without any advantage; merged_rows: completions that fell into another's row;
    masked_rows: completions without a verdict or without tokens; sampled_tokens: completion tokens before merging.
    """

    behaviour_logprobs: torch.Tensor
    loss_mask: torch.Tensor
    versions: torch.Tensor
    advantages: torch.Tensor
    row_weights: torch.Tensor
    micro_batches: tuple[MicroBatch, ...]
    groups: int
    skipped_groups: int
    merged_rows: int
    masked_rows: int
    sampled_tokens: int

    @property
    def packed_tokens(self) -> int:
        return sum(len(micro.input_ids) for micro in self.micro_batches)

    @classmethod
    def build(cls, groups: Sequence[GroupRows], micro_batch_tokens: int) -> TrainBatch:
        """Merges, packs and splits. A group whose advantages are all 0 teaches nothing: it is counted and left out.

        micro_batch_tokens bounds T; a single prompt with one completion may exceed it. Raises ValueError for misfits.
        """
        rows: list[_Row] = []
        pieces: list[_Piece] = []
        trained = skipped = merged = masked = sampled = 0
        for index, group in enumerate(groups):
            group.check(index)
            kept, dropped = _merge(group)
            masked += dropped
            if all(row.advantage == 0 for row in kept):
                skipped += 1
                continue
            trained += 1
            merged += sum(row.weight - 1 for row in kept)
            sampled += sum(row.weight * len(row.tokens) for row in kept)
            pieces += _pieces(group.prompt_ids, kept, len(rows), micro_batch_tokens)
            rows += kept
        width = max((len(row.tokens) for row in rows), default=0)
        micro_batches = [_pack(bundle) for bundle in _bundles(pieces, micro_batch_tokens)]
        return cls(
            behaviour_logprobs=torch.from_numpy(_padded([r.logprobs for r in rows], width, 0.0, np.float32)),
            loss_mask=torch.from_numpy(_padded([np.ones(len(r.tokens), bool) for r in rows], width, False, bool)),
            versions=torch.from_numpy(_padded([r.versions for r in rows], width, -1, np.int32)),
            advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
            row_weights=torch.tensor([row.weight for row in rows], dtype=torch.float32),
            micro_batches=tuple(micro_batches),
            groups=trained,
            skipped_groups=skipped,
            merged_rows=merged,
            masked_rows=masked,
            sampled_tokens=sampled,
        )


@dataclass
class _Row:
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    advantage: float
    weight: int


@dataclass(frozen=True)
class _Piece:
    """A prompt with some of its completions; rows are consecutive from first_row."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    first_row: int

    @property
    def size(self) -> int:
        return self.prompt.size + sum(len(c) for c in self.completions)


def _merge(group: GroupRows) -> tuple[list[_Row], int]:
    """Rows of a group. Completions with the same tokens, versions and advantage become one (their logprobs differ by the
    engine's rounding alone: the first one's are kept), so the weighted loss is the loss of the separate rows."""
    rows: dict[tuple[bytes, bytes, float], _Row] = {}
    masked = 0
    for i, length in enumerate(group.lengths.tolist()):
        if length == 0 or (group.valid is not None and not group.valid[i]):
            masked += 1
            continue
        tokens, versions = group.tokens[i, :length], group.versions[i, :length]
        advantage = float(group.advantages[i])
        key = (tokens.tobytes(), versions.tobytes(), advantage)
        if key in rows:
            rows[key].weight += 1
        else:
            rows[key] = _Row(tokens, group.behaviour_logprobs[i, :length], versions, advantage, 1)
    return list(rows.values()), masked


def _pieces(prompt: np.ndarray, rows: list[_Row], first_row: int, budget: int) -> list[_Piece]:
    """One piece per group, or several that repeat the prompt when together they exceed the budget."""
    pieces: list[_Piece] = []
    held: list[np.ndarray] = []
    size = prompt.size
    for row in rows:
        if held and size + len(row.tokens) > budget:
            pieces.append(_Piece(prompt, tuple(held), first_row))
            first_row, held, size = first_row + len(held), [], prompt.size
        held.append(row.tokens)
        size += len(row.tokens)
    return [*pieces, _Piece(prompt, tuple(held), first_row)]


def _bundles(pieces: list[_Piece], budget: int) -> list[list[_Piece]]:
    bundles: list[list[_Piece]] = []
    size = 0
    for piece in pieces:
        if bundles and size + piece.size <= budget:
            bundles[-1].append(piece)
            size += piece.size
        else:
            bundles.append([piece])
            size = piece.size
    return bundles


def _pack(pieces: list[_Piece]) -> MicroBatch:
    ids, positions, source, target, row, column = ([] for _ in range(6))
    segments = []
    start = 0
    first_row = pieces[0].first_row
    for piece in pieces:
        prompt = piece.prompt.size
        ids.append(piece.prompt)
        positions.append(np.arange(prompt))
        seen = torch.zeros(piece.size, piece.size, dtype=torch.bool)
        seen[:, :prompt] = True
        seen[:prompt, :prompt] = torch.ones(prompt, prompt, dtype=torch.bool).tril()
        at = prompt
        for k, completion in enumerate(piece.completions):
            n = len(completion)
            seen[at : at + n, at : at + n] = torch.ones(n, n, dtype=torch.bool).tril()
            ids.append(completion)
            positions.append(np.arange(prompt, prompt + n))
            source.append([start + prompt - 1, *range(start + at, start + at + n - 1)])
            target.append(completion)
            row.append(np.full(n, piece.first_row - first_row + k))
            column.append(np.arange(n))
            at += n
        barrier = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        segments.append(Segment(start, start + piece.size, barrier))
        start += piece.size
    return MicroBatch(
        first_row=first_row,
        last_row=pieces[-1].first_row + len(pieces[-1].completions),
        input_ids=_joined(ids),
        position_ids=_joined(positions),
        segments=tuple(segments),
        source=_joined(source),
        target=_joined(target),
        row=_joined(row),
        column=_joined(column),
    )


def _joined(parts: Sequence[Sequence[int] | np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]))


def _padded(rows: Sequence[np.ndarray], width: int, fill: float, dtype: type) -> np.ndarray:
    out = np.full((len(rows), width), fill, dtype=dtype)
    for i, values in enumerate(rows):
        out[i, : len(values)] = values
    return out
