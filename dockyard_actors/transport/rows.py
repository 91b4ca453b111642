"""Rows of sealed blocks as values: chosen, cut, joined and tagged by metadata alone, read only at the end.

A `Rows` names rows of any number of refs, in an order, with tags (one value a row). Its operations touch no tensor and no plane;
`read` then gives views, and copies only where rows that do not lie side by side are asked for as one column. A ragged column is
two fields: values (T, …) and offsets (B + 1,), row i being values[offsets[i] : offsets[i + 1]]. It knows no meaning of any column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from dockyard_actors.transport.plane import DataPlane, Fields, FieldShapes, TensorRef
from dockyard_actors.transport.tensors import DTYPES, FieldSpec

OFFSETS = ".offsets"  # suffix of the field beside the values of a ragged column

Tag = int | float | str | bool


@dataclass(frozen=True)
class Ragged:
    """A column whose rows differ in length. values: (T, …); offsets: int64 (B + 1,), from 0 to T, never falling."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> np.ndarray:
        """A view, (length of the row, …)."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a ragged column of {len(self)} rows")
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> Ragged:
        """Copies rows of one dtype and one shape but for their length behind each other; at least one row."""
        kinds = {(row.dtype, row.shape[1:]) for row in rows}
        if len(kinds) != 1:
            raise ValueError(
                f"a ragged column has rows of one dtype and one inner shape, not {sorted(map(str, kinds))}"
            )
        return cls(np.concatenate(rows), np.cumsum([0, *map(len, rows)], dtype=np.int64))

    def check(self, name: str) -> Ragged:
        """Itself. ValueError when the offsets are not those of its values: then no row of it may be looked at."""
        offsets, total = self.offsets, len(self.values) if self.values.ndim else -1
        if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) == 0:
            raise ValueError(f"{name}{OFFSETS}: {offsets.dtype}{list(offsets.shape)} instead of int64[rows + 1]")
        if offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
            raise ValueError(f"{name}{OFFSETS} do not rise from 0 to the {total} values of {name!r}")
        return self


def ragged_shapes(name: str, dtype: str, rows: int, values: int, inner: Sequence[int] = ()) -> FieldShapes:
    """The two fields of a ragged column, for `alloc`: `values` entries of shape `inner` in all."""
    return {name: (dtype, (values, *inner)), name + OFFSETS: ("int64", (rows + 1,))}


def ragged_arrays(columns: Mapping[str, Ragged]) -> dict[str, np.ndarray]:
    """The fields of ragged columns, for `put`."""
    return {
        field: array
        for name, column in columns.items()
        for field, array in ((name, column.check(name).values), (name + OFFSETS, column.offsets))
    }


def as_ragged(fields: Mapping[str, np.ndarray], name: str) -> Ragged:
    """Views of a ragged column. KeyError without its offsets, ValueError when they do not fit."""
    return Ragged(fields[name], fields[name + OFFSETS]).check(name)


class Rows(msgspec.Struct, frozen=True):
    """Small enough to travel in a message. Every operation gives a new value; refs that no row needs any more are left out."""

    refs: tuple[TensorRef, ...]
    at: tuple[tuple[int, int], ...]  # each row: index into refs, and its row in that block
    fields: tuple[str, ...]  # columns by name, the ragged ones without their offsets
    tags: dict[str, tuple[Tag, ...]]  # by name one value a row

    @classmethod
    def of(cls, ref: TensorRef, tags: Mapping[str, Sequence[Tag]] | None = None) -> Rows:
        """All rows of a block, whose fields must agree on how many there are (ValueError)."""
        counts = {name: _count(ref, name) for name in _columns(ref)}
        if len(set(counts.values())) != 1:
            raise ValueError(f"the columns of arena {ref.arena} block {ref.block} differ in rows: {counts}")
        rows = cls((ref,), tuple((0, row) for row in range(next(iter(counts.values())))), tuple(counts), {})
        for name, values in (tags or {}).items():
            rows = rows.tagged(name, values)
        return rows

    def __len__(self) -> int:
        return len(self.at)

    def tagged(self, name: str, values: Sequence[Tag]) -> Rows:
        """With another tag, or other values of a tag."""
        if len(values) != len(self):
            raise ValueError(f"tag {name!r}: {len(values)} values for {len(self)} rows")
        return msgspec.structs.replace(self, tags={**self.tags, name: tuple(values)})

    def subset(self, indices: Iterable[int]) -> Rows:
        """The rows with these indices (from 0), in this order, repeated where an index is."""
        wanted = tuple(indices)
        if bad := [index for index in wanted if not 0 <= index < len(self)]:
            raise IndexError(f"row {bad[0]} of {len(self)} rows")
        at = [self.at[index] for index in wanted]
        used = sorted({ref for ref, _ in at})
        place = {ref: index for index, ref in enumerate(used)}
        return Rows(
            tuple(self.refs[ref] for ref in used),
            tuple((place[ref], row) for ref, row in at),
            self.fields,
            {name: tuple(values[index] for index in wanted) for name, values in self.tags.items()},
        )

    def slice(self, start: int, stop: int) -> Rows:
        """Rows start … stop - 1. IndexError unless 0 <= start <= stop <= rows: a shard that is short is an error."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}:{stop} of {len(self)} rows")
        return self.subset(range(start, stop))

    def where(self, tag: str, keep: Callable[[Tag], bool]) -> Rows:
        """The rows whose tag is to be kept."""
        return self.subset(index for index, value in enumerate(self._tag(tag)) if keep(value))

    def ordered(self, tag: str) -> Rows:
        """By rising tag; rows of equal tags stay in their order."""
        values = self._tag(tag)
        return self.subset(sorted(range(len(self)), key=lambda index: values[index]))  # type: ignore[arg-type]

    def select(self, fields: Iterable[str]) -> Rows:
        """With these columns only."""
        wanted = tuple(fields)
        if missing := [name for name in wanted if name not in self.fields]:
            raise KeyError(f"no column {missing[0]!r}; there are {', '.join(self.fields)}")
        return msgspec.structs.replace(self, fields=wanted)

    def _tag(self, name: str) -> tuple[Tag, ...]:
        if name not in self.tags:
            raise KeyError(f"no tag {name!r}; there are {', '.join(self.tags) or 'none'}")
        return self.tags[name]


