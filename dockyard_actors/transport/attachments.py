"""A process's read-only hold on the arenas of others: views of blocks, their end, and the release of what they showed.

It promises that a block is not freed under a live view of this process whoever releases it, that whoever releases the last block of a dead producer's
arena has the server drop it, and that memory returns: an arena that its server dropped is let go at the next look.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dockyard_actors.transport.arena import DROPPED, ArenaFds, ControlPage, State, map_memory
from dockyard_actors.transport.fdclient import ArenaUnknown, FdClient, FdServerGone
from dockyard_actors.transport.tensors import StaleRef

log = logging.getLogger(__name__)

# A finalizer on a memoryview is not enough: `np.frombuffer` wraps it in a memoryview of its own, so the one that we watch dies
# while the array lives. The array's base is therefore an object of ours: every slice, dtype view, torch tensor and `.numpy()` of it
# keeps that object alive, and its end is the end of the last of them.

_GATE = threading.Lock()  # guards the lease tables of all attachments
_ENDED: deque[_Lease] = (
    deque()
)  # one entry per dead span; finalizers run anywhere, so they only append here and try to settle


class _Lease:
    """How many live views this process has of one generation of one block."""

    __slots__ = ("attachment", "block", "generation", "live")

    def __init__(self, attachment: Attachment, block: int, generation: int) -> None:
        self.attachment = attachment
        self.block = block
        self.generation = generation
        self.live = 0


class _Span:
    """Exports block memory through numpy's array interface, and tells when the last view of it died."""

    __slots__ = ("__array_interface__", "_lease", "_memory")

    def __init__(self, address: int, nbytes: int, memory: object, lease: _Lease) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self._memory = memory
        self._lease = lease

    def __del__(self) -> None:
        _ENDED.append(self._lease)
        settle()


@contextmanager
def _gate() -> Iterator[None]:
    try:
        with _GATE:
            yield
    finally:
        settle()


def settle() -> None:
    """Finish what ended views left to do: end this process's lease of their blocks."""
    while _ENDED and _GATE.acquire(blocking=False):  # whoever holds the gate settles when leaving it
        try:
            while _ENDED:
                lease = _ENDED.popleft()
                lease.live -= 1
                if lease.live == 0:
                    lease.attachment._ended(lease)
        finally:
            _GATE.release()


class Attachment:
    """This process's read-only hold on an arena. Takes the descriptors over; the data is mapped at the first `view`."""

    def __init__(self, arena: str, fds: ArenaFds, lock_wait_s: float) -> None:
        self.arena = arena
        self._fds = fds
        try:
            self.page = ControlPage(fds.take("ctl"), lock_wait_s)
        except BaseException:
            fds.close()
            raise
        self._leases: dict[tuple[int, int], _Lease] = {}
        self._row = -1  # ours in the page's lease table, claimed with the first view
        self._memory: np.ndarray | None = None
        self._closing = False

    def view(self, block: int, generation: int, nbytes: int) -> np.ndarray:
        """uint8 (nbytes,), read-only, of the block's start. The caller checks bounds before, and afterwards that the block is
        still readable: only then does its producer have to respect the view."""
        with _gate():
            memory = self._mapped()
            if self._row < 0:
                with self.page.locked():
                    self._row = self.page.leases.claim(self._fds.reader)
            lease = self._leases.setdefault((block, generation), _Lease(self, block, generation))
            lease.live += 1
            self.page.leases.set(self._row, block, True)  # leaving the gate is the fence before the caller's look
            address = memory.ctypes.data + block * self.page.block_bytes
            span = _Span(address, nbytes, memory, lease)
        return np.asarray(span)

    def release(self, block: int, generation: int) -> bool:
        """Give the block back, to be reused once no living process has views of it. True when this call did it."""
        with _gate():
            if self.page.closed or not 0 <= block < self.page.blocks:
                return False
            if done := self.page.let_go(block, generation):
                self._ring()
            return done

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of bytes of the data memfd, wherever they lie in it."""
        with _gate():
            return self._mapped()[offset : offset + nbytes].tobytes()

    def _mapped(self) -> np.ndarray:
        """The gate is held."""
        if self._closing:
            raise StaleRef(f"arena {self.arena} was closed by this process")
        if self._memory is None:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # the producer touched the pages: this only maps them
            self._memory = map_memory(self._fds.take("data"), self.page.data_bytes, flags, mmap.PROT_READ)
        return self._memory

    @property
    def dropped(self) -> bool:
        """The server let go of the arena."""
        with _gate():
            return self.page.closed or bool(self.page.flags & DROPPED)

    @property
    def drained(self) -> bool:
        """No block of the arena is readable, and none ever will be."""
        with _gate():
            return not self.page.closed and self.page.drained()

    @property
    def live_views(self) -> int:
        """Blocks that this process has views of."""
        return len(self._leases)

    def close(self) -> None:
        """Let go now, or as soon as the last view died. Idempotent."""
        with _gate():
            self._closing = True
            if not self._leases and not self.page.closed:
                self._close_now()

    def _ended(self, lease: _Lease) -> None:
        """The gate is held. The last view of a block died."""
        del self._leases[(lease.block, lease.generation)]
        if not any(block == lease.block for block, _ in self._leases):
            self.page.leases.set(self._row, lease.block, False)
            if self.page.state(lease.block) is not State.READY:
                self._ring()  # its producer may be waiting for us
        if self._closing and not self._leases:
            self._close_now()

    def _ring(self) -> None:
        os.eventfd_write(self._fds.bell, 1)

    def _close_now(self) -> None:
        if self._row >= 0:
            self.page.leases.give_up(self._row)
        self._memory = None  # the mapping goes with its last reference
        self.page.close()
        self._fds.close()


class Attachments:
    """The arenas of others that this process has open, each opened once. Used by readers of tensors and of weights."""

    def __init__(self, lock_wait_s: float, call_s: float) -> None:
        self._lock_wait_s = lock_wait_s
        self._call_s = call_s
        self._open: dict[str, Attachment] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def attach(self, arena: str, fd_path: str) -> Attachment:
        """The open arena. `StaleRef` when its server no longer has it."""
        with self._lock:
            if (found := self._open.get(arena)) is not None:
                return found
            self._sweep()
            try:
                fds = FdClient(fd_path, self._call_s).open_arena(arena)
            except ArenaUnknown as error:
                raise StaleRef(str(error)) from error
            found = self._open[arena] = Attachment(arena, fds, self._lock_wait_s)
            return found

    def release(self, arena: str, fd_path: str, block: int, generation: int) -> bool:
        """Release a block; whoever released the last of an arena without producer has the server drop it."""
        try:
            attachment = self.attach(arena, fd_path)
        except StaleRef:
            return False  # the arena went with its last block: released already
        done = attachment.release(block, generation)
        if done and attachment.drained:
            try:
                FdClient(fd_path, self._call_s).reap_arena(arena)
            except FdServerGone as error:
                log.warning("arena %s is drained, but its server is gone with it: %s", arena, error)
            self.sweep()
        return done

    def sweep(self) -> None:
        """Let go of arenas that their server dropped, so that their memory returns."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        for name in [name for name, attachment in self._open.items() if attachment.dropped]:
            self._open.pop(name).close()

    def live_views(self) -> int:
        with self._lock:
            return sum(attachment.live_views for attachment in self._open.values())

    def close(self) -> None:
        """Idempotent. An arena with live views goes with the last of them."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()
