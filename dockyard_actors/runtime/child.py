"""One supervised process: starts it on a leash, knows of its end through a pidfd, and restarts it within its policy.

When it ends, its process group and every descendant that carries its environment end with it. It reports to its agent and
knows nothing of names or registries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections import deque
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec

from dockyard_actors.runtime import leash
from dockyard_actors.runtime.guard import GuardBoard, board_path
from dockyard_actors.runtime.pidwatch import PidWatch
from dockyard_actors.runtime.process import ENVIRONMENT, Bootstrap, Cause, cause_path
from dockyard_actors.runtime.supervision import Failure, ProcessInfo, ProcessSpec

log = logging.getLogger("dockyard.runtime.child")

_LOGGED = re.compile(
    r"(\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d[.,]"
)  # how log lines start, ours and those of the observe package
_TAIL_LINES = 20
_TAIL_BYTES = 16 << 10
_STACK_DUMP_S = 0.3  # a hung process gets this long to write where its threads are, before SIGKILL


class Supervisor(Protocol):
    """What a child needs of its agent."""

    random: Random

    def bootstrap(self, name: str, uid: str, socket_dir: Path) -> Bootstrap: ...
    async def child_died(self, uid: str, socket_dir: Path, cause: str, clean: bool) -> None: ...
    def child_failed(self, failure: Failure) -> None: ...


class Child:
    def __init__(self, supervisor: Supervisor, spec: ProcessSpec, runtime_dir: Path) -> None:
        self.supervisor, self.spec, self.runtime_dir = supervisor, spec, runtime_dir
        self.state = "starting"
        self.uid = ""
        self.pid = 0
        self.starts = 0
        self.restarts = 0
        self.started_at = 0.0
        self.started_mono = 0.0
        self.cause = ""
        self.board: GuardBoard | None = None
        self.socket_dir = Path()
        self.answered = 0.0  # monotonic time of the last pong of this start; 0: none yet
        self.changed = asyncio.Event()  # pulsed at every change of state
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._stop = asyncio.Event()
        self._asked: str | None = None  # restart was asked for: the next end is no crash (""), or one of this cause
        self._kill_reason = ""
        self._permanent = False  # the last crash: no restart can fix it
        self._crashes: deque[float] = deque()
        self._first: tuple[str, str, tuple[str, ...]] | None = None  # cause, traceback, log tail
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ commands

    def start(self) -> None:
        """Starts it and its supervision. OSError when it cannot be started at all."""
        self._stop.clear()
        self._spawn()
        self._task = asyncio.get_running_loop().create_task(self._supervise(), name=f"supervise {self.spec.name}")

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL for its process group after ``grace_s``; returns when it is gone and not restarted."""
        self._stop.set()
        if self._task is not None and not self._task.done():
            if self._ended is not None and not self._ended.done():
                self._set_state("stopping")
                await self._terminate(grace_s)
            await self._task
        if self.state not in ("exited", "failed"):
            self._set_state("stopped")

    async def restart(self, cause: str = "") -> None:
        """With a cause it counts as a crash. Returns when it is started, or has failed for good or been stopped meanwhile.

        One that is just ending or in backoff starts again anyway: nothing is counted twice.
        """
        if self._task is None or self._task.done():
            if cause:
                log.warning("%s is %s and is not restarted: %s", self.spec.name, self.state, cause)
                return
            self._first = None
            self._crashes.clear()
            self.start()
            return
        before = self.starts
        if self._ended is not None and not self._ended.done():
            if self._asked is None:
                self._asked = cause
            await self._terminate(self.spec.stop_grace_s)
        while self.starts == before and not self._task.done():
            await self.next_change()

    async def kill(self, reason: str) -> None:
        """Ends a hung process; ``reason`` becomes its cause. Its threads' stacks go to its log if it can still write them."""
        if self._kill_reason or self._ended is None or self._ended.done():
            return
        self._kill_reason = reason
        log.error("%s (pid %d): %s", self.spec.name, self.pid, reason)
        self._signal(signal.SIGUSR1)
        await asyncio.wait((self._ended,), timeout=_STACK_DUMP_S)
        self._kill_group()

    def saw_answer(self) -> None:
        self.answered = time.monotonic()
        if self.state in ("starting", "unresponsive"):
            self._set_state("running")

    def suspect(self, silent_s: float) -> None:
        if self.state == "running":
            log.warning("%s (pid %d): its loop has not answered for %.1f s", self.spec.name, self.pid, silent_s)
            self._set_state("unresponsive")

    def silent_since(self, now: float) -> float:
        """Monotonic time of the last sign of life; declared guards count as one for as long as they hold."""
        since = max(self.answered, self.started_mono)
        if self.board is not None:
            guarded = self.board.read()
            since = max(since, guarded.changed, min(guarded.until, now))
        return since

    async def next_change(self) -> None:
        await self.changed.wait()

    def info(self) -> ProcessInfo:
        return ProcessInfo(
            self.spec.name, self.pid, self.starts, self.state, self.restarts, self.started_at, self.cause
        )

    # ------------------------------------------------------------------ life

    def _spawn(self) -> None:
        self.starts += 1
        self.uid = secrets.token_hex(8)
        self.socket_dir = self.runtime_dir / f"{self.spec.name.replace('/', '_')}.{self.starts}"
        self.socket_dir.mkdir(mode=0o700)
        self.board = GuardBoard(board_path(self.socket_dir), create=True)
        bootstrap = self.supervisor.bootstrap(self.spec.name, self.uid, self.socket_dir)
        env = {**os.environ, **self.spec.env, ENVIRONMENT: msgspec.json.encode(bootstrap).decode()}
        self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._kill_reason = ""
        self._permanent = False
        self.answered = 0.0
        with self.spec.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                leash.command(self.spec.argv),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.started_at, self.started_mono = time.time(), time.monotonic()
        self._ended = asyncio.get_running_loop().create_future()
        self._watch = PidWatch(self.pid, self._on_end)
        self._set_state("starting")
        log.info("%s#%d started, pid %d, log %s", self.spec.name, self.starts, self.pid, self.spec.log_path)

    def _on_end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def _supervise(self) -> None:
        while True:
            assert self._ended is not None
            await self._ended
            code = self._bury()
            cause, trace, tail = self._find_cause(code)
            done = code == 0 and not self.spec.keep_running
            asked, self._asked = self._asked, None
            if asked:
                cause, trace = asked, ""
            orderly = self._stop.is_set() or (done if asked is None else not asked)
            self.cause = cause
            await self.supervisor.child_died(self.uid, self.socket_dir, cause, orderly)
            self._clean_up()
            if self._stop.is_set() or (done and asked is None):
                self._set_state("stopped" if self._stop.is_set() else "exited")
                log.info("%s: %s", self.spec.name, cause)
                return
            if asked != "" and not await self._may_restart(cause, trace, tail):
                return
            try:
                self._spawn()
            except OSError as error:
                self._fail(f"cannot be started again: {error}")
                return

    async def _may_restart(self, cause: str, trace: str, tail: tuple[str, ...]) -> bool:
        policy, now = self.spec.policy, time.monotonic()
        while self._crashes and now - self._crashes[0] > policy.window_s:
            self._crashes.popleft()
        if not self._crashes:
            self._first = (cause, trace, tail)
        self._crashes.append(now)
        log.error("%s#%d died: %s", self.spec.name, self.starts, cause)
        if len(self._crashes) > policy.max_restarts or self._permanent:
            self._fail(cause)
            return False
        pause = policy.pause_s(len(self._crashes), self.supervisor.random)
        self._set_state("backoff")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._stop.wait()
        if self._stop.is_set():
            self._set_state("stopped")
            return False
        self.restarts += 1
        return True

    def _fail(self, cause: str) -> None:
        first, trace, tail = self._first or (cause, "", ())
        self._set_state("failed")
        self.supervisor.child_failed(
            Failure(self.spec.name, first, trace, cause, self.restarts, str(self.spec.log_path), tail)
        )

    def _bury(self) -> int:
        """Ends what is left of its process group while the unreaped leader still keeps the group's number, then reaps it."""
        assert self._process is not None
        self._kill_group()
        _kill_descendants(self.uid)
        code = self._process.wait()
        self._watch.close()
        self.pid = 0
        return code

    def _clean_up(self) -> None:
        if self.board is not None:
            self.board.close()
            self.board = None
        shutil.rmtree(self.socket_dir, ignore_errors=True)

    def _find_cause(self, code: int) -> tuple[str, str, tuple[str, ...]]:
        """(cause, traceback, log tail) of the end."""
        tail = _tail(self.spec.log_path)
        ended = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if self._kill_reason:
            return f"{self._kill_reason} ({ended})", "", tail
        with contextlib.suppress(FileNotFoundError):  # only a crash of the actor system leaves one
            told = msgspec.json.decode(cause_path(self.socket_dir).read_bytes(), type=Cause)
            self._permanent = told.permanent
            return f"{told.where}: {told.error} ({ended})", told.traceback, tail
        if code > 0 and tail and not _LOGGED.match(tail[-1]):  # most likely the last line of a traceback
            return f"{ended}: {tail[-1]}", "", tail
        return ended, "", tail

    # ------------------------------------------------------------------ signals

    async def _terminate(self, grace_s: float) -> None:
        assert self._ended is not None
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process could not act on it
        done, _ = await asyncio.wait((self._ended,), timeout=grace_s)
        if not done:
            log.warning(
                "%s (pid %d) did not end within %s s of SIGTERM and is killed", self.spec.name, self.pid, grace_s
            )
            self._kill_group()
            await self._ended

    def _signal(self, number: signal.Signals) -> None:
        if self._ended is not None and not self._ended.done() and self._watch.fd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it just ended, which the pidfd will say
                signal.pidfd_send_signal(self._watch.fd, number)

    def _kill_group(self) -> None:
        """Only while the leader is not reaped: its pid, which is the group's number, cannot be anyone else's."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _set_state(self, state: str) -> None:
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()


def _kill_descendants(uid: str) -> None:
    """Ends descendants that left the process group but carry the start's uid in their environment."""
    mark = f'"uid":"{uid}"'.encode()
    for _ in range(5):  # one that forks while it is being killed is met in the next round
        found = 0
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):  # gone, or another user's
                with open(f"/proc/{entry.name}/environ", "rb") as file:
                    if mark not in file.read():
                        continue
                os.kill(int(entry.name), signal.SIGKILL)
                found += 1
        if not found:
            return


def _tail(path: Path) -> tuple[str, ...]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return tuple(line for line in lines if line.strip())[-_TAIL_LINES:]
