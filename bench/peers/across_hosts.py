"""Blocks pulled from another host by UCX and by TCP, beside a plain blocking `recv_into` loop over the same path.

The other host is a process in a network namespace of its own behind a veth where that is allowed, else a process on loopback; the
figures say which. Checksums are off on all sides. Leaves no process and no namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import secrets
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import note
from dockyard_actors.transport.fdserver import FdServer
from dockyard_actors.transport.pull import PullConfig
from dockyard_actors.transport.pull_server import PullServer
from dockyard_actors.transport.puller import Puller
from dockyard_actors.transport.slab import SlabConfig, SlabPlane

SPAWN = multiprocessing.get_context("spawn")
COOKIE = secrets.token_hex(16)
ANSWER_S = 60.0  # the other host answers in milliseconds; one that hangs is an error
Rounds = dict[str, list[float]]


def measured(nbytes: int, rounds: int, count: int, idle_s: float, ucx: bool) -> tuple[Rounds, float | None, str]:
    """(seconds of one block by side, the median of each round; percent of a core of both ends while idle; the path)."""
    with contextlib.ExitStack() as stack:
        namespace, host, path = stack.enter_context(_path())
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dy-h-"))
        here, there = (Path(directory) / name for name in ("here", "there"))
        for each in (here, there):
            each.mkdir(mode=0o700)
        other = stack.enter_context(_OtherHost(namespace, str(there), host, nbytes))
        server = stack.enter_context(served(here))
        plane = SlabPlane(server.path, "consumer", SlabConfig(blocks=1, block_bytes=nbytes, checksum=False))
        stack.callback(plane.close)
        plane.prepare()
        pullers = {
            backend: Puller(COOKIE, lambda _: other.address, PullConfig(backend=backend))
            for backend in (("ucx", "tcp") if ucx else ("tcp",))
        }
        for puller in pullers.values():
            stack.callback(puller.close)

        def pull(puller: Puller) -> float:
            started = time.perf_counter()
            block = plane.try_alloc({"x": ("uint8", (nbytes,))})
            assert block is not None
            puller.pull(other.ref, block, ANSWER_S)
            copy = block.seal()
            seconds = time.perf_counter() - started
            plane.release(copy)
            return seconds

        plain = stack.enter_context(contextlib.closing(socket.create_connection((host, other.plain_port))))
        buffer = np.ones(nbytes, np.uint8).data
        sides: dict[str, Callable[[], float]] = {"blocking loop": lambda: _blocking(plain, buffer)}
        sides |= {name: lambda puller=puller: pull(puller) for name, puller in pullers.items()}
        found: Rounds = {name: [] for name in sides}
        for side in sides.values():
            statistics.median(side() for _ in range(count))
        for number in range(rounds):
            for name, side in sides.items():
                found[name].append(statistics.median(side() for _ in range(count)))
            note(f"  round {number + 1}: " + ", ".join(f"{n} {times[-1] * 1e3:.1f} ms" for n, times in found.items()))
        carried = {name: puller.stats().received_bytes for name, puller in pullers.items()}
        assert all(set(bytes_by) == {name} for name, bytes_by in carried.items()), carried
        return found, _idle_cpu_pct(other, idle_s) if ucx else None, path


def _blocking(sock: socket.socket, buffer: memoryview) -> float:
    started = time.perf_counter()
    sock.sendall(b"x")
    got = 0
    while got < len(buffer):
        count = sock.recv_into(buffer[got:])
        assert count
        got += count
    return time.perf_counter() - started


def _idle_cpu_pct(other: _OtherHost, idle_s: float) -> float:
    """With open links at both ends, and a receive that nobody answers at ours."""
    from dockyard_actors.transport.ucx import UcxEngine

    engine = UcxEngine.get("127.0.0.1")
    link = engine.link(engine.address)
    link.receive(np.zeros(64, np.uint8), engine.next_tag())
    before = other.cpu_s() + _cpu_s()
    time.sleep(idle_s)
    spent = other.cpu_s() + _cpu_s() - before
    link.close()
    return 100 * spent / idle_s


def _cpu_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


@contextlib.contextmanager
def served(directory: Path) -> Iterator[FdServer]:
    """The node agent's part, in a thread."""
    loop, started, server = asyncio.new_event_loop(), threading.Event(), FdServer(directory)

    def serve() -> None:
        loop.run_until_complete(server.start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(server.close())

    thread = threading.Thread(target=serve)
    thread.start()
    started.wait(ANSWER_S)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# ---------------------------------------------------------------------- the other host


class _OtherHost:
    def __init__(self, namespace: str, directory: str, host: str, nbytes: int) -> None:
        self._pipe, end = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_other, args=(end, namespace, directory, host, nbytes, COOKIE))
        self._process.start()
        end.close()  # so that a dead process is an end of file
        self.address, self.plain_port, self.ref = self._answer()

    def cpu_s(self) -> float:
        self._pipe.send("cpu")
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"the other host said nothing for {ANSWER_S:.0f} s")
        return self._pipe.recv()

    def __enter__(self) -> _OtherHost:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _other(pipe: Connection, namespace: str, directory: str, host: str, nbytes: int, cookie: str) -> None:
    if namespace:
        _enter(namespace)
    with served(Path(directory)) as server, socket.create_server((host, 0)) as listener:
        plane = SlabPlane(
            server.path, "producer", SlabConfig(blocks=1, block_bytes=nbytes, checksum=False, host_id="there")
        )
        block = plane.try_alloc({"x": ("uint8", (nbytes,))})
        assert block is not None
        block.array("x")[...] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        plain = block.array("x").copy().data
        pull_server = PullServer(server.path, cookie, PullConfig(bind=f"{host}:0"))
        pipe.send((pull_server.address, listener.getsockname()[1], block.seal()))

        def send() -> None:
            connection, _ = listener.accept()
            while connection.recv(1):
                connection.sendall(plain)

        threading.Thread(target=send, daemon=True).start()
        with contextlib.suppress(EOFError):
            while pipe.recv():
                pipe.send(_cpu_s())
        os._exit(0)


def _enter(namespace: str) -> None:
    """As `ip netns exec` does: /sys must show the namespace's interfaces, or UCX takes those of the other one."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        for done in (libc.setns(file.fileno(), 0x40000000), libc.unshare(0x20000)):  # CLONE_NEWNET, CLONE_NEWNS
            if done != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    subprocess.run(["mount", "-t", "sysfs", namespace, "/sys"], check=True)


@contextlib.contextmanager
def _path() -> Iterator[tuple[str, str, str]]:
    """(namespace or "", address of the other host, what to say of it)."""
    name = f"dyb{secrets.token_hex(3)}"
    subnet = f"10.232.{secrets.randbelow(250)}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            if os.geteuid() != 0 or shutil.which("ip") is None:
                raise PermissionError("namespaces need root and iproute2")
            ip("netns", "add", name)
            ip("link", "add", f"{name}h", "type", "veth", "peer", "name", f"{name}t", "netns", name)
            ip("addr", "add", f"{subnet}.1/24", "dev", f"{name}h")
            ip("-n", name, "addr", "add", f"{subnet}.2/24", "dev", f"{name}t")
            ip("link", "set", f"{name}h", "up")
            for device in (f"{name}t", "lo"):
                ip("-n", name, "link", "set", device, "up")
        except (PermissionError, subprocess.CalledProcessError) as error:
            where = "", "127.0.0.1", f"loopback ({error})"
        else:
            where = name, f"{subnet}.2", "veth between two network namespaces"
        yield where
    finally:
        if shutil.which("ip") is not None:
            subprocess.run(["ip", "link", "del", f"{name}h"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
