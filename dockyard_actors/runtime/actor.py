"""What an actor looks like: a class whose async methods take one message each, and the context it lives in.

Handlers run one at a time in the order of arrival unless marked. This file knows nothing of sockets or processes.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dockyard_actors.runtime.message import Message, MessageTypeError, Stream, check, decoder, fingerprint
from dockyard_actors.runtime.returns import refuse_contradiction

if TYPE_CHECKING:
    import asyncio

    from dockyard_actors.runtime.ref import Ref
    from dockyard_actors.runtime.system import ActorSystem

F = TypeVar("F", bound=Callable[..., Any])


def concurrent(handler: F) -> F:
    """This handler runs in its own task, because it waits for others. It is cancelled when its asker's deadline passes."""
    handler.__dockyard_concurrent__ = True  # type: ignore[attr-defined]
    return handler


def control(handler: F) -> F:
    """This handler's message travels and is served on the control lane: user traffic never delays it.

    It may run while a user handler of the same actor is suspended at an await.
    """
    handler.__dockyard_control__ = True  # type: ignore[attr-defined]
    return handler


class Death(msgspec.Struct, frozen=True):
    """An incarnation of a watched name is gone. ``clean``: it stopped or left by itself."""

    name: str
    incarnation: int
    cause: str
    clean: bool = False


class Birth(msgspec.Struct, frozen=True):
    """A watched name has a new incarnation, or had it when the watch began. ``meta``: pid, host, process and what its starter gave."""

    name: str
    incarnation: int
    meta: dict[str, str]


class Unresponsive(msgspec.Struct, frozen=True):
    """The process of a watched name has not answered its node agent for ``silent_s`` seconds; 0: it answers again."""

    name: str
    incarnation: int
    silent_s: float


class ActorContext:
    """An actor's view of its surroundings, set as ``self.ctx`` before `on_start`."""

    def __init__(self, system: ActorSystem, name: str, incarnation: int, cell: Any) -> None:
        self.system, self.name, self.incarnation = system, name, incarnation
        self._cell = cell

    @property
    def running(self) -> bool:
        """Whether the actor is served under this name (still)."""
        return self.system.cells.get(self.name) is self._cell and not self.system.closing

    def ref(self, name: str) -> Ref:
        """A reference whose asks show this actor as their owner."""
        return self.system.ref(name, owner=self.name)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Runs a task that the actor owns: cancelled when the actor stops; if it raises, the process ends with that cause."""
        return self._cell.spawn(work, name)

    def watch(self, name: str) -> None:
        """`on_death` and `on_birth` are called for every death and every new incarnation of this name from now on, and at once for
        how it is now; `on_unresponsive` when its process stops answering its node agent."""
        self._cell.watch(name)


class Actor:
    """Base of actors. Handlers are async methods with one parameter annotated with a `Message` subclass; those of a `Stream` are
    async generators and run in tasks of their own.

    An exception in a handler goes to the asker as `RemoteError` and to the log; the actor lives on.
    """

    ctx: ActorContext

    async def on_start(self) -> None:
        """Runs before the first message, after the name is registered. Raising ends the process with that cause."""

    async def on_stop(self) -> None:
        """Runs after the last message, when the actor stops in order."""

    async def on_death(self, death: Death) -> None:
        """A watched name died. Served on the control lane."""

    async def on_birth(self, birth: Birth) -> None:
        """A watched name lives. Served on the control lane."""

    async def on_unresponsive(self, silent: Unresponsive) -> None:
        """The loop of a watched name's process is held, or is free again. Served on the control lane."""


_LIFE = frozenset(name for name in vars(Actor) if not name.startswith("_"))  # these handle no messages


@dataclass(frozen=True)
class Handler:
    """One entry of an actor's table."""

    method: str
    kind: type[Message[Any]]
    decode: Callable[[Any], Any]
    concurrent: bool
    control: bool
    stream: bool = False


def handlers_of(cls: type[Actor]) -> dict[str, Handler]:
    """The handler table of an actor class by message name. MessageTypeError for handlers that cannot work as declared."""
    return _table(cls)


