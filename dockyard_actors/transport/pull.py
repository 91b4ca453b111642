"""How a block travels to another host: the words both ends exchange, the proof that they belong to one run, and what can go wrong.

The consumer dials the other host's pull server, both prove that they know the run's cookie (it never travels), and then it asks for
blocks by descriptor. Bulk bytes follow on the same connection (`tcp`) or by UCX to the worker address said in the proof (`ucx`).
The bytes themselves are not encrypted. Knows no roles, and nothing of where the bytes end up.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.util
import logging
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from dockyard_actors.transport.tensors import DataPlaneError

log = logging.getLogger(__name__)

MAJOR = 1  # peers that speak another one are refused
MAX_WORD = 64 << 10  # bytes of one message that is not bulk
NONCE = 16  # bytes
_LENGTH = struct.Struct("!I")

Backend = Literal["ucx", "tcp"]


class PullError(DataPlaneError):
    """Base of what can go wrong between hosts."""


class BadAddress(PullError, ValueError):
    """Not the address of a pull server."""


class PeerUnreachable(PullError, ConnectionError):
    """Nobody listens at the address, or there is no way to it."""


class PeerLost(PullError, ConnectionError):
    """The other end, or the way to it, went away in the middle."""


class HostLost(PullError, ConnectionError):
    """The run knows that the host is gone, and with it all that lay in its memory."""


class PullTimeout(PullError, TimeoutError):
    """A transfer did not end before its deadline: the other end is stopped, or the link is cut or too slow."""


class NotOfThisRun(PullError, PermissionError):
    """The other end does not know this run's cookie."""


class ShortBuffer(PullError):
    """Sender and receiver disagree on how many bytes a transfer has."""


class NoBackend(PullError, ValueError):
    """The configuration asks for a way to move bytes that is not there."""


@dataclass(frozen=True)
class PullConfig:
    """Times in seconds. Both ends use it; the server ignores what only concerns the asking side."""

    backend: Literal["auto", "ucx", "tcp"] = "auto"  # auto: UCX where both ends have it, else TCP, and the log says so
    bind: str = "127.0.0.1:0"  # HOST:PORT of the server; port 0: any
    transfer_s: float = 120.0  # one block, all attempts together
    release_s: float = 5.0  # one block on its own host; a message and its answer
    attempts: int = 3  # after a lost connection the next one is another attempt, with a tag of its own
    retry_s: float = 0.05  # before the next attempt; doubles
    handshake_s: float = 5.0  # strangers that connect and say nothing are cut after this
    silence_s: float = 30.0  # a connection whose other host answers no probe for so long is dead
    connections: int = 64  # a server's limit; one connection carries one block at a time
    pulls: int = 4  # of a consumer at the same time


class Choice(NamedTuple):
    backend: Backend
    why: str


def choose_backend(configured: Literal["auto", "ucx", "tcp"]) -> Choice:
    """What this process will use, and why. `NoBackend` when UCX is asked for and absent."""
    if configured == "tcp":
        return Choice("tcp", "configured")
    if importlib.util.find_spec("ucxx") is not None:
        return Choice("ucx", "installed" if configured == "auto" else "configured")
    if configured == "ucx":
        raise NoBackend("data_plane.backend is ucx, and ucxx is not installed: make setup EXTRAS=ucx, or set it to tcp")
    return Choice("tcp", "ucxx is not installed (make setup EXTRAS=ucx)")


# ---------------------------------------------------------------------- words


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Server, at once."""

    nonce: bytes
    backends: tuple[Backend, ...]
    major: int = MAJOR


class Prove(msgspec.Struct, frozen=True, tag=True):
    """Client. The mac covers both nonces, the backend and the address, so that UCX never parses a stranger's address."""

    nonce: bytes
    mac: bytes
    backend: Backend
    address: bytes = b""  # of the client's UCX worker


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Server."""

    mac: bytes
    address: bytes = b""  # of the server's UCX worker


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Client: send this block. `within_s` is what is left of its deadline."""

    arena: str
    block: int
    generation: int
    nbytes: int
    tag: int  # of this attempt alone
    within_s: float


class Sending(msgspec.Struct, frozen=True, tag=True):
    """Server: so many bytes follow (tcp) or are on their way under the tag (ucx)."""

    tag: int
    nbytes: int


