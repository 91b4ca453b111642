"""What waits in an actor's mailboxes, and what runs for a message once it has begun: plain values and their small states."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime.actor import Handler
from dockyard_actors.runtime.deadlines import Expires
from dockyard_actors.transport.base import Lane, Peer

Key = tuple[str, int]  # of an ask: uid of the asking process, request id


class Delivery(NamedTuple):
    """A message on its way to its handler, and while it is being handled (see `scope`)."""

    peer: Peer
    lane: Lane
    message: wire.Ask | wire.Tell
    handler: Handler
    deadline: float  # loop time; inf for a tell
    size: int  # bytes of its envelope

    @property
    def trace(self) -> int:
        return self.message.trace

    @property
    def key(self) -> Key:
        return (self.peer.uid, getattr(self.message, "id", 0))


class Event(NamedTuple):
    """Something that the runtime tells the actor: calls ``method`` with ``value``, on the control lane."""

    method: str
    value: Any
    size: int = 0


class Stop(NamedTuple):
    """Ends a mailbox's task."""

    size: int = 0


class Running:
    """A concurrent handler or a stream at work: cancelled at its asker's deadline, or when the asker gives up or dies."""

    __slots__ = ("begun", "credit", "item", "since", "slot", "task", "why")

    def __init__(self, item: Delivery) -> None:
        self.item = item
        self.begun = False  # a task that is cancelled before its first step runs nothing at all
        self.task: asyncio.Task[None] | None = None
        self.slot: dict[Expires, None] | None = None
        self.why = ""
        self.since = time.perf_counter()
        self.credit: StreamCredit | None = None  # of a stream

    def expire(self) -> None:
        self.cancel("its asker's deadline passed")

    def cancel(self, why: str) -> None:
        self.why = self.why or why
        if self.task is not None:
            self.task.cancel()


class Places:
    """Room for the concurrent handlers of one lane; the lane's task alone waits for it."""

    __slots__ = ("_waiter", "left")

    def __init__(self, count: int) -> None:
        self.left = count
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> None:
        while self.left <= 0:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self.left -= 1

    def free(self) -> None:
        self.left += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamCredit:
    """How many more items of a stream may be sent: so many beyond those that its reader has taken."""

    __slots__ = ("_ahead", "_sent", "_taken", "_waiter", "heard")

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._sent = self._taken = 0
        self.heard = 0  # times that the reader has said something
        self._waiter: asyncio.Future[None] | None = None

    @property
    def left(self) -> int:
        return self._taken + self._ahead - self._sent

    def taken(self, count: int) -> None:
        """The reader has taken so many in all."""
        self.heard += 1
        self._taken = max(self._taken, min(count, self._sent))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, patience_s: float) -> bool:
        """Waits for room; false when there is none for so long. The stream's task is cancelled when its reader is gone or its deadline
        passes."""
        if self.left <= 0:
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            timer = loop.call_later(patience_s, lambda: waiter.done() or waiter.set_result(None))
            try:
                await waiter
            finally:
                timer.cancel()
        if self.left <= 0:
            return False
        self._sent += 1
        return True
