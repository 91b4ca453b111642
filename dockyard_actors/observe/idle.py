"""`dockyard-launch inspect RUN --idle`: from trace.json, how busy each role was, what it waited for, and how long the groups' way took.
Promises to read the trace of a running or crashed run as well, and to count a moment once however many spans cover it. Does not know what
the roles do: a figure is as good as the spans that were told.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dockyard_actors.observe.live import duration
from dockyard_actors.observe.text import one_line
from dockyard_actors.observe.trace import WAY, Span, TraceEvent

Interval = tuple[int, int]
AWAY_S = 10.0  # a run that lives traces a wait or some work at least every few seconds
"""Start and end, µs since the epoch."""

OVERLAPPING = ("generate", "score", "train")
"""Own-track names whose overlap is what an asynchronous run is for."""
ASIDE = "evaluator"  # the role whose own generation is no part of that
TRAIN = "train"


class IdleError(Exception):
    """There is nothing to tell idle time from; the message says why and what to do."""


class RoleSpan(msgspec.Struct, frozen=True):
    """A span and who told it."""

    role: str
    incarnation: int
    span: Span


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace file says. A span that was told twice counts once."""

    own: tuple[RoleSpan, ...]  # of the roles' own tracks
    groups: tuple[RoleSpan, ...]
    problems: tuple[str, ...] = ()
    complete: bool = False  # the file was closed in order


