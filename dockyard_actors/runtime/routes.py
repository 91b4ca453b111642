"""Finds the incarnation that a message goes to: the one that is registered now, or, for an ask that may be repeated, the next one too."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from dockyard_actors.runtime.directory import Entry
from dockyard_actors.runtime.errors import (
    ActorError,
    AskTimeout,
    MailboxFull,
    OutcomeUnknown,
    PeerDied,
    StaleIncarnation,
    UnknownName,
)
from dockyard_actors.runtime.message import Message

if TYPE_CHECKING:
    from dockyard_actors.runtime.caller import Caller
    from dockyard_actors.runtime.ref import Ref

log = logging.getLogger("dockyard.runtime.caller")


async def resolve(caller: Caller, ref: Ref, deadline: float) -> Entry:
    """The living incarnation that ``ref`` means. Asks the registry when this process's replica knows none: it may be a moment behind.
    Raises UnknownName, PeerDied, StaleIncarnation."""
    directory = caller.system.directory
    known = directory.entries.get(ref.name) or await caller.system.lookup(ref.name, deadline)
    if known is None:
        raise UnknownName(f"{ref.owner} asked for {ref.name!r}, which is not registered; ask(retry=True) waits for it")
    if not known.alive:
        over = directory.over(ref.name)
        fate = f"is not started again: {over}" if over else "has not been restarted yet"
        raise PeerDied(f"{ref.name}#{known.incarnation} is dead ({known.cause}) and {fate}")
    return _meant(ref, known)


async def ready(caller: Caller, ref: Ref, deadline: float) -> None:
    """Waits until a living incarnation that ``ref`` means is registered. Raises AskTimeout, PeerDied, StaleIncarnation."""
    directory = caller.system.directory
    with caller.waiting(ref.owner, ref.name, "", "start", deadline):
        try:
            entry = await directory.wait_alive(ref.name, 0, deadline)
        except TimeoutError:
            raise _in_vain(caller, f"{ref.owner} waited for {ref.name}", ref, 0) from None
    if entry is None:
        raise PeerDied(
            f"{ref.owner} waited for {ref.name}, which is dead and is not started again: {directory.over(ref.name)}"
        )
    _meant(ref, entry)


async def persist(caller: Caller, ref: Ref, msg: Message[Any], deadline: float, trace: int) -> msgspec.Raw:
    """Asks until the deadline, over any number of incarnations, always under one request id."""
    system = caller.system
    request = caller.next_id()
    kind = type(msg).__name__
    after = 0
    last: ActorError | None = None
    maybe = False  # it was sent and may have been handled
    while True:
        entry = system.directory.alive(ref.name)
        if entry is None or entry.incarnation <= after:
            with caller.waiting(ref.owner, ref.name, kind, "start", deadline):
                try:
                    entry = await system.directory.wait_alive(ref.name, after, deadline)
                except TimeoutError:
                    raise _in_vain(
                        caller, f"{ref.owner} asked {ref.name} for {kind} and waited for it", ref, after
                    ) from last
            if entry is None:
                text = f"{ref.owner} asked {ref.name} for {kind}, which is dead and is not started again"
                over = system.directory.over(ref.name)
                raise (OutcomeUnknown if maybe else PeerDied)(f"{text}: {over}") from last
        try:
            _meant(ref, entry)
        except StaleIncarnation as error:
            if maybe:
                raise OutcomeUnknown(f"{error} by now; #{ref.incarnation} may have handled it") from last
            raise
        attempt = min(deadline, caller.loop.time() + system.config.retry_every_s)
        try:
            return await caller.ask_entry(entry, ref.owner, msg, attempt, trace=trace, repeat=(request, deadline))
        except PeerDied as error:
            last, after = error, entry.incarnation
            maybe = maybe or isinstance(error, OutcomeUnknown)
            log.info("%s: %s; asking the next incarnation", kind, error)
        except (AskTimeout, MailboxFull) as error:
            last, maybe = error, maybe or isinstance(error, AskTimeout)
            if caller.loop.time() >= deadline:
                raise AskTimeout(f"{ref.owner} asked {ref.name} for {kind} again and again in vain: {error}") from error


def _in_vain(caller: Caller, told: str, ref: Ref, after: int) -> AskTimeout:
    again = f" again (after #{after})" if after else ""
    known = caller.system.directory.entries.get(ref.name)
    if known is None:
        why = caller.system.directory.ended_process(ref.name)
        died = f"; a process of this name is not started again: {why}" if why else ""
    else:
        died = "" if known.alive else f"; #{known.incarnation} died: {known.cause}"
    return AskTimeout(f"{told} to be registered{again} in vain{died}")


def _meant(ref: Ref, entry: Entry) -> Entry:
    if ref.incarnation is not None and ref.incarnation != entry.incarnation:
        raise StaleIncarnation(f"{ref.owner} asked {ref}, but {ref.name} is at incarnation {entry.incarnation}")
    return entry
