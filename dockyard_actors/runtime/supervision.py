"""Values and messages of supervision: what to run, how often to restart it, what became of it, and what an agent can be asked.

Plain values: they know nothing of how processes are run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from dockyard_actors.runtime.message import Message


@dataclass(frozen=True)
class RestartPolicy:
    """More than ``max_restarts`` crashes within ``window_s`` seconds are a failure for good.

    The n-th restart within the window waits ``backoff_s * 2**(n-1)`` seconds, at most ``backoff_max_s``, and up to the share ``jitter`` of it
    longer or shorter, so that processes that died together do not come back together. A crash of a `PermanentError` (damaged data, a
    missing file: no restart can fix it) is a failure for good at once.
    """

    max_restarts: int = 5
    window_s: float = 300.0
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    jitter: float = 0.2

    def pause_s(self, crash: int, random: Random) -> float:
        """How long to wait before the restart after the ``crash``-th crash (from 1) within the window."""
        pause = min(self.backoff_s * 2 ** (crash - 1), self.backoff_max_s)
        return pause * (1 + self.jitter * random.uniform(-1, 1))


@dataclass(frozen=True)
class ProcessSpec:
    """A process to run and keep running. ``env`` is added to the agent's own environment; nothing secret belongs in it."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    policy: RestartPolicy = RestartPolicy()
    log_path: Path | None = None  # stdout and stderr, appended over restarts; None: in the agent's runtime directory,
    # which goes with the agent
    stop_grace_s: float = 5.0  # from SIGTERM to SIGKILL of its process group
    keep_running: bool = False  # ending by itself with code 0 (somebody else's SIGTERM) is a crash too
    hang_s: float | None = None  # None: AgentConfig.hang_s
    start_grace_s: float | None = None  # None: AgentConfig.start_grace_s
    group: str = ""  # rest-for-one: depends on the processes of this group that were started before it (see group.py)


class ProcessInfo(msgspec.Struct, frozen=True, tag=True):
    """``state``: starting, running, unresponsive, backoff, waiting (for those before it in its group), stopping, stopped (asked to),
    exited (by itself, code 0), failed."""

    name: str
    pid: int  # 0 when it is not running
    incarnation: int  # counts its starts
    state: str
    restarts: int
    started_at: float  # UNIX time of the last start
    cause: str = ""  # of the last death


class Failure(msgspec.Struct, frozen=True, tag=True):
    """A process failed for good. ``cause`` is the first one of the series; the later ones are usually its echoes."""

    name: str
    cause: str
    traceback: str
    last_cause: str
    restarts: int
    log_path: str
    log_tail: tuple[str, ...]  # last lines of the log at the first crash
    permanent: bool = False  # the last cause is one that no restart can fix

    def __str__(self) -> str:
        why = "no restart can fix this" if self.permanent else f"after {self.restarts} restarts"
        lines = [f"{self.name} failed for good{':' if self.permanent else ''} {why}"]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        elif self.log_tail:
            lines += [f"last lines of {self.log_path} at that time:", *(f"  | {line}" for line in self.log_tail)]
        if self.last_cause != self.cause:
            lines.append(f"last cause: {self.last_cause}")
        lines.append(f"log: {self.log_path}")
        lines.append(f"first cause: {self.cause}")
        return "\n".join(lines)


class Shutdown(Message[None], frozen=True):
    """Asks an agent to end its run: `NodeAgent.wait_shutdown` resolves; the primary tells the secondary agents when it closes."""

    reason: str
    exit_code: int = 0


class StopProcess(Message[None], frozen=True):
    """Asks an agent to stop one of its processes; answered when it is gone. RemoteError(KeyError) for an unknown name."""

    name: str
    grace_s: float | None = None  # None: the process's own


class RestartProcess(Message[None], frozen=True):
    """Stops and starts a process; answered when it is started. RemoteError(KeyError) for an unknown name.

    Without a ``cause`` it is somebody's wish: it counts as no crash, waits for nothing and also starts a process that has ended.
    With one, what the process did wrong, it counts as a crash of that cause: its `RestartPolicy` decides when it comes back, or
    that it failed for good (answered then). A process that has ended already is left as it is.
    """

    name: str
    cause: str = ""


class ProcessList(msgspec.Struct, frozen=True, tag=True):
    processes: tuple[ProcessInfo, ...]


class ListProcesses(Message[ProcessList], frozen=True):
    """Asks an agent for its processes."""


class ReportFailure(Message[None], frozen=True):
    """A secondary agent tells the primary that a process failed for good."""

    failure: Failure
