"""The data plane's front door: the `DataPlane` protocol that roles see, and `LocalPlane`, the same in plain memory.

Named tensors are produced in place, sealed into a tiny `TensorRef`, read as views and released. A ref never reads anything but the
bytes that it was sealed over (or fails with a type that says why), and a full plane pushes back instead of growing. Nothing here
knows what the tensors mean, nor torch (`torch_views` makes tensors of the arrays).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from dockyard_actors.transport.blocks import Backpressure, Block, Fields
from dockyard_actors.transport.tensors import (
    ALIGNMENT,
    DTYPES,
    ArenaFull,
    BlockTooLarge,
    ChecksumError,
    DataPlaneError,
    FieldShapes,
    FieldSpec,
    MalformedRef,
    ReleasedFields,
    StaleRef,
    TensorRef,
    TornBlock,
    WrongHost,
    carve,
    check_fields,
    checksum,
    choose,
    host_id,
    lay_out,
    mismatch,
    too_large,
)

__all__ = [
    "DTYPES",
    "ArenaFull",
    "Block",
    "BlockTooLarge",
    "ChecksumError",
    "DataPlane",
    "DataPlaneError",
    "FieldShapes",
    "FieldSpec",
    "Fields",
    "LocalPlane",
    "MalformedRef",
    "PlaneStats",
    "ReleasedFields",
    "StaleRef",
    "TensorRef",
    "TornBlock",
    "WrongHost",
    "host_id",
]


@dataclass(frozen=True)
class PlaneStats:
    """Of the arenas this plane produces into, and of what this process still looks at."""

    arenas: int
    bytes: int
    blocks: int
    free: int
    writing: int
    ready: int
    draining: int  # released, but a view of it is still alive in some process
    live_views: int  # blocks this process holds views of
    attached: int  # arenas of other producers that this process has open
    waiting: int  # allocations that wait for a block now


@runtime_checkable
class DataPlane(Protocol):
    """What roles see. `alloc` and `put` belong to one event loop; all else may be used from any thread and returns at once
    (the first use of an arena asks the node agent for it: microseconds, or an error after the client's `call_s`)."""

    def try_alloc(self, fields: FieldShapes) -> Block | None:
        """A block with room for the fields, or None when all are in use. `BlockTooLarge` when they never fit."""
        ...

    async def alloc(self, fields: FieldShapes, deadline_s: float) -> Block:
        """A block, waiting up to `deadline_s` seconds for one to become free; then `ArenaFull`."""
        ...

    async def put(self, arrays: Mapping[str, np.ndarray], deadline_s: float) -> TensorRef:
        """Copy arrays that exist already into a fresh block and seal it. Prefer `alloc` and writing in place."""
        ...

    async def fetch(self, refs: Iterable[TensorRef], deadline_s: float) -> None:
        """Have blocks of other hosts readable here; nothing to do for those of this one. `WrongHost` where there is no way."""
        ...

    def forget(self, ref: TensorRef) -> None:
        """Let go of what `fetch` brought here; the block itself stays as it is. Nothing to do for one of this host."""
        ...

    def get(self, ref: TensorRef, select_fields: Iterable[str] | None = None, verify: bool = False) -> Fields:
        """Read-only views. `StaleRef`, `TornBlock`, `MalformedRef`, `WrongHost`; with `verify` also `ChecksumError`."""
        ...

    def release(self, ref: TensorRef) -> bool:
        """Free the block for its producer. True when this call did it; a repeated or late release does nothing."""
        ...

    def notify(self) -> None:
        """Have waiting allocations look again now."""
        ...

    def stats(self) -> PlaneStats: ...

    def close(self) -> None: ...


class LocalPlane(Backpressure):
    """`data_plane: none`: everything in one process. Each block is its own allocation, so an old view stays valid."""

    def __init__(self, owner: str, blocks: int, block_bytes: int, recheck_s: float = 0.25) -> None:
        self.owner = owner
        self._block_bytes = block_bytes
        self._recheck_s = recheck_s
        self._states: dict[int, tuple[int, str]] = dict.fromkeys(
            range(blocks), (0, "free")
        )  # block -> generation, state
        self._payloads: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._host_id = host_id()
        self._name = f"local:{owner}:{os.getpid()}:{id(self):x}"

    def try_alloc(self, fields: FieldShapes) -> Block | None:
        specs, nbytes = lay_out(fields)
        if nbytes > self._block_bytes:
            raise too_large(nbytes, self._block_bytes)
        with self._lock:
            index = next((i for i, (_, state) in self._states.items() if state == "free"), None)
            if index is None:
                return None
            generation = self._states[index][0] + 1
            self._states[index] = (generation, "writing")
        padded = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -padded.ctypes.data % ALIGNMENT
        memory = padded[start : start + nbytes]

        def seal(block: Block) -> TensorRef:
            digest = checksum(memory)
            with self._lock:
                self._payloads[index] = memory
                self._states[index] = (generation, "ready")
            return TensorRef(self._name, index, generation, nbytes, specs, digest, self._host_id, "")

        def abort() -> None:
            self._free(index, generation, "writing")

        return Block(specs, nbytes, memory[:], seal, abort)

    async def fetch(self, refs: Iterable[TensorRef], deadline_s: float) -> None:
        for ref in refs:
            self._check_arena(ref)

    def forget(self, ref: TensorRef) -> None:
        self._check_arena(ref)

    def get(self, ref: TensorRef, select_fields: Iterable[str] | None = None, verify: bool = False) -> Fields:
        self._check_arena(ref)
        check_fields(ref, self._block_bytes)
        with self._lock:
            self._check_state(ref)
            memory = self._payloads[ref.block][:]
        memory.flags.writeable = False
        if verify and (found := checksum(memory)) != ref.checksum:
            raise mismatch(ref, found)

        def still_valid() -> None:
            with self._lock:
                self._check_state(ref)

        return Fields(carve(memory, choose(ref.fields, select_fields)), still_valid, f"block {ref.block}")

    def release(self, ref: TensorRef) -> bool:
        self._check_arena(ref)
        return self._free(ref.block, ref.generation, "ready")

    def stats(self) -> PlaneStats:
        with self._lock:
            states = [state for _, state in self._states.values()]
            held = sum(memory.nbytes for memory in self._payloads.values())
        free, writing, ready = (states.count(state) for state in ("free", "writing", "ready"))
        return PlaneStats(1, held, len(states), free, writing, ready, 0, 0, 0, self._waiting)

    def close(self) -> None:
        """Forget every block. Idempotent."""
        self._payloads.clear()
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1

    def _free(self, block: int, generation: int, expected: str) -> bool:
        with self._lock:
            if self._states.get(block) != (generation, expected):
                return False
            self._states[block] = (generation, "free")
            self._payloads.pop(block, None)
        self.notify()
        return True

    def _check_arena(self, ref: TensorRef) -> None:
        if ref.arena != self._name:
            raise WrongHost(f"arena {ref.arena} is not this process's {self._name}: data_plane none shares with nobody")

    def _check_state(self, ref: TensorRef) -> None:
        generation, state = self._states.get(ref.block, (0, "missing"))
        if state == "missing":
            raise MalformedRef(f"arena {ref.arena} has no block {ref.block}")
        if generation != ref.generation or state == "free":
            raise StaleRef(
                f"block {ref.block} of {ref.arena} is {state} at generation {generation}, not {ref.generation}"
            )
        if state == "writing":
            raise TornBlock(f"block {ref.block} of {ref.arena} is still being written")

    def _bell(self) -> int:
        return self._event_fd

    def _why_full(self) -> str:
        now = self.stats()
        return (
            f"{now.blocks} blocks: {now.ready} ready, {now.writing} writing; consume faster or raise data_plane.blocks"
        )
