"""The data plane of one host: blocks of a sealed shared-memory arena, written in place by one process, mapped read-only by others.

Accepted (sealed) blocks survive SIGKILL of their producer and of any reader, because the node agent's fd server holds the memory;
a block whose producer died while writing is never readable. A restarted producer makes a new arena and the old one goes with its
last block. Blocks have one fixed size. It does not reach other hosts, and it knows no roles.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dockyard_actors.transport.arena import ArenaFds, ControlPage, State, map_memory
from dockyard_actors.transport.attachments import Attachment, Attachments
from dockyard_actors.transport.blocks import Backpressure, Block, Fields
from dockyard_actors.transport.fdclient import COPIES, FdClient, FdConfig, FdServerGone
from dockyard_actors.transport.plane import PlaneStats
from dockyard_actors.transport.tensors import (
    DataPlaneError,
    FieldShapes,
    TensorRef,
    WrongHost,
    aligned,
    carve,
    check_fields,
    checksum,
    choose,
    host_id,
    lay_out,
    mismatch,
    too_large,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlabConfig:
    """Sizes in bytes, times in seconds."""

    blocks: int = 256  # of one producer
    block_bytes: int = 256 << 10  # for one group of responses; rounded up to whole pages
    checksum: bool = True  # xxh3 over each sealed block, about the price of reading it once
    recheck_s: float = 0.25  # how long a wait for a block trusts the bell alone
    lock_wait_s: float = FdConfig.lock_wait_s
    call_s: float = FdConfig.call_s
    host_id: str | None = None  # None: boot id with the network and pid namespaces
    outlives: bool = (
        True  # sealed blocks stay when this process dies; False where all are copies of what lies elsewhere
    )


class SlabPlane(Backpressure):
    """A process's side of the data plane. Its own arena is made at `prepare()` or the first allocation, so a process that
    only reads or releases has none. Any thread may call anything but `alloc` and `put`, which belong to one event loop.
    """

    def __init__(self, fd_path: str, owner: str, config: SlabConfig | None = None) -> None:
        self.owner = owner
        self._config = config or SlabConfig()
        self._client = FdClient(fd_path, self._config.call_s)
        self._host_id = self._config.host_id or host_id()
        self._block_bytes = aligned(self._config.block_bytes, mmap.PAGESIZE)
        self._recheck_s = self._config.recheck_s
        self._attachments = Attachments(self._config.lock_wait_s, self._config.call_s)
        self._own: _OwnArena | None = None
        self._own_lock = threading.Lock()
        self._closed = False
        self._waiting = 0
        self._turn = asyncio.Lock()

    @property
    def host_id(self) -> str:
        return self._host_id

    def prepare(self) -> None:
        """Create and prefault the arena now (about a second per GiB, the largest avoidable cost of a first write)."""
        self._arena()

    def try_alloc(self, fields: FieldShapes) -> Block | None:
        specs, nbytes = lay_out(fields)
        if nbytes > self._block_bytes:
            raise too_large(nbytes, self._block_bytes)
        own = self._arena()
        if (taken := own.take()) is None:
            return None
        index, generation = taken
        start = index * self._block_bytes

        def seal(block: Block) -> TensorRef:
            digest = checksum(block.memory) if self._config.checksum else 0
            own.page.publish(index, nbytes, digest)
            return TensorRef(own.name, index, generation, nbytes, specs, digest, self._host_id, self._client.path)

        return Block(specs, nbytes, own.memory[start : start + nbytes], seal, lambda: own.give_back(index))

    async def fetch(self, refs: Iterable[TensorRef], deadline_s: float) -> None:
        for ref in refs:
            self._check_host(ref)

    def forget(self, ref: TensorRef) -> None:
        self._check_host(ref)

    def get(self, ref: TensorRef, select_fields: Iterable[str] | None = None, verify: bool = False) -> Fields:
        attachment = self._attach(ref)
        page = attachment.page
        page.require_readable(ref.arena, ref.block, ref.generation)
        check_fields(ref, page.block_bytes)
        chosen = choose(ref.fields, select_fields)
        memory = attachment.view(ref.block, ref.generation, ref.nbytes)
        intact = not verify or self._intact(ref, memory)
        # Looked at again with the view in place: from here on a release by this process waits for the view.
        page.require_readable(ref.arena, ref.block, ref.generation)
        if not intact:
            raise mismatch(ref, checksum(memory))
        return Fields(
            carve(memory, chosen),
            lambda: page.require_readable(ref.arena, ref.block, ref.generation),
            f"block {ref.block} generation {ref.generation} of arena {ref.arena}",
        )

    def release(self, ref: TensorRef) -> bool:
        """Free the block for its producer; with views of it alive in any process, once the last of them or its process died
        (until then the block is counted as draining). True when this call did it; a repeated or late one does nothing."""
        self._check_host(ref)
        return self._attachments.release(ref.arena, ref.fd_path, ref.block, ref.generation)

    def stats(self) -> PlaneStats:
        self._attachments.sweep()
        own = self._own
        counts = own.page.counts() if own is not None else dict.fromkeys(State, 0)
        return PlaneStats(
            arenas=int(own is not None),
            bytes=own.page.data_bytes if own is not None else 0,
            blocks=own.page.blocks if own is not None else 0,
            free=counts[State.FREE],
            writing=counts[State.WRITING],
            ready=counts[State.READY],
            draining=counts[State.DRAINING],
            live_views=self._attachments.live_views(),
            attached=len(self._attachments),
            waiting=self._waiting,
        )

    def close(self) -> None:
        """Retire the own arena (sealed blocks stay readable until released) and let go of all others. Idempotent.

        Allocations that still wait must be cancelled first; else this raises.
        """
        if self._waiting:
            raise DataPlaneError(f"{self._waiting} allocations of {self.owner} still wait: cancel them before closing")
        with self._own_lock:
            self._closed = True
            own, self._own = self._own, None
        self._attachments.close()
        if own is not None:
            own.close()
            try:
                self._client.retire_arena(own.name)
            except FdServerGone as error:
                log.warning("%s could not retire arena %s: %s", self.owner, own.name, error)

    def _attach(self, ref: TensorRef) -> Attachment:
        self._check_host(ref)
        if self._closed:
            raise DataPlaneError(f"the data plane of {self.owner} is closed")
        return self._attachments.attach(ref.arena, ref.fd_path)

    def _check_host(self, ref: TensorRef) -> None:
        if ref.host_id != self._host_id:
            raise WrongHost(f"arena {ref.arena} lives on host {ref.host_id}, and {self.owner} on {self._host_id}")

    def _intact(self, ref: TensorRef, memory: np.ndarray) -> bool:
        if ref.checksum == 0:
            raise DataPlaneError(f"arena {ref.arena} was written with data_plane.checksum off: nothing to verify")
        return checksum(memory) == ref.checksum

    def _arena(self) -> _OwnArena:
        with self._own_lock:
            if self._closed:
                raise DataPlaneError(f"the data plane of {self.owner} is closed")
            if self._own is None:
                self._own = _OwnArena(self._client, self.owner, self._config, self._block_bytes)
            return self._own

    def _bell(self) -> int:
        return self._arena().fds.bell

    def _why_full(self) -> str:
        page = self._arena().page
        counts = page.counts()
        busy = [f"{counts[state]} {state.name.lower()}" for state in State if counts[state]]
        oldest = max((page.age_s(b) for b in range(page.blocks) if page.state(b) is State.READY), default=0.0)
        draining = (block for block in range(page.blocks) if page.state(block) is State.DRAINING)
        drainers = sorted({pid for block in draining for pid in page.leases.readers(block)})
        held_by = f" (draining: views still alive in process {', '.join(drainers)})" if drainers else ""
        return (
            f"{page.blocks} blocks of arena {self._arena().name}: {', '.join(busy)}{held_by}, oldest ready {oldest:.3g} s; "
            "consume faster or raise data_plane.blocks"
        )


class _OwnArena:
    """The producing side: the writable mapping and the list of blocks known to be free."""

    def __init__(self, client: FdClient, owner: str, config: SlabConfig, block_bytes: int) -> None:
        self.name = f"{owner}:{os.getpid()}:{secrets.token_hex(4)}"
        size = config.blocks * block_bytes
        kind = "slab" if config.outlives else COPIES
        self.fds: ArenaFds = client.create_arena(self.name, size, block_bytes, owner=owner, kind=kind)
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self.memory = map_memory(self.fds.take("data"), size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            client.seal_arena(self.name)
            self.page = ControlPage(self.fds.take("ctl"), config.lock_wait_s)
        except BaseException:
            self.fds.close()
            client.drop_arena(self.name)
            raise
        self._free: deque[int] = deque(range(self.page.blocks))
        self._lock = threading.Lock()

    def take(self) -> tuple[int, int] | None:
        """A free block, now WRITING, and its generation; None when all are in use."""
        with self._lock:
            if not self._free:
                self._free.extend(block for block in range(self.page.blocks) if self.page.is_free(block))
            if not self._free:
                return None
            block = self._free.pop()  # the one freed last: its pages are the warmest
            return block, self.page.begin(block)

    def give_back(self, block: int) -> None:
        """Of a block that was not sealed."""
        if self.page.closed:
            return  # the arena was retired: the server marks what was being written as torn
        self.page.set_state(block, State.FREE)
        os.eventfd_write(self.fds.bell, 1)

    def close(self) -> None:
        self.page.close()
        self.fds.close()
