"""Weights through shared memory: the trainer writes a version into one of two slots, engines map it read-only.

A slot that the synchronizer has not released is never overwritten; a published version stays readable, byte for byte, when the
trainer dies, and a restarted trainer publishes into an arena of its own. Checksums are per entry, so that a reader can prove what it
received. It knows names, dtypes and shapes, not models.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Mapping

import msgspec
import numpy as np

from dockyard_actors.transport.arena import ControlPage, State, map_memory
from dockyard_actors.transport.attachments import Attachment, Attachments
from dockyard_actors.transport.blocks import Fields
from dockyard_actors.transport.fdclient import FdClient, FdConfig
from dockyard_actors.transport.tensors import (
    ChecksumError,
    DataPlaneError,
    FieldShapes,
    FieldSpec,
    MalformedRef,
    WrongHost,
    aligned,
    carve,
    checksum,
    host_id,
    lay_out,
)

SLOTS = 2  # engines read the one while the trainer writes the other
KIND = "weights"

WeightEntry = FieldSpec  # name, dtype, shape, offset in the slot (a multiple of 64), nbytes


class WeightSlotHeld(DataPlaneError):
    """Every slot holds a version that the synchronizer has not released. The message names them."""


class WeightVersionError(DataPlaneError, ValueError):
    """Versions only grow, and only the version being written can be published."""


class WeightManifest(msgspec.Struct, frozen=True):
    """What one version consists of; the same for every version of an arena."""

    entries: tuple[WeightEntry, ...]

    @classmethod
    def of(cls, shapes: FieldShapes) -> WeightManifest:
        """Lay out `name -> (dtype, shape)` in the given order."""
        return cls(lay_out(shapes)[0])

    @property
    def nbytes(self) -> int:
        """Bytes of a slot in use, padding included."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)


class WeightRef(msgspec.Struct, frozen=True, tag=True):
    """All that travels: which version lies where, and the xxh3_64 of each entry in the manifest's order."""

    arena: str
    slot: int
    generation: int
    version: int
    checksums: tuple[int, ...]
    host_id: str
    fd_path: str


