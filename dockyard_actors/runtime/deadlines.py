"""One heap of deadlines and one timer for a whole process: a deadline costs a push, and nothing when it is met in time.

Entries are objects with ``done`` and ``expire()``; it knows nothing of what they stand for.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Protocol


class Expires(Protocol):
    done: bool  # set by the owner when the deadline no longer matters

    def expire(self) -> None: ...


class Deadlines:
    """Calls ``expire()`` of every entry that is not done when its time (of `loop.time()`) comes, never before."""

    COMPACT = 4096  # finished entries that may pile up before the heap is rebuilt

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, Expires]] = []
        self._count = 0
        self._finished = 0
        self._timer: asyncio.TimerHandle | None = None
        self._armed = float("inf")

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, when: float, entry: Expires) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, entry))
        if when < self._armed:
            self._arm(when)

    def finished(self) -> None:
        """Says that one entry became done before its time, so that the heap can be kept small."""
        self._finished += 1
        if self._finished > self.COMPACT and self._finished * 2 > len(self._heap):
            self._heap = [item for item in self._heap if not item[2].done]
            heapq.heapify(self._heap)
            self._finished = 0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()
        self._armed = float("-inf")  # no later push arms again

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = when
        self._timer = self._loop.call_at(when, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        self._armed = float("inf")
        now = self._loop.time()
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].done):
            entry = heapq.heappop(self._heap)[2]
            if not entry.done:
                entry.expire()
            elif self._finished:
                self._finished -= 1
        if self._heap and self._heap[0][0] < self._armed:
            self._arm(self._heap[0][0])