@cache
def _table(cls: type[Actor]) -> dict[str, Handler]:
    table: dict[str, Handler] = {}
    for name, function in inspect.getmembers(cls, _may_handle):
        if name in _LIFE:
            continue
        stream = inspect.isasyncgenfunction(function)
        marked = getattr(function, "__dockyard_concurrent__", False) or getattr(function, "__dockyard_control__", False)
        kinds = _message_kinds(cls, name, function)
        if not kinds:
            if marked:
                raise MessageTypeError(
                    f"{cls.__name__}.{name} is marked as a handler but its parameter is annotated with no Message subclass"
                )
            _refuse_unannotated(cls, name, function)
            continue
        for kind in kinds:
            if kind.__name__ in table:
                raise MessageTypeError(
                    f"{cls.__name__} handles {kind.__name__} twice: {table[kind.__name__].method} and {name}"
                )
            if issubclass(kind, Stream) != stream:
                raise MessageTypeError(
                    f"{cls.__name__}.{name} handles {kind.__name__}: a Stream is handled by an async generator, and nothing else is"
                )
            check(kind)  # a reply that cannot travel is found at start, not at the first ask
            table[kind.__name__] = Handler(
                name,
                kind,
                decoder(kind).decode,
                stream or getattr(function, "__dockyard_concurrent__", False),
                getattr(function, "__dockyard_control__", False),
                stream,
            )
        if not stream:
            refuse_contradiction(f"{cls.__name__}.{name}", function, kinds)
    _refuse_lookalikes(cls, table)
    return table


def _refuse_unannotated(cls: type[Actor], name: str, function: Callable[..., Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if (
        len(parameters) == 1
        and parameters[0].name in ("msg", "message")
        and parameters[0].annotation is inspect.Parameter.empty
    ):
        raise MessageTypeError(
            f"{cls.__name__}.{name}({parameters[0].name}) looks like a handler but names no message: annotate its parameter with "
            "the Message subclass that it handles"
        )


def _refuse_lookalikes(cls: type[Actor], table: dict[str, Handler]) -> None:
    """Public methods that take a message which nothing handles: one that is not async, or has other parameters beside it."""
    handled = {handler.kind for handler in table.values()}
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        if name.startswith("_") or name in _LIFE:
            continue
        needed = [p for p in list(inspect.signature(function).parameters.values())[1:] if p.default is p.empty]
        for parameter in needed:
            kind = parameter.annotation
            if isinstance(kind, str):
                kind = getattr(function, "__globals__", {}).get(kind)
            if not (isinstance(kind, type) and issubclass(kind, Message)) or kind in handled:
                continue
            if len(needed) > 1:
                wrong = f"takes {len(needed)} parameters: a handler takes the message alone"
            else:
                wrong = "is not async: a handler is an `async def`"
            raise MessageTypeError(
                f"{cls.__name__}.{name} takes {kind.__name__}, which nothing here handles, and {wrong}"
            )


@cache
def urgent_of(cls: type[Actor]) -> tuple[str, ...]:
    """Names of the messages that this class serves on the control lane; the runtime's own `Inspect` is one of every class."""
    return ("Inspect", *sorted(kind for kind, handler in handlers_of(cls).items() if handler.control))


@cache
def schema_of(cls: type[Actor]) -> str:
    """Fingerprint of everything this class understands and answers."""
    return fingerprint([handler.kind for handler in handlers_of(cls).values()])


def _may_handle(member: Any) -> bool:
    return inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)


def _message_kinds(cls: type, name: str, function: Callable[..., Awaitable[Any]]) -> list[type[Message[Any]]]:
    parameters = [p for p in list(inspect.signature(function).parameters.values())[1:] if p.default is p.empty]
    if len(parameters) != 1 or parameters[0].annotation is inspect.Parameter.empty:
        return []
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, function.__globals__)  # type: ignore[attr-defined]  # an annotation of our own source
        except NameError as error:
            raise MessageTypeError(
                f"{cls.__name__}.{name}({parameters[0].name}: {annotation}): {error}; "
                "message types must be importable at run time, not only for type checkers"
            ) from error
    members = typing.get_args(annotation) or (annotation,)
    if all(isinstance(member, type) and issubclass(member, Message) for member in members):
        return list(members)
    return []
