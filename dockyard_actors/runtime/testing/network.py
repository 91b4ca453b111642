"""A network in memory between simulated processes, with faults by seed: delay, loss, duplicates, disorder, partitions, death.

Without faults it is what ZMQ gives: first in, first out for each connection and lane. It carries the envelopes of real actor systems and
knows as little about them as a wire does.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dockyard_actors.transport.base import Address, ControlConfig, Lane, Peer, Receiver

_APART_S = 1e-7  # two envelopes of one connection: timers of one and the same time have no order
Fate = Literal["sent", "lost", "cut", "nobody", "fenced", "dead", "arrived"]


@dataclass(frozen=True)
class Faults:
    """Chances for each envelope, and its way's time in seconds. With ``disorder`` envelopes of one connection overtake each other."""

    delay: tuple[float, float] = (0.000_1, 0.002)
    loss: float = 0.0
    duplicate: float = 0.0
    disorder: bool = False


@dataclass(frozen=True)
class Event:
    """What became of an envelope. when: simulated seconds; source and target: uids (target empty when nobody listens there)."""

    when: float
    fate: Fate
    source: str
    target: str
    lane: Lane
    envelope: bytes


class SimNetwork:
    """Made once a simulation; `open` is what an ActorSystem takes as its ``transport``. ``faults`` may be changed at any time."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.random = random.Random(f"network {seed}")
        self.faults = faults or Faults()
        self.on_event: Callable[[Event], None] | None = None
        self.lost = self.repeated = 0
        self._places: dict[str, SimTransport] = {}  # by address prefix
        self._cut: dict[tuple[str, str], bool] = {}  # (from, to): uids between which nothing arrives; true: not now
        self._kept: list[tuple[Way, Lane, bytes, Callable[[], None]]] = []  # arrives when that is over
        self._resets: dict[tuple[str, str], float] = {}  # what was sent before is lost
        self._context = contextvars.copy_context()  # no process's own: what is on its way does not stop with its sender

    def open(self, config: ControlConfig, receiver: Receiver) -> SimTransport:
        return SimTransport(self, config, receiver)

    # ------------------------------------------------------------------ faults

    def cut(self, source: str, target: str, *, both: bool = True, keeps: bool = False) -> None:
        """Nothing from process ``source`` (a uid) reaches ``target`` until `heal`; with ``both`` nor the other way.

        What would arrive meanwhile is lost, as with a connection that breaks, or with ``keeps`` arrives then, as with TCP that tries
        again and again."""
        for way in ((source, target), (target, source))[: 1 + both]:
            self._cut[way] = keeps

    def heal(self) -> None:
        self._cut.clear()
        kept, self._kept = self._kept, []
        for way, lane, envelope, deliver in kept:
            self._arrive(way, lane, envelope, deliver, float("inf"))

    def reset(self, one: str, other: str) -> None:
        """The connections between two processes break and are there again at once: what was on its way is lost."""
        now = asyncio.get_running_loop().time()
        self._resets[one, other] = self._resets[other, one] = now

    def crash(self, uid: str) -> None:
        """The process says nothing any more and hears nothing."""
        for prefix, place in list(self._places.items()):
            if place.config.uid == uid:
                place.dead = True
                del self._places[prefix]

    # ------------------------------------------------------------------ places and ways

    def place(self, prefix: str) -> SimTransport | None:
        return self._places.get(prefix)

    def register(self, place: SimTransport) -> None:
        if place.address.ipc in self._places:
            raise OSError(f"{place.address.ipc} is in use")
        self._places[place.address.ipc] = place

    def release(self, place: SimTransport) -> None:
        if self._places.get(place.address.ipc) is place:
            del self._places[place.address.ipc]

    def carry(self, way: Way, lane: Lane, envelope: bytes, deliver: Callable[[], None]) -> None:
        """One envelope on its way; ``deliver`` is called zero times, once or twice."""
        faults, rng = self.faults, self.random
        times = 1
        if rng.random() < faults.loss:
            self.lost += 1
            times = 0
        elif rng.random() < faults.duplicate:
            self.repeated += 1
            times = 2
        self._note("sent" if times else "lost", way, lane, envelope)
        loop = asyncio.get_running_loop()
        for _ in range(times):
            when = loop.time() + rng.uniform(*faults.delay)
            if not faults.disorder:
                when = way.last = max(way.last + _APART_S, when)
            loop.call_at(when, self._arrive, way, lane, envelope, deliver, loop.time(), context=self._context)

    def _arrive(self, way: Way, lane: Lane, envelope: bytes, deliver: Callable[[], None], sent: float) -> None:
        ends = (way.source, way.target())
        keeps = self._cut.get(ends)
        if keeps:
            self._kept.append((way, lane, envelope, deliver))
        elif keeps is not None or sent <= self._resets.get(ends, -1.0):
            self.lost += 1
            self._note("cut", way, lane, envelope)
        else:
            deliver()

    def _note(self, fate: Fate, way: Way, lane: Lane, envelope: bytes) -> None:
        if self.on_event is not None:
            now = asyncio.get_running_loop().time()
            self.on_event(Event(now, fate, way.source, way.target(), lane, envelope))


class Way:
    """One direction of one lane of one connection. target: the uid there at this moment."""

    __slots__ = ("last", "source", "target")

    def __init__(self, source: str, target: Callable[[], str]) -> None:
        self.source, self.target = source, target
        self.last = 0.0


class SimTransport:
    """See `transport.base.ControlTransport`: one simulated process's end of the network."""

    def __init__(self, network: SimNetwork, config: ControlConfig, receiver: Receiver) -> None:
        self.network, self.config, self.receiver = network, config, receiver
        self.address = Address(host="simulated", ipc=config.ipc_prefix)
        self.dead = False
        self.forgotten: dict[str, float] = {}  # uid → when this process was told that it is dead
        self._held = False
        self._links: dict[Address, SimLink] = {}
        self._ends: set[_End] = set()  # of connections that were made to us
        self._paused = [False for _ in Lane]
        self._waiting: list[tuple[Lane, bool, Callable[[], None]]] = []  # lane, request, what to do
        self._draining = False
        self._context = contextvars.copy_context()  # of the process that opens it: what arrives is handled in it

    async def start(self) -> None:
        self.network.register(self)

    def connect(self, address: Address) -> Peer:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = SimLink(self, address)
        return link

    def disconnect(self, peer: Peer) -> None:
        if isinstance(peer, SimLink):
            peer.closed = True
            self._links.pop(peer.address, None)

    def forget(self, uid: str) -> None:
        """As a ROUTER: what still comes over its connections is dropped, and answers still leave. Who dials anew is a new connection."""
        self.forgotten.setdefault(uid, asyncio.get_running_loop().time())
        for end in [end for end in self._ends if end.uid == uid]:
            end.forgotten = True
            self._ends.discard(end)

    def pause(self, lane: Lane, paused: bool) -> None:
        self._paused[lane] = paused
        self._go_on()

    def hold(self, held: bool) -> None:
        """What arrives waits, as for a process that is stopped; or does not wait any more."""
        self._held = held
        self._go_on()

    def opened(self, end: _End) -> None:
        self._ends.add(end)

    def take(self, lane: Lane, request: bool, deliver: Callable[[], None]) -> None:
        """Something has arrived."""
        if self._held or (request and self._paused[lane]) or any(w[:2] == (lane, request) for w in self._waiting):
            self._waiting.append((lane, request, deliver))
        else:
            self._context.run(deliver)

    def _go_on(self) -> None:
        if self._waiting and not self._draining:
            self._draining = True
            asyncio.get_running_loop().call_soon(self._drain, context=self._context)

    def _drain(self) -> None:
        self._draining = False
        waiting, self._waiting = self._waiting, []
        for lane, request, deliver in waiting:
            if self.dead:
                return
            if self._held or (request and self._paused[lane]):  # what was delivered may have filled a mailbox again
                self._waiting.append((lane, request, deliver))
            else:
                deliver()

    def counters(self) -> dict[str, int]:
        return {"bad_frames": 0, "denied_keys": 0}

    async def close(self) -> None:
        self.dead = True
        self.network.release(self)


