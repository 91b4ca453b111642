"""What a process says about itself: counters, waits, and why it stops. Plain values for views and tests."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.waits import Wait

CRASH_CODE = 70  # EX_SOFTWARE: exit code of a process whose actor system crashed


class Counts(msgspec.Struct):
    """Totals since the process started."""

    asks: int = 0
    tells: int = 0
    dead_letters: int = 0  # what could not be delivered
    expired: int = 0  # asks dropped or handlers cancelled because the asker had given up
    deduplicated: int = 0  # repeated asks answered without running the handler again
    repeated: int = 0  # messages that the network brought twice or out of order
    fenced: int = 0  # messages of processes that were declared dead before they came
    late_replies: int = 0  # replies whose asker had given up, or whose sender was not asked
    unbidden: int = 0  # what a process said of others that only the registry may say
    handler_errors: int = 0
    malformed: int = 0  # envelopes that did not decode


_BUCKETS = 32  # the last one is for anything longer
_LONGEST_S = 2.0 ** (_BUCKETS - 1) / 1e6


class HandlerTimes(msgspec.Struct, frozen=True):
    """How long the handler of one message type took. buckets[i]: calls that took less than 2**i microseconds and not less than half of it."""

    count: int
    total_s: float
    max_s: float
    buckets: tuple[int, ...]

    def quantile_s(self, share: float) -> float:
        """Upper bound of the time that this share of calls stayed under: the end of its bucket."""
        seen = 0
        for power, count in enumerate(self.buckets):
            seen += count
            if count and seen >= share * self.count:
                return min(2.0**power / 1e6, self.max_s)
        return self.max_s


class Times:
    """Counts one handler's times."""

    __slots__ = ("_buckets", "max_s", "total_s")

    def __init__(self) -> None:
        self.total_s = self.max_s = 0.0
        self._buckets = [0] * (_BUCKETS + 1)

    def add(self, seconds: float) -> None:
        self.total_s += seconds
        if seconds > self.max_s:
            self.max_s = seconds
        self._buckets[int(seconds * 1e6).bit_length() if seconds < _LONGEST_S else _BUCKETS] += 1

    def value(self) -> HandlerTimes:
        return HandlerTimes(sum(self._buckets), self.total_s, self.max_s, tuple(self._buckets))


class ActorStatus(msgspec.Struct, frozen=True):
    """One actor: messages that wait on either lane, the serial handler at work and for how long, concurrent handlers at work."""

    mailbox: int = 0
    mailbox_bytes: int = 0
    control: int = 0
    busy: str = ""
    busy_s: float = 0.0
    running: int = 0
    handlers: dict[str, HandlerTimes] = {}


class DeadLetter(msgspec.Struct, frozen=True):
    """Something that could not be delivered. when: UNIX time."""

    when: float
    text: str


class SystemStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    asks: int
    tells: int
    dead_letters: int
    expired: int
    deduplicated: int
    repeated: int
    fenced: int
    late_replies: int
    unbidden: int
    handler_errors: int
    malformed: int
    bad_frames: int  # frames from strangers or in no known form
    denied_keys: int  # tcp connections refused for their CURVE key
    mailboxes: dict[str, int]  # messages waiting, by actor
    busy: dict[str, str]  # serial handler at work and its age, by actor
    deadlines: int


class SystemStatus(msgspec.Struct, frozen=True, tag=True):
    """Reply to `Inspect`."""

    process: str
    pid: int
    stats: SystemStats
    waits: tuple[Wait, ...]
    guard: str  # what the loop is held for, if it is declared
    actors: dict[str, ActorStatus] = {}
    dead_letters: tuple[DeadLetter, ...] = ()  # the newest ones; `stats.dead_letters` counts all


class Inspect(Message[SystemStatus], frozen=True):
    """Every actor's process answers this by itself, whatever the actor is doing: `await ref.ask(Inspect())`."""


@dataclass(frozen=True)
class StopRequest:
    """Why a process ends. ``cause`` is set when it crashed."""

    reason: str
    exit_code: int = 0
    cause: BaseException | None = None