class RoleTime(msgspec.Struct, frozen=True, kw_only=True):
    """How one role spent a window. busy + waiting + idle = the window; shares are of it. Seconds."""

    busy_s: float
    waiting_s: float  # not busy, and waiting for somebody
    idle_s: float  # neither: nothing was told of it
    busy_share: float
    by_name: dict[str, float]  # busy seconds by span name; spans that overlap count in each
    waits: dict[str, float]  # waiting seconds by whom or what for; longest first, as by_name


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a window in which generation, scoring and training were busy, over all roles but the evaluator."""

    each: dict[str, float]  # by name of OVERLAPPING
    together: dict[str, float]  # "generate+train" …: both busy
    two_or_more: float


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a stretch of time. Gaps in which no role was traced for `AWAY_S`, as between Ctrl-C and resume, are no part of it."""

    start_us: int
    wall_s: float  # without the gaps
    away_s: float  # the gaps
    roles: dict[str, RoleTime]
    overlap: Overlap


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that groups spent in one stage of their way; a group that went through it twice counts with the sum."""

    groups: int
    median_s: float
    p90_s: float


class IdleReport(msgspec.Struct, frozen=True, kw_only=True):
    """`training` runs from the end of the first `train` span to the end of the last, so that it holds whole steps; None with fewer than
    two. `whole` runs from the first span to the last, evaluations and warm-up included."""

    whole: Window
    training: Window | None
    steps: int  # `train` spans in the trace
    stages: dict[str, Stage]  # in the order of the way, then "way": from a group's first span to the end of its last
    spans: int
    complete: bool
    problems: tuple[str, ...]


def idle_report(path: Path) -> IdleReport:
    """The figures of the trace at `path`. Raises IdleError when there is no trace, or nothing in it yet."""
    trace = read_trace(path)
    spans = trace.own + trace.groups
    if not spans:
        raise IdleError(f"{path} holds no spans yet: roles tell theirs once a second, when they have some")
    whole = (min(s.span.start_us for s in spans), max(s.span.end_us for s in spans))
    if whole[0] == whole[1]:
        raise IdleError(f"{path} holds only spans without a length yet")
    ends = sorted(s.span.end_us for s in trace.own if s.span.name == TRAIN and s.span.busy)
    return IdleReport(
        whole=_window(trace.own, whole),
        training=_window(trace.own, (ends[0], ends[-1])) if len(ends) > 1 and ends[-1] > ends[0] else None,
        steps=len(ends),
        stages=_stages(trace.groups),
        spans=len(spans),
        complete=trace.complete,
        problems=trace.problems,
    )


def read_trace(path: Path) -> Trace:
    """Reads the trace of any run, line by line as `TraceWriter` wrote it. Lines that do not read are counted in `problems`.

    Raises IdleError when there is no file.
    """
    roles: dict[int, str] = {}
    incarnations: dict[int, int] = {}
    own: dict[tuple[object, ...], RoleSpan] = {}  # by all that tells a span from another one
    groups: dict[tuple[object, ...], RoleSpan] = {}
    begun: dict[tuple[int, str], list[TraceEvent]] = defaultdict(list)
    unread = unmatched = 0
    last = b""
    decode = msgspec.json.Decoder(TraceEvent).decode
    try:
        if path.exists() and not path.is_file():
            raise IdleError(f"{path} is no regular file")
        file = path.open("rb")
    except FileNotFoundError:
        raise IdleError(f"{path} does not exist: the run has not started yet, or was made before traces were") from None
    with file:
        for line in file:
            last = line
            text = line.strip().rstrip(b",")
            if text in (b"[", b"]", b"") or not line.endswith(b"\n"):
                continue  # nothing, or a line that is being written or was torn
            try:
                event = decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                unread += 1
                continue
            key = (event.id, event.name)
            if event.ph == "M" and event.name == "process_name":
                roles[event.pid] = str(event.args.get("name"))
            elif event.ph == "M" and event.name == "thread_name":
                number = event.args.get("incarnation", 0)
                incarnations[event.tid] = number if isinstance(number, int) else 0
            elif event.ph == "X":
                role, number = roles.get(event.pid, f"process {event.pid}"), incarnations.get(event.tid, 0)
                busy = event.cat != "wait"
                span = Span(event.name, event.ts, event.dur or 0, busy=busy, args=event.args)
                told = (role, number, busy, span.name, span.start_us, span.duration_us, str(event.args))
                own[told] = RoleSpan(role, number, span)
            elif event.ph == "b":
                begun[key].append(event)
            elif event.ph == "e" and begun[key]:
                first = begun[key].pop()
                role = str(first.args.get("role", ""))
                span = Span(first.name, first.ts, event.ts - first.ts, lease=first.id, args=first.args)
                told = (role, span.lease, span.name, span.start_us, span.duration_us, str(first.args))
                groups[told] = RoleSpan(role, 0, span)
            elif event.ph == "e":
                unmatched += 1
    unmatched += sum(map(len, begun.values()))
    problems = []
    if unread:
        problems.append(f"{unread} lines cannot be read and are left out")
    if unmatched:
        problems.append(f"{unmatched} spans of groups lack an end or a beginning and are left out")
    return Trace(
        own=tuple(own.values()),
        groups=tuple(groups.values()),
        problems=tuple(problems),
        complete=last.strip() == b"]",
    )


def render_idle(report: IdleReport, console: Console) -> None:
    """Prints the report: the training window when there is one, else the whole trace."""
    window = report.training or report.whole
    what = f"training, {report.steps - 1} steps" if report.training else "the whole trace: fewer than two steps so far"
    away = f", {duration(window.away_s)} in which nothing ran left out" if window.away_s else ""
    _line(console, f"{what}: {duration(window.wall_s)} of {duration(report.whole.wall_s)} traced{away}", "bold")
    table = _table("role", "busy", "waiting", "idle", "busy with", "waits for", right=("busy", "waiting", "idle"))
    for role, time in window.roles.items():
        shares = [_percent(seconds / window.wall_s) for seconds in (time.busy_s, time.waiting_s, time.idle_s)]
        table.add_row(one_line(role), *shares, _parts(time.by_name, window), _parts(time.waits, window))
    console.print(table)
    overlap = window.overlap
    _line(console, "busy: " + ", ".join(f"{name} {_percent(share)}" for name, share in overlap.each.items()))
    pairs = ", ".join(f"{names} {_percent(share)}" for names, share in overlap.together.items())
    _line(console, f"at the same time: two or more {_percent(overlap.two_or_more)} of the time ({pairs})")
    if report.stages:
        stages = _table("a group's way", "groups", "median s", "p90 s", right=("groups", "median s", "p90 s"))
        for name, stage in report.stages.items():
            stages.add_row(one_line(name), str(stage.groups), f"{stage.median_s:.3f}", f"{stage.p90_s:.3f}")
        console.print(stages)
    else:
        _line(console, "no group was traced")
    for problem in report.problems:
        _line(console, f"problem: {problem}", "yellow")
    end = "" if report.complete else "; the trace has no end: the run goes on, or crashed"
    _line(console, f"{report.spans} spans{end}")


# ---- figures


def _window(own: Sequence[RoleSpan], window: Interval) -> Window:
    by_role: dict[str, list[Span]] = defaultdict(list)
    for item in own:
        by_role[item.role].append(item.span)
    away = _away([(item.span.start_us, item.span.end_us) for item in own], window)
    wall = window[1] - window[0] - away
    return Window(
        start_us=window[0],
        wall_s=wall / 1e6,
        away_s=away / 1e6,
        roles={role: _role_time(spans, window, wall) for role, spans in sorted(by_role.items())},
        overlap=_overlap([item.span for item in own if item.role != ASIDE], window, wall),
    )


def _away(traced: Iterable[Interval], window: Interval) -> int:
    """Microseconds of the gaps of at least `AWAY_S` between which somebody was traced and in which nobody was: the run was not there."""
    gaps = (later[0] - earlier[1] for earlier, later in pairwise(union(traced, window)))
    return sum(gap for gap in gaps if gap >= AWAY_S * 1e6)


def _role_time(spans: Iterable[Span], window: Interval, wall: int) -> RoleTime:
    working: dict[str, list[Interval]] = defaultdict(list)
    waiting: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        if span.busy:
            working[span.name].append((span.start_us, span.end_us))
        else:
            waiting[str(span.args.get("for", span.name))].append((span.start_us, span.end_us))
    busy = union(_all(working), window)
    covered = length(union([*busy, *_all(waiting)], window))
    # Waiting while something else goes on costs nothing: only what is not busy counts.
    waits = {name: length(union([*busy, *parts], window)) - length(busy) for name, parts in waiting.items()}
    by_name = {name: length(union(parts, window)) for name, parts in working.items()}
    return RoleTime(
        busy_s=length(busy) / 1e6,
        waiting_s=(covered - length(busy)) / 1e6,
        idle_s=(wall - covered) / 1e6,
        busy_share=length(busy) / wall,
        by_name=_longest_first(by_name),
        waits=_longest_first(waits),
    )


def _overlap(spans: Iterable[Span], window: Interval, wall: int) -> Overlap:
    parts: dict[str, list[Interval]] = {name: [] for name in OVERLAPPING}
    for span in spans:
        if span.busy and span.name in parts:
            parts[span.name].append((span.start_us, span.end_us))
    busy = {name: union(intervals, window) for name, intervals in parts.items()}
    share = {name: length(intervals) / wall for name, intervals in busy.items()}

    def either(*names: str) -> float:
        return length(union([part for name in names for part in busy[name]], window)) / wall

    pairs = [(a, b) for i, a in enumerate(OVERLAPPING) for b in OVERLAPPING[i + 1 :]]
    together = {f"{a}+{b}": share[a] + share[b] - either(a, b) for a, b in pairs}
    all_three = either(*OVERLAPPING) - sum(share.values()) + sum(together.values())
    return Overlap(each=share, together=together, two_or_more=sum(together.values()) - 2 * all_three)


def _stages(groups: Iterable[RoleSpan]) -> dict[str, Stage]:
    seconds: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    ways: dict[int, Interval] = {}
    for item in groups:
        span = item.span
        seconds[span.name][span.lease] += span.duration_us
        start, end = ways.get(span.lease, (span.start_us, span.end_us))
        ways[span.lease] = (min(start, span.start_us), max(end, span.end_us))
    names = [*(name for name in WAY if name in seconds), *sorted(seconds.keys() - set(WAY))]
    found = {name: _stage(seconds[name].values()) for name in names}
    if ways:
        found["way"] = _stage([end - start for start, end in ways.values()])
    return found


def _stage(durations: Iterable[int]) -> Stage:
    ordered = sorted(durations)
    return Stage(groups=len(ordered), median_s=quantile(ordered, 0.5) / 1e6, p90_s=quantile(ordered, 0.9) / 1e6)


def union(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of `window` that `intervals` cover, in order and without overlap."""
    merged: list[Interval] = []
    for start, end in sorted((max(start, window[0]), min(end, window[1])) for start, end in intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def quantile(ordered: Sequence[float], q: float) -> float:
    """The `q` quantile of sorted values, linear between neighbours (as numpy.quantile)."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _all(parts: dict[str, list[Interval]]) -> list[Interval]:
    return [interval for intervals in parts.values() for interval in intervals]


def _longest_first(microseconds: dict[str, int]) -> dict[str, float]:
    return {name: us / 1e6 for name, us in sorted(microseconds.items(), key=lambda item: (-item[1], item[0])) if us}


# ---- text


def _table(*columns: str, right: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def _parts(seconds: dict[str, float], window: Window) -> Text:
    return Text(", ".join(f"{one_line(name)} {_percent(s / window.wall_s)}" for name, s in seconds.items()) or "–")


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _line(console: Console, line: str, style: str = "") -> None:
    console.print(Text(one_line(line), style=style), soft_wrap=True)
