"""Turns a handler's exception into text that can travel, and a `Fail` envelope into the error that its asker gets."""

from __future__ import annotations

import traceback

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


def said(error: BaseException) -> tuple[str, str]:
    """What an exception says, and its traceback. Whatever is in it, the texts can be encoded: half of a surrogate pair comes from any file
    name that is no UTF-8, and an exception's own `__str__` may raise."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its text cannot be made: {type(broken).__name__})"
    return printable(text), printable("".join(traceback.format_exception(error)))


def printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


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
