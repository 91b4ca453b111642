"""trace.json: where the wall time of every role and the way of every group went, as one timeline that Perfetto opens.
Promises a file that can be opened at any moment (Chrome trace events, one a line, each written at once) and that neither a full disk nor
a flood of spans stops a run: what is lost is counted and said once. Does not know who traces what, nor how spans travel.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from dockyard_actors.observe.metrics import write_all
from dockyard_actors.observe.rundir import plain_scalar
from dockyard_actors.observe.text import encodable

log = logging.getLogger(__name__)

Value = int | float | str

WAY = ("lease", "generate", "score", "push", "buffered", "train", "sync")
"""Spans of a group's own track, in the order of its way: queue before the first decode step, decoding, verdicts, push, in the buffer, in a
training step, until the engines hold the version that this step led to."""
GROUPS_PID = (
    1  # the row of Perfetto that holds the group tracks; roles follow, in the order in which they first said something
)
GROUPS = "groups"
TIDS_PER_PID = 1000  # thread ids are told apart over all processes, as some viewers want it
ARG_CHARS = 200
LIMIT_BYTES = 1 << 30  # beyond it no viewer opens the file; about a million groups


class Span(msgspec.Struct, frozen=True):
    """A stretch of time: what a role did or waited for, or one stage of a group's way."""

    name: str
    start_us: int  # wall clock, microseconds since the epoch
    duration_us: int
    lease: int = -1  # ≥ 0: on the track of this group; -1: on the role's own
    busy: bool = True  # own track only: work of this role, else waiting, args["for"] says for whom
    args: dict[str, Value] = {}

    @property
    def end_us(self) -> int:
        return self.start_us + self.duration_us


class Tracer:
    """Collects the spans of one role process until they are told. Any thread may add; what exceeds `limit` pushes out the oldest."""

    def __init__(self, limit: int = 20_000) -> None:
        self.lost = 0  # spans that overflowed
        self._spans: deque[Span] = deque()
        self._limit = limit
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._spans)

    @contextmanager
    def span(self, name: str, *, lease: int = -1, busy: bool = True, **args: Any) -> Iterator[dict[str, Any]]:
        """Traces the block, also one that raises. Yields the span's args, which the block may add to."""
        start, clock = time.time(), time.perf_counter()  # the length is right also when the wall clock is set meanwhile
        try:
            yield args
        finally:
            self._add(name, start, start + time.perf_counter() - clock, lease, busy, args)

    @contextmanager
    def waiting(self, name: str, whom: str) -> Iterator[None]:
        """Traces the block as a wait of this role for `whom`."""
        with self.span(name, busy=False) as args:
            args["for"] = whom
            yield

    def add(self, name: str, start_s: float, end_s: float, *, lease: int = -1, busy: bool = True, **args: Any) -> None:
        """A span from `start_s` to `end_s`, both from time.time(). An end before the start counts as the start."""
        self._add(name, start_s, end_s, lease, busy, args)

    def drain(self, most: int = 5_000) -> tuple[Span, ...]:
        """Takes out up to `most` spans, oldest first."""
        with self._lock:
            return tuple(self._spans.popleft() for _ in range(min(most, len(self._spans))))

    def _add(self, name: str, start_s: float, end_s: float, lease: int, busy: bool, args: dict[str, Any]) -> None:
        start = round(start_s * 1e6)
        duration = max(0, round(end_s * 1e6) - start)  # so that adjoining spans share the microsecond they meet at
        span = Span(name, start, duration, int(lease), busy, {key: _plain(value) for key, value in args.items()})
        with self._lock:
            if len(self._spans) >= self._limit:
                self._spans.popleft()
                self.lost += 1
            self._spans.append(span)


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the file. `ph`: X a complete span, b and e the two ends of one on a group's track, M a name of a row."""

    ph: str
    name: str
    pid: int
    tid: int
    cat: str = ""  # "busy" or "wait" of X, "group" of b and e
    ts: int = -1  # microseconds since the epoch; M has none
    dur: int | None = None
    id: int = -1  # the lease
    args: dict[str, Any] = {}


