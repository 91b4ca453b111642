"""Errors of the actor runtime. Every text says who asked whom for what, and what can be done.

They know nothing of sockets: a transport's troubles arrive here as one of these types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from dockyard_actors.runtime.supervision import Failure


class ActorError(Exception):
    """Base of what asks, tells, streams and starts raise when something is wrong with the other side or on the way to it.

    Not of it: `MessageTypeError` (a TypeError: the program is wrong), ValueError for settings and arguments, and the transport's
    TransportError (keys, addresses, sockets) when an actor system or a node agent is opened.
    """


class AskTimeout(ActorError, TimeoutError):
    """The message was sent and no reply came before the deadline: whether it took effect is not known."""


class MailboxFull(ActorError, TimeoutError):
    """The receiver had no room before the deadline: nothing was sent."""


class TooLarge(ActorError, ValueError):
    """The message does not fit into a frame: nothing was sent. Bulk goes over the data plane."""


class PeerDied(ActorError):
    """The receiver is dead or stopped; nothing was handled, asking its next incarnation is safe."""


class OutcomeUnknown(PeerDied):
    """The receiver died after the message was sent and before it replied: it may or may not have taken effect."""


class StaleIncarnation(PeerDied):
    """The message was meant for an incarnation that is gone; it was refused, nothing was handled."""


class UnknownName(ActorError, LookupError):
    """No actor of this name is registered (yet)."""


class RegistryDown(UnknownName):
    """The name is not known here, and the registry that may know it is down. Names that are known here go on working."""


class NameTaken(ActorError):
    """A living actor already has this name."""


class RemoteError(ActorError):
    """The handler raised. ``type`` and ``text`` are the exception's, ``traceback`` is its traceback as text."""

    def __init__(self, message: str, type: str, text: str, traceback: str) -> None:
        super().__init__(message)
        self.type, self.text, self.traceback = type, text, traceback

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.type}: {self.text}\n{self.traceback}".rstrip()


class WireError(ActorError):
    """Base of errors that a handler raises for its askers to catch: they get the same type, when their process knows it by its name.

    The asker's instance is made with the text alone; its ``__cause__`` is the RemoteError with the remote traceback. Where the type
    is not known, that RemoteError is raised itself.
    """

    known: ClassVar[dict[str, type[WireError]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        other = WireError.known.setdefault(cls.__name__, cls)
        if other is not cls and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"two errors are called {cls.__name__} ({other.__module__} and {cls.__module__}): the name goes over the wire, choose another"
            )
        WireError.known[cls.__name__] = cls


class StreamBroken(ActorError):
    """Items of a stream are missing: what was read is not all there was."""


class NotUnderstood(ActorError):
    """The receiver has no handler for this message type, or could not decode it."""


class BadReply(ActorError):
    """The reply is not of the type that the message promises."""


class ProtocolRefused(ActorError):
    """The peer refused our hello: another protocol major or another run's keys."""


class ActorCrashed(ActorError):
    """An actor's own task or its start failed, which ends its process. The cause is chained."""


class PermanentError(Exception):
    """Base of errors that no restart can help against (damaged data, a missing file): the process that crashes of one fails for good
    at once. Of any other base as well: ``class TaskFileError(PermanentError, ValueError)``."""


class RunFailed(ActorError):
    """A process failed for good, which ends the block of its node agent. ``failure`` says which, and why."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


class SystemClosed(ActorError):
    """This process's actor system is closing or closed."""
