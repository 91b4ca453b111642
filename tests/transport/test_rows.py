"""Metadata first: what is chosen, cut and joined without a tensor reads as if the tensors had been."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.transport.plane import LocalPlane, StaleRef, TensorRef
from dockyard_actors.transport.rows import OFFSETS, Ragged, Rows, as_ragged, concat, ragged_arrays, ragged_shapes, read
from dockyard_actors.transport.torch_views import as_torch

WAIT_S = 20.0
BLOCKS = 6
Lists = list[list[int]]  # tokens of each row


@pytest.fixture
def plane() -> Iterator[LocalPlane]:
    plane = LocalPlane("rollout-0", BLOCKS, 64 << 10)
    yield plane
    plane.close()


def seal(plane: LocalPlane, rows: Lists) -> TensorRef:
    """Columns: tokens (ragged), sums (B,), pairs bfloat16 (B, 2)."""
    count, total = len(rows), sum(map(len, rows))
    shapes = {
        **ragged_shapes("tokens", "int32", count, total),
        "sums": ("int64", (count,)),
        "pairs": ("bfloat16", (count, 2)),
    }
    block = plane.try_alloc(shapes)
    assert block is not None
    block.array("tokens")[...] = [token for row in rows for token in row]
    block.array("tokens" + OFFSETS)[...] = np.cumsum([0, *map(len, rows)])
    block.array("sums")[...] = [sum(row) for row in rows]
    as_torch(block.array("pairs")).copy_(torch.tensor([[len(row), -len(row)] for row in rows]).reshape(count, 2))
    return block.seal()


def tagged(plane: LocalPlane, rows: Lists) -> Rows:
    return Rows.of(seal(plane, rows), {"length": [len(row) for row in rows], "first": [str(row[:1]) for row in rows]})


def tokens(plane: LocalPlane, rows: Rows) -> Lists:
    got = read(plane, rows, verify=True)
    return [got.row(index, "tokens").tolist() for index in range(len(rows))]


_lists = st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=5)


@settings(max_examples=120, deadline=None)
@given(parts=st.lists(_lists, min_size=1, max_size=BLOCKS), data=st.data())
def test_any_sequence_of_operations_gives_the_rows_that_lists_would(parts: list[Lists], data: st.DataObject) -> None:
    with contextlib.closing(LocalPlane("rollout-0", BLOCKS, 64 << 10)) as plane:
        operate(plane, parts, data)


def operate(plane: LocalPlane, parts: list[Lists], data: st.DataObject) -> None:
    whole = concat([tagged(plane, part) for part in parts])
    expected = [row for part in parts for row in part]
    for _ in range(data.draw(st.integers(0, 4))):
        match data.draw(st.sampled_from(["subset", "slice", "where", "ordered", "concat"])):
            case "subset":
                indices = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=8)) if expected else []
                whole, expected = whole.subset(indices), [expected[index] for index in indices]
            case "slice":
                start = data.draw(st.integers(0, len(expected)))
                stop = data.draw(st.integers(start, len(expected)))
                whole, expected = whole.slice(start, stop), expected[start:stop]
            case "where":
                whole = whole.where("length", lambda length: int(length) > 1)
                expected = [row for row in expected if len(row) > 1]
            case "ordered":
                whole, expected = whole.ordered("length"), sorted(expected, key=len)
            case "concat":
                whole, expected = concat([whole, whole]), expected * 2
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=Rows)
    assert len(whole) == len(expected)
    assert tokens(plane, whole) == expected
    assert whole.tags["length"] == tuple(len(row) for row in expected)
    assert whole.tags["first"] == tuple(str(row[:1]) for row in expected)
    assert len(whole.refs) == len({ref for ref, _ in whole.at})  # no ref that no row needs
    if expected:
        got = read(plane, whole)
        assert np.asarray(got.column("sums")).tolist() == [sum(row) for row in expected]
        column = got.column("tokens")
        assert isinstance(column, Ragged)
        assert [column.check("tokens").row(index).tolist() for index in range(len(column))] == expected
        pairs = got.column("pairs")
        assert isinstance(pairs, np.ndarray)
        assert as_torch(pairs).tolist() == [[len(row), -len(row)] for row in expected]


def test_metadata_needs_no_tensors_at_all(plane: LocalPlane) -> None:
    rows = tagged(plane, [[1], [2, 3], [4, 5, 6]])
    for ref in rows.refs:
        plane.release(ref)
    kept = concat([rows.where("length", lambda length: int(length) > 1), rows.slice(0, 1)]).ordered("first")
    assert kept.tags["length"] == (1, 2, 3)
    with pytest.raises(StaleRef):
        read(plane, kept)


def test_rows_side_by_side_are_views_of_the_block_and_others_are_copies(plane: LocalPlane) -> None:
    rows = tagged(plane, [[1], [2, 3], [4, 5, 6], [7]])
    base = plane.get(rows.refs[0])

    def shared(chosen: Rows, name: str) -> bool:
        column = read(plane, chosen).column(name)
        return np.shares_memory(column.values if isinstance(column, Ragged) else column, base[name])

    for name in ("tokens", "sums", "pairs"):
        assert shared(rows.slice(1, 3), name)
        assert not shared(rows.subset([2, 1]), name)
    row = as_torch(read(plane, rows.subset([2, 0])).row(0, "tokens"))
    assert row.data_ptr() == base["tokens"][3:].ctypes.data


def test_only_selected_columns_are_got_and_a_ragged_one_brings_its_offsets(plane: LocalPlane) -> None:
    rows = tagged(plane, [[1, 2], [3]]).select(["tokens"])
    got = read(plane, rows)
    assert got.row(1, "tokens").tolist() == [3]
    with pytest.raises(KeyError, match="sums"):
        got.row(0, "sums")
    with pytest.raises(KeyError, match="no column 'nothing'; there are tokens"):
        rows.select(["nothing"])


async def test_ragged_columns_are_put_without_padding(plane: LocalPlane) -> None:
    lists = [np.arange(n, dtype=np.float32) for n in (3, 0, 2)]
    ref = await plane.put(ragged_arrays({"logprobs": Ragged.of(lists)}), deadline_s=WAIT_S)
    assert next(spec.shape for spec in ref.fields if spec.name == "logprobs") == (5,)
    column = as_ragged(plane.get(ref), "logprobs")
    assert [column.row(index).tolist() for index in range(len(column))] == [[0, 1, 2], [], [0, 1]]
    with pytest.raises(IndexError, match="row 3"):
        column.row(3)


@pytest.mark.parametrize("offsets", [[0, 2], [1, 2, 5], [0, 4, 3, 5], [0, 6], [], [0.0, 5.0]])
def test_offsets_that_do_not_fit_their_values_are_refused(offsets: list) -> None:
    dtype = np.float64 if any(isinstance(offset, float) for offset in offsets) else np.int64
    fields = {"x": np.zeros(5, np.int32), "x.offsets": np.array(offsets, dtype)}
    with pytest.raises(ValueError, match=r"x\.offsets"):
        as_ragged(fields, "x")


def test_rows_of_different_kinds_are_not_mixed(plane: LocalPlane) -> None:
    with pytest.raises(ValueError, match="one dtype and one inner shape"):
        Ragged.of([np.zeros(2, np.int32), np.zeros(2, np.float32)])

    def one(dtype: str, shape: tuple[int, ...], **tags: list) -> Rows:
        block = plane.try_alloc({"x": (dtype, shape)})
        assert block is not None
        return Rows.of(block.seal(), tags)

    whole = one("int32", (2, 3))
    with pytest.raises(ValueError, match=r"'x' is float32\[3\] in part 1 and int32\[3\]"):
        concat([whole, one("float32", (2, 3))])
    with pytest.raises(ValueError, match=r"'x' is int32\[4\] in part 1"):
        concat([whole, one("int32", (2, 4))])
    with pytest.raises(ValueError, match=r"tags \['age'\]"):
        concat([whole, one("int32", (2, 3), age=[1, 2])])
    with pytest.raises(ValueError, match="2 rows"):
        whole.tagged("age", [1])
    for wrong in (lambda: whole.subset([2]), lambda: whole.subset([-1]), lambda: whole.slice(0, 3)):
        with pytest.raises(IndexError, match="of 2 rows"):
            wrong()
    with pytest.raises(KeyError, match="no tag 'age'; there are none"):
        whole.ordered("age")
    with pytest.raises(ValueError, match="no parts"):
        concat([])


def test_a_block_whose_columns_disagree_on_rows_is_refused(plane: LocalPlane) -> None:
    block = plane.try_alloc({"x": ("int32", (2,)), "y": ("int32", (3,))})
    assert block is not None
    with pytest.raises(ValueError, match=r"differ in rows: \{'x': 2, 'y': 3\}"):
        Rows.of(block.seal())
    block = plane.try_alloc({"x": ("int32", ())})
    assert block is not None
    with pytest.raises(ValueError, match="has no rows"):
        Rows.of(block.seal())


def test_views_of_rows_keep_no_block_once_they_are_gone(plane: LocalPlane) -> None:
    rows = tagged(plane, [[1], [2]])
    got = read(plane, rows)
    got.release()
    with pytest.raises(Exception, match="released by this reader"):
        got.row(0, "sums")
    gc.collect()
    assert plane.release(rows.refs[0])
    assert plane.stats().free == BLOCKS
