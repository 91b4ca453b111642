"""The torch process group of a collective delivery: made without a global default group, used for one broadcast at a time, left at once.

Every wait ends at a deadline. Gloo over the CPU; with "nccl" the same calls broadcast buffers of CUDA devices, and **that has never run**.
It knows neither weights nor why a group is made.
"""

from __future__ import annotations

import contextlib
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dockyard_actors.transport.tensors import DataPlaneError
from dockyard_actors.transport.weights_lines import (
    SAY_WHY_S,
    Backend,
    Line,
    LineError,
    Welcome,
    exchange_of_engine,
    exchange_of_trainer,
    part,
    what_is_wrong,
)

WATCH_S = 0.05  # between looks at the lines, while torch works
POLL_S = 5e-4  # between looks at a device's queue
CONNECT_S = 10.0  # for gloo's connections, once everybody has said where it listens
GLOO_PATIENCE = 5  # gloo waits so many times its timeout for a member that does not connect

c10d: Any = dist  # torch exports what is used here, but not to type checkers


class GroupError(DataPlaneError):
    """The process group could not be made, or a broadcast failed or did not end in time."""


@contextlib.contextmanager
def _as_group_error() -> Iterator[None]:
    """torch says RuntimeError for everything."""
    try:
        yield
    except DataPlaneError:
        raise
    except RuntimeError as error:
        raise GroupError(f"{type(error).__name__}: {error}") from error


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(until - time.monotonic(), 1e-3))  # torch takes 0 for no limit


class _Introductions(c10d.Store):
    """What a gloo constructor takes for its store: it says its address and wants to know everybody's."""

    def __init__(self, exchange: Callable[[bytes], tuple[bytes, ...]]) -> None:
        super().__init__()
        self._exchange = exchange
        self._mine = b""
        self._all: tuple[bytes, ...] = ()

    def set(self, key: str, value: bytes) -> None:
        self._mine = value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        return None

    def get(self, key: str) -> bytes:  # "0/RANK"
        if not self._all:
            self._all = self._exchange(self._mine)
        return self._all[int(key.rpartition("/")[2])]


