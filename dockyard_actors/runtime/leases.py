"""Leases: processes that must be heard of again and again, because nobody sees them end.

One timer looks at all of them, and judges nobody when its own loop was held. It knows no messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOKS = 3  # looks at the leases in one lease time; a process renews as often


class Leases:
    """Calls ``expired(uid, silent_s)`` once for every process that was not heard of for ``lease_s`` (seconds of `loop.time()`)."""

    def __init__(self, lease_s: float, expired: Callable[[str, float], None]) -> None:
        self.lease_s = lease_s
        self._expired = expired
        self._heard: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def __contains__(self, uid: str) -> bool:
        return uid in self._heard

    def grant(self, uid: str) -> None:
        self._heard[uid] = asyncio.get_running_loop().time()
        self._arm()

    def heard(self, uid: str) -> None:
        """A sign of life; nothing for one that has no lease."""
        if uid in self._heard:
            self._heard[uid] = asyncio.get_running_loop().time()

    def drop(self, uid: str) -> None:
        self._heard.pop(uid, None)

    def close(self) -> None:
        self._heard.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and self._heard:
            loop = asyncio.get_running_loop()
            self._due = loop.time() + self.lease_s / LOOKS
            self._timer = loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        late = now - self._due
        if late < self.lease_s / LOOKS / 2:  # else our own loop was held: what came meanwhile has not been read yet
            for uid, heard in list(self._heard.items()):
                if now - heard > self.lease_s and self._heard.pop(uid, None) is not None:
                    self._expired(uid, now - heard)
        self._arm()