class WeightPublisher:
    """The trainer's side: one arena with two slots, made (and prefaulted, about a second per GiB) at construction.

    Not for several threads at once. Errors: `WeightSlotHeld`, `WeightVersionError`, those of `FdClient`.
    """

    def __init__(
        self, client: FdClient, manifest: WeightManifest, owner: str = "trainer", host: str | None = None
    ) -> None:
        self.manifest = manifest
        self.owner = owner
        self.arena = f"{owner}.weights:{os.getpid()}:{secrets.token_hex(4)}"
        self._client = client
        self._host_id = host or host_id()
        self._slot_bytes = max(aligned(manifest.nbytes, mmap.PAGESIZE), mmap.PAGESIZE)
        self._writing: tuple[int, int, int, dict[str, np.ndarray]] | None = None  # version, slot, generation, arrays
        self._last = -1
        described = msgspec.msgpack.encode(manifest)
        size = SLOTS * self._slot_bytes + aligned(len(described), mmap.PAGESIZE)
        fds = client.create_arena(
            self.arena, size, self._slot_bytes, blocks=SLOTS, kind=KIND, owner=owner, extra=len(described)
        )
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = map_memory(fds.take("data"), size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            start = SLOTS * self._slot_bytes
            self._memory[start : start + len(described)] = np.frombuffer(described, np.uint8)
            client.seal_arena(self.arena)
            self._page = ControlPage(fds.take("ctl"), FdConfig.lock_wait_s)
        except BaseException:
            client.drop_arena(self.arena)
            raise
        finally:
            fds.close()

    def slot(self, version: int) -> dict[str, np.ndarray]:
        """Writable arrays by entry name (bfloat16 as uint16) to fill for `version`; what they hold before is undefined.

        Asking again before `publish` hands out the same slot. After it the arrays must not be written any more.
        """
        if version <= self._last:
            raise WeightVersionError(f"version {version} after {self._last}: versions only grow, across restarts too")
        if self._writing is not None:
            _, slot, generation, arrays = self._writing
        else:
            slot = self._free_slot(version)
            generation = self._page.begin(slot, tag=version)
            start = slot * self._slot_bytes
            arrays = carve(self._memory[start : start + self._slot_bytes], self.manifest.entries)
        self._writing = (version, slot, generation, arrays)
        self._page.set_tag(slot, version)
        return dict(arrays)

    def publish(self, version: int) -> WeightRef:
        """Checksum what was written and make it readable. The slot is held until `release(version)`."""
        if self._writing is None or self._writing[0] != version:
            writing = "none" if self._writing is None else str(self._writing[0])
            raise WeightVersionError(f"version {version} cannot be published: the version being written is {writing}")
        _, slot, generation, arrays = self._writing
        checksums = tuple(checksum(array) for array in arrays.values())
        for array in arrays.values():
            array.flags.writeable = False  # catches the late writer whom we can catch; torch views escape this
        self._page.publish(slot, self.manifest.nbytes, 0)
        self._writing = None
        self._last = version
        return WeightRef(self.arena, slot, generation, version, checksums, self._host_id, self._client.path)

    def release(self, version: int) -> bool:
        """Every engine is done with `version`: its slot may be overwritten. False when it is not held (any more).

        Views are the engines' acknowledgements' business: this looks at none, not even at those of this process.
        """
        for slot in range(SLOTS):
            if self._page.tag(slot) == version:
                if done := self._page.let_go(slot, self._page.generation(slot)):
                    self._page.set_state(slot, State.FREE)
                return done
        return False

    def held(self) -> tuple[int, ...]:
        """Published versions that wait for their release, oldest first."""
        ready = (slot for slot in range(SLOTS) if self._page.state(slot) is State.READY)
        return tuple(sorted(self._page.tag(slot) for slot in ready))

    def drop_predecessors(self) -> int:
        """Have the server let go of arenas left by dead publishers of this owner; called once every engine is fresh.
        Returns how many. Engines that still map one keep their mapping."""
        stale = [
            info.name
            for info in self._client.list_arenas()
            if info.kind == KIND and info.owner == self.owner and info.orphaned and info.name != self.arena
        ]
        return sum(self._client.drop_arena(name) for name in stale)

    def close(self) -> None:
        """Write no more. Held versions stay readable until their release. Idempotent."""
        if not self._page.closed:
            self._page.close()
            self._memory = self._memory[:0]
            self._writing = None
            self._client.retire_arena(self.arena)

    def _free_slot(self, version: int) -> int:
        for slot in range(SLOTS):
            if self._page.is_free(slot):
                return slot
        held = ", ".join(
            f"{self._page.tag(slot)} ({self._page.state(slot).name.lower()} for {self._page.age_s(slot):.3g} s)"
            for slot in range(SLOTS)
        )
        raise WeightSlotHeld(
            f"version {version} finds both slots held by versions {held}: release() the older one once every engine "
            "has acknowledged the newer"
        )


class WeightReader:
    """An engine's side (or the synchronizer's). Errors: `StaleRef`, `TornBlock`, `MalformedRef`, `WrongHost`, `ChecksumError`."""

    def __init__(self, client: FdClient, host: str | None = None, lock_wait_s: float = FdConfig.lock_wait_s) -> None:
        self._host_id = host or host_id()
        self._attachments = Attachments(lock_wait_s, client.call_s)
        self._manifests: dict[str, WeightManifest] = {}

    def manifest(self, ref: WeightRef) -> WeightManifest:
        """As the publisher wrote it into the arena."""
        if (known := self._manifests.get(ref.arena)) is not None:
            return known
        attachment = self._attach(ref)
        page = attachment.page
        described = attachment.read(page.blocks * page.block_bytes, page.extra)
        try:
            manifest = msgspec.msgpack.decode(described, type=WeightManifest)
        except msgspec.MsgspecError as error:
            raise MalformedRef(f"arena {ref.arena} carries no weight manifest: {error}") from error
        if manifest.nbytes > page.block_bytes:
            raise MalformedRef(f"the manifest of arena {ref.arena} exceeds its slots of {page.block_bytes} bytes")
        self._manifests = {ref.arena: manifest}  # an engine follows one arena at a time
        return manifest

    def open(self, ref: WeightRef, *, verify: bool = False) -> Fields:
        """Read-only arrays by entry name (bfloat16 as uint16) on the shared slot. Copy, or be done with them before
        acknowledging the version; `check()` on the result says whether the slot still holds it."""
        manifest = self.manifest(ref)
        attachment = self._attach(ref)
        page = attachment.page

        def still_valid() -> None:
            page.require_readable(ref.arena, ref.slot, ref.generation)

        still_valid()
        memory = attachment.view(ref.slot, ref.generation, manifest.nbytes)
        arrays = carve(memory, manifest.entries)
        wrong = self._wrong_entries(ref, arrays) if verify else []
        still_valid()
        if wrong:
            raise ChecksumError(
                f"{len(wrong)} of {len(arrays)} entries of weights version {ref.version} in arena {ref.arena} are not the "
                f"bytes that were published: {', '.join(wrong[:8])}"
            )
        return Fields(arrays, still_valid, f"weights version {ref.version} of arena {ref.arena}")

    def verify(self, ref: WeightRef) -> None:
        """Raise `ChecksumError` naming the entries whose bytes are not those that were published."""
        self.open(ref, verify=True).release()

    def release(self, ref: WeightRef) -> bool:
        """As `WeightPublisher.release`, from any process and after the publisher's death too. Idempotent."""
        self._check_host(ref)
        return self._attachments.release(ref.arena, ref.fd_path, ref.slot, ref.generation)

    def close(self) -> None:
        """Idempotent."""
        self._attachments.close()

    def _attach(self, ref: WeightRef) -> Attachment:
        self._check_host(ref)
        return self._attachments.attach(ref.arena, ref.fd_path)

    def _check_host(self, ref: WeightRef) -> None:
        if ref.host_id != self._host_id:
            raise WrongHost(f"weights version {ref.version} lie on host {ref.host_id}, this is {self._host_id}")

    def _wrong_entries(self, ref: WeightRef, arrays: Mapping[str, np.ndarray]) -> list[str]:
        if len(ref.checksums) != len(arrays):
            raise MalformedRef(f"{len(ref.checksums)} checksums for {len(arrays)} entries of arena {ref.arena}")
        return [
            name
            for (name, array), expected in zip(arrays.items(), ref.checksums, strict=True)
            if checksum(array) != expected
        ]
