"""Waits for another process: each has an owner, a deadline, and an error that says who, what and how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from dockyard_actors.runtime.deadlines import Expires
from dockyard_actors.runtime.directory import Entry
from dockyard_actors.runtime.errors import ActorError, AskTimeout, MailboxFull
from dockyard_actors.transport.base import Peer

LONGEST_S = 1e9  # some thirty years: a timer takes no more


def endless(seconds: float) -> ValueError:
    return ValueError(f"deadline_s={seconds}: every wait has a deadline, in seconds and below {LONGEST_S:g}")


class Wait(msgspec.Struct, frozen=True):
    """Somebody waits for somebody: who, for whom, for what, how long already, and how long at most from its start (seconds)."""

    owner: str
    peer: str
    message: str
    what: str  # "reply" | "item" | "room" | "start" | a role's own words
    age_s: float
    deadline_s: float
    trace: int = 0  # the same for every wait that one first ask led to


class Waiting:
    """One wait with a deadline. Subclasses say with which error it ends when the deadline passes."""

    __slots__ = ("deadline", "entry", "future", "kind", "owner", "slot", "started", "trace")
    what = ""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, owner: str, entry: Entry, kind: str, deadline: float, trace: int
    ) -> None:
        self.owner, self.entry, self.kind, self.deadline, self.trace = owner, entry, kind, deadline, trace
        self.future: asyncio.Future[Any] = loop.create_future()
        self.started = loop.time()
        self.slot: dict[Expires, None] | None = None

    def expire(self) -> None:
        if not self.future.done():
            self.future.set_exception(self.timeout())

    def settle(self, body: msgspec.Raw) -> None:
        if not self.future.done():
            self.future.set_result(body)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def timeout(self) -> ActorError:
        raise NotImplementedError

    def describe(self) -> str:
        return f"{self.owner} asked {self.entry.name}#{self.entry.incarnation} for {self.kind}"

    def seen(self, now: float) -> Wait:
        return Wait(
            self.owner,
            self.entry.name,
            self.kind,
            self.what,
            now - self.started,
            self.deadline - self.started,
            self.trace,
        )


class PendingReply(Waiting):
    """peer: whom the ask was sent to, and who alone may answer it."""

    __slots__ = ("peer",)
    what = "reply"
    peer: Peer

    def timeout(self) -> ActorError:
        return AskTimeout(f"{self.describe()} and had no reply after {self.deadline - self.started:.3g} s")


class PendingItem(Waiting):
    __slots__ = ()
    what = "item"

    def timeout(self) -> ActorError:
        return AskTimeout(f"{self.describe()} and had no further item after {self.deadline - self.started:.3g} s")


class PendingRoom(Waiting):
    """transmit: sends the message, given its number in the window, and returns the bytes that it took. Called as soon as there is room,
    so that messages leave in the order of their numbers."""

    __slots__ = ("transmit",)
    what = "room"
    transmit: Callable[[int], int]

    def timeout(self) -> ActorError:
        return no_room(self.describe(), self.deadline - self.started)


def no_room(told: str, waited_s: float) -> MailboxFull:
    """What a sender gets that found no room: at once (0), or after it waited."""
    waited = f" for {waited_s:.3g} s" if waited_s else ""
    return MailboxFull(f"{told} and found no room in its mailbox{waited}; nothing was sent")
