"""UCX workers, one for each interface that carries pulls, driven by epoll in a thread of its own: links, sends and receives on them.

Nothing spins: with no transfer on its way the thread sleeps, and with one it wakes for its sockets. Endpoint error handling is always
on, which leaves TCP as the way and makes a peer's death an error. A buffer belongs to UCX until its transfer is complete, even when
whoever waited gave up; `when_complete` tells. Addresses come from proven peers only, since UCX aborts the process on a malformed one.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

import numpy as np
import psutil

from dockyard_actors.transport.pull import Deadline, PeerLost, PullError, ShortBuffer

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CALL_S = 10.0  # the engine's thread answers in microseconds; longer means that UCX hangs in it
# Segments of 8 KiB, as shipped, cost half of the speed. A blocking connect would hold up every transfer of the process for the
# minutes that the kernel takes to give up on a host that does not answer.
SETTINGS = {"TLS": "tcp,self", "TCP_TX_SEG_SIZE": "256K", "TCP_RX_SEG_SIZE": "256K", "TCP_CONN_NB": "y"}
BURST = 64  # steps of progress before calls of other threads are looked at
# Read by the library when it is loaded. It would otherwise replace this process's handlers of fatal signals.
ENVIRONMENT = {"UCX_HANDLE_ERRORS": "none", "UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "fatal"}


class Transfer:
    """One send or receive on its way. Threads wait for it; the engine alone completes it."""

    def __init__(self, what: str, buffer: np.ndarray) -> None:
        self.what = what
        self.request: Any = None
        self._buffer: np.ndarray | None = buffer  # UCX has its address alone
        self._error: Exception | None = None
        self._complete = False
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._bell)

    @property
    def complete(self) -> bool:
        """UCX will not touch the buffer any more."""
        return self._complete

    def wait(self, sock: socket.socket, deadline: Deadline) -> None:
        """Until complete. `PeerLost` when UCX says so or the other end hangs up `sock`, `ShortBuffer`, `PullTimeout`."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(sock, select.POLLIN)
        while not self._complete:
            ready = [fd for fd, _ in poll.poll(deadline.left(self.what) * 1000)]
            if self._bell not in ready and sock.fileno() in ready:
                try:
                    if not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                        raise PeerLost(f"{self.what}: the other end hung up")
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise PeerLost(f"{self.what}: {error}") from None
                poll.unregister(sock)  # it has said its next word already
        if self._error is not None:
            kind = ShortBuffer if "Truncated" in type(self._error).__name__ else PeerLost
            raise kind(f"{self.what}: {type(self._error).__name__}: {self._error}") from self._error

    def when_complete(self, callback: Callable[[], None]) -> None:
        """Called once the buffer is free to be used again: now, or by the engine's thread."""
        with self._lock:
            if not self._complete:
                self._callbacks.append(callback)
                return
        callback()

    def finish(self, error: Exception | None) -> None:
        """By the engine."""
        with self._lock:
            self._error, self._complete, self._buffer, self.request = error, True, None, None
            callbacks, self._callbacks = self._callbacks, []
        os.eventfd_write(self._bell, 1)
        for callback in callbacks:
            callback()


