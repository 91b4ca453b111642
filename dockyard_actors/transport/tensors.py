"""What a sealed block is called and how its fields lie: refs, layouts, and every way in which reading one can fail.

Layouts are deterministic (fields in the given order, each at a multiple of 64 bytes) and refs are checked against their arena
before a pointer is made of them. Values only: nothing here touches shared memory, nor knows what a tensor means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import xxhash

from dockyard_actors.transport.base import host_id as host_id  # one meaning of "the same host"

ALIGNMENT = 64  # bytes; a cache line, and enough for every vector instruction that reads a field

# bfloat16 has no numpy type: its bits travel as uint16, and `torch_views.as_torch` gives them their meaning back.
DTYPES: Mapping[str, np.dtype] = {
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "float32": np.dtype(np.float32),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
    "bfloat16": np.dtype(np.uint16),
}

FieldShapes = Mapping[str, tuple[str, Sequence[int]]]  # name -> (dtype name, shape)


class DataPlaneError(RuntimeError):
    """Base of every error of the data plane and of shared weights."""


class StaleRef(DataPlaneError):
    """The block moved on: it was released, or its arena is gone. Whoever still holds the ref holds it too long."""


class TornBlock(DataPlaneError):
    """The block was never sealed: its producer is still writing, or died while writing. Its bytes are not readable."""


class ChecksumError(DataPlaneError):
    """The bytes are not those that were sealed."""


class MalformedRef(DataPlaneError):
    """A ref that does not fit its arena: a bug or a corrupted message, never a matter of timing."""


class WrongHost(DataPlaneError):
    """The ref's memory lives on another host; this plane only maps memory."""


class BlockTooLarge(DataPlaneError, ValueError):
    """The fields do not fit a block. The message names the config key to raise."""


class ReleasedFields(DataPlaneError):
    """A `Fields` or `Block` was used after `release()`, `seal()` or `abort()`."""


class ArenaFull(DataPlaneError, TimeoutError):
    """No block became free before the deadline. The message says who waited, for how many blocks, for how long."""


class FieldSpec(msgspec.Struct, frozen=True, array_like=True):
    """Where one named tensor lies inside its block."""

    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the block, a multiple of ALIGNMENT

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class TensorRef(msgspec.Struct, frozen=True):
    """All that travels between processes: where sealed bytes lie, what they mean, how to check them."""

    arena: str
    block: int
    generation: int  # of the block; it grows with each allocation, so an old ref can never read a new group
    nbytes: int  # bytes of the block in use, padding between the fields included
    fields: tuple[FieldSpec, ...]
    checksum: int  # xxh3_64 over the first nbytes of the block; 0 = not computed
    host_id: str
    fd_path: str  # unix socket of the fd server that holds the arena


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def lay_out(fields: FieldShapes) -> tuple[tuple[FieldSpec, ...], int]:
    """Field specs in the given order, each at a multiple of ALIGNMENT, and the bytes they take together."""
    specs: list[FieldSpec] = []
    end = 0
    for name, (dtype, shape) in fields.items():
        if dtype not in DTYPES:
            raise ValueError(f"field {name!r}: unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
        if any(size < 0 for size in shape):
            raise ValueError(f"field {name!r}: negative size in shape {tuple(shape)}")
        spec = FieldSpec(name, dtype, tuple(int(size) for size in shape), aligned(end))
        specs.append(spec)
        end = spec.offset + spec.nbytes
    return tuple(specs), end


def check_fields(ref: TensorRef, block_bytes: int) -> None:
    """Raise `MalformedRef` unless every field lies inside the ref's bytes and those inside one block."""
    if not 0 <= ref.nbytes <= block_bytes:
        raise MalformedRef(f"{ref.nbytes} bytes do not fit a block of {block_bytes} (arena {ref.arena})")
    for spec in ref.fields:
        if spec.dtype not in DTYPES:
            raise MalformedRef(f"field {spec.name!r} of arena {ref.arena} has the unknown dtype {spec.dtype!r}")
        if (
            spec.offset < 0
            or spec.offset % ALIGNMENT
            or any(size < 0 for size in spec.shape)
            or spec.offset + spec.nbytes > ref.nbytes
        ):
            raise MalformedRef(
                f"field {spec.name!r} {spec.dtype}{list(spec.shape)} at {spec.offset} is not aligned or lies outside the "
                f"{ref.nbytes} bytes of block {ref.block} of arena {ref.arena}"
            )


def carve(memory: np.ndarray, specs: Iterable[FieldSpec]) -> dict[str, np.ndarray]:
    """Views of `memory` (uint8, 1-D) by field name: no copies, same writability."""
    return {
        spec.name: memory[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).reshape(spec.shape)
        for spec in specs
    }


def choose(ref_fields: tuple[FieldSpec, ...], select_fields: Iterable[str] | None) -> tuple[FieldSpec, ...]:
    """The selected specs, in the order of the selection; a name that is not there raises `KeyError`."""
    if select_fields is None:
        return ref_fields
    known = {spec.name: spec for spec in ref_fields}
    wanted = tuple(select_fields)
    if missing := [name for name in wanted if name not in known]:
        raise KeyError(f"no field {missing[0]!r}; the ref has {', '.join(known)}")
    return tuple(known[name] for name in wanted)


def too_large(nbytes: int, block_bytes: int) -> BlockTooLarge:
    """The error for fields that no block can hold."""
    return BlockTooLarge(
        f"the fields take {nbytes} bytes and a block holds {block_bytes}: raise data_plane.block_bytes to at least "
        f"{aligned(nbytes, 4096)}, or make the group smaller"
    )


def checksum(array: np.ndarray) -> int:
    """xxh3_64 over an array's bytes; contiguous ones are read in place."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def mismatch(ref: TensorRef, found: int) -> ChecksumError:
    """The error for bytes that are not those that were sealed."""
    return ChecksumError(
        f"block {ref.block} generation {ref.generation} of arena {ref.arena}: xxh3 {found:016x} instead of "
        f"{ref.checksum:016x} over {ref.nbytes} bytes"
    )
