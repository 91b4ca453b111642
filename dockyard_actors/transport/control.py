"""Control transport: one ROUTER for each lane and kind of address, one DEALER for each peer and lane, all owned by one loop.

It binds ipc paths (flocked, because a second bind would steal the path) and tcp endpoints (CURVE with the run's key and an
allow-list; plain only on loopback and when asked for). It carries opaque envelopes and knows nothing about actors.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import os
import secrets

import zmq

from dockyard_actors.transport import descriptors
from dockyard_actors.transport.base import (
    Address,
    ControlConfig,
    Lane,
    Peer,
    Receiver,
    TransportError,
    host_id,
    ipc_endpoint,
)
from dockyard_actors.transport.control_ports import DealerPort, Link, Loopback, RouterPort, hello_frame
from dockyard_actors.transport.zap import ZAP_DOMAIN, FailedHandshakes, ZapAllowList

log = logging.getLogger("dockyard.transport.control")

_REASONS_MAX = 50  # kinds of bad frames that are logged once each: strangers choose the texts
_TEXT_MAX = 200  # characters of a stranger's text in the log
_IPC_PATH_MAX = 107  # bytes in sockaddr_un.sun_path, without the final zero


class ZmqControl:
    """See `base.ControlTransport`. Build it on the loop that will own it; `start` binds, `close` leaves no file or descriptor."""

    def __init__(self, config: ControlConfig, receiver: Receiver) -> None:
        self.config, self.receiver = config, receiver
        self.address = Address(host=host_id(), ipc=config.ipc_prefix)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # made by the first socket
        self._routers: list[RouterPort] = []
        self._links: dict[Address, Link] = {}
        self._listeners = descriptors.Listeners(config)
        self._locks: list[tuple[int, str]] = []
        self._zap: ZapAllowList | None = None
        self._handshakes: list[FailedHandshakes] = []
        self._bad_frames = 0
        self._bad_reasons: set[str] = set()
        self._loop_out = Loopback(self, "")
        self._loop_in = Loopback(self, config.uid)
        self._loop_out.other, self._loop_in.other = self._loop_in, self._loop_out
        self._closed = False

    # ------------------------------------------------------------------ opening

    async def start(self) -> None:
        try:
            if self.config.ipc_prefix or self.config.tcp_bind:
                descriptors.require(self.config)
            if self.config.ipc_prefix:
                self._bind_ipc(self.config.ipc_prefix)
            if self.config.tcp_bind:
                self._bind_tcp(self.config.tcp_bind)
            self._listeners.watch()
        except BaseException:
            await self.close()
            raise

    def _bind_ipc(self, prefix: str) -> None:
        for lane in Lane:
            endpoint = ipc_endpoint(prefix, lane)
            path = endpoint.removeprefix("ipc://")
            if len(os.fsencode(path)) > _IPC_PATH_MAX:
                raise TransportError(
                    f"ipc path {path!r} has {len(os.fsencode(path))} bytes and sockets allow {_IPC_PATH_MAX}: "
                    "choose a shorter runtime directory (TMPDIR)"
                )
            self._lock(path)
            self._router(lane, endpoint, curve=False)
            os.chmod(path, 0o600)  # also where the directory is not private

    def _lock(self, path: str) -> None:
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise TransportError(f"ipc path {path!r} is in use by another live process") from None
        self._locks.append((fd, path))

    def _bind_tcp(self, bind: str) -> None:
        host, _, port = bind.removeprefix("tcp://").rpartition(":")
        if not bind.startswith("tcp://") or not host or not port.isdigit():
            raise TransportError(f"tcp bind {bind!r} is not tcp://HOST:PORT")
        if host in ("*", "0.0.0.0", "[::]", "::"):
            raise TransportError(f"tcp bind {bind!r}: name the address that peers connect to, not a wildcard")
        curve = self._needs_curve(host, "listen on")
        if curve:
            assert self.config.keys is not None
            self._zap = ZapAllowList(self._ctx(), {self.config.keys.public})
        control = self._router(Lane.CONTROL, f"tcp://{host}:{port if port != '0' else '*'}", curve)
        user = self._router(Lane.USER, f"tcp://{host}:*", curve)
        self.address = Address(self.address.host, self.address.ipc, (user, control))

    def _needs_curve(self, host: str, verb: str) -> bool:
        """Plain tcp only for loopback and when allowed; everything else needs the run's keys."""
        if self.config.allow_plain_loopback and _is_loopback(host):
            return False
        if self.config.keys is None:
            raise TransportError(
                f"will not {verb} tcp host {host!r} without the run's key file; plain tcp is for loopback with allow_plain_loopback only"
            )
        return True

    def _router(self, lane: Lane, endpoint: str, curve: bool) -> str:
        socket = self._socket(zmq.ROUTER, endpoint)
        socket.router_mandatory = 1
        socket.router_handover = 1  # a peer that reconnects keeps its identity
        if curve:
            assert self.config.keys is not None
            socket.curve_server = True
            socket.curve_publickey = self.config.keys.public.encode()
            socket.curve_secretkey = self.config.keys.secret.encode()
            socket.zap_domain = ZAP_DOMAIN
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise TransportError(f"cannot listen on {endpoint}: {error}") from error
        self._routers.append(RouterPort(self, socket, lane))
        listens = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        if curve:
            self._handshakes.append(FailedHandshakes(socket, listens))
        self._listeners.add(listens)
        return listens

    def _ctx(self) -> zmq.Context[zmq.Socket[bytes]]:
        if self._context is None:
            self._context = zmq.Context()
        return self._context

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._ctx().socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = self.config.hwm_frames
        socket.maxmsgsize = self.config.max_frame_bytes
        socket.handshake_ivl = int(self.config.handshake_s * 1000)
        if endpoint.startswith(
            "tcp://"
        ):  # a host that vanished says nothing; ZMQ's own thread answers, so a busy loop is no silence
            socket.heartbeat_ivl = int(self.config.heartbeat_s * 1000)
            socket.heartbeat_timeout = socket.heartbeat_ttl = int(self.config.heartbeat_timeout_s * 1000)
            socket.tcp_keepalive = 1
        return socket

    # ------------------------------------------------------------------ peers

    def connect(self, address: Address) -> Peer:
        if address == self.address:
            return self._loop_out
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(self, address)
        return link

    def disconnect(self, peer: Peer) -> None:
        if isinstance(peer, Link):
            self._links.pop(peer.address, None)
            peer.flush()
            peer.close(int(self.config.linger_s * 1000))

    def forget(self, uid: str) -> None:
        for router in self._routers:
            router.forget(uid)

    def dial(self, link: Link, lane: Lane) -> DealerPort | descriptors.WaitingPort:
        endpoint = link.address.endpoint(lane, self.address.host)
        host = endpoint.removeprefix("tcp://").rpartition(":")[0] if endpoint.startswith("tcp://") else ""
        curve = bool(host) and self._needs_curve(host, "connect to")
        if descriptors.free() < descriptors.DIAL_NEEDS:
            return descriptors.WaitingPort(link, lane, self.config, lambda: self.dial(link, lane))
        socket = self._socket(zmq.DEALER, endpoint)
        # Random, not the public uid: a stranger must not take it over. One a socket: a ROUTER knows one peer by one id.
        socket.setsockopt(zmq.ROUTING_ID, b"\1" + secrets.token_bytes(15))
        socket.reconnect_ivl = int(self.config.reconnect_s * 1000)
        if curve:
            assert self.config.keys is not None
            socket.curve_serverkey = self.config.keys.public.encode()
            socket.curve_publickey = self.config.keys.public.encode()
            socket.curve_secretkey = self.config.keys.secret.encode()
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise TransportError(f"cannot connect to {endpoint}: {error}") from error
        port = DealerPort(link, socket, lane)
        port.outbox.frames.append((hello_frame(self.config), 0))
        return port

    def pause(self, lane: Lane, paused: bool) -> None:
        for router in self._routers:
            if router.lane == lane and router.paused != paused:
                router.paused = paused
                router.kick()

    def bad_frame(self, sender: str, reason: str) -> None:
        self._bad_frames += 1
        sender, reason = sender[:_TEXT_MAX], reason[:_TEXT_MAX]
        new = reason not in self._bad_reasons and len(self._bad_reasons) < _REASONS_MAX
        if new:
            self._bad_reasons.add(reason)
        level = logging.WARNING if new else logging.DEBUG  # a flood must not fill the disk
        log.log(level, "ignored a frame from %s: %r", sender, reason)

    def counters(self) -> dict[str, int]:
        denied = (self._zap.denied if self._zap else 0) + sum(watch.failed for watch in self._handshakes)
        return {"bad_frames": self._bad_frames, "denied_keys": denied}

    # ------------------------------------------------------------------ closing

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        linger_ms = int(self.config.linger_s * 1000)
        self._listeners.close()
        for watch in self._handshakes:
            watch.close()
        for port in self._routers:
            port.flush()
            port.close(linger_ms)
        for link in list(self._links.values()):
            link.flush()
            link.close(linger_ms)
        if self._zap is not None:
            self._zap.close()
        if self._context is not None:
            self._context.term()  # every socket is closed and lingers at most linger_s, so this cannot hang
        for fd, path in self._locks:
            for name in (path, f"{path}.lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
            os.close(fd)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
