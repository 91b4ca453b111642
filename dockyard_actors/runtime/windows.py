"""How much an actor lets each sender have waiting: a window of messages and bytes for each lane, refilled as the actor takes them.

It is what bounds memory on both sides: a sender without room waits in line, and the receiver never holds more than the windows it gave.
"""

from __future__ import annotations

from collections import deque

from dockyard_actors.runtime.directory import Entry
from dockyard_actors.runtime.envelope import Level
from dockyard_actors.runtime.waits import PendingRoom
from dockyard_actors.transport.base import Lane, Peer


class Window:
    """How many more messages and bytes an actor accepts from this process on one lane. Waiters are served in order.

    A message may be larger than the bytes left, so that one larger than the whole window can go at all.
    """

    __slots__ = (
        "_limit",
        "_probe",
        "_probed",
        "_sent_size",
        "_taken",
        "messages",
        "probing",
        "sent",
        "size",
        "waiters",
    )

    def __init__(self, messages: int, size: int) -> None:
        self.messages, self.size = messages, size
        self.sent = 0  # messages so far: the number of the last one
        self.waiters: deque[PendingRoom] = deque()
        self.probing = False
        self._limit = (messages, size)
        self._sent_size = 0
        self._probed = (0, 0)  # what had been sent when the level was asked for
        self._probe = 0  # number of the last probe; negative when it was answered
        self._taken = (0, 0)  # what the receiver has said that it took, in all

    def take(self, size: int) -> bool:
        """Takes a place for ``size`` bytes, which message ``sent + 1`` was encoded to, if there is one and nobody waits for it."""
        if self.messages > 0 and self.size > 0 and not self.waiters:
            self.messages -= 1
            self.size -= size
            self.sent += 1
            self._sent_size += size
            return True
        return False

    def credit(self, taken: int, size: int) -> None:
        """The receiver has taken so many messages and bytes in all. What the network repeats or brings late changes nothing."""
        if taken > self._taken[0]:
            self.messages += taken - self._taken[0]
            self.size += size - self._taken[1]
            self._taken = (taken, size)
            self._send_waiting()

    def _send_waiting(self) -> None:
        while self.messages > 0 and self.size > 0 and self.waiters:
            room = self.waiters.popleft()
            if not room.future.done():
                self.sent += 1
                size = room.transmit(self.sent)
                self.messages -= 1
                self.size -= size
                self._sent_size += size
                room.future.set_result(None)

    def probe(self) -> int:
        """The receiver is asked how much waits there. Returns the question's number."""
        self._probed = (self.sent, self._sent_size)
        self._probe = abs(self._probe) + 1
        return self._probe

    def level(self, level: Level) -> None:
        """So much waits there of what had been sent before the probe; everything else was taken or lost."""
        if level.number != self._probe:
            return  # an answer to an older question, or the same one again
        self._probe = -self._probe
        sent, sent_size = self.sent - self._probed[0], self._sent_size - self._probed[1]
        self.messages = self._limit[0] - level.waiting - sent
        self.size = self._limit[1] - level.size - sent_size
        self._taken = (level.taken, level.taken_size)
        self._send_waiting()


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
