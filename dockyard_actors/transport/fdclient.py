"""How a role process asks the node agent's fd server for memory: the messages, their errors, and a client with deadlines.

A call is one connection, one request, one reply (with descriptors by SCM_RIGHTS), so that nothing stays open between calls and a
fork inherits nothing; only a reader in another pid namespace keeps its connection, whose end is its own. It knows names and sizes
of arenas, not what lies in them.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from dockyard_actors.transport.arena import ArenaFds
from dockyard_actors.transport.tensors import DataPlaneError

COPIES = "copies"  # kind of an arena that goes with its producer: the originals lie elsewhere
MAX_MESSAGE = 128 * 1024  # bytes; a listing of ~500 arenas, below the kernel's smallest usual send buffer


class FdServerGone(DataPlaneError):
    """Nobody answers at the fd server's socket: the node agent is gone or was never there."""


class FdServerTimeout(DataPlaneError, TimeoutError):
    """The node agent's loop did not answer in time."""


class ArenaRefused(DataPlaneError):
    """The server said no; the message says why."""


class ArenaUnknown(ArenaRefused):
    """No such arena (any more)."""


@dataclass(frozen=True)
class FdConfig:
    """Times in seconds."""

    call_s: float = 5.0  # a call is microseconds of work; longer means that the agent's loop hangs
    request_s: float = 5.0  # a connection that sends nothing for so long is closed
    sweep_s: float = 0.5  # how often arenas of dead producers are looked at, in case a releaser died before asking
    lock_wait_s: float = 2.0  # a lock is held for microseconds; longer means that its holder is stopped
    max_bytes: int | None = None  # all arenas together; None = what the machine gives


class Create(msgspec.Struct, frozen=True, tag=True):
    name: str
    kind: str
    owner: str
    data_bytes: int
    block_bytes: int
    blocks: int
    extra: int
    pid: int  # the asker's, as it knows it


class Seal(msgspec.Struct, frozen=True, tag=True):
    name: str


class Open(msgspec.Struct, frozen=True, tag=True):
    name: str
    pid: int  # the asker's, as it knows it


class Drop(msgspec.Struct, frozen=True, tag=True):
    name: str


class Retire(msgspec.Struct, frozen=True, tag=True):
    name: str


class Reap(msgspec.Struct, frozen=True, tag=True):
    name: str


class ListArenas(msgspec.Struct, frozen=True, tag=True):
    pass


class ArenaInfo(msgspec.Struct, frozen=True):
    """One arena, for the live view."""

    name: str
    kind: str  # "slab", "copies" or "weights"
    owner: str  # role that produces into it
    pid: int
    bytes: int
    free: int
    writing: int
    ready: int
    draining: int
    torn: int
    orphaned: bool  # its producer is gone


class Done(msgspec.Struct, frozen=True, tag=True):
    did: bool = True  # False: there was nothing left to do
    fds: int = 0
    reader: int = (
        0  # the server does not know the asker by its pid: it goes by this number while it keeps the connection
    )


