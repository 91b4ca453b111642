"""What the runtime may know about a control transport: addresses, lanes, peers, and how to open one.

A transport carries opaque envelopes between processes, first in first out for each peer and lane, and says when it cannot.
It knows nothing about actors, names or message types.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

PROTOCOL_MAJOR = 1  # peers with another major are refused at hello
PROTOCOL_MINOR = 1  # 1: whoever is not known is asked for its hello again


class TransportError(Exception):
    """A transport cannot be opened or used as asked; the text names the value and the way out."""


class Lane(enum.IntEnum):
    """Two sockets for each process: a flood on USER cannot delay CONTROL."""

    USER = 0
    CONTROL = 1


class Address(msgspec.Struct, frozen=True):
    """Where a process listens. ``ipc`` is a path prefix for peers on the same host, ``tcp`` has one endpoint for each lane."""

    host: str = ""  # host id (see `host_id`); empty when unknown: then ipc is taken if there is one
    ipc: str = ""
    tcp: tuple[str, str] = ("", "")

    @property
    def interface(self) -> str:
        """The host part of the tcp endpoints, where other hosts reach this process; loopback when it listens on none."""
        return self.tcp[Lane.CONTROL].removeprefix("tcp://").rpartition(":")[0].strip("[]") or "127.0.0.1"

    def endpoint(self, lane: Lane, here: str) -> str:
        """The ZMQ endpoint a peer on host ``here`` connects to; TransportError when there is no way."""
        if self.ipc and self.host in ("", here):
            return ipc_endpoint(self.ipc, lane)
        if self.tcp[lane]:
            return self.tcp[lane]
        raise TransportError(
            f"no way from host {here!r} to {self}: it listens only on ipc paths of its own host; give its agent a tcp:// rendezvous"
        )


def ipc_endpoint(prefix: str, lane: Lane) -> str:
    return f"ipc://{prefix}{'uc'[lane]}"


def parse_rendezvous(text: str) -> Address:
    """``ipc://PATH_PREFIX`` or ``tcp://HOST:PORT`` (the control lane's port). Raises TransportError on anything else."""
    scheme, _, rest = text.partition("://")
    if scheme == "ipc" and rest.startswith("/"):
        return Address(ipc=rest)
    if scheme == "tcp" and rest.rpartition(":")[0] and rest.rpartition(":")[2].isdigit():
        return Address(tcp=("", text))
    raise TransportError(f"rendezvous {text!r} is neither ipc:///PATH nor tcp://HOST:PORT")


def host_id() -> str:
    """Identity of this host: boot id with the network and pid namespaces, so that two containers are two hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = (os.readlink(f"/proc/self/ns/{kind}").partition("[")[2].rstrip("]") for kind in ("net", "pid"))
    return "-".join((boot, *spaces))


class Peer(Protocol):
    """The other end of a connection."""

    @property
    def uid(self) -> str:
        """Process uid that the peer said at hello; empty for a connection that we opened."""
        ...

    def send(self, lane: Lane, envelope: bytes) -> None:
        """Queues one envelope; it leaves in the same loop tick, packed with the others. TransportError when it is too large."""
        ...


class Receiver(Protocol):
    """What a transport calls, always on the loop's thread."""

    def on_envelope(self, peer: Peer, lane: Lane, envelope: memoryview) -> None: ...

    def on_undeliverable(self, peer: Peer, lane: Lane, envelopes: int, reason: str) -> None:
        """So many queued envelopes will never reach the peer."""
        ...

    def on_refused(self, peer: Peer, reason: str) -> None:
        """The peer refused our hello; nothing sent to it was handled."""
        ...

    def on_fault(self, error: BaseException) -> None:
        """The transport itself broke: the process should end with this cause."""
        ...


class ControlTransport(Protocol):
    address: Address

    async def start(self) -> None: ...
    def connect(self, address: Address) -> Peer: ...
    def disconnect(self, peer: Peer) -> None:
        """Closes our connection to a peer that is gone, after giving what was queued ``linger_s`` to leave."""
        ...

    def forget(self, uid: str) -> None:
        """Drops what is kept for a process that is gone and had connected to us."""
        ...

    def pause(self, lane: Lane, paused: bool) -> None:
        """Stops (or resumes) reading requests of a lane; replies on connections that we opened keep flowing."""
        ...

    def counters(self) -> dict[str, int]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class RunKeys:
    """One key pair and one cookie for a run, shared by its processes through a file that only its owner can read."""

    public: str  # z85
    secret: str  # z85
    cookie: str  # said at hello on every connection


@dataclass(frozen=True)
class ControlConfig:
    """Settings of one process's control transport. No prefix and no tcp bind: reachable only from inside the process."""

    uid: str
    ipc_prefix: str = ""
    tcp_bind: str = ""  # "tcp://HOST:PORT" of the control lane (port 0: any); the user lane takes any free port
    keys: RunKeys | None = None
    allow_plain_loopback: bool = False  # tcp without CURVE, loopback only: for tests and debugging
    max_frame_bytes: int = 16 << 20  # MAXMSGSIZE; bulk data has its own plane
    frame_bytes: int = 1 << 20  # a packed frame closes at this size
    frame_envelopes: int = 32  # ... or at this many envelopes: the peer begins while the rest is still being made
    hwm_frames: int = (
        1000  # per peer and direction; what does not fit stays queued in the sender, whose windows bound it
    )
    drain_frames: int = 64  # frames read from one socket before the loop may do something else
    linger_s: float = 0.2  # at close, time for the last frames to leave; 0 would drop a final reply
    retry_s: float = 0.005  # a peer whose pipe is full is tried again after this (ROUTER cannot tell when it has room)
    reconnect_s: float = 0.05  # first try of a lost connection; ZMQ's default of 0.1 is felt at every restart
    heartbeat_s: float = 2.0  # over tcp, how often ZMQ asks whether the other end is there
    heartbeat_timeout_s: float = 6.0  # ... and after how much silence it dials anew: half-open connections say nothing
    process: str = ""  # its name, said to peers that are refused
    spare_descriptors: int = 32  # with fewer free ones nobody new may connect: ZMQ spins or aborts when it finds none
    descriptors_every_s: float = 0.2  # how often they are counted, which takes microseconds
    handshake_s: float = 5.0  # strangers who connect and say nothing are cut after this (ZMQ's default is 30)


def open_control(config: ControlConfig, receiver: Receiver) -> ControlTransport:
    """The control transport of this process (ZMQ); `start` binds it. Raises TransportError for refused settings."""
    from dockyard_actors.transport.control import ZmqControl

    return ZmqControl(config, receiver)


def create_keys(path: Path) -> RunKeys:
    """Makes a run's keys and writes them to ``path`` (mode 0600, must not exist yet)."""
    from dockyard_actors.transport import keys

    return keys.create(path)


def load_keys(path: Path) -> RunKeys:
    """Reads a run's key file; TransportError when it is missing, malformed or readable by others."""
    from dockyard_actors.transport import keys

    return keys.load(path)
