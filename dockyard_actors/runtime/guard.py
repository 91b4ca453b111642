"""`guard(seconds, why)`: says that this process's loop may be held that long, where the node agent sees it at once.

The announcement is a shared page, not a message: the loop that would have to send it is the one that is about to block.
It knows nothing of what the work is.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "DOCKYARD_PROCESS"  # where an agent tells its child who it is (JSON; see process.Bootstrap)
_SIZE = 4096
_LAYOUT = struct.Struct("<dd200s")  # deadline, last change (both CLOCK_MONOTONIC seconds), why (UTF-8, zero padded)


@dataclass(frozen=True)
class Guarded:
    """What a board says: the loop may be silent until ``until``; ``changed`` is when that was last written (monotonic seconds)."""

    until: float
    changed: float
    why: str


class GuardBoard:
    """The shared page of one process: the agent makes the file, the process writes, the agent reads."""

    def __init__(self, path: Path, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, _SIZE)  # a full disk is an error here, not a SIGBUS at the first write
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)

    def write(self, until: float, why: str) -> None:
        _LAYOUT.pack_into(self._map, 0, until, time.monotonic(), why.encode()[:199])

    def read(self) -> Guarded:
        until, changed, why = _LAYOUT.unpack_from(self._map, 0)
        return Guarded(until, changed, why.rstrip(b"\0").decode(errors="replace"))

    def close(self) -> None:
        self._map.close()


_board: GuardBoard | None = None
_active: list[tuple[float, str]] = []
_lock = threading.Lock()


def board_path(socket_dir: str | Path) -> Path:
    return Path(socket_dir) / "guard"


def attach() -> None:
    """Finds the board that this process's agent made, if it has one; done by the first guard as well."""
    text = os.environ.get(ENVIRONMENT)
    if _board is None and text:
        set_board(GuardBoard(board_path(json.loads(text)["socket_dir"])))


def set_board(board: GuardBoard | None) -> None:
    """Where this process's guards are written from now on; None: they are only remembered (no agent watches)."""
    global _board
    with _lock:
        _board = board
        _publish()


def current() -> tuple[float, str] | None:
    """The longest guard in force: (monotonic deadline, why)."""
    with _lock:
        return max(_active, default=None)


def _publish() -> None:
    if _board is not None:
        _board.write(*max(_active, default=(0.0, "")))


@contextlib.contextmanager
def guard(seconds: float, why: str) -> Iterator[None]:
    """Declares that the loop may be held for up to ``seconds`` from now, from any thread; guards may be nested.

    When it takes longer all the same, the process counts as hung and is killed and restarted by its agent.
    """
    attach()
    entry = (time.monotonic() + seconds, why)
    with _lock:
        _active.append(entry)
        _publish()
    try:
        yield
    finally:
        with _lock:
            _active.remove(entry)
            _publish()
