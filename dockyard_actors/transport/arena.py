"""One arena's memory: the control page that says what each block is, and a process's hold on both.

An arena is two memfds and an eventfd, created sealed by the fd server: `data` (blocks of one fixed size; after the producer
mapped it nobody else can map it writable), `ctl` (generation and state per block, shared by the run's own processes) and a bell
that rings when a block becomes free. It promises that two processes never both free a block, and that what a dead producer was
writing is never readable. It does not know where descriptors come from, nor what blocks hold.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dockyard_actors.transport.leases import LeaseTable, own_start, process_start
from dockyard_actors.transport.tensors import DataPlaneError, MalformedRef, StaleRef, TornBlock

MAGIC = 0x4459_4152_454E_4132
WORDS = 8  # 64-bit words per record: one cache line for the header, one for each block
_MAGIC, _BLOCKS, _BLOCK_BYTES, _DATA_BYTES, _PID, _FLAGS, _EXTRA = range(7)
_GENERATION, _STATE, _HOLDER, _HOLDER_START, _NBYTES, _CHECKSUM, _CHANGED_NS, _TAG = range(8)

ORPHANED = 1  # the producer is dead or has left: no block will ever be written again
DROPPED = 2  # the server let go: whoever has it mapped should let go too


class State(enum.IntEnum):
    FREE = 0
    WRITING = 1
    READY = 2
    DRAINING = 3  # released: free as soon as no living reader has views of it
    TORN = 4  # its producer died while writing


class ArenaLocked(DataPlaneError, TimeoutError):
    """Another process held an arena's lock for longer than its few microseconds of work: it is stopped."""


@dataclass
class ArenaFds:
    """Descriptors of one arena, as they arrive from the fd server. Whoever receives them closes them."""

    data: int
    ctl: int
    bell: int
    watch: int = -1  # open as long as the reader holds the arena: its end is how the fd server knows of the reader's
    reader: int = 0  # the number that it has there; 0: its pid says who it is

    def take(self, name: str) -> int:
        """Hand one descriptor over: the caller closes it from now on."""
        fd = getattr(self, name)
        setattr(self, name, -1)
        return fd

    def close(self) -> None:
        """Idempotent."""
        for name in ("data", "ctl", "bell", "watch"):
            if (fd := getattr(self, name)) >= 0:
                setattr(self, name, -1)
                os.close(fd)


# A POSIX record lock belongs to the process: it does not keep threads apart, and closing *any* descriptor of the file drops it.
# So this lock surrounds both every critical section and every close of a control page.
_PROCESS = threading.Lock()


