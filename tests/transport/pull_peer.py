"""Another host for the tests: an fd server, a producer and a pull server in one process, told what to do line by line.

Run as `python -m tests.transport.pull_peer OPTIONS` (JSON); `Host` is the test's end. In a network namespace of its own it shares no
socket with the test but its standard streams.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dockyard_actors.transport.plane import TensorRef
from dockyard_actors.transport.pull import PullConfig
from dockyard_actors.transport.pull_server import PullServer
from dockyard_actors.transport.slab import SlabConfig, SlabPlane
from dockyard_actors.transport.ucx import UcxEngine
from tests.transport.slab_peer import ANSWER_S, Peer, serving

COOKIE = "cookie of the run"
MIB = 1 << 20


def payload(seed: int, nbytes: int) -> np.ndarray:
    """uint8 (nbytes,); any process can make it again."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)


class _Host:
    def __init__(
        self, directory: Path, host_id: str | None, bind: str, backend: Any, blocks: int, block_bytes: int
    ) -> None:
        self.refs: list[Any] = []
        self._serving = serving(directory)
        server = self._serving.__enter__()
        config = SlabConfig(blocks=blocks, block_bytes=block_bytes, host_id=host_id)
        self.plane = SlabPlane(server.path, "producer", config)
        self.server = PullServer(server.path, COOKIE, PullConfig(backend=backend, bind=bind))

    def address(self) -> str:
        return self.server.address

    def produce(self, seed: int, nbytes: int) -> Any:
        block = self.plane.try_alloc({"x": ("uint8", (nbytes,)), "h": ("bfloat16", (3, 5))})
        assert block is not None
        block.array("x")[...] = payload(seed, nbytes)
        block.array("h")[...] = 0x3F80 + seed
        self.refs.append(msgspec.to_builtins(block.seal()))
        return self.refs[-1]

    def again(self) -> Any:
        """The first ref that was produced."""
        return self.refs[0]

    def info(self) -> dict[str, Any]:
        engines = UcxEngine.all()
        return {
            "sent": dict(self.server.sent_bytes),
            "refused": self.server.refused,
            "connections": self.server.connections,
            "links": sum(engine.links for engine in engines),
            "pending": sum(engine.pending for engine in engines),
            "wakeups": sum(engine.wakeups for engine in engines),
            "free": self.plane.stats().free,
            "cpu_s": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "resident": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
            "threads": threading.active_count(),
        }


class Host(Peer):
    """See `Peer`. `namespace`: the network namespace to run in; else `prefix` is a command to run it by."""

    def __init__(
        self,
        directory: Path,
        *,
        host_id: str | None = "there",
        bind: str = "127.0.0.1:0",
        backend: str = "tcp",
        blocks: int = 4,
        block_bytes: int = 4 * MIB,
        namespace: str = "",
        prefix: tuple[str, ...] = (),
    ) -> None:
        options = {
            "directory": str(directory),
            "host_id": host_id,
            "bind": bind,
            "backend": backend,
            "blocks": blocks,
            "block_bytes": block_bytes,
        }
        self._process = subprocess.Popen(
            [
                *(("ip", "netns", "exec", namespace) if namespace else prefix),
                *(sys.executable, "-m", "tests.transport.pull_peer", json.dumps(options)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        self.pid = self._process.pid  # `ip netns exec` becomes the process
        self.address: str = self("address")

    def ref(self, seed: int, nbytes: int) -> TensorRef:
        return msgspec.convert(self("produce", seed=seed, nbytes=nbytes), TensorRef)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.wait_stopped()


def main() -> None:
    options = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="h", dir=options.pop("directory")) as directory:
        host = _Host(Path(directory), **options)
        for line in sys.stdin:
            what, arguments = json.loads(line)
            try:
                reply = {"value": getattr(host, what)(**arguments)}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()


__all__ = ["ANSWER_S", "COOKIE", "MIB", "Host", "payload"]
