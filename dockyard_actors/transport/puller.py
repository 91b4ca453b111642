"""The asking end of pulls between hosts: fills a block of one's own with the bytes of a ref that lies elsewhere.

Each attempt has a tag and a connection's attention of its own, all of them one deadline. What can go wrong has a type, and memory is
given back only when nothing writes into it any more, whoever has stopped waiting. It knows blocks and addresses, no event loop.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dockyard_actors.transport import tensors
from dockyard_actors.transport.blocks import Block
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
    PeerUnreachable,
    Prove,
    Pull,
    PullConfig,
    PullError,
    PullTimeout,
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
from dockyard_actors.transport.tensors import TensorRef
from dockyard_actors.transport.ucx import Link, Transfer, UcxEngine

log = logging.getLogger(__name__)

# What a server may answer by name; anything else is a plain PullError.
ERRORS = {
    kind.__name__: kind
    for kind in (
        tensors.StaleRef,
        tensors.TornBlock,
        tensors.MalformedRef,
        ShortBuffer,
        NotOfThisRun,
    )
}


@dataclass(frozen=True)
class PullStats:
    received_bytes: Mapping[Backend, int]  # bulk, of transfers that succeeded
    pulls: int  # blocks that arrived
    retries: int
    failures: int  # fetches that gave up
    quarantined: int  # blocks that UCX may still write into, although nobody waits for them
    idle_connections: int


class _Line:
    """A connection to a pull server, used for one thing at a time."""

    def __init__(self, address: str, connection: Connection) -> None:
        self.address = address
        self.connection = connection
        self.link: Link | None = None  # once both ends have proven who they are, by UCX

    @property
    def backend(self) -> Backend:
        return "tcp" if self.link is None else "ucx"

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.connection.close()


class _Landing:
    """A block that bytes are to arrive in, and who may be writing there."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.transfer: Transfer | None = None  # of the last attempt; without UCX nobody writes behind our back

    def settled(self, wait_s: float) -> bool:
        """Whether nothing writes into the block any more, after waiting so many seconds for it."""
        done = threading.Event()
        self.when_settled(done.set)
        return done.wait(wait_s)

    def when_settled(self, callback: Callable[[], None]) -> None:
        if self.transfer is None:
            callback()
        else:
            self.transfer.when_complete(callback)


