"""What serves an actor's messages once the first one has come: two mailboxes, a task for each, and one for every concurrent handler.

Every ask that reaches it is answered with a reply or a typed failure, every sender gets its credit back, and how long handlers took
is counted. It knows peers only as something to send to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime.deliveries import Delivery, Event, Key, Places, Running, Stop, StreamCredit
from dockyard_actors.runtime.errors import ActorError, WireError
from dockyard_actors.runtime.failures import said
from dockyard_actors.runtime.mailbox import Mailbox, Remembered
from dockyard_actors.runtime.message import MessageTypeError, Undecodable, encoder
from dockyard_actors.runtime.scope import handled
from dockyard_actors.runtime.status import Times
from dockyard_actors.transport.base import Lane, Peer, TransportError

if TYPE_CHECKING:
    from dockyard_actors.runtime.cell import Cell

log = logging.getLogger("dockyard.runtime.actor")

_OURS = (
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
)  # not the handler's to raise: the process or its coroutines are ending


class Service:
    """Made with the first message; `open` once the actor has started."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.system = cell, cell.system
        config = cell.system.config
        self.user: Mailbox[Delivery | Stop] = Mailbox(config.mailbox_capacity, config.mailbox_bytes)
        self.control: Mailbox[Delivery | Event | Stop] = Mailbox(config.mailbox_capacity, config.mailbox_bytes)
        self.remembered = Remembered(config.dedup_capacity, config.dedup_bytes)
        self.times: dict[str, Times] = {}
        self._at_work: Delivery | None = None  # of the serial user messages
        self._since = 0.0  # when its handler began, by perf_counter
        self._called_slow: Delivery | None = None
        self.running: dict[Key | int, Running] = {}
        self.held_back = False  # the transport stops reading because a mailbox here is full
        self.accounts: dict[
            Peer, list[list[int]]
        ] = {}  # by lane: messages and bytes taken and not yet told, number of the last message, messages and bytes told
        self._credit_every = max(1, config.window // 2)
        self._credit_bytes = max(1, config.window_bytes // 2)
        self._cancelled: set[Key] = set()
        self._places = {True: Places(config.concurrency), False: Places(config.concurrency)}
        self._next: dict[bool, Delivery] = {}  # taken out of the mailbox, waits for a place
        self._ending = False  # the lanes' tasks are cancelled from here
        self._tasks: dict[bool, asyncio.Task[None]] = {}  # serial or not
        self._serving_user = False
        self._number = 0

    @property
    def busy(self) -> str:
        """Kind of the serial user message at work."""
        item = self._at_work
        return item.message.kind if item is not None else ""

    @property
    def busy_s(self) -> float:
        """For how long it has been."""
        return time.perf_counter() - self._since if self._at_work is not None else 0.0

    # ------------------------------------------------------------------ life

    def put(self, item: Delivery) -> None:
        box = self.user
        box.put(item)
        if len(box.items) >= box.capacity or box.size >= box.capacity_bytes:
            self._full()
        if not self._serving_user and self.cell.open:
            self._start(True)

    def _full(self) -> None:
        if not self.held_back:
            self.held_back = True
            self.system.no_room_in(self)

    def put_control(self, item: Delivery | Event) -> None:
        self.control.put(item)
        if False not in self._tasks and self.cell.open:
            self._start(False)

    def open(self) -> None:
        """The actor has started: what has come meanwhile is served."""
        for serial, box in ((True, self.user), (False, self.control)):
            if len(box) and serial not in self._tasks:
                self._start(serial)

    def _start(self, serial: bool) -> None:
        task = self.system.loop.create_task(
            self._serve(self.user if serial else self.control, serial),
            name=f"{self.cell.name}/{'user' if serial else 'control'}",
        )
        self._tasks[serial] = task
        self._serving_user = self._serving_user or serial
        task.add_done_callback(self._server_done)

    def _server_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            if (
                not self._ending
            ):  # nobody serves the lane any more: better a process that says so than one that is silent
                error = ActorError(f"{self.cell.name}: its lane was cancelled, by a handler or from outside")
                self.system.crash(error, f"actor {self.cell.name}")
        elif task.exception() is not None:
            self.system.crash(task.exception(), f"actor {self.cell.name}")

    async def stop(self) -> None:
        """Refuses what waits and lets the handlers at work end, up to stop_s each time: serial ones by themselves, then cancelled; concurrent
        ones are cancelled at once."""
        for running in list(self.running.values()):
            running.cancel("the actor stopped")
        for box in (self.user, self.control):
            for item in box.clear():
                if isinstance(item, Delivery):
                    self.refuse(item.peer, item.lane, item.message, wire.STOPPED, f"{self.cell.name} stopped")
            box.put(Stop())
        if self._tasks:
            _, late = await asyncio.wait(self._tasks.values(), timeout=self.system.config.stop_s)
            self._ending = True
            for task in late:
                log.warning(
                    "%s: handler of %s did not end within stop_s=%s and is cancelled",
                    self.cell.name,
                    self.busy,
                    self.system.config.stop_s,
                )
                task.cancel()
            if (item := self._at_work) is not None:
                text = f"{self.cell.name} stopped in mid-handler"
                self.refuse(item.peer, item.lane, item.message, wire.ABANDONED, text)
        tasks = [r.task for r in self.running.values() if r.task is not None]
        tasks += [task for task in self._tasks.values() if not task.done()]
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=self.system.config.stop_s)
            for task in stuck:
                log.error("%s: %s did not end although it was cancelled", self.cell.name, task.get_name())

    def runs(self, task: asyncio.Task[Any] | None) -> bool:
        return task in self._tasks.values() or any(running.task is task for running in self.running.values())

    def refuse_all(self) -> None:
        """The actor never came up: whoever sent something hears of it."""
        for box in (self.user, self.control):
            for item in box.clear():
                if isinstance(item, Delivery):
                    self.refuse(item.peer, item.lane, item.message, wire.STOPPED, f"{self.cell.name} did not start")

    def abandon(self) -> list[asyncio.Task[None]]:
        """Cancels everything at once; returns the tasks."""
        self._ending = True
        tasks = [*self._tasks.values(), *(r.task for r in self.running.values() if r.task is not None)]
        for task in tasks:
            task.cancel()
        return tasks

    def process_gone(self, uid: str) -> None:
        """A process is dead: what runs for it alone is cancelled, what is kept for it is dropped."""
        for running in [
            r for r in self.running.values() if r.item.peer.uid == uid and type(r.item.message) is wire.Ask
        ]:
            running.cancel("its asker died")
        for item in (*self.user.items, *self.control.items, *self._next.values()):
            if type(item) is Delivery and item.peer.uid == uid and type(item.message) is wire.Ask:
                self._cancelled.add(item.key)
        for peer in [peer for peer in self.accounts if peer.uid == uid]:
            del self.accounts[peer]
        self.remembered.forget(uid)

    # ------------------------------------------------------------------ serving

    async def _serve(self, box: Mailbox[Any], serial: bool) -> None:
        """Written out in one piece: every call saved here is saved for every message."""
        system, actor, clock, now = self.system, self.cell.actor, time.perf_counter, self.system.loop.time
        accounts, every, every_bytes = self.accounts, self._credit_every, self._credit_bytes
        task = asyncio.current_task()
        assert task is not None
        cancelling, uncancel = task.cancelling, task.uncancel
        fairness = left = system.config.fairness
        while True:
            if not box.items:
                await box.more()
            item = box.items.popleft()
            box.size -= item.size
            if self.held_back and serial and box.roomy:
                self.held_back = False
                system.room_in(self)
            left -= 1
            if not left:
                left = fairness
                await asyncio.sleep(0)
            if type(item) is not Delivery:
                if type(item) is Stop:
                    return
                await self._event(item, cancelling, uncancel)
                continue
            peer, lane, message, handler, deadline, size = item
            account = accounts.get(peer) or self._account(peer)
            if account is not None:
                credit = account[lane]
                credit[0] += 1
                credit[1] += size
                if credit[0] >= every or credit[1] >= every_bytes:
                    self._give_back(peer, lane, credit)
            asked = type(message) is wire.Ask
            if asked and (deadline <= now() or (self._cancelled and item.key in self._cancelled)):
                self._skip(item)
                continue
            try:
                decoded = handler.decode(message.body)
            except Undecodable as error:
                text = f"{message.kind} does not decode: {error}"
                self.refuse(peer, lane, message, wire.NOT_UNDERSTOOD, text)
                continue
            if handler.concurrent:
                await self._start_concurrent(item, decoded, serial)
                continue
            started = clock()
            if serial:
                self._at_work, self._since = item, started
                if not system.watching_handlers:
                    system.watch_handlers()
            handled.set(item)
            try:
                value = await getattr(actor, handler.method)(decoded)
            except _OURS:
                raise
            except asyncio.CancelledError as error:
                if cancelling():  # it is this task that is to end
                    raise
                self._raised(item, error)  # something that the handler waited for was cancelled
            except BaseException as error:  # the actor's boundary: the asker gets it, the log keeps it
                self._raised(item, error)
            else:
                if asked:
                    self._reply(item, value)
            while (
                cancelling()
            ):  # the handler cancelled itself and went on, as timeout helpers do: the next one must not pay
                uncancel()
            (self.times.get(message.kind) or self._times(message.kind)).add(clock() - started)
            if serial:
                self._at_work = None

    async def _event(self, event: Event, cancelling: Callable[[], int], uncancel: Callable[[], int]) -> None:
        handled.set(None)
        try:
            await getattr(self.cell.actor, event.method)(event.value)
        except _OURS:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and cancelling():
                raise
            self.system.counts.handler_errors += 1
            log.error("%s: %s(%s) failed", self.cell.name, event.method, event.value, exc_info=error)
        while cancelling():
            uncancel()

    def _skip(self, item: Delivery) -> None:
        """The asker has given up: handling it now would surprise everybody."""
        self._cancelled.discard(item.key)
        self.remembered.drop(item.key)
        self.system.counts.expired += 1

    def _times(self, kind: str) -> Times:
        times = self.times[kind] = Times()
        return times

    def warn_when_slow(self) -> None:
        """Names the serial handler at work, once, when it takes longer than slow_handler_s: what waits behind it waits with it."""
        item, seconds = self._at_work, self.busy_s
        if item is not None and item is not self._called_slow and seconds > self.system.config.slow_handler_s:
            self._called_slow, message = item, item.message
            log.warning(
                "%s: slow handler %s, for %.1f s at %s from %s (trace %x); %d messages wait behind it",
                self.cell.name,
                self.cell.table[message.kind].method,
                seconds,
                message.kind,
                message.src,
                message.trace,
                len(self.user),
            )

    # ------------------------------------------------------------------ concurrent handlers and streams

    async def _start_concurrent(self, item: Delivery, decoded: Any, serial: bool) -> None:
        places, asked = self._places[serial], type(item.message) is wire.Ask
        if places.left > 0:
            places.left -= 1
        else:
            self._next[serial] = item
            await places.take()
            del self._next[serial]
            if self.cell.stopping:
                places.free()
                self.refuse(item.peer, item.lane, item.message, wire.STOPPED, f"{self.cell.name} stopped")
                return
            if asked and (item.deadline <= self.system.loop.time() or item.key in self._cancelled):
                places.free()
                self._skip(item)
                return
        running = Running(item)
        if asked:
            key: Key | int = item.key
            if item.deadline < float("inf"):
                self.system.deadlines.push(item.deadline, running)
        else:
            self._number += 1
            key = self._number
        self.running[key] = running
        handled.set(item)  # the task inherits it
        running.task = self.system.loop.create_task(
            self._run_concurrent(item, decoded, running), name=f"{self.cell.name}/{item.message.kind}"
        )

        def done(task: asyncio.Task[None]) -> None:
            self.system.deadlines.drop(running)
            self.running.pop(key, None)
            places.free()
            if not running.begun:
                self._given_up(running)
            kind = item.message.kind
            (self.times.get(kind) or self._times(kind)).add(time.perf_counter() - running.since)

        running.task.add_done_callback(done)

    def _given_up(self, running: Running) -> None:
        """A concurrent handler was cancelled from here."""
        item = running.item
        log.info("%s: %s was cancelled: %s", self.cell.name, item.message.kind, running.why)
        asked = type(item.message) is wire.Ask
        if self.cell.stopping and asked:
            text = f"{self.cell.name} stopped in mid-handler"
            self.refuse(item.peer, item.lane, item.message, wire.ABANDONED, text)
        else:
            self.system.counts.expired += 1
            if asked:
                self.remembered.drop(item.key)

    async def _run_concurrent(self, item: Delivery, decoded: Any, running: Running) -> None:
        running.begun = True
        asked = type(item.message) is wire.Ask
        try:
            if item.handler.stream:
                value = await self._stream(item, decoded, running)
            else:
                value = await getattr(self.cell.actor, item.handler.method)(decoded)
        except _OURS:
            raise
        except asyncio.CancelledError as error:
            if running.why:
                self._given_up(running)
            elif self._ending:
                raise
            else:
                self._raised(item, error)
        except BaseException as error:  # as in _serve
            self._raised(item, error)
        else:
            if asked:
                self._reply(item, value)

    async def _stream(self, item: Delivery, decoded: Any, running: Running) -> int:
        """Sends items as their reader takes them; returns how many there were, which is the reply."""
        message = item.message
        if type(message) is not wire.Ask or message.credit < 1:
            raise TypeError(f"{message.kind} is a stream: read it with ref.stream, it cannot be asked or told")
        running.credit = credit = StreamCredit(message.credit)
        config = self.system.config
        items = getattr(self.cell.actor, item.handler.method)(decoded)
        number = 0
        still_read = wire.Item(message.id, wire.NO_ITEM, wire.raw(None), self.cell.name)
        try:
            async for value in items:
                heard, asked = credit.heard, 0
                while not await credit.take(config.probe_s):  # it may have left, and its word of it was lost
                    asked = asked + 1 if credit.heard == heard else 1
                    heard = credit.heard
                    if asked * config.probe_s > config.lease_s:
                        raise TimeoutError(
                            f"the reader of {message.kind} says nothing for lease_s={config.lease_s:g} s"
                        )
                    item.peer.send(item.lane, encoder.encode(still_read))
                item.peer.send(item.lane, encoder.encode(wire.Item(message.id, number, wire.raw(value))))
                number += 1
        finally:
            await items.aclose()
        return number

    def more(self, peer: Peer, more: wire.More) -> None:
        """The reader of a stream has room for more items."""
        running = self.running.get((peer.uid, more.id))
        if running is not None and running.credit is not None:
            running.credit.taken(more.count)

    def cancel(self, peer: Peer, request: int) -> None:
        """The asker gave up. A serial handler at work goes on to its end: half of its change would be worse."""
        running = self.running.get((peer.uid, request))
        if running is not None:
            running.cancel("its asker gave up")
        elif any(
            type(i) is Delivery and i.peer is peer and getattr(i.message, "id", None) == request
            for i in (*self.user.items, *self.control.items, *self._next.values())
        ):
            self._cancelled.add((peer.uid, request))

    # ------------------------------------------------------------------ answers

    def _reply(self, item: Delivery, value: Any) -> None:
        message = item.message
        assert type(message) is wire.Ask
        try:
            self._answer(item, encoder.encode(wire.Reply(message.id, wire.raw(value))))
        except MessageTypeError as error:
            self._raised(item, MessageTypeError(f"reply of {message.kind}: {error}"))
        except Exception as error:  # what the handler returned cannot travel
            self._raised(item, error)

    def _raised(self, item: Delivery, error: BaseException) -> None:
        message = item.message
        self.system.counts.handler_errors += 1
        log.error(
            "%s: handling %s from %s failed (trace %x)",
            self.cell.name,
            message.kind,
            message.src,
            message.trace,
            exc_info=error,
        )
        if type(message) is wire.Ask:
            text, trace = said(error)
            code = wire.TYPED if isinstance(error, WireError) else wire.RAISED
            self._answer(item, encoder.encode(wire.Fail(message.id, code, type(error).__name__, text, trace)))

    def _answer(self, item: Delivery, encoded: bytes) -> None:
        message = item.message
        assert type(message) is wire.Ask
        try:
            item.peer.send(item.lane, encoded)
        except TransportError as error:
            text = f"the reply to {message.kind}: {error}"
            encoded = encoder.encode(wire.Fail(message.id, wire.RAISED, "TransportError", text))
            item.peer.send(item.lane, encoded)
        if message.keep:
            self.remembered.answer(item.key, encoded)

    def refuse(self, peer: Peer, lane: Lane, message: wire.Ask | wire.Tell, code: str, text: str) -> None:
        if type(message) is wire.Ask:
            if message.keep:
                self.remembered.drop((peer.uid, message.id))
            peer.send(lane, encoder.encode(wire.Fail(message.id, code, "", text)))
        else:
            log.warning("%s: a tell of %s from %s was not handled: %s", self.cell.name, message.kind, message.src, text)
            peer.send(lane, encoder.encode(wire.Lost(self.cell.name, message.incarnation, message.kind, text)))

    def consumed(self, peer: Peer, lane: Lane, size: int) -> None:
        """A message of this sender does not wait any more: it gets its credit back, half a window at a time."""
        credit = (self.accounts.get(peer) or self.account(peer))[lane]
        credit[0] += 1
        credit[1] += size
        if credit[0] >= self._credit_every or credit[1] >= self._credit_bytes:
            self._give_back(peer, lane, credit)

    def _account(self, peer: Peer) -> list[list[int]] | None:
        """None for a process that was declared dead meanwhile: it gets no credit, and what it still sends is fenced."""
        return None if peer.uid in self.system.gone else self.account(peer)

    def account(self, peer: Peer) -> list[list[int]]:
        account = self.accounts[peer] = [[0, 0, 0, 0, 0] for _ in Lane]
        return account

    def level(self, peer: Peer, lane: Lane, probe: wire.Probe) -> None:
        """Says how much of this sender waits here: what was lost on the way to us or back is room again."""
        waiting = [
            item.size
            for box in (self.user, self.control)
            for item in box.items
            if type(item) is Delivery and item.lane == lane and item.peer.uid == peer.uid
        ]
        credit = self.accounts.get(peer) or self.account(peer)
        level = wire.Level(
            self.cell.name, probe.incarnation, probe.number, len(waiting), sum(waiting), *self._total(credit[lane])
        )
        peer.send(lane, encoder.encode(level))

    def _give_back(self, peer: Peer, lane: Lane, credit: list[int]) -> None:
        taken, size = self._total(credit)
        peer.send(lane, encoder.encode(wire.Credit(self.cell.name, self.cell.incarnation, taken, size)))

    @staticmethod
    def _total(credit: list[int]) -> tuple[int, int]:
        """Messages and bytes taken so far, all of which the sender is about to be told of."""
        credit[3] += credit[0]
        credit[4] += credit[1]
        credit[0] = credit[1] = 0
        return credit[3], credit[4]
