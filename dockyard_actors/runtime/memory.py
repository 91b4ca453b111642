"""How much memory this process holds, and how to give back what the allocator keeps for later.

Linux only. Knows nothing of what the memory is for; the memory of an accelerator is not counted here.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

COUNTED = ("RssAnon", "RssShmem")


class Change(NamedTuple):
    """Bytes that a process held before and after something."""

    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.before >> 20} → {self.after >> 20} MiB"


def resident() -> int:
    """Bytes of this process that only it (RssAnon), or it and others through shared memory (RssShmem), keep in memory. Pages of files are
    left out: the kernel may drop them whenever it likes."""
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(value.split()[0]) << 10 for key, _, value in lines if key in COUNTED)


def trim() -> None:
    """Gives freed memory back to the kernel; does nothing where the C library has no malloc_trim."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