def concat(parts: Sequence[Rows]) -> Rows:
    """All rows of the parts, one after the other. ValueError unless columns (dtype and inner shape too) and tags agree."""
    if not parts:
        raise ValueError("nothing to join: no parts")
    first, kinds = parts[0], _kinds(parts[0])
    place: dict[TensorRef, int] = {}
    for number, part in enumerate(parts):
        if part.fields != first.fields or set(part.tags) != set(first.tags):
            raise ValueError(
                f"part {number} has columns {part.fields} and tags {sorted(part.tags)}, "
                f"part 0 {first.fields} and {sorted(first.tags)}"
            )
        for name, kind in _kinds(part).items():
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"column {name!r} is {kind} in part {number} and {kinds[name]} before it")
        for ref in part.refs:
            place.setdefault(ref, len(place))
    return Rows(
        tuple(place),
        tuple((place[part.refs[ref]], row) for part in parts for ref, row in part.at),
        first.fields,
        {name: tuple(value for part in parts for value in part.tags[name]) for name in first.tags},
    )


class RowsRead:
    """Views of rows, got from a plane. Each block is looked at once, whatever rows of it are in use."""

    def __init__(self, rows: Rows, blocks: list[Fields]) -> None:
        self.rows = rows
        self._blocks = blocks

    def row(self, index: int, name: str) -> np.ndarray:
        """A view of one row of a column: its inner shape, or (length, …) when ragged."""
        block, row = self.rows.at[index]
        fields = self._blocks[block]
        return as_ragged(fields, name).row(row) if name + OFFSETS in fields else fields[name][row]

    def column(self, name: str) -> np.ndarray | Ragged:
        """(rows, …), or `Ragged`: a view where the rows lie side by side in one block, else a copy."""
        if not self.rows.at:
            raise ValueError(f"column {name!r} of no rows has no shape")
        (block, start), count = self.rows.at[0], len(self.rows)
        fields = self._blocks[block]
        side_by_side = self.rows.at == tuple((block, start + index) for index in range(count))
        if name + OFFSETS not in fields:
            if side_by_side:
                return fields[name][start : start + count]
            return np.stack([self.row(index, name) for index in range(count)])
        if side_by_side:
            ragged = as_ragged(fields, name)
            offsets = ragged.offsets[start : start + count + 1]
            return Ragged(ragged.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        return Ragged.of([self.row(index, name) for index in range(count)])

    def release(self) -> None:
        """Forget the views. Idempotent; the blocks return by `plane.release`."""
        for block in self._blocks:
            block.release()


def read(plane: DataPlane, rows: Rows, verify: bool = False) -> RowsRead:
    """Views of the selected columns. Raises what `plane.get` raises."""
    blocks = []
    for ref in rows.refs:
        known = {spec.name for spec in ref.fields}
        names = [n for name in rows.fields for n in (name, name + OFFSETS) if n == name or n in known]
        blocks.append(plane.get(ref, names, verify))
    return RowsRead(rows, blocks)


def _columns(ref: TensorRef) -> list[str]:
    names = {spec.name for spec in ref.fields}
    columns = [s.name for s in ref.fields if not (s.name.endswith(OFFSETS) and s.name.removesuffix(OFFSETS) in names)]
    if not columns:
        raise ValueError(f"arena {ref.arena} block {ref.block} has no columns")
    return columns


def _spec(ref: TensorRef, name: str) -> FieldSpec | None:
    return next((spec for spec in ref.fields if spec.name == name), None)


def _count(ref: TensorRef, name: str) -> int:
    """Rows of a column, from the shape of its offsets when it is ragged."""
    offsets, spec = _spec(ref, name + OFFSETS), _spec(ref, name)
    shape = (spec if offsets is None else offsets).shape  # type: ignore[union-attr]
    if not shape or (offsets is not None and (offsets.dtype != "int64" or len(shape) != 1 or shape[0] == 0)):
        raise ValueError(f"field {name!r} of arena {ref.arena} has no rows: shape {list(shape)}")
    return shape[0] - (offsets is not None)


def _kinds(rows: Rows) -> dict[str, str]:
    """By column what all its blocks must have in common."""
    kinds: dict[str, str] = {}
    for ref in rows.refs:
        for name in rows.fields:
            spec = _spec(ref, name)
            if spec is None or spec.dtype not in DTYPES:
                raise ValueError(f"arena {ref.arena} block {ref.block} has no usable column {name!r}")
            ragged = "ragged " if _spec(ref, name + OFFSETS) else ""
            kind = f"{ragged}{spec.dtype}{list(spec.shape[1:])}"
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"column {name!r} is {kind} in one block and {kinds[name]} in another")
    return kinds
