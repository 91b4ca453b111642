"""How a model is cut into buckets that travel one after the other, and how entries get into them and out again.

Both ends make the same plan from the manifest and the bucket size, so that nothing but bytes has to travel. An entry that fits a bucket
never spans two. It knows no sockets and no process groups; buffers are torch tensors on any device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import torch
import xxhash

from dockyard_actors.transport.tensors import ALIGNMENT, DataPlaneError, aligned
from dockyard_actors.transport.torch_views import as_array
from dockyard_actors.transport.weights_shm import WeightEntry, WeightManifest

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class WrongEntries(DataPlaneError, ValueError):
    """The tensors to be sent are not those of the manifest: a name, an order or a shape differs."""


class Piece(NamedTuple):
    """Bytes [start, start + nbytes) of one entry, which lie at `offset` of their bucket."""

    entry: WeightEntry
    start: int
    nbytes: int
    offset: int

    @property
    def is_whole(self) -> bool:
        return self.nbytes == self.entry.nbytes

    @property
    def is_last(self) -> bool:
        return self.start + self.nbytes == self.entry.nbytes


class Bucket(NamedTuple):
    """What is broadcast at once: `nbytes` bytes, padding between the pieces included."""

    pieces: tuple[Piece, ...]
    nbytes: int


def plan(manifest: WeightManifest, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes` bytes with all entries in the manifest's order, each piece at a multiple of ALIGNMENT.

    Raises ValueError for a bucket size that is no positive multiple of ALIGNMENT, without entries, and for dtypes that do not travel.
    """
    if not manifest.entries:
        raise ValueError("the manifest has no entries: there is nothing to send")
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
        raise ValueError(f"bucket_bytes is {bucket_bytes}: it has to be a positive multiple of {ALIGNMENT} bytes")
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    end = 0

    def close() -> None:
        nonlocal pieces, end
        if pieces:
            buckets.append(Bucket(tuple(pieces), end))
        pieces, end = [], 0

    for entry in manifest.entries:
        if entry.dtype not in WIRE_DTYPES:
            raise ValueError(f"weight {entry.name!r} is {entry.dtype}; what travels is {' or '.join(WIRE_DTYPES)}")
        if entry.nbytes <= bucket_bytes:
            if aligned(end) + entry.nbytes > bucket_bytes:
                close()
            pieces.append(Piece(entry, 0, entry.nbytes, aligned(end)))
            end = aligned(end) + entry.nbytes
            continue
        # The receiver puts large entries together in one place: the next one may not begin before the one before was handed out.
        if aligned(end) >= bucket_bytes or any(not piece.is_whole for piece in pieces):
            close()
        start = 0
        while start < entry.nbytes:
            if aligned(end) >= bucket_bytes:
                close()
            nbytes = min(entry.nbytes - start, bucket_bytes - aligned(end))
            pieces.append(Piece(entry, start, nbytes, aligned(end)))
            start, end = start + nbytes, aligned(end) + nbytes
    close()
    return tuple(buckets)


def largest(buckets: Iterable[Bucket]) -> int:
    """Bytes of the buffer that each of the buckets fits in."""
    return max((bucket.nbytes for bucket in buckets), default=0)


def manifest_digest(manifest: WeightManifest) -> int:
    """xxh3_64 over names, dtypes, shapes and order: equal for two sides that mean the same bytes."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(manifest))


class Packer:
    """Trainer's side: puts tensors into one bucket after the other, cast to the manifest's dtypes, and checksums what it put there.

    Needs no memory of its own for a contiguous tensor; another one is copied for as long as it is being packed. On a device other
    than the CPU each piece is copied to the host for its checksum.
    """

    def __init__(self, entries: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._entries = iter(entries)
        self._source = torch.empty(0)
        self._hash = xxhash.xxh3_64()
        self.checksums: list[int] = []  # of the entries that are complete, in the manifest's order

    def pack(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Write the bucket's bytes into `buffer` (uint8, 1-D). Raises WrongEntries, and what the iterator of entries raises."""
        for piece in bucket.pieces:
            if piece.start == 0:
                self._source = self._next(piece.entry)
                self._hash = xxhash.xxh3_64()
            there = buffer[piece.offset : piece.offset + piece.nbytes]
            typed = there.view(WIRE_DTYPES[piece.entry.dtype])
            first = piece.start // typed.element_size()
            typed.copy_(self._source[first : first + typed.numel()])
            self._hash.update(as_array(there.cpu()).data)
            if piece.is_last:
                self.checksums.append(self._hash.intdigest())
                self._source = torch.empty(0)

    def finish(self) -> None:
        """Raises WrongEntries when there are more tensors than entries."""
        if (more := next(self._entries, None)) is not None:
            raise WrongEntries(f"weight {more[0]!r} comes after the manifest's last entry")

    def _next(self, entry: WeightEntry) -> torch.Tensor:
        name, tensor = next(self._entries, ("nothing", None))
        if tensor is None or name != entry.name or tuple(tensor.shape) != entry.shape:
            found = "no tensor" if tensor is None else f"{name!r} {list(tensor.shape)}"
            raise WrongEntries(f"the manifest goes on with {entry.name!r} {list(entry.shape)}, what came is {found}")
        return tensor.detach().reshape(-1)


class Unpacker:
    """Engine's side: takes entries out of one bucket after the other.

    Needs no memory of its own but for entries larger than a bucket: one buffer as large as the largest of them.
    """

    def __init__(self, buckets: Iterable[Bucket], device: torch.device) -> None:
        apart = [piece.entry.nbytes for bucket in buckets for piece in bucket.pieces if not piece.is_whole]
        self._apart = torch.empty(max(apart, default=0), dtype=torch.uint8, device=device)

    def unpack(self, bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The entries that `bucket` completes, as views of `buffer` (uint8, 1-D) or of the unpacker's own memory: valid until the next
        bucket is unpacked or `buffer` is overwritten."""
        for piece in bucket.pieces:
            entry = piece.entry
            there = buffer[piece.offset : piece.offset + piece.nbytes]
            if not piece.is_whole:
                self._apart[piece.start : piece.start + piece.nbytes].copy_(there)
                there = self._apart[: entry.nbytes]
            if piece.is_last:
                yield entry.name, there.view(WIRE_DTYPES[entry.dtype]).reshape(entry.shape)