class _Making:
    """A gloo group being made, in a thread of its own: the constructor would not hear that a member is gone or that it is late itself.

    No daemon: one that comes back from C++ while the interpreter ends aborts the process.
    """

    def __init__(self, host: str, rank: int, world: int, until: float) -> None:
        self._mine: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._all: queue.SimpleQueue[tuple[bytes, ...]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._left = False
        self._made: Any = None
        self._error = "it was left"
        self.ended = threading.Event()
        threading.Thread(target=self._make, args=(host, rank, world, until), name="weights-group-making").start()

    def address(self, until: float) -> bytes:
        """This member's. Raises GroupError."""
        try:
            mine = self._mine.get(timeout=_left(until).total_seconds())
        except queue.Empty:
            raise GroupError("no address was found to listen at in time") from None
        if not mine:
            raise GroupError(self._error)
        return mine

    def meet(self, addresses: tuple[bytes, ...]) -> None:
        """Go on, with everybody's address."""
        self._all.put(addresses)

    def take(self) -> Any:
        """The process group, once `ended`. Raises GroupError."""
        made, self._made = self._made, None
        if made is None:
            raise GroupError(self._error)
        return made

    def leave(self) -> None:
        """Nobody wants it any more: it ends by its own timeout. Idempotent."""
        with self._lock:
            self._left, self._made = True, None
        self._all.put(())

    def _make(self, host: str, rank: int, world: int, until: float) -> None:
        try:
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = min(_left(until), timedelta(seconds=CONNECT_S)) / GLOO_PATIENCE
            options._threads = 1
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
            made = c10d.ProcessGroupGloo(_Introductions(self._exchange), rank, world, options)
            with self._lock:
                self._made = None if self._left else made
        except Exception as error:  # whatever it is, it is told to the one who waits
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._mine.put(b"")
            self.ended.set()

    def _exchange(self, mine: bytes) -> tuple[bytes, ...]:
        self._mine.put(mine)
        if not (everybody := self._all.get()):
            raise GroupError(self._error)
        return everybody


class Group:
    """A process group with the lines of its members: one broadcast at a time, awaited no longer than until a deadline.

    No torch object leaves it: an exception's traceback that held one would keep threads and sockets alive.
    """

    def __init__(self, backend: Backend, rank: int, lines: list[Line]) -> None:
        self.lines = lines
        self._backend = backend
        self._rank = rank
        self._store: Any = None
        self._making: _Making | None = None
        self._process_group: Any = None
        self._work: Any = None
        self._buffers: list[torch.Tensor] = []

    def join(self, host: str, epoch: str, store_port: int, until: float, world: int) -> None:
        """Make the process group once all lines are there. host: the trainer's. Raises LineError, GroupError."""
        if self._backend == "nccl":
            self._join_nccl(host, epoch, store_port, until, world)
            return
        if self._rank == 0:
            for line in self.lines:
                line.send(Welcome(), until)
        mine = self.lines[0].sock.getsockname()[0] if self._rank else host  # the interface that leads to the others
        self._making = _Making(mine, self._rank, world, until)
        exchange = exchange_of_engine if self._rank else exchange_of_trainer
        self._making.meet(exchange(self.lines, self._making.address(until), until))
        self._watch(self._making.ended.wait, until)
        self._process_group = self._making.take()
        self._making = None

    def _join_nccl(self, host: str, epoch: str, store_port: int, until: float, world: int) -> None:
        with _as_group_error():
            self._store = c10d.TCPStore(host, store_port, None, not store_port, _left(until), wait_for_workers=False)
            if self._rank == 0:
                for line in self.lines:
                    line.send(Welcome(self._store.port), until)
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = _left(until)
            store = c10d.PrefixStore(epoch, self._store)
            self._process_group = c10d.ProcessGroupNCCL(store, self._rank, world, options)

    def buffers(self, nbytes: int, device: torch.device) -> list[torch.Tensor]:
        """Two, uint8 (nbytes,); kept for as long as the group and the size."""
        if not self._buffers or len(self._buffers[0]) != nbytes:
            self._buffers.clear()
            self._buffers += [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        return self._buffers

    def broadcast(self, buffer: torch.Tensor, until: float) -> None:
        """Begin to send or to fill `buffer`, which belongs to the group until it was awaited. Raises GroupError."""
        if not len(buffer):
            return
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = True
        options.timeout = _left(until)
        with _as_group_error():
            self._work = self._process_group.broadcast([buffer], options)

    def await_broadcast(self, until: float) -> None:
        """Raises GroupError when it failed or is not done at `until`, LineError as soon as a member is gone or gave up. Without one under
        way it returns at once."""
        if self._work is not None:
            self._watch(self._is_done, until)
            self._work = None

    def wrong(self, until: float = 0.0) -> LineError | None:
        """See `what_is_wrong`. until: torch has failed, and so long (no longer than a moment) the others may take to say why."""
        until = min(until, time.monotonic() + SAY_WHY_S)
        while (wrong := what_is_wrong(self.lines)) is None and (left := until - time.monotonic()) > 0:
            select.select([line.sock for line in self.lines if line.is_open], [], [], left)
        return wrong

    def leave(self, reason: str, *, own: bool) -> None:
        """Say why, and whether for a reason of one's own, and let go of everything. What torch is still doing ends by its own timeout, behind the caller's back."""
        part(self.lines, reason, own=own)
        self.lines = []
        self._buffers.clear()
        if self._making is not None:
            self._making.leave()
            self._making = None
        held = [self._work, self._process_group, self._store]
        self._work = self._process_group = self._store = None
        if self._backend == "nccl" and held[1] is not None:
            held[1].abort()
        if held[0] is not None and not held[0].is_completed():
            threading.Thread(target=held.clear, name="weights-group-end").start()
        else:
            held.clear()

    def _watch(self, wait: Callable[[float], bool], until: float) -> None:
        """Return when `wait`, which takes seconds, says that it is done."""
        while not wait(min(WATCH_S, _left(until).total_seconds())):
            if (wrong := self.wrong()) is not None:
                raise wrong
            if time.monotonic() >= until:
                raise GroupError("it did not end in time")

    def _is_done(self, within_s: float) -> bool:
        with _as_group_error():
            if self._backend == "nccl":
                time.sleep(POLL_S)
            else:
                with contextlib.suppress(RuntimeError):
                    self._work.wait(timedelta(seconds=within_s))
            if not self._work.is_completed():
                return False
            self._work.wait()
            return True
