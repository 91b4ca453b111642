"""What a handler works under: the deadline and the trace id of the message it handles, inherited by whatever it asks of others.

It is a context variable, so tasks that a handler starts for itself inherit it too; `ctx.spawn` starts without one.
"""

from __future__ import annotations

from contextvars import Context, ContextVar, copy_context
from typing import NamedTuple, Protocol


class Scope(NamedTuple):
    """deadline: of `loop.time()`; inf when the message has none. trace: one id for everything that one first ask or tell led to."""

    deadline: float
    trace: int


class Handled(Protocol):
    """A message that is being handled."""

    @property
    def deadline(self) -> float: ...
    @property
    def trace(self) -> int: ...


handled: ContextVar[Handled | None] = ContextVar("dockyard_handled", default=None)


def current() -> Scope | None:
    """The scope of the running handler; None outside of one."""
    message = handled.get()
    return None if message is None else Scope(message.deadline, message.trace)


def fresh() -> Context:
    """A copy of the present context in which no message is being handled: for a task that outlives the handler that starts it."""
    context = copy_context()
    context.run(handled.set, None)
    return context
