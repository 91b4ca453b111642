"""`dockyard-launch inspect RUN`: what a run directory says about a running, crashed or finished run.
Promises to change nothing and to read whatever is there; what is missing or damaged is named. A recount of the ledger is made
elsewhere and handed in.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dockyard_actors.observe.gain import Gain, Gains
from dockyard_actors.observe.live import WEAK, WEAK_TEXT, duration
from dockyard_actors.observe.logs import LOG_LINE
from dockyard_actors.observe.metrics import MetricsLog, fields_text, read_metrics
from dockyard_actors.observe.rollouts import markdown, read_rollouts
from dockyard_actors.observe.rundir import RunDir, RunDirError
from dockyard_actors.observe.summary import PAIRS, EvalPoint, PassRates, Summary, read_summary
from dockyard_actors.observe.text import one_line, visible

LOG_TAIL_BYTES = 1 << 18
"""How much of the end of a role's log is searched for errors."""
ERRORS_PER_ROLE = 3
_RAW_ERROR = re.compile(
    r"[\w.]*(?:Error|Exception|Interrupt)\b.*|Fatal Python error.*|Segmentation fault.*|Aborted.*|Killed.*"
)


def inspect_run(path: Path | str, ledger: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything known of the run at `path`, as JSON data. Raises RunDirError when there is no run.

    Keys: id, path, state ("running", "crashed", or the summary's status), pid and host (of the process that holds it, while
    running), step, facts (of the `started` event), last_step (record or None), pass_rate (by PAIRS), gain (by PAIRS: Gain or None), evaluations (beside training),
    ledger (`ledger` as given, else the summary's counts, else None), summary (or None), errors (role → last error lines), events (the last ten texts),
    rollouts (samples recorded), plot (path or None), problems (texts: damaged or missing files).
    """
    run = RunDir(path)
    if not run.is_run():
        raise RunDirError(f"{run.path} is not a run directory (no run.lock, no config.resolved.yaml)")
    held = run.is_held()
    log = read_metrics(run.metrics)
    problems = list(log.problems)
    if held and log.torn:
        problems[-1] += "; the run is writing to it"
    summary = _summary(run, problems)
    samples, damaged = read_rollouts(run.rollouts)
    problems += damaged
    holder = run.holder() if held else None
    ended = summary.status if summary else "crashed"
    facts = dict(log.facts)
    if summary:
        facts |= {
            "model": summary.model,
            "mode": summary.mode,
            "engine": summary.engine,
            "isolation": summary.isolation,
        }
    return {
        "id": run.id,
        "path": str(run.path),
        "state": "running" if held else ended,
        "pid": holder.pid if holder else None,
        "host": holder.host if holder else None,
        "step": log.steps[-1].step if log.steps else 0,
        "facts": facts,
        "last_step": _plain(log.steps[-1]) if log.steps else None,
        "pass_rate": _plain(summary.pass_rate if summary else PassRates.of(log)),
        "gain": _plain(Gains.of(log) if log.evals or summary is None else summary.gain),
        "evaluations": [_plain(point) for point in EvalPoint.beside(log)],
        "ledger": dict(ledger) if ledger is not None else _plain(summary.ledger) if summary else None,
        "summary": _plain(summary) if summary else None,
        "errors": {log_path.stem: lines for log_path in _logs(run) if (lines := last_errors(log_path))},
        "events": _event_texts(log),
        "rollouts": len(samples),
        "plot": str(run.plot) if run.plot.is_file() else None,
        "problems": problems,
    }


def last_errors(path: Path, count: int = ERRORS_PER_ROLE) -> list[str]:
    """The last `count` error lines of a role's log: records of level ERROR and above, and what a dying process wrote raw."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
        tail = file.read().decode("utf-8", "backslashreplace")
    found: deque[str] = deque(maxlen=count)
    for line in tail.splitlines():
        record = LOG_LINE.fullmatch(line)
        if record["level"] in ("ERROR", "CRITICAL") if record else _RAW_ERROR.match(line):
            found.append(visible(line))
    return list(found)


def render_inspection(report: Mapping[str, Any], console: Console) -> None:
    """Prints what `inspect_run` found."""
    state = str(report["state"])
    colour = {"completed": "green", "running": "cyan", "interrupted": "yellow"}.get(state, "red")
    title = Text.assemble((one_line(str(report["id"])), "bold"), " ", (state, f"bold {colour}"))
    if report["pid"] is not None:
        title.append(f" (process {report['pid']} on {report['host']})")
    console.print(title, soft_wrap=True)
    facts = report["facts"]
    if facts.get("isolation") == WEAK:
        console.print(Text(WEAK_TEXT, style="bold red"))
    if facts:
        _line(console, fields_text(facts))
    summary = report["summary"]
    if summary:
        _line(console, f"{summary['steps']} steps in {duration(summary['wall_s'])}")
    last = report["last_step"]
    if last:
        names = ("reward_mean", "pass_rate", "loss", "age_mean", "age_max", "tokens_per_s")
        shown = ", ".join(f"{name} {_short(last[name])}" for name in names)
        _line(console, f"step {last['step']} (version {last['version']}): {shown}")
    else:
        _line(console, "no training step recorded")
    _pass_rates(report["pass_rate"], report["gain"], console)
    _beside_training(report["evaluations"], console)
    if report["ledger"] is not None:
        _line(console, "ledger: " + ", ".join(f"{key} {value}" for key, value in report["ledger"].items()))
    for event in report["events"]:
        _line(console, f"event: {event}")
    for role, lines in report["errors"].items():
        _line(console, f"last errors of {role}:", "red")
        for line in lines:
            # A record keeps its newlines as `\n`; a traceback is for reading.
            console.print(Text("  " + line.replace("\\n", "\n    ")), soft_wrap=True)
    for problem in report["problems"]:
        _line(console, f"problem: {problem}", "yellow")
    for warning in (summary or {}).get("warnings", ()):
        _line(console, f"warning: {warning}", "yellow")
    _line(console, f"{report['rollouts']} rollout samples; run directory: {report['path']}")
    if report["plot"]:
        _line(console, f"plot: {report['plot']}")
    if summary and summary["cause"]:
        console.print(Text(f"cause: {visible(summary['cause'])}", style="bold red"), soft_wrap=True)


def render_rollouts(path: Path | str, console: Console, *, last: int = 5) -> int:
    """Prints the last `last` rollout samples as markdown text. Returns how many were printed."""
    samples, problems = read_rollouts(RunDir(path).rollouts)
    for problem in problems:
        _line(console, f"problem: {problem}", "yellow")
    chosen = samples[-last:] if last > 0 else []
    for sample in chosen:
        console.print(Text(f"Step {sample.step}", style="bold"))
        console.print(Text(markdown(sample)), soft_wrap=True)
    if not chosen:
        _line(console, "no rollout samples recorded")
    return len(chosen)


def _pass_rates(pairs: Mapping[str, Any], gains: Mapping[str, Any], console: Console) -> None:
    if all(value is None for pair in pairs.values() for value in pair):
        _line(console, "no evaluation recorded")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("pass rate", "before", "after", "gain", "paired 90 %", "tasks"):
        table.add_column(column)
    for name in PAIRS:
        before, after = pairs[name]
        gain = msgspec.convert(gains[name], Gain | None)
        paired = (f"{gain.gain:+.3f}", gain.interval(), str(gain.tasks)) if gain else ()
        table.add_row(name, _short(before), _short(after), *paired)
    console.print(table)


def _beside_training(points: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not points:
        return
    names = [name for name in PAIRS if any(f"{point['split']}_{point['mode']}" == name for point in points)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("beside training, step", *names):
        table.add_column(column)
    for step in sorted({point["step"] for point in points}):
        rates = {f"{point['split']}_{point['mode']}": point["pass_rate"] for point in points if point["step"] == step}
        table.add_row(str(step), *(_short(rates[name]) if name in rates else "" for name in names))
    console.print(table)


def _summary(run: RunDir, problems: list[str]) -> Summary | None:
    try:
        return read_summary(run.summary)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problems.append(f"summary.json cannot be read: {error}")
        return None


def _logs(run: RunDir) -> list[Path]:
    return sorted(run.logs.glob("*.log"))


def _event_texts(log: MetricsLog, count: int = 10) -> list[str]:
    return [f"{event.name}: {event.text}" if event.text else event.name for event in log.events[-count:]]


def _plain(value: Any) -> dict[str, Any]:
    return msgspec.to_builtins(value)


def _short(value: float | int | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _line(console: Console, line: str, style: str = "") -> None:
    console.print(Text(one_line(line), style=style), soft_wrap=True)
