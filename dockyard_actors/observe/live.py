"""What a person sees while a run goes on and when it ends: a table on a terminal, plain lines elsewhere.
Promises that nothing foreign reaches the terminal as a control code, that weak isolation is shown in red in every view, and
that whatever takes over two seconds shows progress. Only draws: it asks nobody, the caller hands in snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dockyard_actors.observe.gain import Gain
from dockyard_actors.observe.rollouts import RolloutSample
from dockyard_actors.observe.summary import PAIRS, LedgerCounts, PassRates, Summary
from dockyard_actors.observe.text import one_line, shorten, visible

WEAK = "weak"
WEAK_TEXT = (
    "WEAK ISOLATION: the programs that the model writes are not fully confined on this host (sandbox.allow_weak)"
)
# A phase that takes longer than this says on plain output that it goes on; repeated at the second interval.
PROGRESS_AFTER_S = 2.0
PROGRESS_EVERY_S = 15.0
EXAMPLE_CHARS = 700
_PAIR_NAMES = {
    "train_t1": "train T=1",
    "train_greedy": "train greedy",
    "heldout_t1": "held-out T=1",
    "heldout_greedy": "held-out greedy",
}


class RoleState(msgspec.Struct, frozen=True, kw_only=True):
    """One role process."""

    name: str
    pid: int | None = None
    state: str = "starting"  # "starting" | "running" | "restarting" | "stopped" | "failed"
    restarts: int = 0
    doing: str = ""
    waits_for: str = ""  # the peer and message of its longest wait
    wait_s: float = 0.0  # how long so far


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at one moment. Rates are per second; None means not known yet."""

    run_id: str
    phase: str  # "starting", "warm-up", "evaluating before", "training" …
    engine: str = ""
    mode: str = ""  # "sync" | "async"
    isolation: str = ""  # "" until the executor reported
    step: int = 0
    steps: int = 0
    phase_done: int | None = None  # units of the phase done, for phases that are not training steps
    phase_total: int | None = None
    reward_mean: float | None = None
    pass_rate: float | None = None  # of the last training batch
    evals: PassRates = PassRates()  # (before, last) so far
    age_mean: float | None = None  # in steps
    age_max: int | None = None
    tokens_per_s_generated: float | None = None
    tokens_per_s_trained: float | None = None
    ledger: LedgerCounts = LedgerCounts()
    groups_in_flight: int = 0
    groups_buffered: int = 0
    roles: tuple[RoleState, ...] = ()
    eta_s: float | None = None
    warnings: tuple[str, ...] = ()


