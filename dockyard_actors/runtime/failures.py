"""Turns a `Fail` envelope into the error that its asker gets."""

from __future__ import annotations

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime.errors import (
    ActorError,
    MailboxFull,
    NotUnderstood,
    OutcomeUnknown,
    PeerDied,
    RemoteError,
    StaleIncarnation,
    WireError,
)


def failure(fail: wire.Fail, told: str) -> ActorError:
    """``told``: who asked whom for what."""
    match fail.code:
        case wire.STALE:
            return StaleIncarnation(f"{told}: refused, {fail.text}")
        case wire.UNKNOWN | wire.STOPPED:
            return PeerDied(f"{told}: {fail.text}")
        case wire.ABANDONED:
            return OutcomeUnknown(f"{told}: {fail.text}")
        case wire.FULL:
            return MailboxFull(f"{told}: {fail.text}")
        case wire.NOT_UNDERSTOOD:
            return NotUnderstood(f"{told}: {fail.text}")
    remote = RemoteError(f"{told}, whose handler raised", fail.error, fail.text, fail.trace)
    known = WireError.known.get(fail.error) if fail.code == wire.TYPED else None
    if known is None:
        return remote
    error = known(fail.text)
    error.__cause__ = remote
    return error
