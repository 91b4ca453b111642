"""An executor as a child process on a unix socket: start, watch, stop, start again.

Promises that the child never outlives this process (parent death signal), that `start` returns a healthy executor or raises
with the child's own last words, and that `stop` leaves no process of its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dockyard_actors.sandbox.client import ClientConfig, ExecutorClient, ExecutorUnavailable
from dockyard_actors.sandbox.types import Health


class ExecutorStartError(RuntimeError):
    """The child executor did not become healthy; the message has its exit status and last log lines."""


@dataclass(frozen=True)
class ExecutorProcessConfig:
    """Of one child executor. Times in seconds."""

    socket_path: Path  # at most 107 bytes
    log_path: Path  # appended to over restarts
    workers: int = 2
    memory_bytes: int | None = None  # of one program; None: the executor's default
    allow_weak: bool = False
    log_level: str = "info"
    start_s: float = 30.0  # from spawn to healthy: an interpreter and its fork servers on a busy machine
    drain_s: float = 10.0  # what the executor gives accepted tasks after SIGTERM
    stop_s: float = 15.0  # from SIGTERM to SIGKILL: above drain_s
    probe_s: float = 0.05  # between looks at a starting executor
    log_tail_lines: int = 20


class ExecutorProcess:
    """Call from one asyncio loop, in the thread that will live longest (the death signal follows the spawning thread)."""

    def __init__(self, config: ExecutorProcessConfig) -> None:
        if len(os.fsencode(config.socket_path)) > 107:
            raise ValueError(
                f"socket_path {str(config.socket_path)!r} has more than 107 bytes, the longest a unix socket can have"
            )
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()
        self._pidfd = -1
        self._finishing: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and not self._ended.is_set()

    @property
    def returncode(self) -> int | None:
        """Of the last child that ended; negative for a signal."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> Health:
        """Spawns the executor and waits until it is healthy. Raises ExecutorStartError; RuntimeError when it runs already."""
        if self.is_alive:
            raise RuntimeError(f"the executor runs already (pid {self.pid})")
        command = self._command()
        environment = {key: value for key, value in os.environ.items() if key not in ("API_TOKEN", "API_TOKEN_FILE")}
        if self.config.memory_bytes is not None:
            environment["MEMORY_BYTES"] = str(self.config.memory_bytes)
        self.config.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.config.log_path.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self._process, self._ended = process, asyncio.Event()
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)
        try:
            async with asyncio.timeout(self.config.start_s):
                return await self._healthy()
        except TimeoutError:
            await self.stop(grace_s=0)
            raise ExecutorStartError(self._says(f"was not healthy within {self.config.start_s:g} s")) from None
        except BaseException:
            await self.stop(grace_s=0)
            raise

    def _command(self) -> Sequence[str]:
        c = self.config
        arguments = [
            "--socket",
            str(c.socket_path),
            "--workers",
            str(c.workers),
            "--drain",
            str(c.drain_s),
            "--log-level",
            c.log_level,
        ]
        arguments += ["--parent-pid", str(os.getpid()), *(["--allow-weak"] if c.allow_weak else [])]
        return [sys.executable, "-m", "dockyard_executor", *arguments]

    async def _healthy(self) -> Health:
        async with ExecutorClient(
            socket_path=self.config.socket_path, config=ClientConfig(health_s=self.config.start_s)
        ) as client:
            while True:
                if self._ended.is_set():
                    raise ExecutorStartError(self._says(f"ended with status {self.returncode} before it was healthy"))
                if self.config.socket_path.exists():
                    with contextlib.suppress(
                        ExecutorUnavailable
                    ):  # between bind and listen, or a stale socket: look again
                        return await client.health()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), self.config.probe_s)

    async def wait_dead(self) -> int:
        """Returns the exit status (negative: signal) as soon as the running child has ended. Raises RuntimeError if never started."""
        if self._process is None:
            raise RuntimeError("the executor was never started")
        await self._ended.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    async def stop(self, grace_s: float | None = None) -> None:
        """SIGTERM, and after `grace_s` (default `stop_s`) SIGKILL to its whole group. Fine to call at any time."""
        process = self._process
        if process is None:
            return
        if not self._ended.is_set():
            grace_s = self.config.stop_s if grace_s is None else grace_s
            if grace_s > 0:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), grace_s)
            self._kill_group(process)
            await self._ended.wait()
        with contextlib.suppress(FileNotFoundError):
            self.config.socket_path.unlink()

    async def restart(self) -> Health:
        """`stop` at once what may be left, then `start`."""
        await self.stop(grace_s=0)
        return await self.start()

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):  # nobody left in it
            os.killpg(process.pid, signal.SIGKILL)

    def _on_end(self) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._finishing = asyncio.create_task(self._finish(self._process), name="executor-end")

    async def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """Ends what the leader left of its group and waits for it; only then the leader is reaped, which frees the group's id."""
        members = []
        for pid in _group(process.pid):
            with contextlib.suppress(ProcessLookupError):  # ended while we looked
                members.append(os.pidfd_open(pid))
        self._kill_group(process)
        for descriptor in members:
            await _readable(descriptor)
            os.close(descriptor)
        process.wait()
        self._ended.set()

    def _says(self, what: str) -> str:
        try:
            lines = self.config.log_path.read_text(errors="replace").splitlines()[-self.config.log_tail_lines :]
        except FileNotFoundError:
            lines = []
        return (
            f"the child executor (pid {self.pid}, {time.strftime('%H:%M:%S')}) {what}. Last lines of {self.config.log_path}:\n"
            + "\n".join(lines)
        )


def _group(leader: int) -> list[int]:
    """Processes of the group that are not dead yet."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended while we looked
                state, _, group = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == leader and state not in "ZX":
                    found.append(int(entry.name))
    return found


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
