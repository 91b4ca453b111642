"""A network in memory between simulated processes, with faults by seed: delay, loss, duplicates, disorder, partitions, death.

Without faults it is what ZMQ gives: first in, first out for each connection and lane. It carries the envelopes of real actor systems and
knows as little about them as a wire does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from dockyard_actors.transport.base import Address, ControlConfig, Lane, Peer, Receiver

_APART_S = 1e-7  # two envelopes of one connection: timers of one and the same time have no order


@dataclass(frozen=True)
class Faults:
    """Chances for each envelope, and its way's time in seconds. With ``disorder`` envelopes of one connection overtake each other."""

    delay: tuple[float, float] = (0.000_1, 0.002)
    loss: float = 0.0
    duplicate: float = 0.0
    disorder: bool = False


class SimNetwork:
    """Made once a simulation; `open` is what an ActorSystem takes as its ``transport``."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.random = random.Random(f"network {seed}")
        self.faults = faults or Faults()
        self.log: Callable[[str], None] = lambda text: None
        self.carried = self.lost = self.repeated = 0
        self._places: dict[str, SimTransport] = {}  # by address prefix
        self._cut: set[tuple[str, str]] = set()  # (from, to): uids between which nothing arrives

    def open(self, config: ControlConfig, receiver: Receiver) -> SimTransport:
        return SimTransport(self, config, receiver)

    def cut(self, source: str, target: str, *, both: bool = True) -> None:
        """Nothing from process ``source`` (a uid) reaches ``target`` any more; with ``both`` nor the other way."""
        self._cut.add((source, target))
        if both:
            self._cut.add((target, source))

    def heal(self) -> None:
        self._cut.clear()

    def crash(self, uid: str) -> None:
        """The process says nothing any more and hears nothing."""
        for prefix, place in list(self._places.items()):
            if place.config.uid == uid:
                place.dead = True
                del self._places[prefix]

    def place(self, prefix: str) -> SimTransport | None:
        return self._places.get(prefix)

    def register(self, place: SimTransport) -> None:
        if place.address.ipc in self._places:
            raise OSError(f"{place.address.ipc} is in use")
        self._places[place.address.ipc] = place

    def release(self, place: SimTransport) -> None:
        if self._places.get(place.address.ipc) is place:
            del self._places[place.address.ipc]

    def carry(self, way: Way, arrive: Callable[[], None]) -> None:
        """One envelope on its way; ``arrive`` is called zero times, once or twice."""
        faults, rng = self.faults, self.random
        times = 1
        if rng.random() < faults.loss:
            self.lost += 1
            times = 0
        elif rng.random() < faults.duplicate:
            self.repeated += 1
            times = 2
        loop = asyncio.get_running_loop()
        for _ in range(times):
            when = loop.time() + rng.uniform(*faults.delay)
            if not faults.disorder:
                when = way.last = max(way.last + _APART_S, when)
            way.number += 1
            loop.call_at(when, self._arrive, way, arrive)

    def _arrive(self, way: Way, arrive: Callable[[], None]) -> None:
        if (way.source, way.target()) in self._cut:
            self.lost += 1
            return
        self.carried += 1
        arrive()


class Way:
    """One direction of one lane of one connection. target: the uid there at this moment."""

    __slots__ = ("last", "number", "source", "target")

    def __init__(self, source: str, target: Callable[[], str]) -> None:
        self.source, self.target = source, target
        self.last = 0.0
        self.number = 0


class SimTransport:
    """See `transport.base.ControlTransport`: one simulated process's end of the network."""

    def __init__(self, network: SimNetwork, config: ControlConfig, receiver: Receiver) -> None:
        self.network, self.config, self.receiver = network, config, receiver
        self.address = Address(host="simulated", ipc=config.ipc_prefix)
        self.dead = False
        self.held = False  # the process is stopped: what arrives waits
        self._links: dict[Address, SimLink] = {}
        self._paused = [False for _ in Lane]
        self._waiting: list[tuple[Lane, bool, Callable[[], None]]] = []  # lane, request, what to do
        self._fenced: set[str] = set()

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
        self._fenced.add(uid)

    def pause(self, lane: Lane, paused: bool) -> None:
        self._paused[lane] = paused
        self._go_on()

    def hold(self, held: bool) -> None:
        """Stops the process's ears (its loop is held), and opens them again."""
        self.held = held
        self._go_on()

    def take(self, lane: Lane, source: str, request: bool, deliver: Callable[[], None]) -> None:
        """Something has arrived."""
        if self.dead or (request and source in self._fenced):
            return
        if self.held or (request and self._paused[lane]) or any(w[:2] == (lane, request) for w in self._waiting):
            self._waiting.append((lane, request, deliver))
        else:
            deliver()

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, []
        for lane, request, deliver in waiting:
            if self.dead:
                return
            if self.held or (request and self._paused[lane]):
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
        data = bytes(envelope)

        def arrive() -> None:
            place = self.owner.network.place(self.address.ipc)
            if place is None:
                return  # nobody listens: it waits in the sender's queue, for whoever is never told
            end = self._ends.get(place.config.uid)
            if end is None:
                end = self._ends[place.config.uid] = _End(self, place)
            place.take(
                lane,
                self.owner.config.uid,
                True,
                lambda: place.receiver.on_envelope(end, lane, memoryview(data)),
            )

        self.owner.network.carry(self._ways[lane], arrive)


class _End:
    """The other end of a connection, as its listener sees it."""

    def __init__(self, link: SimLink, place: SimTransport) -> None:
        self.link, self.place = link, place
        self.uid = link.owner.config.uid
        self._ways = [Way(place.config.uid, lambda: self.uid) for _ in Lane]

    def send(self, lane: Lane, envelope: bytes) -> None:
        if self.place.dead:
            return
        data = bytes(envelope)

        def arrive() -> None:
            owner = self.link.owner
            if not self.link.closed:
                owner.take(lane, self.uid, False, lambda: owner.receiver.on_envelope(self.link, lane, memoryview(data)))

        self.place.network.carry(self._ways[lane], arrive)
