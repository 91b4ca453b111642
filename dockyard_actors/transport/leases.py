"""Who looks at which block of an arena: one row for each reader in the control page, ended by the reader or by its death.

A block that was released stays out of its producer's hands while a living process has views of it, whoever released it. Each
reader writes its own row alone, so that taking and ending a lease needs no lock. A reader whose pid means nothing here has a number
of the fd server's instead, which ends its row when it ends. It knows no states and frees nothing.
"""

from __future__ import annotations

import functools
import os

from dockyard_actors.transport.tensors import DataPlaneError

READERS = 64  # of one arena at a time: each process that has it open, once for each plane
_ROW = 2  # 64-bit words of a row: pid and start, or FOREIGN and a number
FOREIGN = 1 << 63  # of a reader in another pid namespace: lives until the fd server says otherwise


class TooManyReaders(DataPlaneError):
    """The arena is open in as many places as its lease table has rows."""


def process_start(pid: int) -> int:
    """Clock ticks between boot and the start of the process, which tells it from a later one with its pid; 0 = none such."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            after_name = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if after_name[0] in "ZX" else int(after_name[19])  # a zombie holds nothing


@functools.lru_cache(maxsize=2)
def own_start(pid: int) -> int:
    """`process_start` of this process; by pid, so that a forked child looks anew."""
    return process_start(pid)


class LeaseTable:
    """READERS rows of (pid, start), then one byte a row and block: 1 while that reader has views of the block.

    A reader first writes its byte and then looks whether the block is still readable; the producer first sees that it was
    released and then looks for bytes. With a full fence between a reader's two steps (the caller's lock gives it) at least one
    of them notices the other.
    """

    def __init__(self, page: memoryview, start: int, blocks: int) -> None:
        self._blocks = blocks
        self._rows = page[start : start + READERS * _ROW * 8].cast("Q")
        at = start + READERS * _ROW * 8
        self._bytes = page[at : at + READERS * blocks]

    @staticmethod
    def bytes_for(blocks: int) -> int:
        return READERS * (_ROW * 8 + blocks)

    def close(self) -> None:
        self._rows.release()
        self._bytes.release()

    def claim(self, reader: int = 0) -> int:
        """A row for this process (for `reader`, the number that the fd server gave it). The caller holds the page's lock.
        `TooManyReaders` when every row's process lives."""
        for row in range(READERS):
            if self._rows[row * _ROW] == 0 or not self._alive(row):
                self._bytes[row * self._blocks : (row + 1) * self._blocks] = bytes(self._blocks)
                self._rows[row * _ROW + 1] = 0 if reader else own_start(os.getpid())
                self._rows[row * _ROW] = FOREIGN | reader if reader else os.getpid()
                return row
        raise TooManyReaders(f"{READERS} readers have the arena open already; process {os.getpid()} cannot join them")

    def give_up(self, row: int) -> None:
        """The reader has no views left and will take no more."""
        self._rows[row * _ROW] = 0

    def end(self, reader: int) -> None:
        """By the fd server: the reader with this number is dead, or has closed the arena."""
        for row in range(READERS):
            if self._rows[row * _ROW] == FOREIGN | reader:
                self._bytes[row * self._blocks : (row + 1) * self._blocks] = bytes(self._blocks)
                self._rows[row * _ROW] = 0  # last: from here on the row may be somebody else's

    def set(self, row: int, block: int, held: bool) -> None:
        self._bytes[row * self._blocks + block] = held

    def readers(self, block: int) -> list[str]:
        """Pids of the living processes that have views of the block; "?3" is reader 3 of another pid namespace."""
        column = bytes(self._bytes[block :: self._blocks])
        if not any(column):
            return []
        words = [self._rows[row * _ROW] for row, held in enumerate(column) if held and self._alive(row)]
        return [f"?{word ^ FOREIGN}" if word & FOREIGN else str(word) for word in words]

    def _alive(self, row: int) -> bool:
        if self._rows[row * _ROW] & FOREIGN:
            return True
        return process_start(self._rows[row * _ROW]) == self._rows[row * _ROW + 1]
