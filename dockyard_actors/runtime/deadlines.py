"""All deadlines of a process in slots of a few milliseconds, and one timer: one that is met in time costs two dictionary operations.

Entries are objects with ``expire()`` and an attribute ``slot``; it knows nothing of what they stand for.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Protocol

SLOT_S = 1 / 128  # by so much an entry may expire late; never early


class Expires(Protocol):
    slot: dict[Expires, None] | None  # where it waits; kept by Deadlines

    def expire(self) -> None: ...


class Deadlines:
    """Calls ``expire()`` of every entry that was not dropped when its time (of `loop.time()`) has come, never before."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._slots: dict[int, dict[Expires, None]] = {}
        self._times: list[int] = []  # heap of the slots' numbers
        self._timer: asyncio.TimerHandle | None = None
        self._armed: float = float("inf")  # number of the slot that the timer is for

    def __len__(self) -> int:
        return sum(len(slot) for slot in self._slots.values())

    def push(self, when: float, entry: Expires) -> None:
        number = int(when / SLOT_S) + 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
            heapq.heappush(self._times, number)
            if number < self._armed:
                self._arm(number)
        slot[entry] = None
        entry.slot = slot

    def drop(self, entry: Expires) -> None:
        """It does not matter any more. Repeating it changes nothing."""
        slot, entry.slot = entry.slot, None
        if slot is not None:
            slot.pop(entry, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._slots.clear()
        self._times.clear()
        self._armed = float("-inf")  # no later push arms again

    def _arm(self, number: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = number
        self._timer = self._loop.call_at(number * SLOT_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        self._armed = float("inf")
        now = self._loop.time()
        while self._times and (self._times[0] * SLOT_S <= now or not self._slots[self._times[0]]):
            for entry in self._slots.pop(heapq.heappop(self._times)):
                entry.slot = None
                entry.expire()
        if self._times and self._times[0] < self._armed:
            self._arm(self._times[0])
