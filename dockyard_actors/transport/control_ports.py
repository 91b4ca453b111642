"""Raw ZMQ sockets on the event loop: ports that send a lone envelope at once and pack what comes thick into frames.

Order is kept for each peer and lane; nothing is dropped silently (full pipes queue, vanished peers are reported). A peer
must say a valid hello before its envelopes count. Opening, binding and securing sockets is `control.py`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
from collections import deque
from typing import Protocol

import msgspec
import zmq

from dockyard_actors.transport.base import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Address,
    ControlConfig,
    Lane,
    Peer,
    Receiver,
    TransportError,
)

_LENGTH = struct.Struct("<I")
_DATA, _HELLO, _REFUSAL, _WHO = b"D", b"H", b"R", b"W"  # first byte of every frame
_HELLO_MAX = 4096  # bytes of a hello in an unknown form that are looked at
_NAME_MAX = 64  # characters of a name that a stranger said
_FORGOTTEN_MAX = 4096  # connections of dead processes that are remembered
_CONNECTIONS_MAX = 8  # of one process to one socket: it has one, and while it dials anew two
# plain numbers: an enum costs as much as the call that it is passed to
_EVENTS, _RCVMORE, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN), int(zmq.POLLOUT)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)


class Hello(msgspec.Struct, array_like=True):
    """First frame on every connection."""

    major: int
    minor: int
    uid: str
    cookie: str
    process: str = ""


def hello_frame(config: ControlConfig) -> bytes:
    cookie = config.keys.cookie if config.keys else ""
    return _HELLO + msgspec.msgpack.encode(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, config.uid, cookie, config.process))


def _who(side: Hello | ControlConfig) -> str:
    return f"{side.process[:_NAME_MAX] or '?'} (uid {side.uid[:_NAME_MAX]})"


def _major_of(frame: bytes) -> int | None:
    """The first number of a hello in whatever form."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        hello = msgspec.msgpack.decode(memoryview(frame)[1:])
        if isinstance(hello, list) and hello and isinstance(hello[0], int):
            return hello[0]
    return None


def pack(envelopes: list[bytes]) -> bytes:
    """A data frame: each envelope behind its length."""
    parts = [_DATA]
    for envelope in envelopes:
        parts += (_LENGTH.pack(len(envelope)), envelope)
    return b"".join(parts)


def unpack(frame: bytes) -> list[memoryview]:
    """Envelopes of a data frame; ValueError when the lengths do not add up."""
    view = memoryview(frame)
    length = _LENGTH.unpack_from
    envelopes = []
    at, end = 1, len(view)
    while at < end:
        start = at + 4
        if start > end:
            raise ValueError(f"{end - at} stray bytes at the end of a frame")
        at = start + length(view, at)[0]
        if at > end:
            raise ValueError(f"an envelope of {at - start} bytes in a frame with {end - start} left")
        envelopes.append(view[start:at])
    return envelopes


class Owner(Protocol):
    """What a port needs of the transport it belongs to."""

    config: ControlConfig
    receiver: Receiver

    def dial(self, link: Link, lane: Lane) -> OutPort: ...
    def bad_frame(self, sender: str, reason: str) -> None: ...


class OutPort(Protocol):
    """One lane to a peer that we dialled."""

    outbox: Outbox
    kicked: bool

    def kick(self) -> None: ...
    def push(self) -> None: ...
    def flush(self) -> None: ...
    def close(self, linger_ms: int) -> None: ...


