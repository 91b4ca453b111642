"""What happened in a simulation, and what must hold in any: at most once, in order, by a deadline, and errors that mean what they say."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dockyard_actors.runtime.errors import (
    ActorError,
    MailboxFull,
    OutcomeUnknown,
    PeerDied,
    TooLarge,
    UnknownName,
)

NOTHING_HANDLED = (PeerDied, MailboxFull, UnknownName, TooLarge)  # OutcomeUnknown apart
SLACK_S = 0.02  # an answer may be seen so long after its deadline: the slots of `deadlines`


class Violation(AssertionError):
    """A promise of the runtime did not hold. The text names it, and every event that belongs to it."""


@dataclass
class Operation:
    """One ask or tell. handled: (incarnation, time) of every time that a handler ran for it."""

    number: int
    sender: str
    receiver: str
    kind: str  # "ask", "retry" or "tell"
    started: float
    deadline: float
    ended: float | None = None
    reply: int | None = None  # the incarnation that replied
    error: ActorError | None = None
    handled: list[tuple[int, float]] = field(default_factory=list)

    def __str__(self) -> str:
        end = "not ended" if self.ended is None else f"{self.ended:.4f}"
        outcome = repr(self.error) if self.error is not None else f"reply of #{self.reply}"
        handled = ", ".join(f"#{incarnation} at {when:.4f}" for incarnation, when in self.handled) or "never"
        return f"{self.kind} {self.number} of {self.sender} to {self.receiver} at {self.started:.4f}, end {end}: {outcome}; handled {handled}"


class History:
    """Actors and clients of a simulation write into it; `check` reads it."""

    def __init__(self, in_order: bool = True) -> None:
        self.operations: list[Operation] = []
        self.in_order = in_order  # the network kept the order of each connection
        self._order: dict[tuple[str, str, int], int] = {}  # sender, receiver, incarnation → last number handled
        self.violations: list[str] = []

    def begin(self, sender: str, receiver: str, kind: str, deadline_s: float) -> Operation:
        now = asyncio.get_running_loop().time()
        operation = Operation(len(self.operations), sender, receiver, kind, now, now + deadline_s)
        self.operations.append(operation)
        return operation

    def end(self, operation: Operation, reply: int | None = None, error: ActorError | None = None) -> None:
        operation.ended = asyncio.get_running_loop().time()
        operation.reply, operation.error = reply, error

    def handle(self, number: int, receiver: str, incarnation: int) -> None:
        """A handler runs for this operation."""
        operation = self.operations[number]
        operation.handled.append((incarnation, asyncio.get_running_loop().time()))
        if operation.receiver != receiver:
            self.violations.append(f"handled by {receiver}: {operation}")
        if operation.kind != "retry":  # one that is sent again comes behind what was sent meanwhile
            key = (operation.sender, receiver, incarnation)
            if self.in_order and self._order.get(key, -1) > number:
                self.violations.append(f"out of order, {self._order[key]} came before: {operation}")
            self._order[key] = number

    def check(self) -> None:
        """Raises Violation with everything that went wrong."""
        found = list(self.violations)
        for operation in self.operations:
            found += [f"{text}: {operation}" for text in self._wrong(operation)]
        if found:
            raise Violation(f"{len(found)} violations:\n" + "\n".join(found[:20]))

    def _wrong(self, operation: Operation) -> list[str]:
        wrong: list[str] = []
        incarnations = [incarnation for incarnation, _ in operation.handled]
        if operation.kind == "retry":
            if len(set(incarnations)) < len(incarnations):
                wrong.append("handled more than once in one incarnation")
        elif len(incarnations) > 1:
            wrong.append("handled more than once")
        if operation.ended is None:
            wrong.append("never ended")
        elif operation.ended > operation.deadline + SLACK_S:
            wrong.append("ended after its deadline")
        if operation.reply is not None and operation.reply not in incarnations:
            wrong.append("answered by an incarnation that did not handle it")
        nothing = isinstance(operation.error, NOTHING_HANDLED) and not isinstance(operation.error, OutcomeUnknown)
        if nothing and incarnations and operation.kind != "retry":
            wrong.append("handled, and its error says that it was not")
        return wrong
