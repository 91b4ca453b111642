"""Bounded mailboxes and the table of remembered replies.

A mailbox never drops: senders hold credits, and when it is full all the same it says so and the transport stops reading.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """FIFO queue of one consumer."""

    __slots__ = ("_waiter", "capacity", "items")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def full(self) -> bool:
        return len(self.items) >= self.capacity

    def put(self, item: T) -> None:
        self.items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> T:
        while not self.items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.items.popleft()


class Remembered:
    """Replies of asks that may be sent again, by (asking process, request id): the oldest answered ones are forgotten first.

    An ask that is still being handled is never forgotten, so a retry cannot run its handler twice at once.
    """

    RUNNING = b""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._running: set[tuple[str, int]] = set()
        self._answered: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running) + len(self._answered)

    def seen(self, key: tuple[str, int]) -> bytes | None:
        """The encoded answer, RUNNING while it is handled, None when this ask is new."""
        if key in self._running:
            return self.RUNNING
        answer = self._answered.get(key)
        if answer is not None:
            self._answered.move_to_end(key)
        return answer

    def begin(self, key: tuple[str, int]) -> None:
        self._running.add(key)

    def answer(self, key: tuple[str, int], encoded: bytes) -> None:
        self._running.discard(key)
        self._answered[key] = encoded
        while len(self._answered) > self.capacity:
            self._answered.popitem(last=False)

    def drop(self, key: tuple[str, int]) -> None:
        """It was never handled to an end (expired or cancelled): a retry starts anew."""
        self._running.discard(key)