class TraceWriter:
    """The one writer of a run's trace.json. Opened again, it cuts what a crash tore and what `close` added, and goes on.

    Each role has a process row, and each of its incarnations as many lanes (threads) as it had spans at the same time. Group tracks lie
    in a row of their own. `warn` is told once when the file cannot be written.
    """

    def __init__(
        self, path: Path, *, warn: Callable[[str], None] | None = None, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.path = path
        self.lost = 0  # spans that could not be written
        self._warn = warn
        self._warned = False
        self._limit = limit_bytes
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[str, int], list[int]] = {}  # (role, incarnation) → its lanes
        self._ends: dict[int, int] = {}  # tid → where its last span ended, in µs
        self._names: dict[tuple[int, str], int] = {}  # (pid, span name) → the lane it was in last
        self._fd, self._size = -1, 0
        self._open()

    def append(self, role: str, incarnation: int, spans: Sequence[Span]) -> None:
        """Writes the spans at once. Never raises OSError: a batch that cannot be written is left out whole and counted in `lost`."""
        if not spans:
            return
        if self._fd < 0:
            self._open()
        rows = dict(self._pids), {key: list(lanes) for key, lanes in self._tids.items()}
        events: list[TraceEvent] = []
        for span in sorted(spans, key=lambda span: span.end_us):
            events += self._group(role, span) if span.lease >= 0 else self._own(role, incarnation, span)
        if self._fd < 0 or not self._write(b"".join(map(_line, events))):
            self.lost += len(spans)
            self._pids, self._tids = rows  # a row that was not named in the file must be when it comes again

    def close(self) -> None:
        """Ends the JSON array; the file is strict JSON then."""
        if self._fd < 0:
            return
        end = TraceEvent(ph="M", name="trace_end", pid=GROUPS_PID, tid=0, args={"spans_lost": self.lost})
        self._write(msgspec.json.encode(end) + b"\n]\n", limit=False)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ---- the file

    def _open(self) -> None:
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = _cut_end(self._fd)
            if self._size == 0 and os.fstat(self._fd).st_size:
                os.close(self._fd)
                self._fd = -1
                aside = self.path.with_suffix(".damaged.json")
                os.replace(self.path, aside)
                log.warning("%s was no trace and is now %s", self.path, aside)
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.lseek(self._fd, self._size, os.SEEK_SET)
        except OSError as error:
            self._failed(error)
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            return
        if self._size:
            self._recall()
        else:
            self._write(b"")

    def _write(self, data: bytes, limit: bool = True) -> bool:
        """Whether all of it was written, after the beginning of the array when there is none yet; if not, the file is as before."""
        if not self._size:
            data = b"[\n" + _line(_named("process_name", GROUPS_PID, 0, GROUPS)) + _line(_sorted(GROUPS_PID)) + data
        try:
            if limit and self._size + len(data) > self._limit:
                raise OSError(f"the trace has reached its limit of {self._limit} bytes")
            write_all(self._fd, data)
        except OSError as error:
            self._failed(error)
            try:
                os.ftruncate(self._fd, self._size)  # shrinking needs no space
                os.lseek(self._fd, self._size, os.SEEK_SET)
            except OSError:  # the disk is failing: the next append opens the file anew, which cuts what was torn
                os.close(self._fd)
                self._fd = -1
            return False
        self._size += len(data)
        return True

    def _failed(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            text = f"spans are missing from {self.path}: {error}"
            log.warning("%s", text)
            if self._warn is not None:
                self._warn(text)

    def _recall(self) -> None:
        """Rows that the file has already: their numbers must not be given twice."""
        roles: dict[int, str] = {}
        self._pids, self._tids = {}, {}
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for line in file:
                if not line.startswith(b'{"ph":"M"'):
                    continue
                try:
                    event = msgspec.json.decode(line.rstrip(b",\n"), type=TraceEvent)
                    if event.name == "process_name" and event.pid != GROUPS_PID:
                        role = roles[event.pid] = str(event.args["name"])
                        self._pids[role] = event.pid
                    elif event.name == "thread_name" and event.pid in roles:
                        incarnation = int(event.args["incarnation"])
                        self._tids.setdefault((roles[event.pid], incarnation), []).append(event.tid)
                except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
                    continue  # damaged: readers name it
        os.lseek(self._fd, self._size, os.SEEK_SET)

    # ---- events

    def _group(self, role: str, span: Span) -> list[TraceEvent]:
        begin = TraceEvent(
            ph="b",
            cat="group",
            name=span.name,
            pid=GROUPS_PID,
            tid=0,
            ts=span.start_us,
            id=span.lease,
            args={"role": role, **span.args},
        )
        end = TraceEvent(ph="e", cat="group", name=span.name, pid=GROUPS_PID, tid=0, ts=span.end_us, id=span.lease)
        return [begin, end]

    def _own(self, role: str, incarnation: int, span: Span) -> list[TraceEvent]:
        events: list[TraceEvent] = []
        pid = self._pids.get(role)
        if pid is None:
            pid = self._pids[role] = max(self._pids.values(), default=GROUPS_PID) + 1
            events += [_named("process_name", pid, 0, role), _sorted(pid)]
        tid = self._lane(role, incarnation, pid, span)
        lanes = self._tids[role, incarnation]
        if tid not in lanes:
            lanes.append(tid)
            label = f"#{incarnation}" if len(lanes) == 1 else f"#{incarnation} lane {len(lanes)}"
            events.append(_named("thread_name", pid, tid, label, incarnation=incarnation))
        self._ends[tid] = span.end_us
        self._names[pid, span.name] = tid
        events.append(
            TraceEvent(
                ph="X",
                cat="busy" if span.busy else "wait",
                name=span.name,
                pid=pid,
                tid=tid,
                ts=span.start_us,
                dur=span.duration_us,
                args=span.args,
            )
        )
        return events

    def _lane(self, role: str, incarnation: int, pid: int, span: Span) -> int:
        """A lane of the incarnation that is free when the span starts, best the one where this name was last; else a new one."""
        lanes = self._tids.setdefault((role, incarnation), [])
        last = self._names.get((pid, span.name))
        for tid in (last, *lanes):
            if tid in lanes and self._ends.get(tid, 0) <= span.start_us:
                return tid
        used = sum(len(tids) for (name, _), tids in self._tids.items() if name == role)
        return pid * TIDS_PER_PID + used


def _line(event: TraceEvent) -> bytes:
    return msgspec.json.encode(event) + b",\n"


def _named(kind: str, pid: int, tid: int, name: str, **args: int) -> TraceEvent:
    return TraceEvent(ph="M", name=kind, pid=pid, tid=tid, args={"name": encodable(name), **args})


def _sorted(pid: int) -> TraceEvent:
    return TraceEvent(ph="M", name="process_sort_index", pid=pid, tid=0, args={"sort_index": pid})


def _cut_end(fd: int) -> int:
    """Cuts a torn last line, half a pair of a group's track and what `close` wrote. Returns the length left; 0: this is no trace."""
    if os.pread(fd, 2, 0) != b"[\n":
        if os.fstat(fd).st_size <= 1:
            os.ftruncate(fd, 0)
        return 0
    while True:
        size = os.fstat(fd).st_size
        line = _last_line(fd, size)
        if line == b"[\n" or (line.endswith(b",\n") and not line.startswith(b'{"ph":"b"')):
            return size
        os.ftruncate(fd, size - len(line))


def _last_line(fd: int, size: int) -> bytes:
    """The last line of the first `size` bytes, whole or torn."""
    found = b""
    start = size
    while start > 0:
        step = min(1 << 12, start)
        start -= step
        found = os.pread(fd, step, start) + found
        newline = found.rfind(b"\n", 0, -1)
        if newline >= 0:
            return found[newline + 1 :]
    return found


def _plain(value: Any) -> Value:
    """A value as a trace holds it: a number or a short text."""
    if isinstance(value, str):
        return encodable(value[:ARG_CHARS])
    if not isinstance(value, int | float):
        try:
            value = plain_scalar(value)
        except TypeError:
            return encodable(str(value)[:ARG_CHARS])
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(value) else str(value)