class ControlPage:
    """Header and block records in the ctl memfd. 64-bit words, each written with one store.

    Who writes what: the producer alone moves FREE → WRITING → READY and DRAINING → FREE of its own blocks; any process that
    holds a ref moves READY → DRAINING, under the lock; the server sets flags and marks TORN, under the lock; each reader writes
    its own row of `leases`. Takes the descriptor over.
    """

    def __init__(self, ctl_fd: int, lock_wait_s: float) -> None:
        self._fd = ctl_fd
        self._lock_wait_s = lock_wait_s
        self._map = mmap.mmap(self._fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._words = memoryview(self._map).cast("Q")
        if self._words[_MAGIC] != MAGIC:
            self.close()
            raise MalformedRef("not an arena's control page")
        self.blocks = self._words[_BLOCKS]
        self.block_bytes = self._words[_BLOCK_BYTES]
        self.data_bytes = self._words[_DATA_BYTES]
        self.producer_pid = self._words[_PID]
        self.extra = self._words[_EXTRA]
        self.leases = LeaseTable(memoryview(self._map), (1 + self.blocks) * WORDS * 8, self.blocks)

    @staticmethod
    def bytes_for(blocks: int) -> int:
        """Size of the ctl memfd in bytes."""
        return (1 + blocks) * WORDS * 8 + LeaseTable.bytes_for(blocks)

    @staticmethod
    def format(ctl_fd: int, blocks: int, block_bytes: int, data_bytes: int, producer_pid: int, extra: int) -> None:
        """Write the header of a fresh, zeroed ctl memfd."""
        header = struct.pack("=8Q", MAGIC, blocks, block_bytes, data_bytes, producer_pid, 0, extra, 0)
        os.pwrite(ctl_fd, header, 0)

    def close(self) -> None:
        """Idempotent."""
        with _PROCESS:
            if self._fd >= 0:
                if hasattr(self, "leases"):
                    self.leases.close()
                self._words.release()
                self._map.close()
                os.close(self._fd)
                self._fd = -1

    @property
    def fd(self) -> int:
        """The ctl memfd, still owned by the page."""
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    @property
    def flags(self) -> int:
        return self._words[_FLAGS]

    @contextmanager
    def locked(self, wait_s: float | None = None) -> Iterator[None]:
        """Exclude every other process and thread. Dies with its holder. `ArenaLocked` after `wait_s` seconds."""
        deadline = time.monotonic() + (self._lock_wait_s if wait_s is None else wait_s)
        with _PROCESS:
            if self._fd < 0:
                raise StaleRef("the arena was closed by this process")
            while True:
                try:
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 8, 0)
                    break
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EACCES):
                        raise
                if time.monotonic() >= deadline:
                    raise ArenaLocked(
                        f"process {os.getpid()} waited for the arena lock that process {self._lock_holder()} holds: "
                        "is that process stopped?"
                    )
                time.sleep(0.0001)  # the holder needs microseconds; record locks offer nothing to wait on
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 8, 0)

    def _lock_holder(self) -> int:
        query = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 8, 0)
        return struct.unpack("hhqqi", fcntl.fcntl(self._fd, fcntl.F_GETLK, query))[4]

    # -- records
    def state(self, block: int) -> State:
        return State(self._words[(1 + block) * WORDS + _STATE])

    def generation(self, block: int) -> int:
        return self._words[(1 + block) * WORDS + _GENERATION]

    def nbytes(self, block: int) -> int:
        """Bytes in use of a sealed block."""
        return self._words[(1 + block) * WORDS + _NBYTES]

    def tag(self, block: int) -> int:
        """A number of the user's own (the weight version)."""
        return self._words[(1 + block) * WORDS + _TAG]

    def holder_alive(self, block: int) -> bool:
        """Whether the process that writes the block still lives."""
        at = (1 + block) * WORDS
        return process_start(self._words[at + _HOLDER]) == self._words[at + _HOLDER_START]

    def holder(self, block: int) -> int:
        return self._words[(1 + block) * WORDS + _HOLDER]

    def is_free(self, block: int) -> bool:
        """Asked by the producer, who alone ends DRAINING: so no two processes can both free a block."""
        if self.state(block) is State.DRAINING and not self.leases.readers(block):
            self.set_state(block, State.FREE)
        return self.state(block) is State.FREE

    def age_s(self, block: int) -> float:
        """Seconds since the block's last change of state."""
        return (time.monotonic_ns() - self._words[(1 + block) * WORDS + _CHANGED_NS]) / 1e9

    def counts(self) -> dict[State, int]:
        """Blocks by state; DRAINING are those with living readers, FREE what the producer would get."""
        counts = dict.fromkeys(State, 0)
        for block in range(self.blocks):
            state = self.state(block)
            drained = state is State.DRAINING and not self.leases.readers(block)
            counts[State.FREE if drained else state] += 1
        return counts

    def set_tag(self, block: int, tag: int) -> None:
        """Of a block that the caller is writing."""
        self._words[(1 + block) * WORDS + _TAG] = tag

    # -- transitions
    def begin(self, block: int, tag: int = 0) -> int:
        """FREE → WRITING by the producer. Returns the new generation, which makes every older ref stale."""
        words, at = self._words, (1 + block) * WORDS
        generation = words[at + _GENERATION] + 1
        words[at + _STATE] = State.WRITING
        words[at + _GENERATION] = generation
        words[at + _HOLDER] = os.getpid()
        words[at + _HOLDER_START] = own_start(os.getpid())
        words[at + _TAG] = tag
        words[at + _CHANGED_NS] = time.monotonic_ns()
        return generation

    def publish(self, block: int, nbytes: int, checksum: int) -> None:
        """WRITING → READY by the producer."""
        if self._fd < 0:
            raise DataPlaneError(f"block {block}: the arena was closed before the block was sealed")
        words, at = self._words, (1 + block) * WORDS
        words[at + _NBYTES] = nbytes
        words[at + _CHECKSUM] = checksum
        words[at + _CHANGED_NS] = time.monotonic_ns()
        words[at + _STATE] = State.READY  # last: from here on others may read

    def set_state(self, block: int, state: State) -> None:
        """A transition whose caller made sure that nobody else can make one."""
        at = (1 + block) * WORDS
        self._words[at + _CHANGED_NS] = time.monotonic_ns()
        self._words[at + _STATE] = state

    def let_go(self, block: int, generation: int) -> bool:
        """READY → DRAINING, once per generation whoever asks. True when this call did it."""
        with self.locked():
            if self.generation(block) != generation or self.state(block) is not State.READY:
                return False
            self.set_state(block, State.DRAINING)
            return True

    def set_flag(self, flag: int) -> None:
        """Caller holds the lock, or is the server that drops the arena."""
        self._words[_FLAGS] |= flag

    def orphan(self, wait_s: float) -> None:
        """Say that the producer is gone; what it was writing is torn for good."""
        with self.locked(wait_s):
            self.set_flag(ORPHANED)
            for block in range(self.blocks):
                if self.state(block) is State.WRITING:
                    self.set_state(block, State.TORN)

    def drained(self) -> bool:
        """No block is readable any more, and none ever will be."""
        return bool(self.flags & ORPHANED) and not any(self.state(b) is State.READY for b in range(self.blocks))

    def require_readable(self, arena: str, block: int, generation: int) -> None:
        """Raise `MalformedRef`, `StaleRef` or `TornBlock` unless the block holds that generation, sealed."""
        if not 0 <= block < self.blocks:
            raise MalformedRef(f"arena {arena} has {self.blocks} blocks, not block {block}")
        if self.flags & DROPPED:
            raise StaleRef(f"arena {arena} was dropped: its producer is gone and its last block was released")
        found, state = self.generation(block), self.state(block)
        if found != generation or state in (State.FREE, State.DRAINING):
            raise StaleRef(f"block {block} of arena {arena} is {state.name} at generation {found}, not {generation}")
        if state is not State.READY:
            writer = "lives and is still writing" if self.holder_alive(block) else "died while writing"
            raise TornBlock(
                f"block {block} of arena {arena} was never sealed: its producer {self.holder(block)} {writer}"
            )


def map_memory(data_fd: int, nbytes: int, flags: int, protection: int) -> np.ndarray:
    """uint8 (nbytes,) over the data memfd, unmapped with its last view. Takes the descriptor over."""
    try:
        return np.frombuffer(mmap.mmap(data_fd, nbytes, flags, protection), np.uint8)
    finally:
        os.close(data_fd)
