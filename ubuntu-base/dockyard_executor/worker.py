"""The executor's side of one fork server: starts it, hands it runs, notices its death.

Promises that a run either returns what the fork server observed or raises WorkerDied, within a known time.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dockyard_executor.config import ExecutorConfig
from dockyard_executor.verdict import Run
from dockyard_executor.zygote import children_of

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from dockyard_executor.zygote import main; main(sys.argv[2:])"
# All that a program can see of an environment. One malloc arena: others reserve address space by the 64 MiB.
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",
}


class WorkerDied(RuntimeError):
    """The fork server ended, hung or answered nonsense; the run's outcome is unknown."""


class Worker:
    """One fork server, for one run at a time. `slot` chooses its uid."""

    def __init__(self, config: ExecutorConfig, slot: int, fork_servers: set[int] | None = None) -> None:
        """`fork_servers`: process ids of all of this executor's, kept up to date here. When given, this process must have no
        other children: any that appear are what a lost fork server left, and are ended."""
        self.config = config
        self.slot = slot
        self._fork_servers = fork_servers
        self.level = ""
        self.isolated = False
        self.remedy = ""
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._control: asyncio.StreamWriter | None = None
        self._secrets: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Raises WorkerDied when the fork server does not come up within `worker_start_s`."""
        self.starts += 1
        control, its_control = socket.socketpair()
        tests, its_tests = socket.socketpair()
        limits = asdict(self.config.limits)
        settings = {**limits, "uid": self.config.first_uid + self.slot, "executor_pid": os.getpid()}
        package_directory = str(Path(__file__).resolve().parent.parent)
        with its_control, its_tests:
            numbers = (its_control.fileno(), its_tests.fileno())
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-s",
                    "-S",
                    "-P",
                    "-X",
                    "utf8",
                    "-c",
                    _BOOT,
                    package_directory,
                    *map(str, numbers),
                    json.dumps(settings),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                pass_fds=numbers,
            )
        if self._fork_servers is not None:
            self._fork_servers.add(self._process.pid)
        self._reader, self._control = await asyncio.open_unix_connection(sock=control)
        _, self._secrets = await asyncio.open_unix_connection(sock=tests)
        try:
            hello = json.loads(await asyncio.wait_for(self._receive(), self.config.worker_start_s))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await self.kill()
            raise WorkerDied(f"fork server {self.slot} did not start: {type(error).__name__}") from error
        self.level, self.isolated, self.remedy = hello["level"], hello["isolated"], hello["remedy"]

    async def run(self, program: bytes, tests: Sequence[Mapping[str, object]], timeout_s: float) -> Run:
        """One process: the program, then the tests as delivered. Raises WorkerDied."""
        if self._control is None or self._secrets is None:
            raise WorkerDied(f"fork server {self.slot} is not running")
        key = secrets.token_bytes(32)
        started = time.monotonic()
        try:
            self._control.writelines((*_frame(json.dumps({"timeout": timeout_s}).encode()), *_frame(program)))
            self._secrets.writelines(_frame(json.dumps({"key": key.hex(), "tests": list(tests)}).encode()))
            async with asyncio.timeout(timeout_s + self.config.worker_grace_s):
                report = json.loads(await self._receive())
                events, out, err = [await self._receive() for _ in range(3)]
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            waited = time.monotonic() - started
            await self.kill()
            raise WorkerDied(
                f"fork server {self.slot} was lost after {waited:.1f} s of a run ({type(error).__name__})"
            ) from error
        return Run(
            key=key,
            events=events,
            status=report["status"],
            ended=report["ended"],
            stdout=out,
            stderr=err,
            seconds=report["seconds"],
            cpu_s=report["cpu_s"],
            timeout_s=timeout_s,
            cpu_limit_s=report["cpu_limit_s"],
        )

    def cancel(self) -> None:
        """Ends the run in progress; it returns as cancelled. Harmless when there is none."""
        if self._control is not None and not self._control.is_closing():
            self._control.writelines(_frame(json.dumps({"cancel": True}).encode()))

    async def close(self, grace_s: float) -> None:
        """Lets the fork server end by itself, then ends it."""
        for writer in (self._control, self._secrets):
            if writer is not None:
                writer.close()
        if self._process is not None and not await _ended_within(self._process, grace_s):
            await self.kill()
        self._forget()

    async def kill(self) -> None:
        """SIGKILL; its running program dies with it (parent death signal) and is reaped here."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            await _ended_within(self._process, None)
            if self._fork_servers is not None:
                self._fork_servers.discard(self._process.pid)
                reap_orphans(self._fork_servers)
        for writer in (self._control, self._secrets):
            if writer is not None:
                writer.close()
        self._forget()

    def _forget(self) -> None:
        if self._process is not None and self._fork_servers is not None:
            self._fork_servers.discard(self._process.pid)
        self._process = self._reader = self._control = self._secrets = None

    async def _receive(self) -> bytes:
        assert self._reader is not None
        (size,) = struct.unpack("=I", await self._reader.readexactly(4))
        return await self._reader.readexactly(size)


def reap_orphans(expected: set[int]) -> None:
    """Ends and reaps children of this process that are not `expected`: what a lost fork server left.

    This process is their reaper (it is a subreaper, or the first process of a container).
    """
    for pid in children_of(os.getpid()):
        if pid not in expected:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _frame(data: bytes) -> tuple[bytes, bytes]:
    return struct.pack("=I", len(data)), data


async def _ended_within(process: subprocess.Popen[bytes], seconds: float | None) -> bool:
    """Waits for the process without a thread and without polling, and reaps it."""
    if process.poll() is not None:
        return True
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    try:
        loop.add_reader(descriptor, ended.set)
        await asyncio.wait_for(ended.wait(), seconds)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()
    return True
