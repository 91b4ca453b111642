"""Another process for the data plane's tests: does what its stdin says, line by line, and answers each line on stdout.

Run as `python -m tests.transport.slab_peer FD_PATH CONFIG` (JSON, of `SlabConfig`); `Peer` is the test's end of it, `serving` an fd
server in a thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dockyard_actors.transport.fdserver import FdClient, FdConfig, FdServer
from dockyard_actors.transport.plane import Fields, TensorRef
from dockyard_actors.transport.slab import SlabConfig, SlabPlane
from dockyard_actors.transport.tensors import lay_out
from dockyard_actors.transport.weights_shm import WeightManifest, WeightPublisher, WeightReader, WeightRef

ANSWER_S = 30.0  # a cold interpreter on a busy machine; everything it does after that is milliseconds
BLOCK = 64 << 10
FIELDS = {"tokens": ("int32", (4, 100)), "logprobs": ("float32", (4, 100)), "hidden": ("bfloat16", (7, 33))}
WEIGHTS = {"embed": ("float32", (50, 16)), "head": ("bfloat16", (33, 5)), "scalar": ("float32", ())}


def content(seed: int, fields: dict[str, tuple[str, tuple[int, ...]]] = FIELDS) -> dict[str, np.ndarray]:
    """Arrays that any process can make again from the seed."""
    random = np.random.default_rng(seed)
    return {
        spec.name: random.integers(0, 250, spec.nbytes, np.uint8).view(_numpy(spec.dtype)).reshape(spec.shape)
        for spec in lay_out(fields)[0]
    }


def _numpy(name: str) -> np.dtype:
    return np.dtype("uint16" if name == "bfloat16" else name)


def same(fields: Any, seed: int, shapes: dict[str, Any] = FIELDS) -> bool:
    """Byte for byte (the content holds NaNs)."""
    expected = content(seed, shapes)
    return set(fields) == set(expected) and all(fields[n].tobytes() == expected[n].tobytes() for n in expected)


class _Peer:
    def __init__(self, fd_path: str, **config: Any) -> None:
        self.plane = SlabPlane(fd_path, f"peer{os.getpid()}", SlabConfig(blocks=4, block_bytes=BLOCK, **config))
        self.client = FdClient(fd_path)
        self.reader = WeightReader(self.client)
        self.publisher: WeightPublisher | None = None
        self.held: dict[str, Fields] = {}
        self.blocks: list[Any] = []

    def produce(self, seed: int) -> Any:
        with asyncio.run(self.plane.alloc(FIELDS, deadline_s=ANSWER_S)) as block:
            for name, array in content(seed).items():
                block.array(name)[...] = array
            return msgspec.to_builtins(block.seal())

    def half(self, seed: int) -> Any:
        """Write half a block; the answer is the ref that it would have got."""
        block = self.plane.try_alloc(FIELDS)
        assert block is not None
        self.blocks.append(block)
        block.array("tokens")[...] = content(seed)["tokens"]
        own = self.plane._own
        assert own is not None
        index = next(i for i in range(own.page.blocks) if own.page.state(i).name == "WRITING")
        specs, nbytes = lay_out(FIELDS)
        ref = TensorRef(
            own.name, index, own.page.generation(index), nbytes, specs, 1, self.plane._host_id, self.client.path
        )
        return msgspec.to_builtins(ref)

    def get(self, ref: Any) -> Any:
        decoded = msgspec.convert(ref, TensorRef)
        fields = self.held[f"{decoded.arena}/{decoded.block}"] = self.plane.get(decoded, verify=True)
        return {name: array.tobytes().hex() for name, array in fields.items()}

    def release(self, ref: Any) -> bool:
        return self.plane.release(msgspec.convert(ref, TensorRef))

    def forget(self) -> None:
        self.held.clear()

    def stats(self) -> Any:
        return msgspec.to_builtins(self.plane.stats())

    def lock_and_stop(self, ref: Any) -> None:
        """Hold the arena's lock for as long as this process is stopped."""
        decoded = msgspec.convert(ref, TensorRef)
        page = self.plane._attachments.attach(decoded.arena, decoded.fd_path).page
        with page.locked():
            os.kill(os.getpid(), signal.SIGSTOP)

    def publish(self, version: int, seed: int) -> Any:
        if self.publisher is None:
            self.publisher = WeightPublisher(self.client, WeightManifest.of(WEIGHTS))
        for name, array in self.publisher.slot(version).items():
            array[...] = content(seed, WEIGHTS)[name]
        return msgspec.to_builtins(self.publisher.publish(version))

    def half_publish(self, version: int) -> None:
        """Begin to write a version, and no more."""
        assert self.publisher is not None
        self.publisher.slot(version)["embed"][...] = 0

    def open_weights(self, ref: Any) -> Any:
        fields = self.held["weights"] = self.reader.open(msgspec.convert(ref, WeightRef), verify=True)
        return {name: array.tobytes().hex() for name, array in fields.items()}

    def drop_predecessors(self) -> int:
        assert self.publisher is not None
        return self.publisher.drop_predecessors()


class Peer:
    """The test's end: `peer("produce", seed=1)` asks and waits for the answer."""

    def __init__(self, fd_path: str, *prefix: str, **config: Any) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.transport.slab_peer", fd_path, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        self.pid = self._process.pid

    def __call__(self, what: str, **arguments: Any) -> Any:
        self.send(what, **arguments)
        return self.answer()

    def send(self, what: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, arguments]) + "\n")
        self._process.stdin.flush()

    def answered(self, within_s: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], within_s)[0])

    def answer(self) -> Any:
        assert self._process.stdout is not None
        if not self.answered(ANSWER_S):
            raise TimeoutError(f"peer {self.pid} did not answer within {ANSWER_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"peer {self.pid} ended with {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["value"]

    def wait_stopped(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def serving(directory: Path, config: FdConfig | None = None) -> Iterator[FdServer]:
    """An fd server in a loop and thread of its own, as the node agent would run it."""
    directory.chmod(0o700)
    server = FdServer(directory, config)
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        await server.start()
        started.set()
        try:
            await stop.wait()
        finally:
            await server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert started.wait(ANSWER_S)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """For what happens in the server's thread (deaths, hang-ups): there is no event on this side."""
    deadline = time.monotonic() + ANSWER_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def main() -> None:
    peer = _Peer(sys.argv[1], **json.loads(sys.argv[2]))
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            reply = {"value": getattr(peer, what)(**arguments)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