class Got(msgspec.Struct, frozen=True, tag=True):
    """Client: the bytes are here; the block may go."""

    tag: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Client: free the block."""

    arena: str
    block: int
    generation: int


class Released(msgspec.Struct, frozen=True, tag=True):
    did: bool


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Server: no. `kind` is the name of the error that the asker raises."""

    kind: str
    why: str


Word = Hello | Prove | Welcome | Pull | Sending | Got | Release | Released | Failed
_decode = msgspec.msgpack.Decoder(Word).decode
_encode = msgspec.msgpack.Encoder().encode


def proof(cookie: str, side: Literal["client", "server"], hello: Hello, prove: Prove, address: bytes) -> bytes:
    """What only a holder of the cookie can say in this conversation."""
    said = msgspec.msgpack.encode((side, MAJOR, hello.nonce, prove.nonce, prove.backend, prove.address, address))
    return hmac.digest(cookie.encode(), said, "sha256")


def nonce() -> bytes:
    return secrets.token_bytes(NONCE)


# ---------------------------------------------------------------------- a connection


class Deadline:
    """So many seconds from now, shared by all steps of one thing. `what` names it in errors."""

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self.what = what

    def left(self, so_far: str = "") -> float:
        """Seconds, more than 0; else `PullTimeout`."""
        if (left := self._ends - time.monotonic()) > 0:
            return left
        raise self.passed(so_far)

    def passed(self, so_far: str = "") -> PullTimeout:
        return PullTimeout(f"{self.what}: not done within {self._seconds:.3g} s{so_far and ', ' + so_far}")


class Connection:
    """Words and bulk over one TCP socket, each step bounded by a deadline. `PeerLost` and `PullTimeout` alone come out."""

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        self.sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s / 4)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(silence_s / 4)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))
        host, port = sock.getpeername()[:2]
        self.peer = f"{host}:{port}"
        self.here: str = sock.getsockname()[0]  # the address of ours that the connection goes over

    def say(self, word: Word, deadline: Deadline) -> None:
        payload = _encode(word)
        self.send(memoryview(_LENGTH.pack(len(payload)) + payload), deadline)

    def hear(self, deadline: Deadline | None) -> Word:
        """The next word; without a deadline it may take for ever, as between two requests."""
        head = bytearray(_LENGTH.size)
        self.receive(memoryview(head), deadline)
        (length,) = _LENGTH.unpack(head)
        if length > MAX_WORD:
            raise PeerLost(f"{self.peer} announced a message of {length} bytes: it does not speak this protocol")
        payload = bytearray(length)
        self.receive(memoryview(payload), deadline)
        try:
            return _decode(payload)
        except msgspec.MsgspecError as error:
            raise PeerLost(f"{self.peer} does not speak this protocol: {error}") from None

    def send(self, data: memoryview, deadline: Deadline) -> None:
        sent, total = 0, len(data)
        try:
            while sent < total:
                self.sock.settimeout(deadline.left(f"{sent} of {total} bytes sent"))
                sent += self.sock.send(data[sent:])
        except TimeoutError:
            raise deadline.passed(f"{sent} of {total} bytes sent") from None
        except OSError as error:
            raise PeerLost(f"{self.peer} was lost after {sent} of {total} bytes sent: {error}") from None

    def receive(self, into: memoryview, deadline: Deadline | None) -> None:
        """Fill `into` from the socket, without a copy in between."""
        got, total = 0, len(into)
        try:
            self.sock.settimeout(None)
            while got < total:
                if deadline is not None:
                    self.sock.settimeout(deadline.left(f"{got} of {total} bytes received"))
                if (count := self.sock.recv_into(into[got:])) == 0:
                    raise PeerLost(f"{self.peer} hung up after {got} of {total} bytes")
                got += count
        except TimeoutError:
            assert deadline is not None
            raise deadline.passed(f"{got} of {total} bytes received") from None
        except PeerLost:
            raise
        except OSError as error:
            raise PeerLost(f"{self.peer} was lost after {got} of {total} bytes received: {error}") from None

    def close(self) -> None:
        """Idempotent; a thread that waits for the other end is woken."""
        with contextlib.suppress(OSError):  # not connected any more
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def parse_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` → both. `BadAddress` on anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise BadAddress(f"{address!r} is not HOST:PORT of a pull server")
    return host.strip("[]"), int(port)