class LiveView:
    """Draws snapshots on `console`: a table redrawn in place on a terminal, else one plain line per step and phase change.

    `plain` forces the choice; by default it is plain unless the console is an interactive terminal. Use as a context
    manager, or call `close()`, so that the terminal's cursor comes back. Not for more than one thread.
    """

    def __init__(
        self, console: Console, *, plain: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console
        # FORCE_COLOR makes rich believe in a terminal; cursor movements in a log file help nobody.
        isatty = getattr(console.file, "isatty", lambda: False)
        self.plain = not (console.is_interactive and isatty()) if plain is None else plain
        self._clock = clock
        self._start = clock()
        self._live: Live | None = None
        self._last: Snapshot | None = None
        self._phase_since = self._start
        self._said_at = self._start
        self._progress_said = False
        self._warned: set[str] = set()

    def update(self, snapshot: Snapshot) -> None:
        """Shows `snapshot`. Call it at least every second, so that waits and progress keep moving."""
        now = self._clock()
        if self._last is None or snapshot.phase != self._last.phase:
            self._phase_since = now
        if self.plain:
            self._update_plain(snapshot, now)
        else:
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="ellipsis")
                self._live.start()
            view = render(snapshot, elapsed_s=now - self._start, phase_s=now - self._phase_since)
            self._live.update(view, refresh=True)
        self._last = snapshot

    def close(self) -> None:
        """Leaves the last table on the screen and gives the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _update_plain(self, snapshot: Snapshot, now: float) -> None:
        last = self._last
        for warning in snapshot.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                self._say(f"warning: {warning}")
        if snapshot.isolation == WEAK and WEAK not in self._warned:
            self._warned.add(WEAK)
            self._say(f"warning: {WEAK_TEXT}")
        if last is not None and snapshot.evals != last.evals:
            self._say(f"evaluated: {_evals_text(snapshot.evals)}", now)
        if last is None or snapshot.phase != last.phase:
            self._progress_said = False
            self._say(f"phase: {snapshot.phase}", now)
        if snapshot.step > 0 and (last is None or snapshot.step != last.step):
            self._say(step_line(snapshot), now)
            return
        due = PROGRESS_EVERY_S if self._progress_said else PROGRESS_AFTER_S
        if now - self._said_at >= due:
            self._progress_said = True
            self._say(progress_line(snapshot, phase_s=now - self._phase_since), now)

    def _say(self, line: str, now: float | None = None) -> None:
        if now is not None:
            self._said_at = now
        out = self.console.file
        encoding = getattr(out, "encoding", None) or "utf-8"
        text = f"[{duration(self._clock() - self._start)}] {one_line(line)}\n"
        out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        out.flush()


def step_line(snapshot: Snapshot) -> str:
    """One training step as plain text."""
    s = snapshot
    parts = [
        f"step {s.step}/{s.steps}",
        f"reward {_number(s.reward_mean)}",
        f"pass {_number(s.pass_rate)}",
        f"age {_number(s.age_mean, 1)} (max {_number(s.age_max, 0)})",
        f"tokens/s {_number(s.tokens_per_s_generated, 0)} generated, {_number(s.tokens_per_s_trained, 0)} trained",
        s.ledger.text(),
    ]
    if s.eta_s is not None:
        parts.append(f"ETA {duration(s.eta_s)}")
    if s.isolation == WEAK:
        parts.append("WEAK ISOLATION")
    return " | ".join(parts)


def progress_line(snapshot: Snapshot, *, phase_s: float) -> str:
    """What a long phase is at: how far, since when, and the longest wait."""
    line = f"{snapshot.phase}: {duration(phase_s)} so far"
    if snapshot.phase_total:
        line += f", {snapshot.phase_done or 0} of {snapshot.phase_total}"
    if snapshot.steps:
        line += f", step {snapshot.step}/{snapshot.steps}"
    waiting = max((r for r in snapshot.roles if r.waits_for), key=lambda r: r.wait_s, default=None)
    if waiting is not None:
        line += f"; {waiting.name} waits {waiting.wait_s:.0f} s for {waiting.waits_for}"
    return line


def render(snapshot: Snapshot, *, elapsed_s: float, phase_s: float) -> RenderableType:
    """The table of the live view, as wide as its console."""
    s = snapshot
    rows: list[RenderableType] = []
    if s.isolation == WEAK:
        rows.append(Text(WEAK_TEXT, style="bold red"))
    rows.append(_progress(s, phase_s))
    figures = Table.grid(padding=(0, 3))
    figures.add_row(
        _pair("reward", _number(s.reward_mean)),
        _pair("pass rate", _number(s.pass_rate)),
        _pair("age", f"{_number(s.age_mean, 1)} (max {_number(s.age_max, 0)})"),
        _pair("tokens/s", f"{_number(s.tokens_per_s_generated, 0)} out, {_number(s.tokens_per_s_trained, 0)} trained"),
    )
    rows.append(figures)
    rows.append(_pair("evaluated", _evals_text(s.evals)))
    rows.append(_pair("ledger", s.ledger.text(), style="" if s.ledger.balanced else "bold red"))
    rows.append(_pair("groups", f"{s.groups_in_flight} in flight, {s.groups_buffered} buffered"))
    rows.append(_roles(s.roles))
    rows += [Text(f"! {one_line(warning)}", style="yellow") for warning in s.warnings[-5:]]
    facts = [s.run_id, s.mode, s.engine, f"isolation {s.isolation}" if s.isolation else "", duration(elapsed_s)]
    title = Text(" · ".join(one_line(fact, 60) for fact in facts if fact))
    return Panel(Group(*rows), title=title, title_align="left", border_style="red" if s.isolation == WEAK else "dim")


def final_report(
    console: Console,
    summary: Summary,
    examples: Sequence[RolloutSample],
    *,
    run_dir: Path,
    plot: Path | None = None,
    hint: str = "",
) -> None:
    """Prints how the run ended: pass rates before and after, up to three examples, the ledger, where things lie, the cause."""
    console.print()
    if summary.isolation == WEAK:
        console.print(Text(WEAK_TEXT, style="bold red"))
    table = Table(title="Pass rate", title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("before", "after", "change", "paired 90 %", "tasks"):
        table.add_column(column, justify="right")
    for name in PAIRS:
        before, after = getattr(summary.pass_rate, name)
        change = Text("–")
        if before is not None and after is not None:
            change = Text(
                f"{after - before:+.3f}", style="green" if after > before else "red" if after < before else ""
            )
        gain: Gain | None = getattr(summary.gain, name)
        paired = (gain.interval(), str(gain.tasks)) if gain else ("–", "–")
        table.add_row(_PAIR_NAMES[name], _number(before, 3), _number(after, 3), change, *paired)
    console.print(table)
    for number, sample in enumerate(examples[:3], start=1):
        good = sample.verdict == "ok" and bool(sample.tests) and all(t.outcome == "passed" for t in sample.tests)
        title = Text(f"Example {number}: {one_line(sample.task, 60)}, step {sample.step}, {sample.verdict_line}")
        text, left_out = shorten(visible(sample.completion), EXAMPLE_CHARS)
        body = Text((text.rstrip("\n") or "(empty)") + (f"\n… {left_out} more characters" if left_out else ""))
        console.print(Panel(body, title=title, title_align="left", border_style="green" if good else "yellow"))
    if not examples:
        _line(console, "No example completions were recorded.")
    _line(console, f"Ledger: {summary.ledger.text()}")
    for name, causes in (("filtered", summary.filtered_by_cause), ("failed", summary.failed_by_cause)):
        if causes:
            _line(console, f"  {name}: " + ", ".join(f"{count} {cause}" for cause, count in sorted(causes.items())))
    if any(summary.restarts.values()):
        _line(console, "Restarts: " + ", ".join(f"{role} {n}" for role, n in summary.restarts.items() if n))
    _line(
        console,
        f"{summary.steps} steps in {duration(summary.wall_s)}, {summary.tokens.generated} tokens generated, "
        f"{summary.tokens.trained} trained; {summary.mode}, engine {summary.engine}, isolation {summary.isolation}",
    )
    for warning in summary.warnings:
        _line(console, f"Warning: {warning}", "yellow")
    _line(console, f"Run directory: {run_dir}")
    if plot is not None:
        _line(console, f"Plot: {plot}")
    if hint:
        _line(console, hint)
    if summary.status == "completed":
        _line(console, "Status: completed", "bold green")
    else:
        cause = visible(summary.cause or "no cause recorded")
        console.print(Text(f"Status: {summary.status}\nCause: {cause}", style="bold red"), soft_wrap=True)


def duration(seconds: float) -> str:
    """`75` → `1:15`; `3700` → `1:01:40`."""
    whole = max(0, int(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _progress(s: Snapshot, phase_s: float) -> RenderableType:
    done, total, unit = (s.phase_done or 0, s.phase_total, "") if s.phase_total else (s.step, s.steps, "step ")
    grid = Table.grid(padding=(0, 2))
    label = Text(one_line(s.phase, 50), style="bold")
    tail = f"{unit}{done}/{total}  {duration(phase_s)}" if total else duration(phase_s)
    if s.eta_s is not None:
        tail += f"  ETA {duration(s.eta_s)}"
    bar = ProgressBar(total=total or None, completed=min(done, total or 0), width=32, pulse=not total)
    grid.add_row(label, bar, Text(tail))
    return grid


def _roles(roles: Sequence[RoleState]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    for column in ("role", "pid", "state", "restarts"):
        table.add_column(column, justify="right" if column in ("pid", "restarts") else "left", no_wrap=True)
    for column in ("doing", "waits for"):  # these two share what a narrow terminal leaves
        table.add_column(column, ratio=1, overflow="ellipsis", no_wrap=True)
    colours = {"running": "green", "failed": "bold red", "restarting": "yellow"}
    for role in roles:
        waits = f"{role.wait_s:.1f} s: {one_line(role.waits_for, 60)}" if role.waits_for else ""
        table.add_row(
            Text(one_line(role.name, 20)),
            Text("" if role.pid is None else str(role.pid)),
            Text(one_line(role.state, 12), style=colours.get(role.state, "")),
            Text(str(role.restarts), style="yellow" if role.restarts else ""),
            Text(one_line(role.doing, 60)),
            Text(waits),
        )
    return table


def _evals_text(evals: PassRates) -> str:
    shown: list[str] = []
    for name in PAIRS:
        before, after = getattr(evals, name)
        if before is None and after is None:
            continue
        shown.append(f"{_PAIR_NAMES[name]} {_number(before)}" + ("" if after is None else f" → {after:.2f}"))
    return ", ".join(shown) or "not yet"


def _pair(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label} ", "dim"), (visible(value), style))


def _line(console: Console, line: str, style: str = "") -> None:
    # soft_wrap: a path or a ledger line must stay one line, to be copied and to be grepped
    console.print(Text(one_line(line), style=style), soft_wrap=True)


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
