"""Bounded mailboxes and the table of remembered replies.

A mailbox never drops: senders hold credits, and when it is full all the same it says so and the transport stops reading.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound="Sized")


class Sized(Protocol):
    """What waits in a mailbox. size: bytes of its envelope."""

    @property
    def size(self) -> int: ...


class Mailbox(Generic[S]):
    """FIFO queue of one consumer, which takes from `items` and `size` itself and waits in `more` when there is nothing."""

    __slots__ = ("_waiter", "capacity", "capacity_bytes", "items", "size")

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self.capacity, self.capacity_bytes = capacity, capacity_bytes
        self.items: deque[S] = deque()
        self.size = 0  # bytes
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def full(self) -> bool:
        return len(self.items) >= self.capacity or self.size >= self.capacity_bytes

    @property
    def roomy(self) -> bool:
        """Half empty: whoever was held back because it was full may go on."""
        return len(self.items) * 2 <= self.capacity and self.size * 2 <= self.capacity_bytes

    def put(self, item: S) -> None:
        self.items.append(item)
        self.size += item.size
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> list[S]:
        """Takes out everything."""
        items = list(self.items)
        self.items.clear()
        self.size = 0
        return items

    async def more(self) -> None:
        """Returns when there is something to take."""
        while not self.items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class Remembered:
    """Replies of asks that may be sent again, by (asking process, request id): the oldest answered ones are forgotten first.

    An ask that is still being handled is never forgotten, so a retry cannot run its handler twice at once.
    """

    RUNNING = b""

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self.capacity, self.capacity_bytes = capacity, capacity_bytes
        self.size = 0  # bytes of the answers
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
        self.size += len(encoded) - len(self._answered.pop(key, b""))
        self._answered[key] = encoded
        while len(self._answered) > self.capacity or (self.size > self.capacity_bytes and len(self._answered) > 1):
            self.size -= len(self._answered.popitem(last=False)[1])

    def forget(self, uid: str) -> None:
        """The asking process is dead: it asks nothing again."""
        for key in [key for key in self._answered if key[0] == uid]:
            self.size -= len(self._answered.pop(key))

    def drop(self, key: tuple[str, int]) -> None:
        """It was never handled to an end (expired or cancelled): a retry starts anew."""
        self._running.discard(key)