class Listing(msgspec.Struct, frozen=True, tag=True):
    arenas: tuple[ArenaInfo, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    why: str
    unknown: bool = False


Request = Create | Seal | Open | Drop | Retire | Reap | ListArenas
Reply = Done | Listing | Refused
_decode_reply = msgspec.msgpack.Decoder(Reply).decode
_encode = msgspec.msgpack.Encoder().encode

# The agent's own loop cannot wait for itself: a client in the thread that serves `path` calls the server directly.
# (path, pid, thread) -> FdServer.handle
SERVED_HERE: dict[tuple[str, int, int], Callable[[Request, int], tuple[Reply, list[int]]]] = {}


class FdClient:
    """Asks the fd server at `path`. Calls block for at most `call_s`; no connection stays open between them.

    Errors: `FdServerGone`, `FdServerTimeout`, `ArenaRefused`, `ArenaUnknown`.
    """

    def __init__(self, path: str, call_s: float = FdConfig.call_s) -> None:
        self.path = path
        self.call_s = call_s

    def create_arena(
        self,
        name: str,
        data_bytes: int,
        block_bytes: int,
        *,
        blocks: int | None = None,
        kind: str = "slab",
        owner: str = "",
        extra: int = 0,
    ) -> ArenaFds:
        """New memory, this process its producer. Sizes in bytes, multiples of the page; `blocks` as many as fit."""
        count = data_bytes // block_bytes if blocks is None else blocks
        _, fds = self._call(Create(name, kind, owner, data_bytes, block_bytes, count, extra, os.getpid()))
        return ArenaFds(*fds)

    def seal_arena(self, name: str) -> None:
        """Refuse writable mappings from now on. The producer calls it once it has mapped the memory."""
        self._call(Seal(name))

    def open_arena(self, name: str) -> ArenaFds:
        """Descriptors of a sealed arena: data (maps read-only), ctl, bell."""
        reply, fds = self._call(Open(name, os.getpid()))
        return ArenaFds(*fds, reader=reply.reader if isinstance(reply, Done) else 0)

    def drop_arena(self, name: str) -> bool:
        """Let go of the arena whatever it holds. False when it was gone already."""
        return self._did(Drop(name))

    def retire_arena(self, name: str) -> bool:
        """The producer writes no more: drop now if nothing is readable, else with the last release. True if dropped."""
        return self._did(Retire(name))

    def reap_arena(self, name: str) -> bool:
        """Asked by whoever released the last block of an arena without producer. True when this dropped it."""
        return self._did(Reap(name))

    def list_arenas(self) -> tuple[ArenaInfo, ...]:
        reply, _ = self._call(ListArenas())
        assert isinstance(reply, Listing)
        return reply.arenas

    def _did(self, request: Request) -> bool:
        reply, _ = self._call(request)
        return isinstance(reply, Done) and reply.did

    def _call(self, request: Request) -> tuple[Reply, list[int]]:
        handle = SERVED_HERE.get((self.path, os.getpid(), threading.get_ident()))
        if handle is not None:
            reply, kept = handle(request, os.getpid())
            fds = [os.dup(fd) for fd in kept]
        else:
            reply, fds = self._ask(request)
        if isinstance(reply, Refused):
            raise (ArenaUnknown if reply.unknown else ArenaRefused)(reply.why)
        return reply, fds

    def _ask(self, request: Request) -> tuple[Reply, list[int]]:
        what = f"process {os.getpid()} asked the fd server at {self.path} for {type(request).__name__}"
        deadline = time.monotonic() + self.call_s
        fds = array.array("i")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
            try:
                while True:
                    connection.settimeout(max(deadline - time.monotonic(), 0.001))
                    try:
                        connection.connect(self.path)
                        break
                    except BlockingIOError:  # its backlog is full, and unix sockets offer nothing to wait on
                        if time.monotonic() >= deadline:
                            raise TimeoutError from None
                        time.sleep(0.001)
                _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if uid != os.geteuid():
                    raise ArenaRefused(f"the fd server at {self.path} belongs to uid {uid}, not {os.geteuid()}")
                connection.send(_encode(request))
                space = socket.CMSG_SPACE(3 * array.array("i").itemsize)
                payload, ancillary, _, _ = connection.recvmsg(MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
            except TimeoutError:
                raise FdServerTimeout(f"{what}: no answer within {self.call_s:.3g} s") from None
            except (ConnectionError, FileNotFoundError, PermissionError) as error:
                raise FdServerGone(f"{what}: {error}") from error
            try:
                for level, kind, data in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                if not payload:
                    raise FdServerGone(f"{what}: it hung up without an answer")
                reply = _decode_reply(payload)
                if isinstance(reply, Done) and reply.fds != len(fds):
                    raise FdServerGone(
                        f"{what}: {reply.fds} descriptors expected, {len(fds)} received (open file limit?)"
                    )
            except BaseException:
                for fd in fds:
                    os.close(fd)
                raise
            kept = [connection.detach()] if isinstance(reply, Done) and reply.reader else []
        return reply, [*fds, *kept]
