"""Another process for the tests of weights by broadcast: an engine or a trainer that does what it is told and dies or stops where it is told.

Forked from a server that has loaded torch already: `Peer` is the test's end of one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import msgspec
import torch

from dockyard_actors.transport.tensors import checksum
from dockyard_actors.transport.weights_collective import CollectiveError, CollectiveReceiver, CollectiveSender, Meeting
from dockyard_actors.transport.weights_group import Group
from dockyard_actors.transport.weights_lines import Line
from dockyard_actors.transport.weights_shm import WeightManifest

ANSWER_S = 60.0
HOST = "127.0.0.1"
Shapes = dict[str, tuple[str, tuple[int, ...]]]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def tensors(shapes: Shapes, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A trainer's parameters: float32, in the manifest's order, the same in every process."""
    random = torch.Generator().manual_seed(seed)
    for name, (_, shape) in shapes.items():
        yield name, torch.randn(shape, generator=random)


def resources() -> tuple[int, int]:
    """This process's descriptors and threads, those of C++ included."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


class _Peer:
    def __init__(self) -> None:
        self.receiver = CollectiveReceiver()
        self.sender: CollectiveSender | None = None
        self.kept: dict[str, torch.Tensor] = {}
        self.fault: tuple[str, int] | None = None
        self.broadcasts = 0
        say, broadcast = Line.send, Group.broadcast

        def saying(line: Line, message: Any, until: float) -> None:
            say(line, message, until)
            self.at(type(message).__name__)

        def broadcasting(group: Group, buffer: torch.Tensor, until: float) -> None:
            broadcast(group, buffer, until)
            self.at(f"broadcast {self.broadcasts}")
            self.broadcasts += 1

        Line.send, Group.broadcast = saying, broadcasting

    def at(self, point: str) -> None:
        """Where a fault may be due."""
        if self.fault is not None and self.fault[0] == point:
            number, self.fault = self.fault[1], None
            os.kill(os.getpid(), number)

    def fail(self, point: str, number: int) -> None:
        """From now on, send yourself signal `number` when you get to `point`."""
        self.fault, self.broadcasts = (point, number), 0

    def receive(
        self,
        meeting: dict[str, Any],
        shapes: Shapes,
        version: int,
        only: int | None = None,
        content: bool = False,
    ) -> list[Any]:
        """Checksums in the order of arrival, or (name, dtype, shape, bytes). only: leave after so many entries."""
        self.at("start")
        manifest = WeightManifest.of(shapes)
        entries = self.receiver.receive(msgspec.convert(meeting, Meeting), manifest, version)
        came: list[Any] = []
        for name, array in entries:
            assert not array.flags.writeable
            came.append((name, str(array.dtype), array.shape, array.tobytes()) if content else checksum(array))
            self.at(f"entry {len(came) - 1}")
            if len(came) == only:
                entries.close()  # pyright: ignore[reportAttributeAccessIssue]
                break
        self.at("end")
        return came

    def decline(self, meeting: dict[str, Any], reason: str) -> None:
        self.receiver.decline(msgspec.convert(meeting, Meeting), reason)

    def trainer(self, shapes: Shapes, bucket_bytes: int, timeout_s: float) -> None:
        manifest = WeightManifest.of(shapes)
        self.sender = CollectiveSender(manifest, HOST, bucket_bytes=bucket_bytes, timeout_s=timeout_s)

    def parameters(self, shapes: Shapes, seed: int) -> None:
        self.kept = dict(tensors(shapes, seed))

    def meet(self, members: list[str]) -> dict[str, dict[str, Any]]:
        assert self.sender is not None
        return {name: msgspec.to_builtins(meeting) for name, meeting in self.sender.meet(members).items()}

    def send(self, version: int) -> tuple[int, ...]:
        assert self.sender is not None
        return self.sender.send(version, self.kept.items())

    def peak(self, of: str, **arguments: Any) -> int:
        """Bytes that doing it needed at once, beyond what there was before."""
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = _memory("VmRSS")
        getattr(self, of)(**arguments)
        return _memory("VmHWM") - before

    def resources(self) -> tuple[int, int]:
        return resources()

    def close(self) -> None:
        self.receiver.close()
        if self.sender is not None:
            self.sender.close()


class Failure(Exception):
    """What a peer's call ended with. error: attributes of its CollectiveError, empty for another one."""

    def __init__(self, text: str, error: dict[str, Any]) -> None:
        super().__init__(text)
        self.error = error


def _serve(connection: Any) -> None:
    torch.set_num_threads(1)
    peer = _Peer()
    while True:
        what, arguments = connection.recv()
        began = time.monotonic()
        try:
            reply = ("value", getattr(peer, what)(**arguments), {})
        except CollectiveError as error:
            reply = ("error", str(error), {"who": error.who, "phase": error.phase, "version": error.version})
        except Exception as error:
            reply = ("error", f"{type(error).__name__}: {error}", {})
        connection.send((*reply, time.monotonic() - began))


class Peer:
    """`peer("receive", …)` asks and waits for the answer; `tell` and `answer` are its halves. took_s: of the last answer."""

    def __init__(self) -> None:
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.took_s = 0.0

    def __call__(self, what: str, **arguments: Any) -> Any:
        self.tell(what, **arguments)
        return self.answer()

    def tell(self, what: str, **arguments: Any) -> None:
        self._connection.send((what, arguments))

    def answer(self) -> Any:
        if not self._connection.poll(ANSWER_S):
            raise TimeoutError(f"no answer within {ANSWER_S} s")
        kind, value, error, self.took_s = self._connection.recv()
        if kind == "error":
            raise Failure(value, error)
        return value

    def failure(self) -> Failure:
        """The answer, which has to be an error."""
        try:
            value = self.answer()
        except Failure as failure:
            return failure
        raise AssertionError(f"it answered {value!r}")

    def wait_stopped(self) -> None:
        assert self._process.pid
        stat = Path(f"/proc/{self._process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def wait_dead(self) -> None:
        self._process.join(ANSWER_S)
        assert not self._process.is_alive()

    def resume(self) -> None:
        assert self._process.pid
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for the end. Idempotent."""
        if self._connection.closed:
            return
        self._process.kill()
        self._process.join(ANSWER_S)
        self._process.close()
        self._connection.close()


@contextmanager
def forking() -> Iterator[None]:
    """While the server runs that peers are forked from. multiprocessing would keep it for as long as this process lives."""
    Peer().kill()
    try:
        yield
    finally:
        forkserver._forkserver._stop()
        resource_tracker._resource_tracker._stop()


@contextmanager
def peers() -> Iterator[Callable[[], Peer]]:
    """Start some; they are killed in the end."""
    started: list[Peer] = []

    def start() -> Peer:
        started.append(Peer())
        return started[-1]

    try:
        yield start
    finally:
        for peer in started:
            peer.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    """For what happens in another process or in a thread of torch: there is no event on this side."""
    deadline = time.monotonic() + ANSWER_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
