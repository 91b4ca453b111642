"""Tells when a process ends, through its pidfd: no polling, no confusion when a pid is reused.

It works for any process of the same host, child or not, and does not reap it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class PidWatch:
    """Calls ``on_exit`` once, on the loop, when the process has ended (at once if it is gone already)."""

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self.fd = -1
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(self._exited)
            return
        try:
            self._loop.add_reader(self.fd, self._exited)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        self._on_exit = lambda: None
        if self.fd >= 0:
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.fd = -1

    def _exited(self) -> None:
        on_exit = self._on_exit
        if self.fd >= 0:
            self._loop.remove_reader(self.fd)  # the descriptor stays open for waitid until close()
        self._on_exit = lambda: None
        on_exit()
