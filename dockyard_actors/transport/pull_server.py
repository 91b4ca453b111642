"""The serving end of pulls between hosts: sends sealed blocks of this host's arenas to whoever proves to be of the run.

One per host, beside the fd server whose arenas it opens read-only. A block is leased while it travels, so a release by somebody else
waits for it. Each connection has a thread that blocks; nothing runs in an event loop, and an idle server costs nothing.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from collections import Counter
from collections.abc import Mapping

import numpy as np

from dockyard_actors.transport.attachments import Attachments
from dockyard_actors.transport.fdclient import FdConfig
from dockyard_actors.transport.pull import (
    Backend,
    Choice,
    Connection,
    Deadline,
    Failed,
    Got,
    Hello,
    NotOfThisRun,
    PeerLost,
    Prove,
    Pull,
    PullConfig,
    Release,
    Released,
    Sending,
    ShortBuffer,
    Welcome,
    choose_backend,
    nonce,
    parse_address,
    proof,
)
from dockyard_actors.transport.tensors import DataPlaneError
from dockyard_actors.transport.ucx import Link, UcxEngine

log = logging.getLogger(__name__)


class PullServer:
    """Serves from construction on, at `address`. `OSError` when it cannot bind."""

    def __init__(self, fd_path: str, cookie: str, config: PullConfig | None = None) -> None:
        self._config = config or PullConfig()
        self._fd_path = fd_path
        self._cookie = cookie
        self._attachments = Attachments(FdConfig.lock_wait_s, FdConfig.call_s)
        self.choice: Choice = choose_backend(self._config.backend)
        self._connections: set[Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._sent: Counter[Backend] = Counter()
        self._refused = 0
        host, port = parse_address(self._config.bind)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        bound = self._listener.getsockname()
        self.address = f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="pull-accept", daemon=True)
        self._acceptor.start()
        log.info("pull server at %s, by %s (%s)", self.address, self.choice.backend, self.choice.why)

    @property
    def sent_bytes(self) -> Mapping[Backend, int]:
        """Bulk bytes by what carried them."""
        return dict(self._sent)

    @property
    def refused(self) -> int:
        """Strangers turned away, and connections over the limit."""
        return self._refused

    @property
    def connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """Cut what travels and end. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            open_now, threads = list(self._connections), list(self._threads)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in open_now:
            connection.close()
        for thread in [self._acceptor, *threads]:
            thread.join()
        self._attachments.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
                connection = Connection(sock, self._config.silence_s)
            except OSError as error:
                if self._closed:
                    return
                log.warning("pull server: a connection was not accepted: %s", error)
                continue
            with self._lock:
                if self._closed or len(self._connections) >= self._config.connections:
                    self._refused += 1
                    log.warning("pull server: refused %s: %d connections are open", connection.peer, self.connections)
                    connection.close()
                    continue
                self._connections.add(connection)
                thread = threading.Thread(target=self._serve, args=(connection,), name="pull-serve", daemon=True)
                self._threads.add(thread)
                thread.start()

    def _serve(self, connection: Connection) -> None:
        link: Link | None = None
        try:
            link = self._welcome(connection)
            while True:
                match connection.hear(None):
                    case Pull() as pull:
                        self._send(connection, link, pull)
                    case Release() as release:
                        did = self._attachments.release(release.arena, self._fd_path, release.block, release.generation)
                        connection.say(Released(did), Deadline(self._config.handshake_s, "answering a release"))
                    case other:
                        raise PeerLost(f"{connection.peer} said {type(other).__name__} out of turn")
        except PeerLost as error:
            log.debug("pull server: %s", error)
        except (DataPlaneError, OSError) as error:
            if not self._closed:
                log.warning("pull server: %s: %s", connection.peer, error)
        finally:
            if link is not None:
                link.close()
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                self._threads.discard(threading.current_thread())

    def _welcome(self, connection: Connection) -> Link | None:
        """The link to the client's UCX worker, None for plain TCP. `NotOfThisRun` is said to the stranger, too."""
        deadline = Deadline(self._config.handshake_s, f"the handshake with {connection.peer}")
        hello = Hello(nonce(), ("ucx", "tcp") if self.choice.backend == "ucx" else ("tcp",))
        connection.say(hello, deadline)
        prove = connection.hear(deadline)
        if not isinstance(prove, Prove):
            raise PeerLost(f"{connection.peer} said {type(prove).__name__} instead of its proof")
        if not hmac.compare_digest(prove.mac, proof(self._cookie, "client", hello, prove, prove.address)):
            self._refused += 1
            why = f"{connection.peer} does not know this run's cookie"
            connection.say(Failed(NotOfThisRun.__name__, why), deadline)
            raise NotOfThisRun(why)
        if prove.backend not in hello.backends:
            raise PeerLost(f"{connection.peer} chose {prove.backend}, which was not offered")
        engine = UcxEngine.get(connection.here) if prove.backend == "ucx" else None
        address = engine.address if engine is not None else b""
        connection.say(Welcome(proof(self._cookie, "server", hello, prove, address), address), deadline)
        return engine.link(prove.address) if engine is not None else None

    def _send(self, connection: Connection, link: Link | None, pull: Pull) -> None:
        deadline = Deadline(pull.within_s, f"sending block {pull.block} of arena {pull.arena} to {connection.peer}")
        try:
            memory = self._leased(pull)
        except DataPlaneError as error:
            connection.say(Failed(type(error).__name__, str(error)), deadline)
            return
        connection.say(Sending(pull.tag, pull.nbytes), deadline)
        if link is None:
            connection.send(memory.data, deadline)
            self._sent["tcp"] += pull.nbytes
        else:
            transfer = link.send(memory, pull.tag)
            transfer.wait(connection.sock, deadline)
            self._sent["ucx"] += pull.nbytes
        # The view, and with it the lease, stays until the bytes are known to be there.
        answer = connection.hear(deadline)
        if answer != Got(pull.tag):
            raise PeerLost(f"{connection.peer} answered {answer} to the bytes of attempt {pull.tag}")

    def _leased(self, pull: Pull) -> np.ndarray:
        attachment = self._attachments.attach(pull.arena, self._fd_path)
        page = attachment.page
        page.require_readable(pull.arena, pull.block, pull.generation)
        if page.nbytes(pull.block) != pull.nbytes:
            raise ShortBuffer(
                f"block {pull.block} of arena {pull.arena} holds {page.nbytes(pull.block)} bytes, not {pull.nbytes}"
            )
        memory = attachment.view(pull.block, pull.generation, pull.nbytes)
        page.require_readable(pull.arena, pull.block, pull.generation)
        return memory
