"""Errors of the actor runtime. Every text says who asked whom for what, and what can be done.

They know nothing of sockets: a transport's troubles arrive here as one of these types.
"""

from __future__ import annotations


class ActorError(Exception):
    """Base of everything the runtime raises."""


class AskTimeout(ActorError, TimeoutError):
    """The message was sent and no reply came before the deadline: whether it took effect is not known."""


class MailboxFull(ActorError, TimeoutError):
    """The receiver had no room before the deadline: nothing was sent."""


class PeerDied(ActorError):
    """The receiver is dead or stopped; nothing was handled, asking its next incarnation is safe."""


class OutcomeUnknown(PeerDied):
    """The receiver died after the message was sent and before it replied: it may or may not have taken effect."""


class StaleIncarnation(PeerDied):
    """The message was meant for an incarnation that is gone; it was refused, nothing was handled."""


class UnknownName(ActorError, LookupError):
    """No actor of this name is registered (yet)."""


class NameTaken(ActorError):
    """A living actor already has this name."""


class RemoteError(ActorError):
    """The handler raised. ``type`` and ``text`` are the exception's, ``traceback`` is its traceback as text."""

    def __init__(self, message: str, type: str, text: str, traceback: str) -> None:
        super().__init__(message)
        self.type, self.text, self.traceback = type, text, traceback

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.type}: {self.text}\n{self.traceback}".rstrip()


class NotUnderstood(ActorError):
    """The receiver has no handler for this message type, or could not decode it."""


class BadReply(ActorError):
    """The reply is not of the type that the message promises."""


class ProtocolRefused(ActorError):
    """The peer refused our hello: another protocol major or another run's keys."""


class ActorCrashed(ActorError):
    """An actor's own task or its start failed, which ends its process. The cause is chained."""


class SystemClosed(ActorError):
    """This process's actor system is closing or closed."""
