"""Who takes part in a collective delivery: each engine holds one plain TCP connection, its line, to the trainer for as long as a group lives.

Over it the engine proves that it was invited, both sides agree on what is about to be sent, say that it was taken or why it failed, and
learn at once that the other one is gone. Every wait ends at a deadline. No weight travels here; it knows no process groups, nor torch.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import msgspec

from dockyard_actors.transport.tensors import DataPlaneError

FRAME_BYTES = 1 << 20  # the longest message; the addresses of a thousand members fit
HELLO_BYTES = 1 << 10  # the longest one from somebody who is not known yet
REASON_CHARS = 1000
SAY_WHY_S = 1.0  # to tell the others why, once it has failed
STRANGERS = 32  # connections that have not said who they are; the oldest has to go
_LENGTH = struct.Struct(">I")


Backend = Literal["gloo", "nccl"]


class Meeting(msgspec.Struct, frozen=True):
    """Where an engine meets the others, and as whom. Whoever knows it can take part: it travels on the authenticated control plane only."""

    host: str
    port: int
    epoch: str  # names the group; unguessable
    rank: int  # 1..world-1; the trainer is 0
    world: int
    backend: Backend
    bucket_bytes: int
    timeout_s: float  # for one version, meeting included


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of an engine. Only who was invited knows the epoch."""

    epoch: str
    rank: int


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Everybody has come. store_port: of the TCP store for backends that want one, 0 for none."""

    store_port: int = 0


class Address(msgspec.Struct, frozen=True, tag=True):
    """Where this member's backend listens; opaque."""

    value: bytes


class Addresses(msgspec.Struct, frozen=True, tag=True):
    """Everybody's, by rank."""

    values: tuple[bytes, ...]


