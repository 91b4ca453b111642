"""The private runtime directory of a node agent: sockets, keys and guard pages, mode 0700, removed at the end.

A directory whose agent was killed is recognised by its unheld lock and removed by the next agent of the same user.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

log = logging.getLogger("dockyard.runtime.rundir")

_LOCK = "lock"


class RuntimeDir:
    """Holds the directory's lock while it lives; `close` removes everything."""

    def __init__(self, parent: Path | None = None) -> None:
        base = parent or Path(tempfile.gettempdir())
        prefix = f"dockyard-{os.getuid()}-"
        _sweep(base, prefix)
        made = Path(
            tempfile.mkdtemp(prefix=f".{prefix}", dir=base)
        )  # hidden until it is locked, so that no sweep takes it
        self._fd = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = base / f"{prefix}{made.name.rpartition('-')[2]}"
        os.rename(made, self.path)

    def close(self) -> None:
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def _sweep(base: Path, prefix: str) -> None:
    for path in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # somebody else's, or being removed right now: not ours to take
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                log.info("removing %s: its node agent did not live to do so", path)
                shutil.rmtree(path)
            finally:
                os.close(fd)
