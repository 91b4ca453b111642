"""`dockyard-launch top RUN`: what a running run does at this moment: who waits for whom, queues, handlers, dead letters.

It joins the run as an observer: registers no name, asks what every process answers by itself, and leaves. It changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dockyard_actors.observe.text import one_line
from dockyard_actors.runtime.addresses import tcp_host
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.directory import REGISTRY, Entry
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.runtime.ref import collect
from dockyard_actors.runtime.registry import ListAll
from dockyard_actors.runtime.status import Inspect, SystemStatus
from dockyard_actors.runtime.supervision import ListProcesses, ProcessInfo
from dockyard_actors.runtime.system import ActorSystem

RUNTIME = "runtime.json"
"""In the run directory of a running run: where it can be joined."""
ANSWER_S = 2.0  # a process whose loop does not answer within this is shown as silent
JOIN_S = 5.0
REFRESH_S = 1.0
WAITS, LETTERS = 12, 5


class NotRunning(Exception):
    """There is nothing to look at; the text says why."""


class Ended(NotRunning):
    """The run ended while it was looked at."""


class Runtime(msgspec.Struct, frozen=True):
    """What the launcher writes to `RUNTIME`: an address and a path, no secret."""

    rendezvous: str
    key_file: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a run. processes: by name; silent: names of processes that did not answer, with the reason."""

    time: float
    supervised: tuple[ProcessInfo, ...]
    processes: dict[str, SystemStatus]
    silent: dict[str, str]
    entries: tuple[Entry, ...]


def runtime_of(run: Path) -> Runtime:
    """Where the run at this directory can be joined. Raises NotRunning."""
    if not (run / "run.lock").exists():
        raise NotRunning(f"{run} is not a run directory")
    try:
        return msgspec.json.decode((run / RUNTIME).read_bytes(), type=Runtime)
    except FileNotFoundError:
        raise NotRunning(f"{run} does not run now; `dockyard-launch inspect` shows what it did") from None
    except msgspec.DecodeError as error:
        raise NotRunning(f"{run / RUNTIME} cannot be read: {error}") from None


@contextlib.asynccontextmanager
async def joined(runtime: Runtime) -> AsyncIterator[ActorSystem]:
    """The observer's place in the run. Raises NotRunning when nobody is there any more."""
    key_file = Path(runtime.key_file)
    keys = key_file if runtime.key_file and key_file.exists() else None
    try:
        host = tcp_host("", runtime.rendezvous) if keys is not None else ""  # where the registry tells it who lives
        config = SystemConfig(
            name="top",
            rendezvous=runtime.rendezvous,
            tcp_bind=f"tcp://{host}:0" if host else "",
            key_file=keys,
            join_s=JOIN_S,
        )
        system = ActorSystem(config)
        await system.__aenter__()
    except (ActorError, OSError) as error:
        raise NotRunning(f"nobody answers at {runtime.rendezvous}: the run has ended or was killed ({error})") from None
    try:
        yield system
    finally:
        await system.close()


async def look(system: ActorSystem) -> View:
    """Asks everybody. Raises Ended when the run has ended meanwhile."""
    try:
        known = await system.ref(REGISTRY).ask(ListAll(), deadline_s=ANSWER_S)
        listed = await system.ref("agent").ask(ListProcesses(), deadline_s=ANSWER_S)
    except ActorError as error:
        raise Ended(f"the run has ended: {error}") from None
    names = {process.uid: process.name for process in known.processes if process.uid != system.config.uid}
    doors: dict[str, str] = {}  # uid → an actor of that process
    for entry in known.entries:
        if entry.alive and entry.uid in names and entry.name != REGISTRY:
            doors.setdefault(entry.uid, entry.name)
    answers = await collect([system.ref(name) for name in doors.values()], Inspect(), deadline_s=ANSWER_S)
    processes: dict[str, SystemStatus] = {}
    silent: dict[str, str] = {}
    for uid, answer in zip(doors, answers, strict=True):
        if isinstance(answer, ActorError):
            silent[names[uid]] = str(answer).splitlines()[0]
        else:
            processes[names[uid]] = answer
    return View(
        time=time.time(), supervised=listed.processes, processes=processes, silent=silent, entries=known.entries
    )


