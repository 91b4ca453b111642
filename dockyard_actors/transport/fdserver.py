"""The node agent's safe for arena descriptors: what is sealed here outlives its producer and every reader.

`FdServer` runs in the agent's event loop, creates each arena's memory before its first use and holds it until the producer is gone
*and* the last block was released. It answers over a SOCK_SEQPACKET socket in the run's private directory and refuses peers of
another uid. It does not know what blocks hold, and never waits for a client.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import mmap
import os
import re
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dockyard_actors.transport.arena import DROPPED, ArenaFds, ArenaLocked, ControlPage, State
from dockyard_actors.transport.fdclient import (
    COPIES,
    MAX_MESSAGE,
    SERVED_HERE,
    ArenaInfo,
    ArenaRefused,
    ArenaUnknown,
    Create,
    Done,
    Drop,
    FdClient,
    FdConfig,
    FdServerGone,
    FdServerTimeout,
    ListArenas,
    Listing,
    Open,
    Reap,
    Refused,
    Reply,
    Request,
    Retire,
    Seal,
)

__all__ = [
    "ArenaInfo",
    "ArenaRefused",
    "ArenaUnknown",
    "FdClient",
    "FdConfig",
    "FdServer",
    "FdServerGone",
    "FdServerStats",
    "FdServerTimeout",
]

log = logging.getLogger(__name__)

SOCKET_NAME = "fds.sock"
_MAX_PATH = 107  # bytes of sun_path without its NUL
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since 5.1; Python 3.11 has no name for it
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,120}")
_decode_request = msgspec.msgpack.Decoder(Request).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class FdServerStats:
    arenas: int
    bytes: int
    orphaned: int  # arenas kept only for blocks that nobody released yet
    dropped: int  # arenas let go since the start
    refused: int  # peers and requests turned away


class _Arena:
    def __init__(self, request: Create, pid: int, lock_wait_s: float) -> None:
        self.name, self.kind, self.owner, self.pid = request.name, request.kind, request.owner, pid
        self.bytes = request.data_bytes
        self.foreign = request.pid != pid  # it looks for its readers by their pids, in another pid namespace than ours
        self.sealed = self.orphaned = False
        self.fds = ArenaFds(-1, -1, -1)
        try:
            # The names show in /proc/<pid>/maps.
            for field, size in (("data", request.data_bytes), ("ctl", ControlPage.bytes_for(request.blocks))):
                fd = os.memfd_create(f"dockyard-{field}:{self.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                setattr(self.fds, field, fd)
                os.ftruncate(fd, size)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.fds.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            ControlPage.format(
                self.fds.ctl, request.blocks, request.block_bytes, request.data_bytes, pid, request.extra
            )
            self.page = ControlPage(os.dup(self.fds.ctl), lock_wait_s)
        except BaseException:
            self.fds.close()
            raise

    def seal(self) -> None:
        # From here on the memory can only be mapped read-only; the producer's own mapping stays writable.
        fcntl.fcntl(self.fds.data, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self.sealed = True

    def close(self) -> None:
        self.page.set_flag(DROPPED)
        self.page.close()
        self.fds.close()

    def info(self) -> ArenaInfo:
        counts = self.page.counts()
        return ArenaInfo(
            self.name,
            self.kind,
            self.owner,
            self.pid,
            self.bytes,
            free=counts[State.FREE],
            writing=counts[State.WRITING],
            ready=counts[State.READY],
            draining=counts[State.DRAINING],
            torn=counts[State.TORN],
            orphaned=self.orphaned,
        )


class FdServer:
    """Holds arenas. `start()` needs a running loop; `close()` lets go of everything and removes the socket."""

    def __init__(self, runtime_dir: Path, config: FdConfig | None = None) -> None:
        self.path = str(runtime_dir / SOCKET_NAME)
        self._config = config or FdConfig()
        self._arenas: dict[str, _Arena] = {}
        self._producers: dict[int, int] = {}  # pid -> pidfd
        self._connections: dict[socket.socket, asyncio.TimerHandle] = {}
        self._readers = 0  # numbers given so far
        self._sweeper: asyncio.TimerHandle | None = None
        self._listener: socket.socket | None = None
        self._bind_lock = -1
        self._dropped = self._refused = 0

    async def start(self) -> None:
        directory = Path(self.path).parent
        status = directory.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"runtime directory {directory} must belong to this user with mode 0700")
        if len(os.fsencode(self.path)) > _MAX_PATH:
            raise ValueError(
                f"socket path {self.path} is longer than {_MAX_PATH} bytes: use a shorter runtime directory"
            )
        self._loop = asyncio.get_running_loop()
        self._bind_lock = os.open(self.path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._bind_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._bind_lock)
            self._bind_lock = -1
            raise OSError(f"another fd server already serves {self.path}") from None
        Path(self.path).unlink(missing_ok=True)  # we hold the lock, so whatever lies there is of a dead server
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._listen()
        self._here = (self.path, os.getpid(), threading.get_ident())
        SERVED_HERE[self._here] = self.handle

    async def close(self) -> None:
        """Idempotent. Mappings that processes already have stay valid until they let go."""
        if self._listener is None:
            return
        del SERVED_HERE[self._here]
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        for connection in list(self._connections):
            self._hang_up(connection)
        for name in list(self._arenas):
            self._drop(name)
        if self._sweeper is not None:
            self._sweeper.cancel()
        Path(self.path).unlink(missing_ok=True)
        Path(self.path + ".lock").unlink(missing_ok=True)
        os.close(self._bind_lock)

    def stats(self) -> FdServerStats:
        arenas = self._arenas.values()
        orphaned = sum(arena.orphaned for arena in arenas)
        return FdServerStats(len(arenas), sum(a.bytes for a in arenas), orphaned, self._dropped, self._refused)

    def arenas(self) -> list[ArenaInfo]:
        return [arena.info() for arena in self._arenas.values()]

    # -- connections
    def _listen(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the peer went away between the wake-up and the accept
        except OSError as error:
            # Out of descriptors, most likely. The listener stays readable, so look away for a while instead of spinning.
            log.error("fd server: cannot accept: %s; again in %.3g s", error, self._config.sweep_s)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(self._config.sweep_s, self._listen)
            return
        connection.setblocking(False)
        expiry = self._loop.call_later(self._config.request_s, self._hang_up, connection)
        self._connections[connection] = expiry
        self._loop.add_reader(connection.fileno(), self._serve, connection)

    def _hang_up(self, connection: socket.socket) -> None:
        self._connections.pop(connection).cancel()
        self._loop.remove_reader(connection.fileno())
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """One request, one reply, then the connection ends: clients keep nothing open, but for readers that we know by nothing else."""
        reply: Reply | None = None
        try:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, uid, _ = struct.unpack("iII", credentials)
            payload = connection.recv(MAX_MESSAGE)
            if payload:
                reply, fds = self._answer(connection, payload, pid, uid)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                connection.sendmsg([_encode(reply)], ancillary)
        except OSError as error:  # the client notices: it gets no reply
            reply = None
            log.warning("fd server: a request went unanswered: %r", error)
        finally:
            if not (isinstance(reply, Done) and reply.reader):
                self._hang_up(connection)

    def _watch_reader(self, connection: socket.socket, arena: _Arena, reader: int) -> None:
        """Its pid says nothing here, so that the end of its connection has to say when it is dead."""

        def ended() -> None:
            self._hang_up(connection)
            if self._arenas.get(arena.name) is arena:
                arena.page.leases.end(reader)
                os.eventfd_write(arena.fds.bell, 1)  # its producer may be waiting for it
                self._reap(arena)

        self._connections[connection].cancel()
        self._loop.remove_reader(connection.fileno())
        self._loop.add_reader(connection.fileno(), ended)

    def _answer(self, connection: socket.socket, payload: bytes, pid: int, uid: int) -> tuple[Reply, list[int]]:
        if uid != os.geteuid():
            self._refused += 1
            log.warning("fd server: refused a peer of uid %d (pid %d)", uid, pid)
            return Refused(f"uid {uid} may not use the arenas of uid {os.geteuid()}"), []
        try:
            request = _decode_request(payload)
        except msgspec.MsgspecError as error:
            self._refused += 1
            return Refused(f"malformed request: {error}"), []
        if pid == 0 and isinstance(request, Create):
            self._refused += 1
            return Refused("the producer lives in another pid namespace: its death could not be noticed"), []
        reply, fds = self.handle(request, pid)
        if isinstance(request, Open) and fds:
            arena = self._arenas[request.name]
            if arena.foreign or request.pid != pid:
                self._readers += 1
                self._watch_reader(connection, arena, self._readers)
                reply = Done(fds=len(fds), reader=self._readers)
        return reply, fds

    # -- requests
    def handle(self, request: Request, pid: int) -> tuple[Reply, list[int]]:
        """Answer one request of process `pid`: the reply, and descriptors (still the server's) to send along."""
        if isinstance(request, ListArenas):
            return Listing(tuple(self.arenas())), []
        if isinstance(request, Create):
            return self._create(request, pid)
        arena = self._arenas.get(request.name)
        if arena is None:
            if isinstance(request, (Drop, Retire, Reap)):
                return Done(did=False), []  # what it asks for is already so
            return Refused(f"no arena {request.name}: never created, or dropped with its last block", unknown=True), []
        match request:
            case Seal():
                if pid != arena.pid:
                    return Refused(f"arena {arena.name} is of process {arena.pid}, not {pid}"), []
                arena.seal()
                return Done(), []
            case Open():
                if not arena.sealed:
                    return Refused(f"arena {arena.name} is still being set up by process {arena.pid}"), []
                return Done(fds=3), [arena.fds.data, arena.fds.ctl, arena.fds.bell]
            case Drop():
                self._drop(arena.name)
                return Done(), []
            case Retire():
                if pid != arena.pid:
                    return Refused(f"arena {arena.name} is of process {arena.pid}, not {pid}"), []
                self._orphan(arena)
                return Done(did=arena.name not in self._arenas), []
            case Reap():
                self._reap(arena)
                return Done(did=arena.name not in self._arenas), []

    def _create(self, request: Create, pid: int) -> tuple[Reply, list[int]]:
        if not _NAME.fullmatch(request.name):
            return Refused(f"arena name {request.name!r} must match {_NAME.pattern}"), []
        if request.name in self._arenas:
            return Refused(f"arena {request.name} exists already: every producer makes its own"), []
        sizes_fit = 0 < request.blocks * request.block_bytes <= request.data_bytes
        if not sizes_fit or request.block_bytes % mmap.PAGESIZE or request.data_bytes % mmap.PAGESIZE:
            return Refused(
                f"{request.blocks} blocks of {request.block_bytes} bytes do not divide {request.data_bytes} bytes "
                f"into whole pages of {mmap.PAGESIZE}"
            ), []
        held = sum(arena.bytes for arena in self._arenas.values())
        limit = self._config.max_bytes
        if limit is not None and held + request.data_bytes > limit:
            return Refused(
                f"{request.data_bytes} bytes for {request.name} on top of {held} exceed the limit of {limit}: lower "
                "data_plane.blocks or raise the fd server's max_bytes"
            ), []
        try:
            self._watch(pid)
            arena = _Arena(request, pid, self._config.lock_wait_s)
        except OSError as error:
            self._unwatch(pid)
            return Refused(f"cannot create arena {request.name}: {error}"), []
        self._arenas[arena.name] = arena
        return Done(fds=3), [arena.fds.data, arena.fds.ctl, arena.fds.bell]

    # -- the end of producers and of arenas
    def _watch(self, pid: int) -> None:
        if pid not in self._producers:
            self._producers[pid] = pidfd = os.pidfd_open(pid)
            self._loop.add_reader(pidfd, self._died, pid)

    def _unwatch(self, pid: int) -> None:
        if pid in self._producers and not any(a.pid == pid and not a.orphaned for a in self._arenas.values()):
            pidfd = self._producers.pop(pid)
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def _died(self, pid: int) -> None:
        for arena in [arena for arena in self._arenas.values() if arena.pid == pid]:
            log.info("fd server: producer %s (pid %d) of arena %s died", arena.owner, pid, arena.name)
            self._orphan(arena)
        self._unwatch(pid)

    def _orphan(self, arena: _Arena) -> None:
        arena.orphaned = True
        if arena.kind == COPIES:
            self._drop(arena.name)
            return
        self._reap(arena)
        self._unwatch(arena.pid)

    def _reap(self, arena: _Arena) -> None:
        """Drop the arena if its producer is gone and nothing in it is readable; else look again later."""
        if not arena.orphaned:
            return
        try:
            arena.page.orphan(wait_s=0.0)  # never wait in the agent's loop
        except ArenaLocked:
            pass  # the sweep repeats this, well after the holder's microseconds
        else:
            if arena.page.drained():
                self._drop(arena.name)
                return
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._config.sweep_s, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        for arena in list(self._arenas.values()):
            self._reap(arena)

    def _drop(self, name: str) -> None:
        arena = self._arenas.pop(name)
        arena.close()
        self._dropped += 1
        self._unwatch(arena.pid)
