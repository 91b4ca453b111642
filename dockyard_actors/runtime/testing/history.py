"""What happened in a simulation, and what must hold in any: at most once, in order, by a deadline, and errors that mean what they say.

Actors and clients write down what they do; the check knows the runtime's promises and nothing of how it keeps them.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.errors import (
    AskTimeout,
    MailboxFull,
    OutcomeUnknown,
    PeerDied,
    StreamBroken,
    SystemClosed,
    TooLarge,
    UnknownName,
)
from dockyard_actors.runtime.testing.network import SimTransport
from dockyard_actors.runtime.testing.world import Process, World

NOTHING_HANDLED = (PeerDied, MailboxFull, UnknownName, TooLarge)  # OutcomeUnknown apart
EXPECTED = (
    AskTimeout,
    MailboxFull,
    PeerDied,
    UnknownName,
    StreamBroken,
    SystemClosed,
)  # what faults of network and processes may lead to
SLACK_S = 0.02  # an answer may be seen so long after its deadline: the slots of `deadlines`
SHOWN = 20
_REFUSED = re.compile(r"\(any more\)$|it was meant for incarnation")  # by a process that has no such actor

Kind = Literal["ask", "retry", "tell"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Violation(AssertionError):
    """A promise of the runtime did not hold. The text names it, and every event that belongs to it."""


class Handling(NamedTuple):
    """A handler ran. instance: counts the actor instances of a history; incarnation: the number it had then."""

    instance: int
    incarnation: int
    uid: str  # of its process
    when: float


@dataclass
class Operation:
    """One ask or tell. lane: messages of one lane keep their order; within: the operation whose handler did this one."""

    number: int
    uid: str  # of the process that did it
    receiver: str
    kind: Kind
    lane: str
    started: float
    deadline: float
    within: int = -1
    ended: float | None = None
    instance: int | None = None  # the one that replied
    error: BaseException | None = None
    given_up: bool = False  # it was cancelled: who did it saw no outcome
    handled: list[Handling] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        return self.kind != "tell" and self.ended is not None and self.error is None and not self.given_up

    def __str__(self) -> str:
        end = "not ended" if self.ended is None else f"ended {self.ended:.4f}"
        outcome = repr(self.error) if self.error is not None else f"reply of instance {self.instance}"
        handled = ", ".join(
            f"#{h.incarnation} (instance {h.instance} in {h.uid}) at {h.when:.4f}" for h in self.handled
        )
        within = f" within {self.within}" if self.within >= 0 else ""
        return (
            f"{self.kind} {self.number}{within} ({self.lane}) of {self.uid} to {self.receiver} at {self.started:.4f}, "
            f"deadline {self.deadline:.4f}, {end}: {outcome}; handled: {handled or 'never'}"
        )


class History:
    """Actors and clients of a simulation write into it; `check` reads it.

    in_order: the network kept the order of each connection. once: it brought nothing twice. TCP promises both; without the second, who
    is refused because an actor is gone cannot know that the first of two copies was handled.
    """

    def __init__(self, in_order: bool = True, once: bool = True) -> None:
        self.operations: list[Operation] = []
        self.in_order, self.once = in_order, once
        self.notes: list[str] = []  # what was done to the world, with its time
        self.watched: list[str] = []  # what watchers were told
        self.violations: list[str] = []
        self._instances: dict[Actor, int] = {}
        self._order: dict[tuple[str, str, int, str], int] = {}  # sender, receiver, instance, lane → last number handled

    # ------------------------------------------------------------------ written

    def note(self, text: str) -> None:
        self.notes.append(f"{_now():.4f} {text}")

    def begin(
        self, uid: str, receiver: str, kind: Kind, deadline_s: float, lane: str = "user", within: int = -1
    ) -> Operation:
        if kind not in KINDS:
            raise ValueError(f"an operation is one of {', '.join(KINDS)}, not {kind!r}")
        now = _now()
        operation = Operation(len(self.operations), uid, receiver, kind, lane, now, now + deadline_s, within)
        self.operations.append(operation)
        return operation

    def end(
        self,
        operation: Operation,
        instance: int | None = None,
        error: BaseException | None = None,
        given_up: bool = False,
    ) -> None:
        operation.ended = _now()
        operation.instance, operation.error, operation.given_up = instance, error, given_up

    def handle(self, number: int, actor: Actor) -> int:
        """A handler of ``actor`` runs for this operation. Returns the number of the instance, which is to be in its reply."""
        operation, context, now = self.operations[number], actor.ctx, _now()
        instance = self._instances.setdefault(actor, len(self._instances))
        operation.handled.append(Handling(instance, context.incarnation, context.system.config.uid, now))
        if operation.receiver != context.name:
            self.violations.append(f"handled by {context.name}: {operation}")
        if operation.kind != "retry":  # one that is sent again comes behind what was sent meanwhile
            key = (operation.uid, context.name, instance, operation.lane)
            if self.in_order and self._order.get(key, -1) > number:
                self.violations.append(f"out of order, {self._order[key]} came before: {operation}")
            self._order[key] = number
        transport = context.system.transport
        if isinstance(transport, SimTransport):
            told = transport.forgotten.get(operation.uid)
            if told is not None and operation.started > told:
                self.violations.append(
                    f"handled by {transport.config.uid}, which knew since {told:.4f} that its sender is dead: {operation}"
                )
        return instance

    # ------------------------------------------------------------------ checked

    def check(self, world: World) -> None:
        """Raises Violation with everything that went wrong, and what had been done to the world; ValueError when no handler ever
        called `handle` although asks were answered: then nothing was checked."""
        answered = [operation for operation in self.operations if operation.answered]
        if answered and not any(operation.handled for operation in self.operations):
            raise ValueError(
                f"{len(answered)} asks were answered and no handler called `handle`: nothing can be checked"
            )
        found = list(self.violations)
        for operation in self.operations:
            found += [f"{text}: {operation}" for text in self._wrong(operation, world)]
        for process in world.all.values():
            cause = process.stop.cause if process.stop is not None else None
            if cause is not None and "declared" not in str(cause):  # this process dead, which is how it may end
                found.append(f"{process} crashed: {cause!r}")
        if found:
            raise Violation("\n".join([f"{len(found)} violations:", *found[:SHOWN], "after", *self.notes[-SHOWN:]]))

    def _wrong(self, operation: Operation, world: World) -> list[str]:
        wrong: list[str] = []
        handled, error = operation.handled, operation.error
        instances = [handling.instance for handling in handled]
        if operation.kind == "retry":
            if len(set(instances)) < len(instances):
                wrong.append("handled more than once in one incarnation")
        elif len(instances) > 1:
            wrong.append("handled more than once")
        if operation.answered and not instances:
            wrong.append("answered, and no handler said that it handled it")
        wrong += self._wrong_end(operation, world.all[operation.uid])
        if operation.instance is not None and operation.instance not in instances:
            wrong.append("answered by an incarnation that did not handle it")
        nothing = isinstance(error, NOTHING_HANDLED) and not isinstance(error, OutcomeUnknown)
        if nothing and handled and (self.once or not _REFUSED.search(str(error))):
            wrong.append("handled, and its error says that it was not")
        if error is not None and not isinstance(error, EXPECTED):
            wrong.append("ended with an error that no fault of the network or of a process leads to")
        for handling in handled:
            process = world.all[handling.uid]
            if process.told_at is not None and handling.when > process.told_at and process.stop and process.stop.cause:
                wrong.append(f"handled by {process}, which was told at {process.told_at:.4f} that it is dead")
        return wrong

    def _wrong_end(self, operation: Operation, process: Process) -> list[str]:
        ended, deadline = operation.ended, operation.deadline
        if ended is None:
            return [] if not process.alive else ["never ended"]
        latest = deadline
        for start, end in process.held:  # it sees its deadlines when it goes on
            if start <= latest + SLACK_S:
                latest = max(latest, end)
        if ended > latest + SLACK_S:
            return ["ended after its deadline"]
        if isinstance(operation.error, SystemClosed) and process.told_at is None:
            return ["ended because its process ends, which it does not"]
        return []


def _now() -> float:
    return asyncio.get_running_loop().time()
