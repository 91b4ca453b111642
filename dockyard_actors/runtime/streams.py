"""The reading side of a stream: items as they come, and credit for as many as were taken.

At most ``credit`` items are on their way or unread, so a fast sender and a slow reader cost no memory. Leaving the block early
cancels the sender's generator.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic

import msgspec

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime import routes
from dockyard_actors.runtime.directory import Entry
from dockyard_actors.runtime.errors import BadReply, OutcomeUnknown, StreamBroken, SystemClosed
from dockyard_actors.runtime.message import I, Stream, Undecodable, encoder, item_decoder
from dockyard_actors.runtime.scope import handled
from dockyard_actors.runtime.waits import PendingItem, PendingRoom
from dockyard_actors.transport.base import Lane, Peer

if TYPE_CHECKING:
    from dockyard_actors.runtime.caller import Caller
    from dockyard_actors.runtime.ref import Ref


class Streaming(Generic[I]):
    """``async with ref.stream(msg) as items: async for item in items``. Made by `Ref.stream`."""

    def __init__(self, caller: Caller, ref: Ref, msg: Stream[I], item_s: float | None, credit: int) -> None:
        if credit < 1:
            raise ValueError(f"credit={credit}: a stream needs room for one item at least")
        self._caller, self._ref, self._msg, self._credit = caller, ref, msg, credit
        self._item_s = caller.system.config.ask_s if item_s is None else item_s
        self._decode = item_decoder(type(msg))
        self._items: deque[msgspec.Raw] = deque()
        self._received = self._taken = self._told = 0
        self._end: BaseException | None = None  # StopAsyncIteration: it ended in order
        self._next: PendingItem | None = None
        self._entry: Entry | None = None
        self.peer: Peer | None = None  # whom it was asked of, and who alone may send items

    # ------------------------------------------------------------------ what a user sees

    async def __aenter__(self) -> Streaming[I]:
        caller, ref, kind = self._caller, self._ref, type(self._msg).__name__
        deadline, trace = caller.scoped(self._item_s)
        entry = await routes.resolve(caller, ref, deadline)
        self._lane = Lane.CONTROL if kind in entry.control else Lane.USER
        outlet = caller.outlet(entry)
        window = outlet.window(entry, self._lane)
        scope = handled.get()
        ttl = float("inf") if scope is None else scope.deadline - caller.loop.time()
        self._request, body = caller.next_id(), wire.raw(self._msg)
        ask = wire.Ask(
            self._request, entry.name, entry.incarnation, ref.owner, kind, ttl, False, body, trace, self._credit
        )

        def transmit(number: int) -> int:
            ask.seq = number
            envelope = encoder.encode(ask)
            caller.feeds[self._request] = self
            self._entry, self.peer = entry, outlet.peer
            outlet.peer.send(self._lane, envelope)
            return len(envelope)

        ask.seq = window.sent + 1
        envelope = encoder.encode(ask)
        if len(envelope) > caller.most:
            raise caller.too_large(envelope, ref, kind)
        if window.take(len(envelope)):
            transmit(window.sent)
        else:
            room = PendingRoom(caller.loop, ref.owner, entry, kind, deadline, trace)
            try:
                await caller.room(outlet, self._lane, window, room, transmit, True)
            except BaseException:
                if (
                    caller.feeds.pop(self._request, None) is not None
                ):  # it was sent in the tick in which the reader gave up
                    self._send(wire.Cancel(self._request, ref.name))
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._caller.feeds.pop(self._request, None)
        if self._end is None:
            self._end = StreamBroken("the stream was left before its end")
            self._send(wire.Cancel(self._request, self._ref.name))

    def __aiter__(self) -> Streaming[I]:
        if self._entry is None:
            kind = type(self._msg).__name__
            raise TypeError(
                f"the stream {kind} is not open: `async with ref.stream({kind}(...)) as items:`, and in it `async for item in items:`"
            )
        return self

    async def __anext__(self) -> I:
        """The next item. Raises AskTimeout when none comes in time, OutcomeUnknown when the sender died, RemoteError or a WireError
        when its generator raised, StreamBroken when items are missing."""
        if not self._items and self._end is None:
            await self._wait()
        if not self._items:
            assert self._end is not None
            raise self._end
        body = self._items.popleft()
        self._taken += 1
        if (self._taken - self._told) * 2 >= self._credit and self._end is None:
            self._tell()
        try:
            return self._decode(body)
        except Undecodable as error:
            raise BadReply(
                f"{self._ref.name} sent an item of {type(self._msg).__name__} that is none: {error}"
            ) from error

    # ------------------------------------------------------------------ what the caller brings

    def item(self, item: wire.Item) -> None:
        if self._end is not None:
            return
        if item.number == wire.NO_ITEM:
            self._tell()  # yes, somebody reads; the sender waits for room, so what told it of some was lost
            return
        if item.number != self._received:
            self._finish(StreamBroken(f"{self.describe()}: item {item.number} came where {self._received} was due"))
            self._send(wire.Cancel(self._request, self._ref.name))
            return
        self._received += 1
        self._items.append(item.body)
        self._wake()

    def settle(self, body: msgspec.Raw) -> None:
        """The sender's generator ended, after so many items."""
        count = _count(body)
        if count == self._received:
            self._finish(StopAsyncIteration())
        else:
            self._finish(StreamBroken(f"{self.describe()}: {self._received} of {count} items arrived"))

    def fail(self, error: BaseException) -> None:
        if self._end is None:
            self._finish(error)

    def gone(self, uid: str, cause: str) -> None:
        if self._entry is not None and self._entry.uid == uid:
            self.fail(OutcomeUnknown(f"{self.describe()}, which died before its end: {cause}"))

    def close(self) -> None:
        self.fail(SystemClosed(f"{self.describe()}, but this process's actor system closes"))

    def describe(self) -> str:
        incarnation = f"#{self._entry.incarnation}" if self._entry is not None else ""
        return f"{self._ref.owner} reads {type(self._msg).__name__} of {self._ref.name}{incarnation}"

    # ------------------------------------------------------------------

    async def _wait(self) -> None:
        caller = self._caller
        assert self._entry is not None
        scope = handled.get()
        deadline = caller.loop.time() + self._item_s
        trace = 0
        if scope is not None:
            deadline, trace = min(deadline, scope.deadline), scope.trace
        kind = type(self._msg).__name__
        self._next = wait = PendingItem(caller.loop, self._ref.owner, self._entry, kind, deadline, trace)
        try:
            await caller.bounded(wait)
        finally:
            self._next = None

    def _tell(self) -> None:
        self._told = self._taken
        self._send(wire.More(self._request, self._ref.name, self._taken))

    def _finish(self, end: BaseException) -> None:
        self._end = end
        self._caller.feeds.pop(self._request, None)
        self._wake()

    def _wake(self) -> None:
        if self._next is not None and not self._next.future.done():
            self._next.future.set_result(None)

    def _send(self, message: Any) -> None:
        if self.peer is not None and not self._caller.closed:
            self.peer.send(Lane(self._lane), encoder.encode(message))


_count = msgspec.msgpack.Decoder(int).decode