class SimLink:
    """A connection that this process opened."""

    uid = ""

    def __init__(self, owner: SimTransport, address: Address) -> None:
        self.owner, self.address = owner, address
        self.closed = False
        self._ways = [Way(owner.config.uid, self._target) for _ in Lane]
        self._ends: dict[str, _End] = {}  # by the uid that listens there

    def _target(self) -> str:
        place = self.owner.network.place(self.address.ipc)
        return place.config.uid if place is not None else ""

    def send(self, lane: Lane, envelope: bytes) -> None:
        if self.closed:
            self.owner.receiver.on_undeliverable(self, lane, 1, "the connection was closed")
            return
        if self.owner.dead:
            return
        network, way, data = self.owner.network, self._ways[lane], bytes(envelope)

        def deliver() -> None:
            place = network.place(self.address.ipc)
            if place is None:  # nobody listens: it waits in the sender's queue, for whoever is never told
                network._note("nobody", way, lane, data)
                return
            end = self._ends.get(place.config.uid)
            if end is None:
                end = self._ends[place.config.uid] = _End(self, place)
                place.opened(end)
            if end.forgotten:
                network._note("fenced", way, lane, data)
                return
            network._note("arrived", way, lane, data)
            place.take(lane, True, lambda: end.receive(lane, data))

        network.carry(way, lane, data, deliver)


class _End:
    """The other end of a connection, as its listener sees it."""

    def __init__(self, link: SimLink, place: SimTransport) -> None:
        self.link, self.place = link, place
        self.uid = link.owner.config.uid
        self.forgotten = False
        self._ways = [Way(place.config.uid, lambda: self.uid) for _ in Lane]

    def receive(self, lane: Lane, envelope: bytes) -> None:
        if not self.forgotten:
            self.place.receiver.on_envelope(self, lane, memoryview(envelope))

    def send(self, lane: Lane, envelope: bytes) -> None:
        if self.place.dead:
            return
        network, way, data = self.place.network, self._ways[lane], bytes(envelope)

        def deliver() -> None:
            owner = self.link.owner
            if owner.dead or self.link.closed:
                network._note("dead", way, lane, data)
                return
            network._note("arrived", way, lane, data)
            owner.take(lane, False, lambda: owner.receiver.on_envelope(self.link, lane, memoryview(data)))

        network.carry(way, lane, data, deliver)
