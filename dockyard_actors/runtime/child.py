"""One supervised process: starts it on a leash, knows of its end through a pidfd, and restarts it within its policy.

When it ends, its process group and every descendant that carries its environment end with it. It reports to its agent, asks its
group (if it has one) when it may come back, and knows nothing of names or registries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec

from dockyard_actors.runtime import leash, warden
from dockyard_actors.runtime.group import Group
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

    def own(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]: ...
    def bootstrap(self, name: str, uid: str, socket_dir: Path) -> Bootstrap: ...
    async def child_died(self, uid: str, socket_dir: Path, cause: str, clean: bool) -> None: ...
    def child_failed(self, failure: Failure) -> None: ...
    def child_ended(self, name: str, cause: str) -> None: ...


@dataclass(frozen=True)
class _End:
    """How a process ended. code: as of `subprocess.Popen.returncode`; tail: the last lines of its log."""

    code: int
    cause: str
    traceback: str = ""
    tail: tuple[str, ...] = ()
    permanent: bool = False


class Child:
    def __init__(
        self, supervisor: Supervisor, spec: ProcessSpec, runtime_dir: Path, group: Group | None = None
    ) -> None:
        self.supervisor, self.spec, self.runtime_dir, self.group = supervisor, spec, runtime_dir, group
        self.log_path = spec.log_path or runtime_dir / f"{spec.name.replace('/', '_')}.log"
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
        self._tell_end = True  # that it is not started again
        self._asked: str | None = None  # restart was asked for: the next end is no crash (""), or one of this cause
        self._halted = False  # its group halts it: the next end is no crash
        self._kill_reason = ""
        self._crashes: deque[float] = deque()
        self._first: _End | None = None  # of the crashes within the window
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ commands

    def start(self) -> None:
        """Starts it and its supervision. OSError when it cannot be started at all: then it has failed."""
        self._stop.clear()
        self._tell_end = True
        try:
            self._spawn()
        except Exception as error:
            self.cause = f"cannot be started: {error}"
            self._set_state("failed")
            raise
        if self.starts > 1:
            self.supervisor.child_ended(self.spec.name, "")
        self._task = self.supervisor.own(self._live(), f"supervise {self.spec.name}")
        self._task.add_done_callback(lambda _: self._pulse())  # however it ended: nobody waits for it any longer

    @property
    def retired(self) -> bool:
        return self._stop.is_set()

    def retire(self) -> None:
        """It is not started again, however it ends."""
        self._stop.set()
        self._pulse()

    async def stop(self, grace_s: float, tell: bool = True) -> None:
        """SIGTERM, and SIGKILL for its process group after ``grace_s``; returns when it is gone and not restarted. This goes on when
        whoever waits for it gives up. Without ``tell`` nobody hears that it does not come back."""
        self.retire()
        self._tell_end = tell
        task = self._task
        if task is not None and not task.done():
            if self._ended is not None and not self._ended.done():
                self._set_state("stopping")
                await self._terminate(grace_s)
            await asyncio.wait((task,))
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

    async def halt(self) -> None:
        """Stops it because one that it depends on died; it comes back in its turn. Nothing to do for one that is down."""
        if self._ended is not None and not self._ended.done():
            if not self.retired:
                self._halted = True
                self._set_state("stopping")
            await self._terminate(self.spec.stop_grace_s)
        while self.pid and self._task is not None and not self._task.done():
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

    def silent_since(self) -> float:
        """Monotonic time of the last sign of life, or of the end of a declared guard, which may be still to come."""
        since = max(self.answered, self.started_mono)
        if self.board is not None:
            guarded = self.board.read()
            since = max(since, guarded.changed, guarded.until)
        return since

    @property
    def doomed(self) -> bool:
        """It hung and is being killed."""
        return bool(self._kill_reason)

    def lives(self) -> bool:
        """Whether its process runs at this moment, whatever has been noticed of it."""
        if not self.pid or self._ended is None or self._ended.done() or self._watch.fd < 0:
            return False
        poll = select.poll()
        poll.register(self._watch.fd, select.POLLIN)
        return not poll.poll(0)

    async def next_change(self) -> None:
        await self.changed.wait()

    def info(self) -> ProcessInfo:
        return ProcessInfo(
            self.spec.name, self.pid, self.starts, self.state, self.restarts, self.started_at, self.cause
        )

    # ------------------------------------------------------------------ life

    def _spawn(self) -> None:
        """Raises OSError when that is not possible; then nothing of it is left."""
        before, self._process = self.socket_dir, None
        try:
            self._launch()
        except BaseException:
            self._undo(made=self.socket_dir != before)
            raise

    def _launch(self) -> None:
        self.starts += 1
        self.uid = secrets.token_hex(8)
        socket_dir = self.runtime_dir / f"{self.spec.name.replace('/', '_')}.{self.starts}"
        socket_dir.mkdir(mode=0o700)
        self.socket_dir = socket_dir
        self.board = GuardBoard(board_path(self.socket_dir), create=True)
        bootstrap = self.supervisor.bootstrap(self.spec.name, self.uid, self.socket_dir)
        env = {**os.environ, **self.spec.env, ENVIRONMENT: msgspec.json.encode(bootstrap).decode()}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._kill_reason = ""
        self.answered = 0.0
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                leash.command(self.spec.argv),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._watch = PidWatch(self._process.pid, self._on_end)
        self.pid = self._process.pid
        self.started_at, self.started_mono = time.time(), time.monotonic()
        self._ended = asyncio.get_running_loop().create_future()
        self._set_state("starting")
        log.info("%s#%d started, pid %d, log %s", self.spec.name, self.starts, self.pid, self.log_path)

    def _undo(self, made: bool) -> None:
        """A start that failed, at whatever point: a process whose end nobody would see must not run."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.pid = 0
        if made:
            self._remove()

    def _on_end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def _live(self) -> None:
        await self._supervise()
        if self._tell_end:
            how = {"failed": "it failed for good", "exited": "it exited", "stopped": "it was stopped"}[self.state]
            self.supervisor.child_ended(self.spec.name, f"{how} ({self.cause})")

    async def _supervise(self) -> None:
        try:
            await self._keep()
        except Exception as error:  # nobody would look after it any longer; the agent takes this for its own failure
            self.cause = f"its supervision failed: {error!r}"
            if self._process is not None:
                self._kill_group()
                self._bury()
            self._set_state("failed")
            raise

    async def _keep(self) -> None:
        while True:
            assert self._ended is not None
            await asyncio.wait((self._ended,))
            self._kill_group()
            end = self._find_end()
            done = end.code == 0 and not self.spec.keep_running
            asked, self._asked = self._asked, None
            halted, self._halted = self._halted, False
            if asked:
                end = _End(end.code, asked, tail=end.tail)
            wished = self.retired or halted or (done if asked is None else not asked)
            self.cause = end.cause
            await asyncio.gather(  # whoever waits for it hears of its death before its descendants are looked for
                self.supervisor.child_died(self.uid, self.socket_dir, end.cause, wished),
                asyncio.to_thread(warden.kill_marked, f'"uid":"{self.uid}"'),
            )
            self._bury()
            if self.retired or (done and asked is None and not halted):
                self._set_state("stopped" if self.retired else "exited")
                log.info("%s: %s", self.spec.name, end.cause)
                return
            if not await self._may_start_again(end, crashed=not wished, halted=halted):
                return
            try:
                self._spawn()
            except OSError as error:
                self.cause = f"cannot be started again: {error}"
                self._fail(_End(-1, self.cause))
                return

    async def _may_start_again(self, end: _End, crashed: bool, halted: bool) -> bool:
        """Returns when it is to start again (True), or has failed for good or been stopped."""
        group, died = self.group, time.monotonic()
        broken = group.broken_before(self) if group is not None and crashed else None
        if broken is not None:
            crashed = False
            log.warning("%s#%d died with %s: %s", self.spec.name, self.starts, broken.spec.name, end.cause)
        if crashed and not self._count(end):
            return False
        if crashed or group is not None:
            self._set_state("backoff" if crashed else "waiting")
        if group is not None and not halted:
            await group.halt_rest(self)
        if crashed:
            pause = self.spec.policy.pause_s(len(self._crashes), self.supervisor.random)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(died + pause - time.monotonic()):
                    await self._stop.wait()
        if group is not None:
            self._set_state("waiting")
            await group.turn(self)
        if self.retired:
            self._set_state("stopped")
            return False
        self.restarts += crashed
        return True

    def _count(self, end: _End) -> bool:
        """Counts a crash; False when it is for good."""
        policy, now = self.spec.policy, time.monotonic()
        while self._crashes and now - self._crashes[0] > policy.window_s:
            self._crashes.popleft()
        if not self._crashes:
            self._first = end
        self._crashes.append(now)
        log.error("%s#%d died: %s", self.spec.name, self.starts, end.cause)
        if len(self._crashes) > policy.max_restarts or end.permanent:
            self._fail(end)
            return False
        return True

    def _fail(self, end: _End) -> None:
        first, name, path = self._first or end, self.spec.name, str(self.log_path)
        self._set_state("failed")
        self.supervisor.child_failed(
            Failure(name, first.cause, first.traceback, end.cause, self.restarts, path, first.tail, end.permanent)
        )

    def _bury(self) -> None:
        """Reaps it: until then its number, which is its process group's, cannot be anyone else's. Removes what it had."""
        assert self._process is not None
        self._process.wait()
        self._watch.close()
        self.pid = 0
        self._remove()

    def _remove(self) -> None:
        if self.board is not None:
            self.board.close()
            self.board = None
        shutil.rmtree(self.socket_dir, ignore_errors=True)

    def _find_end(self) -> _End:
        code = self._exit_code()
        tail = _tail(self.log_path)
        ended = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if self._kill_reason:
            if code in (
                -signal.SIGUSR1,
                -signal.SIGKILL,
            ):  # ours, whichever came first: one that has no handler yet dies of the first
                ended = "killed"
            return _End(code, f"{self._kill_reason} ({ended})", tail=tail)
        with contextlib.suppress(
            OSError, msgspec.DecodeError
        ):  # only a crash of the actor system leaves one, if it can
            told = msgspec.json.decode(cause_path(self.socket_dir).read_bytes(), type=Cause)
            return _End(code, f"{told.where}: {told.error} ({ended})", told.traceback, tail, told.permanent)
        if code > 0 and tail and not _LOGGED.match(tail[-1]):  # most likely the last line of a traceback
            return _End(code, f"{ended}: {tail[-1]}", tail=tail)
        return _End(code, ended, tail=tail)

    def _exit_code(self) -> int:
        """Of the dead leader, which stays unreaped."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    # ------------------------------------------------------------------ signals

    async def _terminate(self, grace_s: float) -> None:
        """Returns when the process has ended. It ends all the same when whoever waits here is cancelled: the task is the supervisor's."""
        assert self._ended is not None
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process could not act on it
        escalation = self._escalate(self._ended, grace_s)
        await asyncio.wait((self.supervisor.own(escalation, f"terminate {self.spec.name}"),))

    async def _escalate(self, ended: asyncio.Future[None], grace_s: float) -> None:
        done, _ = await asyncio.wait((ended,), timeout=grace_s)
        if not done:
            log.warning(
                "%s (pid %d) did not end within %s s of SIGTERM and is killed", self.spec.name, self.pid, grace_s
            )
            self._kill_group()
            await asyncio.wait((ended,))

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
        self._pulse()

    def _pulse(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
        if self.group is not None:
            self.group.pulse()


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError as error:  # somebody removed it, or there is no descriptor left: the end is known all the same
        log.warning("the log of a process that ended cannot be read: %s", error)
        return ()
    return tuple(line for line in lines if line.strip())[-_TAIL_LINES:]
