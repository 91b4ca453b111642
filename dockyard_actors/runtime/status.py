"""What a process says about itself: counters, waits, and why it stops. Plain values for views and tests."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dockyard_actors.runtime.caller import Wait
from dockyard_actors.runtime.message import Message

CRASH_CODE = 70  # EX_SOFTWARE: exit code of a process whose actor system crashed


class Counts(msgspec.Struct):
    """Totals since the process started."""

    asks: int = 0
    tells: int = 0
    dead_letters: int = 0  # what could not be delivered
    expired: int = 0  # asks dropped or handlers cancelled because the asker had given up
    deduplicated: int = 0  # repeated asks answered without running the handler again
    late_replies: int = 0  # replies whose asker had given up
    handler_errors: int = 0
    malformed: int = 0  # envelopes that did not decode


class SystemStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    asks: int
    tells: int
    dead_letters: int
    expired: int
    deduplicated: int
    late_replies: int
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


class Inspect(Message[SystemStatus], frozen=True):
    """Every actor's process answers this by itself, whatever the actor is doing: `await ref.ask(Inspect())`."""


@dataclass(frozen=True)
class StopRequest:
    """Why a process ends. ``cause`` is set when it crashed."""

    reason: str
    exit_code: int = 0
    cause: BaseException | None = None
