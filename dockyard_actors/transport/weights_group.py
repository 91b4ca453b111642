"""The torch process group of a collective delivery: made without a global default group, used for one broadcast at a time, left at once.

Every wait ends at a deadline. Gloo over the CPU; with "nccl" the same calls broadcast buffers of CUDA devices, and **that has never run**.
It knows neither weights nor why a group is made.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dockyard_actors.transport.tensors import DataPlaneError
from dockyard_actors.transport.weights_lines import (
    Exchange,
    Failed,
    Line,
    LineError,
    Welcome,
    exchange_of_engine,
    exchange_of_trainer,
    wrong_ones,
)
from dockyard_actors.transport.weights_meeting import Backend

SAY_WHY_S = 1.0  # to tell the others why, once it has failed
POLL_S = 5e-4  # between looks at a device's queue

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
    """What a gloo constructor takes for its store. Unlike a TCP store's, its every wait has an end, a stopped trainer included."""

    def __init__(self, exchange: Exchange) -> None:
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


class Group:
    """A process group with the lines of its members: one broadcast at a time, awaited no longer than until a deadline.

    No torch object leaves it: an exception's traceback that held one would keep threads and sockets alive.
    """

    def __init__(self, backend: Backend, rank: int, lines: list[Line]) -> None:
        self.lines = lines
        self._backend = backend
        self._rank = rank
        self._store: Any = None
        self._process_group: Any = None
        self._work: Any = None
        self._buffers: list[torch.Tensor] = []

    def join(self, host: str, epoch: str, store_port: int, until: float, world: int) -> None:
        """Make the process group once all lines are there. host: the trainer's. Raises LineError, GroupError."""
        with _as_group_error():
            if self._backend == "nccl":
                self._store = c10d.TCPStore(
                    host, store_port, None, not store_port, _left(until), wait_for_workers=False
                )
                store_port = self._store.port
            if self._rank == 0:
                for line in self.lines:
                    line.send(Welcome(store_port), until)
            if self._backend == "nccl":
                options = c10d.ProcessGroupNCCL.Options()
                options._timeout = _left(until)
                store = c10d.PrefixStore(epoch, self._store)
                self._process_group = c10d.ProcessGroupNCCL(store, self._rank, world, options)
                return
            exchange = (exchange_of_engine if self._rank else exchange_of_trainer)(self.lines, until)
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = _left(until)
            options._threads = 1
            mine = self.lines[0].sock.getsockname()[0] if self._rank else host  # the interface that leads to the others
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=mine, lazy_init=False)]
            self._process_group = c10d.ProcessGroupGloo(_Introductions(exchange), self._rank, world, options)

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
        """Raises GroupError when it failed or is not done at `until`. Without one under way it returns at once."""
        if self._work is None:
            return
        with _as_group_error():
            if self._backend == "nccl":
                while not self._work.is_completed():
                    if time.monotonic() > until:
                        raise GroupError("the broadcast did not end in time")
                    time.sleep(POLL_S)
            self._work.wait(_left(until))
        self._work = None

    def wrong(self) -> list[LineError]:
        """See `wrong_ones`."""
        return wrong_ones(self.lines)

    def leave(self, reason: str) -> None:
        """Say why, and let go of everything. A broadcast under way ends by its own timeout, behind the caller's back."""
        until = time.monotonic() + SAY_WHY_S
        for line in self.lines:
            with contextlib.suppress(LineError):
                line.send(Failed(reason[:1000]), until)
            line.close()
        self.lines = []
        self._buffers.clear()
        held = [self._work, self._process_group, self._store]
        self._work = self._process_group = self._store = None
        if self._backend == "nccl" and held[1] is not None:
            held[1].abort()
        if held[0] is not None and not held[0].is_completed():
            threading.Thread(target=held.clear, name="weights-collective-end", daemon=True).start()
        else:
            held.clear()
