"""A typed reference to an actor by name: ask for a reply, tell without one, or read a stream of items.

It follows the name across restarts; what an ask promises in each case is written at `ask`. It holds no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from dockyard_actors.runtime import routes
from dockyard_actors.runtime.errors import ActorError, MailboxFull
from dockyard_actors.runtime.message import I, Message, R, Stream
from dockyard_actors.runtime.streams import Streaming

if TYPE_CHECKING:
    from dockyard_actors.runtime.caller import Caller


class Ref:
    """Made by `system.ref(name)` or `ctx.ref(name)`. With an incarnation it means that one only, for fencing."""

    __slots__ = ("_caller", "incarnation", "name", "owner")

    def __init__(self, caller: Caller, name: str, owner: str, incarnation: int | None = None) -> None:
        self._caller, self.name, self.owner, self.incarnation = caller, name, owner, incarnation

    def __repr__(self) -> str:
        return f"Ref({self.name}{'' if self.incarnation is None else f'#{self.incarnation}'})"

    @property
    def host(self) -> str | None:
        """Id of the host (see `transport.base.host_id`) of the process that serves the name now; None while nobody does, as far as is
        known here."""
        entry = self._caller.system.directory.alive(self.name)
        return entry.address.host if entry is not None else None

    @property
    def here(self) -> str:
        """Id of the host of the process that holds this reference."""
        return self._caller.system.transport.address.host

    def ask(
        self, msg: Message[R], *, deadline_s: float | None = None, retry: bool = False, wait: bool = True
    ) -> Coroutine[Any, Any, R]:
        """Sends ``msg`` and returns the reply. ``deadline_s`` defaults to `SystemConfig.ask_s`; within a handler it is at most what
        the handler's own asker has left.

        Raises UnknownName, MailboxFull, TooLarge, PeerDied, StaleIncarnation (nothing was handled), AskTimeout, OutcomeUnknown (it
        may have been handled), RemoteError or a WireError (the handler raised), NotUnderstood, BadReply, ProtocolRefused,
        SystemClosed.

        ``retry=True`` is for messages that may be handled again by a new incarnation: it waits for the name to be registered,
        follows restarts and repeats the same request until the deadline, then raises AskTimeout; PeerDied (or OutcomeUnknown) at
        once when its process failed for good, exited or was stopped. Within one incarnation a repeated request is handled once; the
        next one handles it again. ``wait=False``: MailboxFull at once when there is no room, instead of waiting for it.
        """
        return self._caller.ask(self, msg, deadline_s, retry, wait)

    def ready(self, deadline_s: float | None = None) -> Coroutine[Any, Any, Ref]:
        """Waits until an actor of this name is registered and returns this reference: ``ref = await system.ref("it").ready(60)``.

        Raises AskTimeout, and PeerDied at once when its process is known not to come back.
        """
        return _ready(self, deadline_s)

    def tell(
        self, msg: Message[Any], *, deadline_s: float | None = None, wait: bool = True
    ) -> Coroutine[Any, Any, None]:
        """Sends ``msg`` and waits only for room in the receiver's mailbox: MailboxFull after `SystemConfig.tell_s`, without
        ``wait`` at once. Raises TooLarge.

        What cannot be delivered (unknown name, dead receiver) is counted and kept in the status's dead letters, not raised.
        """
        return self._caller.tell(self, msg, deadline_s, wait)

    def stream(self, msg: Stream[I], *, deadline_s: float | None = None, credit: int = 16) -> Streaming[I]:
        """``async with ref.stream(msg) as items: async for item in items``. ``deadline_s``: longest wait for one item (default
        `SystemConfig.ask_s`). ``credit``: items that may be on their way or unread. Errors as of `ask`, and StreamBroken."""
        return Streaming(self._caller, self, msg, deadline_s, credit)


async def _ready(ref: Ref, deadline_s: float | None) -> Ref:
    caller = ref._caller
    deadline, _ = caller.scoped(caller.system.config.ask_s if deadline_s is None else deadline_s)
    await routes.ready(caller, ref, deadline)
    return ref


async def collect(
    refs: Sequence[Ref], msg: Message[R], *, deadline_s: float | None = None, retry: bool = False
) -> list[R | ActorError]:
    """Asks all of them at once and returns their replies or errors in the order of ``refs``: one that is gone costs its own answer only."""

    async def one(ref: Ref) -> R | ActorError:
        try:
            return await ref.ask(msg, deadline_s=deadline_s, retry=retry)
        except ActorError as error:
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(ref)) for ref in refs]
    return [task.result() for task in tasks]


async def broadcast(refs: Sequence[Ref], msg: Message[Any], *, deadline_s: float | None = None) -> None:
    """Tells all of them at once. Who has no room in time, or is gone, is a counted dead letter and costs the others nothing."""

    async def one(ref: Ref) -> None:
        with contextlib.suppress(MailboxFull):  # counted by tell
            await ref.tell(msg, deadline_s=deadline_s)

    async with asyncio.TaskGroup() as group:
        for ref in refs:
            group.create_task(one(ref))
