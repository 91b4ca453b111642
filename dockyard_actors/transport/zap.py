"""ZAP on the event loop: lets in only clients that prove one of the allowed CURVE keys.

Without a ZAP handler a CURVE server accepts any client key; this one refuses everything that is not CURVE with a known key.
"""

from __future__ import annotations

import asyncio
import logging

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger("dockyard.transport.control")

ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27
ZAP_DOMAIN = b"dockyard"


class ZapAllowList:
    """Answers the authentication requests of one ZMQ context. Must be open before a CURVE socket of it binds."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], public_keys: set[str]) -> None:
        self.allowed = {key.encode() for key in public_keys}
        self.denied = 0
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(ZAP_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._serve)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close(0)

    def _serve(self) -> None:
        while True:  # until empty: the descriptor is edge-triggered, and a send may eat the edge
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            split = frames.index(b"") + 1
            head, request = frames[:split], frames[split:]
            # version, request id, domain, address, identity, mechanism, credentials...
            version, request_id, domain, address, _, mechanism, *credentials = request
            known = (
                domain == ZAP_DOMAIN
                and mechanism == b"CURVE"
                and len(credentials) == 1
                and z85.encode(credentials[0]) in self.allowed
            )
            if not known:
                self.denied += 1
                often = (
                    self.denied.bit_count() == 1
                )  # the 1st, 2nd, 4th, 8th …: who tries for ever must not fill the disk
                log.log(
                    logging.WARNING if often else logging.DEBUG,
                    "refused a %s connection from %s: its key is not this run's (%d so far)",
                    *(mechanism.decode(), address.decode(), self.denied),
                )
            status = (b"200", b"OK", b"run") if known else (b"400", b"unknown key", b"")
            self._socket.send_multipart([*head, version, request_id, *status, b""])


_FAILED = int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL)


class FailedHandshakes:
    """Counts and logs who never gets as far as ZAP: a client that has another run's key file cannot even greet a CURVE socket."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self.failed = 0
        self._watched, self._endpoint = socket, endpoint
        self._events = socket.get_monitor_socket(_FAILED)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._events.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)
        self._read()  # what came before the reader has had its edge

    def close(self) -> None:
        """Before the watched socket is closed."""
        self._loop.remove_reader(self._fd)
        self._watched.disable_monitor()
        self._events.close(0)

    def _read(self) -> None:
        while True:  # until empty, as above
            try:
                parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.failed += 1
            often = self.failed.bit_count() == 1
            log.log(
                logging.WARNING if often else logging.DEBUG,
                "refused a connection to %s in its handshake: it has the key file of another run, or none (%d so far)",
                *(self._endpoint, self.failed),
            )