class _Port:
    """One raw socket on the loop. The descriptor is edge-triggered, and any send or read may swallow the edge: whoever touched the
    socket looks at EVENTS afterwards (`kick` sees to it) and goes on as long as there is something to do."""

    def __init__(self, transport: Owner, socket: zmq.Socket[bytes], lane: Lane) -> None:
        self.transport, self.socket, self.lane = transport, socket, lane
        self.loop = asyncio.get_running_loop()
        self.paused = self.closed = self.kicked = False
        self._fd = int(socket.getsockopt(zmq.FD))
        self.loop.add_reader(self._fd, self._work, _POLLIN)

    def kick(self) -> None:
        if not self.kicked and not self.closed:
            self.kicked = True
            self.loop.call_soon(self._tick)

    def close(self, linger_ms: int) -> None:
        if not self.closed:
            self.closed = True
            self.loop.remove_reader(self._fd)
            self.socket.close(linger_ms)

    def flush(self) -> None:
        raise NotImplementedError

    def read(self) -> None:
        """Takes one frame from the socket; zmq.Again when there is none."""
        raise NotImplementedError

    def _tick(self) -> None:
        self.kicked = False
        self._work(0)

    def _work(self, events: int) -> None:
        """``events``: POLLIN when the descriptor says that something happened, which mostly is a frame; 0 to look first."""
        if self.closed:
            return
        get = self.socket.get
        try:
            self.flush()
            if not events or self.paused:
                events = int(get(_EVENTS))
            # mostly there is one frame: EVENTS says so cheaper than an empty read would
            for most in (1, self.transport.config.drain_frames):
                if not events & _POLLIN or self.paused:
                    break
                self._drain(most)
                if self.closed:
                    return
                self.flush()  # replies made while reading leave in this very tick
                events = int(get(_EVENTS))
            if (events & _POLLIN and not self.paused) or (events & _POLLOUT and self.wants_room):
                self.kick()
        except Exception as error:  # the boundary of the transport: the receiver ends the process with this cause
            self.transport.receiver.on_fault(error)

    @property
    def wants_room(self) -> bool:
        return False

    def _drain(self, most: int) -> None:
        try:
            for _ in range(most):
                self.read()
                if self.closed or self.paused:
                    return
        except zmq.Again:
            return

    def deliver(self, peer: Peer, frame: bytes) -> None:
        on_envelope, lane = self.transport.receiver.on_envelope, self.lane
        try:
            envelopes = unpack(frame)
        except ValueError as error:
            self.transport.bad_frame(peer.uid, str(error))
            return
        for envelope in envelopes:
            on_envelope(peer, lane, envelope)


class Outbox:
    """Envelopes for one peer, in order. ``frames`` holds what the socket did not take yet.

    A lone envelope leaves at once, as does a full frame; the rest of a tick leaves packed at its end.
    """

    __slots__ = ("_full_at", "_full_bytes", "_lone", "_most", "_sparse", "envelopes", "frames", "size")

    def __init__(self, config: ControlConfig) -> None:
        self._most = config.max_frame_bytes - 64  # bytes of a frame
        self._full_bytes, self._full_at = config.frame_bytes, config.frame_envelopes
        self.envelopes: list[bytes] = []
        self.frames: deque[tuple[bytes, int]] = deque()
        self.size = 0  # bytes that the envelopes take in their frame
        self._sparse = True  # the last tick had one envelope at most: the next one has no company to wait for
        self._lone = False  # the first of this tick went alone

    def add(self, envelope: bytes) -> bool:
        """Whether there are frames now that should be sent at once."""
        size = len(envelope)
        if size > self._most:
            raise TransportError(
                f"an envelope of {size} bytes exceeds max_frame_bytes={self._most + 64}: "
                "tensors and other bulk go over the data plane"
            )
        envelopes = self.envelopes
        if not envelopes:
            if self._sparse and not self._lone and not self.frames:
                self._lone = True
                self.frames.append((_DATA + _LENGTH.pack(size) + envelope, 1))
                return True
            full = False
        elif self.size + size > self._most:
            full = self.seal()  # what is there and this one do not fit into one frame
            envelopes = self.envelopes
        else:
            full = False
        envelopes.append(envelope)
        self.size += size + 4
        if len(envelopes) >= self._full_at or self.size >= self._full_bytes:
            full = self.seal()
        return full

    def seal(self) -> bool:
        """Closes the frame, if there is one; says whether there was."""
        if not self.envelopes:
            return False
        self._sparse = False
        self.frames.append((pack(self.envelopes), len(self.envelopes)))
        self.envelopes = []
        self.size = 0
        return True

    def end_tick(self) -> None:
        """Closes the last frame, and learns how thick the envelopes come."""
        count = len(self.envelopes) + self._lone
        if count:
            self.seal()
            self._sparse = count == 1
            self._lone = False

    def clear(self) -> int:
        """Forgets everything; returns how many envelopes that was."""
        lost = self.waiting()
        self.envelopes = []
        self.frames.clear()
        self.size = 0
        return lost

    def waiting(self) -> int:
        return len(self.envelopes) + sum(count for _, count in self.frames)


