"""What happens when a process runs out of descriptors: listeners rest before the last ones are taken, and dialling waits.

ZMQ's own thread accepts connections. Without a descriptor for one, its tcp listener tries again without a pause (a whole core) and
its ipc listener aborts the process, so a few are kept free for it. It knows nothing of what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import resource
import socket
import struct
from collections.abc import Callable

from dockyard_actors.transport.base import ControlConfig, Lane, TransportError
from dockyard_actors.transport.control_ports import DealerPort, Link, Outbox

log = logging.getLogger("dockyard.transport.control")

USED_UP = (errno.EMFILE, errno.ENFILE)
_RESTING = "-"  # behind the name of an ipc path that rests
_ATTACH_FILTER, _DETACH_FILTER = (
    26,
    27,
)  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux; the socket module has no names for them
DIAL_NEEDS = 4  # of which a socket takes two: one for its signals, one for its connection
_UNLIMITED = 1 << 30


def free() -> int:
    """Descriptors that this process may still open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return _UNLIMITED
    try:  # Linux 6.2 and later say how many there are; before, they are counted
        used = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        if error.errno in USED_UP:
            return 0
        raise
    return soft - used


def way_out() -> str:
    return (
        f"{os.strerror(errno.EMFILE)} (limit {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}): raise it with ulimit -n"
    )


def require(config: ControlConfig) -> None:
    """Before listening; TransportError when there are too few."""
    left = free()
    if left < config.spare_descriptors:
        raise TransportError(
            f"cannot listen with {left} free descriptors, {config.spare_descriptors} are kept for peers that connect: {way_out()}"
        )


class Listeners:
    """The endpoints that a transport listens on. They rest while descriptors are scarce; connections that exist go on.

    Unbinding would end those (ZMQ owns them with their listener), so a resting ipc path is renamed, and a resting tcp port drops
    what comes for it unseen (newcomers try again within a second or three).
    """

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        self.resting = False
        self._paths: list[str] = []
        self._ports: list[int] = []  # descriptors of listening tcp sockets, which are ZMQ's
        self._timer: asyncio.TimerHandle | None = None

    def add(self, endpoint: str) -> None:
        if endpoint.startswith("ipc://"):
            self._paths.append(endpoint.removeprefix("ipc://"))
        else:
            self._ports.append(_listening(int(endpoint.rpartition(":")[2])))

    def watch(self) -> None:
        if self._paths or self._ports:
            self._timer = asyncio.get_running_loop().call_later(self.config.descriptors_every_s, self._look)

    def close(self) -> None:
        """Before the sockets are closed."""
        if self._timer is not None:
            self._timer.cancel()
        if self.resting:
            self._set(False)

    def _look(self) -> None:
        left, spare = free(), self.config.spare_descriptors
        if left < spare and not self.resting:
            self._set(True)
            log.error("nobody new may connect, only %d descriptors are free: %s", left, way_out())
        elif left >= spare and self.resting:
            self._set(False)
            log.warning("peers may connect again, %d descriptors are free", left)
        self.watch()

    def _set(self, rest: bool) -> None:
        self.resting = rest
        for path in self._paths:
            os.rename(*((path, path + _RESTING) if rest else (path + _RESTING, path)))
        for port in self._ports:
            listener = socket.socket(fileno=port)
            try:
                listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER if rest else _DETACH_FILTER, _drop_all())
            finally:
                listener.detach()


def _listening(port: int) -> int:
    """This process's descriptor of the tcp socket that listens on ``port``."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since, or no socket
            found = socket.socket(fileno=int(name))
            try:
                tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                listens = tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and found.getsockname()[1] == port:
                    return int(name)
            finally:
                found.detach()
    raise TransportError(f"this process has no socket that listens on port {port}")


_NOTHING = ctypes.create_string_buffer(
    struct.pack("HBBI", 0x06, 0, 0, 0)
)  # struct sock_filter: return 0 bytes of every packet


def _drop_all() -> bytes:
    """A `struct sock_fprog` with one instruction."""
    return struct.pack("HP", 1, ctypes.addressof(_NOTHING))


class WaitingPort:
    """Stands where a `DealerPort` will be: keeps envelopes, in order, until there is a descriptor for its socket."""

    kicked = True

    def __init__(
        self, link: Link, lane: Lane, config: ControlConfig, dial: Callable[[], DealerPort | WaitingPort]
    ) -> None:
        self.link, self.lane = link, lane
        self.outbox = Outbox(config)
        self._dial, self._every_s = dial, config.descriptors_every_s
        self._wait()
        log.error("cannot dial %s now, what is for it waits: %s", link.address, way_out())

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._again)

    def _again(self) -> None:
        if free() < DIAL_NEEDS:
            self._wait()
            return
        port = self._dial()
        self.outbox.seal()
        port.outbox.frames.extend(self.outbox.frames)
        self.link.ports[self.lane] = port
        port.kick()

    def kick(self) -> None:
        pass

    def push(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, linger_ms: int) -> None:
        self._timer.cancel()