class Header(msgspec.Struct, frozen=True, tag=True):
    """What is about to be sent. manifest: its xxh3_64. nbytes: of all buckets."""

    version: int
    nbytes: int
    manifest: int


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The engine expects just this."""

    version: int


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The engine has every byte of the version."""

    version: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last message of either side: why it gives up. own: for a reason of its own, not because of somebody else."""

    reason: str
    own: bool


Said = Hello | Welcome | Address | Addresses | Header | Accepted | Taken | Failed
T = TypeVar("T")
_decoder = msgspec.msgpack.Decoder(Said)
_encode = msgspec.msgpack.Encoder().encode


class LineError(DataPlaneError):
    """Somebody is gone, is late, or gave up. who: their names. own: it is their fault, as far as can be told."""

    def __init__(self, who: Iterable[str], message: str, *, own: bool = True) -> None:
        super().__init__(message)
        self.who = tuple(who)
        self.own = own


class Line:
    """One end of a connection. `who` is the other one. `sock` is taken over."""

    def __init__(self, sock: socket.socket, who: str, limit: int = FRAME_BYTES) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.who = who
        self.limit = limit
        self._buffer = bytearray()
        self._said: deque[Said] = deque()  # and not taken yet
        self._lost: tuple[str, bool] | None = None  # why nothing more will be said, and whether that is its own fault

    def send(self, message: Said, until: float) -> None:
        """Raises LineError when it is not on its way at `until` (of time.monotonic())."""
        body = _encode(message)
        try:
            self.sock.settimeout(_left(until))
            self.sock.sendall(_LENGTH.pack(len(body)) + body)
            self.sock.setblocking(False)
        except OSError as error:
            raise LineError([self.who], f"{self.who} cannot be reached any more: {error}") from error

    def poll(self) -> Said | None:
        """The next whole message, or None while there is none. Raises LineError when none can come any more."""
        self._read()
        if self._said:
            return self._said.popleft()
        if (error := self._error()) is not None:
            raise error
        return None

    def wrong(self) -> LineError | None:
        """Whether it gave up or is gone, as far as is known now. Takes no message. Who has taken everything may go."""
        self._read()
        return None if any(isinstance(message, Taken) for message in self._said) else self._error()

    @property
    def is_open(self) -> bool:
        """Whether more may come, as far as was known at the last look."""
        return self._lost is None

    def receive(self, kind: type[T], until: float, what: str) -> T:
        """The next message, which has to be a `kind`. Raises LineError."""
        return gather([self], kind, until, what)[self.who]

    def close(self) -> None:
        self.sock.close()

    def _read(self) -> None:
        """Take in what has come, and notice the end."""
        while self._lost is None:
            try:
                received = self.sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                return self._lose(f"is gone: {error}")
            if not received:
                return self._lose("is gone: it closed its connection")
            self._buffer += received
            self._split()

    def _split(self) -> None:
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if length > self.limit:
                return self._lose(f"says {length} bytes at once, more than {self.limit}")
            if len(self._buffer) < end:
                return None
            try:
                message = _decoder.decode(bytes(self._buffer[_LENGTH.size : end]))
            except msgspec.MsgspecError as error:
                return self._lose(f"says what is no message: {error}")
            if isinstance(message, Failed):
                return self._lose(f"gave up: {message.reason}", own=message.own)
            self._said.append(message)
            del self._buffer[:end]
        return None

    def _lose(self, why: str, *, own: bool = True) -> None:
        self._lost = why, own

    def _error(self) -> LineError | None:
        if self._lost is None:
            return None
        return LineError([self.who], f"{self.who} {self._lost[0]}", own=self._lost[1])


def _left(until: float) -> float:
    return max(until - time.monotonic(), 1e-3)


def gather(lines: Iterable[Line], kind: type[T], until: float, what: str) -> dict[str, T]:
    """One `kind` of everybody, by name. Raises LineError as soon as somebody is gone or gives up, and at `until` for all who are late."""
    everybody = list(lines)
    waiting = {line.who: line for line in everybody}
    came: dict[str, T] = {}
    with selectors.DefaultSelector() as selector:
        for line in everybody:
            selector.register(line.sock, selectors.EVENT_READ, line)
        ready = everybody
        while True:
            for line in ready:
                try:
                    message = line.poll()
                except LineError as error:
                    raise what_is_wrong(everybody) or error from None
                if message is None:
                    continue
                if not isinstance(message, kind) or line.who in came:
                    raise LineError([line.who], f"{line.who} says {type(message).__name__} where {what} was due")
                came[line.who] = message
                del waiting[line.who]
                selector.unregister(line.sock)
            if not waiting:
                return came
            if time.monotonic() >= until:
                raise LineError(waiting, f"{what} of {', '.join(waiting)} did not come")
            ready = [key.data for key, _ in selector.select(_left(until))]


def what_is_wrong(lines: Iterable[Line]) -> LineError | None:
    """Who is gone or has given up, as far as is known now: those whose fault it is, else those who say nothing while others complain."""
    everybody = list(lines)
    found = [wrong for line in everybody if (wrong := line.wrong()) is not None]
    if not found:
        return None
    # Whoever is complained about may have gone while its line was looked at before the complaint's.
    found = [wrong for line in everybody if (wrong := line.wrong()) is not None]
    at_fault = [wrong for wrong in found if wrong.own]
    if at_fault:
        return LineError([name for wrong in at_fault for name in wrong.who], "; ".join(map(str, at_fault)))
    complain = [name for wrong in found for name in wrong.who]
    silent = [line.who for line in everybody if line.who not in complain]
    return LineError(silent or complain, "; ".join(map(str, found)), own=False)


def part(lines: Iterable[Line], reason: str, *, own: bool) -> None:
    """Say why, as far as somebody still hears it, and close."""
    until = time.monotonic() + SAY_WHY_S
    for line in lines:
        with contextlib.suppress(LineError):
            line.send(Failed(reason[:REASON_CHARS], own), until)
        line.close()


class Door:
    """Where invited engines knock: a listening socket and a word that nobody can guess."""

    def __init__(self, host: str) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address[:2], family=family)
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()[:2]
        self.epoch = secrets.token_hex(16)

    def roll_call(self, members: Mapping[int, str], until: float) -> list[Line]:
        """A line to everybody, by rank. Raises LineError for the first who left again, and at `until` for all who did not come. Others
        who connect are sent away and change nothing."""
        here: dict[int, Line] = {}
        strangers: list[Line] = []

        def absent() -> list[str]:
            return [name for rank, name in members.items() if rank not in here]

        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while len(here) < len(members):
                    if time.monotonic() >= until:
                        raise LineError(absent(), f"{', '.join(absent())} did not come")
                    for key, _ in selector.select(_left(until)):
                        if key.data is None:
                            self._let_in(selector, strangers)
                        elif key.data in strangers:
                            self._ask(key.data, selector, strangers, here, members)
                        elif key.data in here.values() and (wrong := key.data.wrong()) is not None:
                            raise wrong if wrong.own else LineError(absent(), str(wrong))
        except OSError as error:
            part(here.values(), f"the trainer lets nobody in: {error}", own=True)
            raise LineError(absent(), f"nobody can be let in: {error}") from error
        except BaseException as error:
            part(here.values(), str(error), own=False)
            raise
        finally:
            for line in strangers:
                line.close()
        return [here[rank] for rank in members]

    def _let_in(self, selector: selectors.BaseSelector, strangers: list[Line]) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it left before it was let in
            return
        strangers.append(Line(sock, f"somebody at {address[0]}", HELLO_BYTES))
        selector.register(sock, selectors.EVENT_READ, strangers[-1])
        if len(strangers) > STRANGERS:
            _send_away(strangers[0], selector, strangers)

    def _ask(
        self,
        line: Line,
        selector: selectors.BaseSelector,
        strangers: list[Line],
        here: dict[int, Line],
        members: Mapping[int, str],
    ) -> None:
        try:
            message = line.poll()
        except LineError:
            return _send_away(line, selector, strangers)
        if message is None:
            return None
        if (
            not isinstance(message, Hello)
            or not secrets.compare_digest(message.epoch.encode(), self.epoch.encode())
            or message.rank not in members
        ):
            return _send_away(line, selector, strangers)
        strangers.remove(line)
        if (before := here.get(message.rank)) is not None:  # it tries again
            selector.unregister(before.sock)
            before.close()
        line.who, line.limit = members[message.rank], FRAME_BYTES
        here[message.rank] = line
        return None

    def close(self) -> None:
        self._listener.close()


def _send_away(line: Line, selector: selectors.BaseSelector, strangers: list[Line]) -> None:
    selector.unregister(line.sock)
    strangers.remove(line)
    line.close()


def excuse(meeting: Meeting, reason: str) -> None:
    """Says in the stead of an engine that cannot come any more that it will not, so that nobody waits for it at the door. Nothing happens
    when the door is closed."""
    with contextlib.suppress(OSError, LineError):
        line = Line(socket.create_connection((meeting.host, meeting.port), SAY_WHY_S), "the trainer")
        line.send(Hello(meeting.epoch, meeting.rank), time.monotonic() + SAY_WHY_S)
        part([line], reason, own=True)


def exchange_of_trainer(lines: list[Line], mine: bytes, until: float) -> tuple[bytes, ...]:
    """Rank 0's part of making everybody's address known to everybody: all of them, by rank. Raises LineError."""
    addresses = gather(lines, Address, until, "the address")
    values = (mine, *(addresses[line.who].value for line in lines))
    for line in lines:
        line.send(Addresses(values), until)
    return values


def exchange_of_engine(lines: list[Line], mine: bytes, until: float) -> tuple[bytes, ...]:
    """The other ranks' part."""
    (line,) = lines
    line.send(Address(mine), until)
    return line.receive(Addresses, until, "the addresses").values