class RouterPeer:
    """A process that connected to one of our ROUTERs; replies go back over the same connection."""

    __slots__ = ("identity", "outbox", "port", "uid")

    def __init__(self, port: RouterPort, identity: bytes, uid: str) -> None:
        self.port, self.identity, self.uid = port, identity, uid
        self.outbox = Outbox(port.transport.config)

    def send(self, lane: Lane, envelope: bytes) -> None:
        port = self.port
        now = self.outbox.add(envelope)
        port.dirty[self.identity] = self
        if now and not port.closed:
            port.push(self)
        if not port.kicked:
            port.kick()


class RouterPort(_Port):
    def __init__(self, transport: Owner, socket: zmq.Socket[bytes], lane: Lane) -> None:
        super().__init__(transport, socket, lane)
        self.peers: dict[bytes, RouterPeer] = {}
        self.dirty: dict[bytes, RouterPeer] = {}
        self._forgotten: dict[bytes, None] = {}  # connections of the dead: they do not get in again by another hello
        self._retry: asyncio.TimerHandle | None = None

    def read(self) -> None:
        socket = self.socket
        identity = socket.recv(_NOBLOCK)
        frame = socket.recv(_NOBLOCK)
        if socket.get(_RCVMORE) or not frame:
            parts = 2
            while socket.get(_RCVMORE):
                socket.recv(_NOBLOCK)
                parts += 1
            self.transport.bad_frame("stranger", f"{parts} parts where 2 are expected" if frame else "an empty frame")
            return
        peer = self.peers.get(identity)
        kind = frame[:1]
        if kind == _DATA and peer is not None:
            self.deliver(peer, frame)
        elif kind == _HELLO:
            self._hello(identity, frame)
        elif kind == _DATA:
            self.transport.bad_frame("stranger", "a frame before any accepted hello")
            if identity not in self._forgotten:
                self._answer(identity, _WHO)  # the hello may have died with its connection
        else:
            self.transport.bad_frame(peer.uid if peer else "stranger", "unknown kind")

    def _hello(self, identity: bytes, frame: bytes) -> None:
        try:
            hello = msgspec.msgpack.decode(memoryview(frame)[1:], type=Hello)
        except (msgspec.MsgspecError, RecursionError) as error:
            major = _major_of(frame) if len(frame) <= _HELLO_MAX else None
            if major in (None, PROTOCOL_MAJOR):
                self.transport.bad_frame("stranger", f"malformed hello: {error}")
                return
            hello = Hello(major, 0, "?", "")  # another major may say other things in its hello
        config = self.transport.config
        if hello.major != PROTOCOL_MAJOR:
            reason = (
                f"protocol {hello.major}.{hello.minor} of process {_who(hello)} spoken to process {_who(config)}, which speaks "
                f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: run the same release of dockyard-actors on both sides"
            )
        elif not secrets.compare_digest(hello.cookie.encode(), (config.keys.cookie if config.keys else "").encode()):
            reason = "the hello's cookie is not this run's: wrong key file"
        else:
            if identity not in self.peers and identity not in self._forgotten:
                self.peers[identity] = RouterPeer(self, identity, hello.uid)
                self._drop_old(hello.uid)
            return
        self.transport.bad_frame(_who(hello), reason)
        self._answer(identity, _REFUSAL + reason.encode())

    def _answer(self, identity: bytes, frame: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # whoever it was may be gone already, or does not read
            self.socket.send_multipart([identity, frame], zmq.NOBLOCK)

    def _drop_old(self, uid: str) -> None:
        """A ROUTER is not told of connections that end: only the newest ones of a process are kept."""
        for identity in [key for key, peer in self.peers.items() if peer.uid == uid][:-_CONNECTIONS_MAX]:
            del self.peers[identity]
            self.dirty.pop(identity, None)

    def forget(self, uid: str) -> None:
        for identity in [key for key, peer in self.peers.items() if peer.uid == uid]:
            del self.peers[identity]
            self.dirty.pop(identity, None)
            self._forgotten[identity] = None
        while len(self._forgotten) > _FORGOTTEN_MAX:
            del self._forgotten[next(iter(self._forgotten))]

    def flush(self) -> None:
        if self.dirty:
            for peer in list(self.dirty.values()):
                peer.outbox.end_tick()
                if self.push(peer):
                    del self.dirty[peer.identity]

    def push(self, peer: RouterPeer) -> bool:
        """Sends the peer's frames; False when its pipe is full, which is tried again later."""
        send, frames = self.socket.send, peer.outbox.frames
        try:
            while frames:
                send(peer.identity, _NOBLOCK | _SNDMORE)
                send(frames[0][0], _NOBLOCK)
                frames.popleft()
        except zmq.Again:
            if self._retry is None:
                self._retry = self.loop.call_later(self.transport.config.retry_s, self._again)
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            lost = peer.outbox.clear()
            self.transport.receiver.on_undeliverable(peer, self.lane, lost, "the peer is gone")
        return True

    def _again(self) -> None:
        self._retry = None
        self.kick()

    def close(self, linger_ms: int) -> None:
        if self._retry is not None:
            self._retry.cancel()
        super().close(linger_ms)


class DealerPort(_Port):
    def __init__(self, link: Link, socket: zmq.Socket[bytes], lane: Lane) -> None:
        super().__init__(link.transport, socket, lane)
        self.link = link
        self.outbox = Outbox(self.transport.config)

    @property
    def wants_room(self) -> bool:
        return bool(self.outbox.frames)

    def read(self) -> None:
        frame = self.socket.recv(_NOBLOCK)
        if frame[:1] == _DATA:
            self.deliver(self.link, frame)
        elif frame[:1] == _REFUSAL:
            self.transport.receiver.on_refused(self.link, frame[1:].decode(errors="replace"))
        elif frame == _WHO:
            self._introduce()
        else:
            self.transport.bad_frame(str(self.link.address), "unknown kind of frame in a reply")

    def _introduce(self) -> None:
        """The peer does not know us: our hello was lost with a connection, and it did not handle what came after. Says hello again."""
        hello = hello_frame(self.transport.config)
        if all(frame != hello for frame, _ in self.outbox.frames):
            self.outbox.frames.appendleft((hello, 0))
            self.kick()
        self.transport.receiver.on_undeliverable(self.link, self.lane, 1, "the connection's hello had been lost")

    def flush(self) -> None:
        self.outbox.end_tick()
        self.push()

    def push(self) -> None:
        frames = self.outbox.frames
        try:
            while frames:
                self.socket.send(frames[0][0], _NOBLOCK)
                frames.popleft()
        except zmq.Again:
            return  # `_work` looks for POLLOUT


class Link:
    """Our connection to another process: a DEALER for each lane, opened when first used."""

    uid = ""

    def __init__(self, transport: Owner, address: Address) -> None:
        self.transport, self.address = transport, address
        self.ports: list[OutPort | None] = [None, None]
        self.closed = False

    def send(self, lane: Lane, envelope: bytes) -> None:
        port = self.ports[lane]
        if port is None:
            if self.closed:
                self.transport.receiver.on_undeliverable(self, lane, 1, "the connection was closed")
                return
            port = self.ports[lane] = self.transport.dial(self, lane)
        if port.outbox.add(envelope):
            port.push()
        if not port.kicked:
            port.kick()

    def flush(self) -> None:
        for port in self.ports:
            if port is not None:
                port.flush()

    def close(self, linger_ms: int) -> None:
        self.closed = True
        for lane, port in enumerate(self.ports):
            if port is not None:
                waiting = port.outbox.waiting()
                port.close(linger_ms)
                if waiting:
                    self.transport.receiver.on_undeliverable(self, Lane(lane), waiting, "the connection was closed")
        self.ports = [None, None]


class Loopback:
    """A process talking to itself: same order, same framing cost avoided, delivery in a later tick like from anyone else."""

    def __init__(self, transport: Owner, uid: str) -> None:
        self.transport, self.uid = transport, uid
        self.other = self
        self.queue: deque[tuple[Lane, bytes]] = deque()

    def send(self, lane: Lane, envelope: bytes) -> None:
        if not self.queue:
            asyncio.get_running_loop().call_soon(self._run)
        self.queue.append((lane, envelope))

    def _run(self) -> None:
        batch, self.queue = self.queue, deque()
        try:
            for lane, envelope in batch:
                self.transport.receiver.on_envelope(self.other, lane, memoryview(envelope))
        except Exception as error:  # as in _Port._work
            self.transport.receiver.on_fault(error)