def as_json(view: View) -> str:
    return json.dumps(msgspec.to_builtins(view))


def render(view: View) -> RenderableType:
    """The longest waits first: that is what a stuck run is about."""
    parts: list[RenderableType] = [_waits(view), _processes(view), _actors(view)]
    letters = [
        (letter.when, name, letter.text)
        for name, status in view.processes.items()
        for letter in status.dead_letters[-LETTERS:]
    ]
    if letters:
        table = _table("dead letters", "process", "what")
        for when, name, text in sorted(letters)[-LETTERS:]:
            table.add_row(time.strftime("%H:%M:%S", time.localtime(when)), name, one_line(text, 140))
        parts.append(table)
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title_justify="left")
    for column in columns:
        table.add_column(column)
    return table


def _waits(view: View) -> RenderableType:
    waits = sorted((w for s in view.processes.values() for w in s.waits), key=lambda wait: -wait.age_s)
    if not waits:
        return Text("nobody waits for anybody")
    table = _table("longest waits", "for", "message", "what", "age s", "of s", "trace")
    for wait in waits[:WAITS]:
        late = "bold red" if wait.age_s > wait.deadline_s / 2 > 0.5 else ""
        row = (wait.owner, wait.peer, one_line(wait.message, 40), wait.what)
        times = (f"{wait.age_s:.1f}", f"{wait.deadline_s:.0f}", f"{wait.trace:x}" if wait.trace else "")
        table.add_row(*row, *times, style=late)
    if len(waits) > WAITS:
        table.add_row(f"… and {len(waits) - WAITS} more")
    return table


def _processes(view: View) -> RenderableType:
    table = _table("process", "pid", "state", "start", "restarts", "asks", "tells", "dead letters", "loop")
    supervised = {process.name: process for process in view.supervised}
    for name in sorted({*supervised, *view.processes, *view.silent}):
        process, status = supervised.get(name), view.processes.get(name)
        about = (
            (str(process.pid), process.state, f"#{process.incarnation}", str(process.restarts))
            if process is not None
            else (str(status.pid) if status else "", "", "", "")
        )
        stats = status.stats if status is not None else None
        counts = (str(stats.asks), str(stats.tells), str(stats.dead_letters)) if stats else ("", "", "")
        loop = one_line(view.silent.get(name, status.guard if status else ""), 60)
        table.add_row(name, *about, *counts, loop, style="red" if name in view.silent else "")
    return table


def _actors(view: View) -> RenderableType:
    table = _table(
        "actor", "queued", "running", "busy with", "for s", "slowest handler", "calls", "p50 ms", "p99 ms", "max ms"
    )
    for status in view.processes.values():
        for name, actor in sorted(status.actors.items()):
            slowest = max(actor.handlers.items(), key=lambda item: item[1].total_s, default=None)
            times = ("", "", "", "", "")
            if slowest is not None:
                kind, took = slowest
                ms = (took.quantile_s(0.5), took.quantile_s(0.99), took.max_s)
                times = (kind, str(took.count), *(f"{seconds * 1e3:.1f}" for seconds in ms))
            busy = f"{actor.busy_s:.1f}" if actor.busy else ""
            queued = f"{actor.mailbox + actor.control}"
            table.add_row(name, queued, str(actor.running), actor.busy, busy, *times)
    return table


async def watch(run: Path, console: Console, *, once: bool = False, as_lines: bool = False) -> None:
    """Shows the run until it ends, or once. ``as_lines``: one JSON object a look."""
    async with joined(runtime_of(run)) as system:
        first = await look(system)
        if once or as_lines:
            view = first
            while True:
                if as_lines:
                    console.file.write(as_json(view) + "\n")
                    console.file.flush()
                else:
                    console.print(render(view))
                if once:
                    return
                await asyncio.sleep(REFRESH_S)
                view = await look(system)
        with Live(render(first), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                live.update(render(await look(system)), refresh=True)
