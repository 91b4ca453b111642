"""A typed reference to an actor by name: ask for a reply, or tell without one.

It follows the name across restarts; what an ask promises in each case is written at `ask`. It holds no connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dockyard_actors.runtime.message import Message, R

if TYPE_CHECKING:
    from dockyard_actors.runtime.caller import Caller


class Ref:
    """Made by `system.ref(name)` or `ctx.ref(name)`. With an incarnation it means that one only, for fencing."""

    __slots__ = ("_caller", "incarnation", "name", "owner")

    def __init__(self, caller: Caller, name: str, owner: str, incarnation: int | None = None) -> None:
        self._caller, self.name, self.owner, self.incarnation = caller, name, owner, incarnation

    def __repr__(self) -> str:
        return f"Ref({self.name}{'' if self.incarnation is None else f'#{self.incarnation}'})"

    async def ask(self, msg: Message[R], *, deadline_s: float | None = None, retry: bool = False) -> R:
        """Sends ``msg`` and returns the reply. ``deadline_s`` defaults to `SystemConfig.ask_s`.

        Raises UnknownName, MailboxFull, PeerDied, StaleIncarnation (nothing was handled), AskTimeout, OutcomeUnknown (it may
        have been handled), RemoteError (the handler raised), NotUnderstood, BadReply, ProtocolRefused, SystemClosed.

        ``retry=True`` is for messages that may be handled again by a new incarnation: it waits for the name to be registered,
        follows restarts and repeats the same request until the deadline, then raises AskTimeout. Within one incarnation a
        repeated request is handled once.
        """
        return await self._caller.ask(self, msg, deadline_s, retry)

    async def tell(self, msg: Message[Any], *, deadline_s: float | None = None) -> None:
        """Sends ``msg`` and waits only for room in the receiver's mailbox (MailboxFull after `SystemConfig.tell_s`).

        What cannot be delivered (unknown name, dead receiver) is counted in `stats().dead_letters` and logged, not raised.
        """
        await self._caller.tell(self, msg, deadline_s)