class Puller:
    """The asking end. Calls block; any thread. `server_of` gives the address of a host's pull server, or raises
    `WrongHost` or `HostLost`."""

    def __init__(self, cookie: str, server_of: Callable[[str], str], config: PullConfig) -> None:
        self._cookie = cookie
        self._server_of = server_of
        self._config = config
        self.choice: Choice = choose_backend(config.backend)
        log.info("blocks of other hosts come by %s (%s)", self.choice.backend, self.choice.why)
        self._idle: dict[str, list[_Line]] = {}
        self._open: set[_Line] = set()
        self._announced: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._received: Counter[Backend] = Counter()
        self._counts: Counter[str] = Counter()

    def pull(self, ref: TensorRef, block: Block, within_s: float) -> None:
        """Fill the block with the ref's bytes. On an error the block is aborted as soon as nothing writes into it any more."""
        deadline = Deadline(within_s, f"pulling block {ref.block} of arena {ref.arena} from host {ref.host_id}")
        wait_s = self._config.retry_s
        landing = _Landing(block)
        for attempt in range(1, self._config.attempts + 1):
            try:
                self._attempt(ref, landing, deadline)
                self._counts["pulls"] += 1
                return
            except (PeerLost, PeerUnreachable) as error:
                last = attempt == self._config.attempts or self._closed
                if last or not landing.settled(min(wait_s, deadline.left())) or deadline.left() <= wait_s:
                    self._give_up(landing)
                    raise
                log.warning("%s: attempt %d failed, another follows: %s", deadline.what, attempt, error)
                self._counts["retries"] += 1
                time.sleep(wait_s)
                wait_s *= 2
            except BaseException:
                self._give_up(landing)
                raise

    def release(self, ref: TensorRef, within_s: float) -> bool:
        """Free a block on its own host. True when this call did it."""
        deadline = Deadline(within_s, f"releasing block {ref.block} of arena {ref.arena} on host {ref.host_id}")
        for fresh in (False, True):
            line = self._line(self._server_of(ref.host_id), deadline, fresh)
            try:
                line.connection.say(Release(ref.arena, ref.block, ref.generation), deadline)
                answer = line.connection.hear(deadline)
                if not isinstance(answer, Released):
                    raise PeerLost(f"{line.connection.peer} answered {answer} to a release")
            except PeerLost:
                self._drop(line)
                if fresh:
                    raise
            except BaseException:
                self._drop(line)
                raise
            else:
                self._keep(line)
                return answer.did
        raise AssertionError("unreachable")

    def stats(self) -> PullStats:
        return PullStats(
            dict(self._received),
            self._counts["pulls"],
            self._counts["retries"],
            self._counts["failures"],
            self._counts["quarantined"],
            sum(map(len, self._idle.values())),
        )

    def close(self) -> None:
        """Cut what is on its way. Idempotent."""
        with self._lock:
            self._closed = True
            lines = list(self._open)
            self._idle.clear()
        for line in lines:
            line.connection.close()  # wakes whoever waits; that thread closes the rest
            self._drop(line)

    def _give_up(self, landing: _Landing) -> None:
        self._counts["failures"] += 1
        self._counts["quarantined"] += 1

        def free() -> None:
            self._counts["quarantined"] -= 1
            landing.block.abort()

        landing.when_settled(free)

    def _attempt(self, ref: TensorRef, landing: _Landing, deadline: Deadline) -> None:
        """One try under a tag of its own."""
        memory = landing.block.memory
        line = self._line(self._server_of(ref.host_id), deadline)
        try:
            tag = line.link.engine.next_tag() if line.link is not None else int.from_bytes(nonce()[:8], "big")
            within_s = deadline.left()
            line.connection.say(Pull(ref.arena, ref.block, ref.generation, ref.nbytes, tag, within_s), deadline)
            match line.connection.hear(deadline):
                case Failed(kind, why):
                    raise ERRORS.get(kind, PullError)(f"host {ref.host_id}: {why}")
                case Sending(tag=announced, nbytes=nbytes) if announced == tag:
                    if nbytes != len(memory):
                        raise ShortBuffer(f"{nbytes} bytes come for a buffer of {len(memory)}")
                case other:
                    raise PeerLost(f"{line.connection.peer} answered {other} to a pull under tag {tag}")
            if line.link is None:
                line.connection.receive(memory.data, deadline)
            else:
                landing.transfer = line.link.receive(memory, tag)
                landing.transfer.wait(line.connection.sock, deadline)
            line.connection.say(Got(tag), deadline)
        except BaseException:
            self._drop(line)
            raise
        self._received[line.backend] += ref.nbytes
        self._keep(line)

    def _line(self, address: str, deadline: Deadline, fresh: bool = False) -> _Line:
        with self._lock:
            if self._closed:
                raise PeerLost(f"{deadline.what}: this process is closing")
            if not fresh and (idle := self._idle.get(address)):
                return idle.pop()
        where = parse_address(address)
        try:
            sock = socket.create_connection(where, timeout=min(deadline.left(), self._config.handshake_s))
            line = _Line(address, Connection(sock, self._config.silence_s))
        except OSError as error:
            raise PeerUnreachable(f"{deadline.what}: nobody answers at {address}: {error}") from error
        with self._lock:
            self._open.add(line)  # from here on `close` cuts it
        try:
            if self._closed:
                raise PeerLost(f"{deadline.what}: this process is closing")
            line.link = self._prove(line.connection, address)
        except PullTimeout as error:
            self._drop(line)
            raise PeerUnreachable(f"{deadline.what}: nobody answers at {address}: {error}") from error
        except BaseException:
            self._drop(line)
            raise
        return line

    def _prove(self, connection: Connection, address: str) -> Link | None:
        deadline = Deadline(self._config.handshake_s, f"the handshake with the pull server at {address}")
        hello = connection.hear(deadline)
        if not isinstance(hello, Hello) or hello.major != 1:
            raise PeerLost(f"{address} does not speak this protocol: {hello}")
        backend = self.choice.backend
        if backend not in hello.backends:
            if self._config.backend != "auto":
                raise PullError(f"{address} offers {', '.join(hello.backends)}, and data_plane.backend is {backend}")
            backend = "tcp"
            if address not in self._announced:
                self._announced.add(address)
                log.warning("blocks of %s come by tcp: it has no %s", address, self.choice.backend)
        engine = UcxEngine.get(connection.here) if backend == "ucx" else None
        prove = Prove(nonce(), b"", backend, engine.address if engine is not None else b"")
        mac = proof(self._cookie, "client", hello, prove, prove.address)
        connection.say(Prove(prove.nonce, mac, backend, prove.address), deadline)
        welcome = connection.hear(deadline)
        if isinstance(welcome, Failed):
            raise ERRORS.get(welcome.kind, PullError)(f"refused by {address}: {welcome.why}")
        if not isinstance(welcome, Welcome):
            raise PeerLost(f"{address} said {type(welcome).__name__} instead of its proof")
        if not hmac.compare_digest(welcome.mac, proof(self._cookie, "server", hello, prove, welcome.address)):
            raise NotOfThisRun(f"the server at {address} does not know this run's cookie")
        return engine.link(welcome.address) if engine is not None else None

    def _keep(self, line: _Line) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(line.address, []).append(line)
                return
        self._drop(line)

    def _drop(self, line: _Line) -> None:
        with self._lock:
            self._open.discard(line)
        line.close()
