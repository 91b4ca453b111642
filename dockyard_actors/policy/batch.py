"""From groups of completions to packed micro-batches: what the policy computes on.
Identical completions of a group become one row with a weight, and what the rows of a group have in common, the prompt
first of all, is computed once. Promises that every trained token appears in exactly one micro-batch, and that
micro-batches are as few as fit and of even size. Knows no model.

Legend: G completions of a group, S their width, B rows after merging; of a micro-batch: b rows, T packed tokens,
U of them sources (positions that predict something), N trained tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dockyard_actors.policy.tree import TokenTree, trees_within


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
    """Tokens [start, end) of a packed row: one tree, whose tokens see their ancestors and themselves only.

    barrier: (end-start, end-start) float32, added to attention scores: 0 where row sees column, -inf elsewhere.
    """

    start: int
    end: int
    barrier: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass.

    rows (b,) int64: which rows of the batch, ascending. input_ids, position_ids (T,) int64. source (U,) int64, ascending:
    the packed positions that predict. For each of the N trained tokens, all (N,) int64: owner, which source predicts it,
    ascending; target, its id; row and column, its place in this micro-batch's (b, S).
    """

    rows: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: tuple[Segment, ...]
    source: torch.Tensor
    owner: torch.Tensor
    target: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


@dataclass(frozen=True)
class TrainBatch:
    """The rows of one optimizer step, padded to (B, S), in the order of the groups, and the micro-batches that cover them.

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

        micro_batch_tokens bounds T; a single prompt with one completion may exceed it. Which micro-batch a group lands in
        depends on the groups' sizes and order alone. Raises ValueError for misfits.
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
            at = len(rows)
            for tree in trees_within(group.prompt_ids, [row.tokens for row in kept], micro_batch_tokens):
                pieces.append(_Piece(tree, at))
                at += len(tree.source)
            rows += kept
        width = max((len(row.tokens) for row in rows), default=0)
        bundles = balanced([len(piece.tree) for piece in pieces], micro_batch_tokens)
        micro_batches = [_pack([pieces[i] for i in bundle], rows) for bundle in bundles]
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
    """A group, or a part of one; its rows are consecutive from first_row."""

    tree: TokenTree
    first_row: int


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


def balanced(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into `sizes` in as few bundles as fit within `budget`, of sums as even as that allows.

    Longest first into the smallest bundle (Graham 1969: the largest is at most 4/3 - 1/(3k) of the best possible), and
    where that needs more bundles than filling one after the other does, that filling. A size above the budget gets a
    bundle of its own. Bundles and what they hold are in ascending order of index.
    """
    alone = [[i] for i, size in enumerate(sizes) if size > budget]
    order = sorted((i for i, size in enumerate(sizes) if size <= budget), key=lambda i: -sizes[i])
    filled: list[list[int]] = []
    left: list[int] = []
    for i in order:  # first fit, longest first
        place = next((k for k, room in enumerate(left) if sizes[i] <= room), len(filled))
        if place == len(filled):
            filled.append([])
            left.append(budget)
        filled[place].append(i)
        left[place] -= sizes[i]
    least = -(-sum(sizes[i] for i in order) // budget)
    for count in range(least, len(filled) + 1):
        even, heap = [[] for _ in range(count)], [(0, k) for k in range(count)]
        for i in order:
            size, k = heapq.heappop(heap)
            even[k].append(i)
            heapq.heappush(heap, (size + sizes[i], k))
        if all(size <= budget for size, _ in heap):
            filled = even
            break
    return sorted(sorted(bundle) for bundle in [*alone, *filled])


def _pack(pieces: Sequence[_Piece], rows: Sequence[_Row]) -> MicroBatch:
    segments, source, owner, target, row, column = ([] for _ in range(6))
    start = sources = count = 0
    for piece in pieces:
        tree = piece.tree
        held = rows[piece.first_row : piece.first_row + len(tree.source)]
        barrier = torch.zeros(len(tree), len(tree)).masked_fill_(~torch.from_numpy(tree.sees()), -torch.inf)
        segments.append(Segment(start, start + len(tree), barrier))
        used, owners = np.unique(np.concatenate(tree.source), return_inverse=True)
        order = np.argsort(owners, kind="stable")
        source.append(start + used)
        owner.append(sources + owners[order])
        target.append(np.concatenate([r.tokens for r in held])[order])
        row.append(np.concatenate([np.full(len(r.tokens), count + k) for k, r in enumerate(held)])[order])
        column.append(np.concatenate([np.arange(len(r.tokens)) for r in held])[order])
        start, sources, count = start + len(tree), sources + len(used), count + len(held)
    return MicroBatch(
        rows=_joined([np.arange(p.first_row, p.first_row + len(p.tree.source)) for p in pieces]),
        input_ids=_joined([piece.tree.ids for piece in pieces]),
        position_ids=_joined([piece.tree.position for piece in pieces]),
        segments=tuple(segments),
        source=_joined(source),
        owner=_joined(owner),
        target=_joined(target),
        row=_joined(row),
        column=_joined(column),
    )


def _joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _padded(rows: Sequence[np.ndarray], width: int, fill: float, dtype: type) -> np.ndarray:
    out = np.full((len(rows), width), fill, dtype=dtype)
    for i, values in enumerate(rows):
        out[i, : len(values)] = values
    return out