class Link:
    """An endpoint to another process's worker, for one transfer at a time."""

    def __init__(self, engine: UcxEngine, endpoint: Any) -> None:
        self.engine = engine
        self._endpoint: Any = endpoint
        self._sending: Transfer | None = None  # the last one

    def send(self, data: np.ndarray, tag: int) -> Transfer:
        """data: uint8, contiguous; it must not change before the transfer is complete."""
        transfer = Transfer(f"sending {data.nbytes} bytes by UCX", data)
        self._sending = transfer
        return self.engine.start(transfer, lambda array: self._endpoint.tag_send(array, self.engine.tag(tag)), data)

    def receive(self, into: np.ndarray, tag: int) -> Transfer:
        """Bound to this endpoint, so that its peer's death ends it."""
        transfer = Transfer(f"receiving {into.nbytes} bytes by UCX", into)
        engine = self.engine
        return engine.start(transfer, lambda array: self._endpoint.tag_recv(array, engine.tag(tag), engine.whole), into)

    def close(self) -> None:
        """Ends a receive that is on its way with an error. A send goes on until it is complete, as it is when the other end
        closed or died: UCX segfaults when the peer of an endpoint that was closed under a send comes back. Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            return
        if self._sending is None or self._sending.complete:
            self.engine.close_endpoint(endpoint)
        else:
            self._sending.when_complete(lambda: self.engine.close_endpoint(endpoint, wait=False))


class UcxEngine:
    """Use `UcxEngine.get(address)`. `PullError` where UCX does not come up or hangs.

    A worker that knows all interfaces tells peers of all of them, reads them once, and is of no use to anybody when one that a
    peer picked is gone. So each has one interface, the one that the connection beside it goes over. It lives as long as the
    process. (One made after another was destroyed was never woken.)
    """

    _here: ClassVar[dict[tuple[int, str], UcxEngine]] = {}  # by index of the interface, and address
    _pid: ClassVar[int] = 0
    _over: ClassVar[bool] = False
    _once: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def get(cls, address: str) -> UcxEngine:
        """The worker of the interface that has this address of ours."""
        with cls._once:
            if cls._over:
                raise PullError("UCX was ended in this process")
            if cls._pid != os.getpid():  # a fork has the workers but not their threads
                cls._here, cls._pid = {}, os.getpid()
            interface = interface_of(address)
            key = (socket.if_nametoindex(interface), address)  # one that was made again under its name is another one
            if key not in cls._here:
                cls._here[key] = cls(interface)
            return cls._here[key]

    @classmethod
    def all(cls) -> list[UcxEngine]:
        """Of this process."""
        return list(cls._here.values()) if cls._pid == os.getpid() else []

    @classmethod
    def end(cls) -> None:
        """Close the workers' sockets, for a process that goes on without UCX. For good: `get` raises from then on."""
        with cls._once:
            for engine in cls.all() if not cls._over else []:
                engine._call(engine._finish)
                engine._thread.join()
            cls._over = True

    def _finish(self) -> None:
        self._ended = True

    def __init__(self, interface: str) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._library: Any = importlib.import_module("ucxx._lib.libucxx")
        self._array: Any = importlib.import_module("ucxx._lib.arr").Array
        types: Any = importlib.import_module("ucxx.types")
        self.tag, self.whole = types.Tag, types.TagMaskFull
        self._tags = itertools.count(int.from_bytes(os.urandom(7), "big"))
        self._calls: deque[Callable[[], None]] = deque()
        self._pending: list[Transfer] = []
        self._settings = {**SETTINGS, "NET_DEVICES": interface}
        self.links = 0
        self.wakeups = 0
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        started: Future[bytes] = Future()
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(started,), name="ucx", daemon=True)
        self._thread.start()
        try:
            self.address = started.result(CALL_S)  # of the worker, for other processes
        except Exception as error:
            raise PullError(f"UCX does not come up: {type(error).__name__}: {error}") from error

    @property
    def pending(self) -> int:
        """Transfers whose buffers UCX still has, whether or not somebody waits for them."""
        return len(self._pending)

    def next_tag(self) -> int:
        """Of a receive of this worker; never the same twice."""
        return next(self._tags) % (1 << 64)

    def link(self, address: bytes) -> Link:
        """To the worker at an address that a proven peer said."""
        lib = self._library

        def create() -> Link:
            there = lib.UCXAddress.create_from_buffer(address)
            link = Link(self, lib.UCXEndpoint.create_from_worker_address(self._worker, there, True))
            self.links += 1
            return link

        try:
            return self._call(create)
        except lib.UCXError as error:
            raise PeerLost(f"no UCX endpoint to the peer: {type(error).__name__}: {error}") from error

    def start(self, transfer: Transfer, submit: Callable[[Any], Any], buffer: np.ndarray) -> Transfer:
        """`submit` runs in the engine's thread."""

        def begin() -> None:
            try:
                transfer.request = submit(self._array(buffer))
            except Exception as error:  # an endpoint that failed meanwhile, or was closed
                transfer.finish(error)
            else:
                self._pending.append(transfer)

        self._call(begin)
        return transfer

    def close_endpoint(self, endpoint: Any, wait: bool = True) -> None:
        def close() -> None:
            self.links -= 1
            # By force: cancels what is on its way. The gentle `close` gives a request that segfaults where the peer is dead.
            endpoint.close_blocking()
            endpoint.remove_close_callback()

        if wait:
            self._call(close)
        else:
            self._calls.append(close)  # by the engine's own thread, which cannot wait for itself
            os.eventfd_write(self._bell, 1)

    def _call(self, work: Callable[[], Result]) -> Result:
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._calls.append(run)
        os.eventfd_write(self._bell, 1)
        try:
            return done.result(CALL_S)
        except TimeoutError:
            if done.done():
                raise
            raise PullError(f"process {os.getpid()} waited {CALL_S:.3g} s for its UCX thread, which hangs") from None

    # -- the thread
    def _run(self, started: Future[bytes]) -> None:
        self.thread_id = threading.get_native_id()
        try:
            self._context = self._library.UCXContext(self._settings)
            self._worker = self._library.UCXWorker(
                self._context, enable_delayed_submission=False, enable_python_future=False
            )
            self._worker.init_blocking_progress_mode()
            epoll = select.epoll()
            epoll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
            epoll.register(self._bell, select.EPOLLIN)
            address = bytes(self._worker.address)
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(address)
        while True:
            while self._calls:
                self._calls.popleft()()
            if self._ended:
                epoll.close()
                del self._worker, self._context
                return
            steps = 0
            while steps < BURST and self._worker.progress_once():
                steps += 1
            if steps < BURST:
                self._worker.progress()  # also what UCXX itself put off, as the cancelling of requests
            self._sweep()
            if steps == BURST or self._calls or not self._worker.arm():
                continue
            epoll.poll()
            self.wakeups += 1
            with contextlib.suppress(BlockingIOError):  # it was the worker that woke us
                os.eventfd_read(self._bell)

    def _sweep(self) -> None:
        if any(transfer.request.completed for transfer in self._pending):
            finished = [transfer for transfer in self._pending if transfer.request.completed]
            self._pending = [transfer for transfer in self._pending if not transfer.request.completed]
            for transfer in finished:
                try:
                    transfer.request.check_error()
                except Exception as error:
                    transfer.finish(error)
                else:
                    transfer.finish(None)


def interface_of(address: str) -> str:
    """Name of the interface that has this address of ours. `PullError` when none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    raise PullError(f"no interface of this host has the address {address} (any more)")
