"""How much an actor lets each sender have waiting: a window of messages and bytes for each lane, refilled as the actor takes them.

It is what bounds memory on both sides: a sender without room waits in line, and the receiver never holds more than the windows it gave.
"""

from __future__ import annotations

from collections import deque

from dockyard_actors.runtime.directory import Entry
from dockyard_actors.runtime.waits import PendingRoom
from dockyard_actors.transport.base import Lane, Peer


class Window:
    """How many more messages and bytes an actor accepts from this process on one lane. Waiters are served in order.

    A message may be larger than the bytes left, so that one larger than the whole window can go at all.
    """

    __slots__ = ("messages", "size", "waiters")

    def __init__(self, messages: int, size: int) -> None:
        self.messages, self.size = messages, size
        self.waiters: deque[PendingRoom] = deque()

    def take(self, size: int) -> bool:
        """Takes a place for ``size`` bytes if there is one and nobody waits for it."""
        if self.messages > 0 and self.size > 0 and not self.waiters:
            self.messages -= 1
            self.size -= size
            return True
        return False

    def add(self, messages: int, size: int) -> None:
        self.messages += messages
        self.size += size
        while self.messages > 0 and self.size > 0 and self.waiters:
            room = self.waiters.popleft()
            if not room.future.done():
                self.messages -= 1
                self.size -= room.size
                room.future.set_result(None)


class Outlet:
    """The way to one process: a connection and the windows of its actors."""

    __slots__ = ("peer", "windows")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.windows: dict[tuple[str, int], list[Window]] = {}  # by lane

    def window(self, entry: Entry, lane: Lane) -> Window:
        key = (entry.name, entry.incarnation)
        windows = self.windows.get(key)
        if windows is None:
            windows = self.windows[key] = [Window(entry.window, entry.window_bytes) for _ in Lane]
        return windows[lane]

    def rename(self, before: Entry, entry: Entry) -> None:
        """The same actor under another incarnation."""
        windows = self.windows.pop((before.name, before.incarnation), None)
        if windows is not None:
            self.windows[entry.name, entry.incarnation] = windows

    def forget(self, entry: Entry) -> None:
        """The incarnation is dead; who waits for its room has been told."""
        self.windows.pop((entry.name, entry.incarnation), None)
