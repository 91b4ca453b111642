"""`dockyard-launch`: one command for each thing. Parses arguments, prints, and picks exit codes; the work is done elsewhere.

Exit codes: 0 done · 1 the run failed, or a ledger is not exact · 2 the command line, configuration or a file was wrong · 130 interrupted.
Imports no torch until a command needs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dockyard_actors.config import Config, ConfigError, load_config

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
ROLES = ("trainer", "inference", "sandbox", "buffer", "controller", "evaluator")

EPILOG = """\
examples:
  dockyard-launch up launch/configs/repair_tiny.yaml run.seed=1 grpo.max_num_steps=50
  dockyard-launch check launch/configs/functions_smollm2.yaml
  dockyard-launch inspect runs/latest --ledger
  dockyard-launch inspect runs/latest --idle
  dockyard-launch resume runs/latest
  dockyard-launch eval runs/latest/checkpoints/latest --tasks functions --json
  dockyard-launch --role controller --config launch/configs/repair_tiny.yaml     (prints the rendezvous address)
  dockyard-launch --role trainer --rendezvous ADDRESS

exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="dockyard-launch",
        description="Asynchronous RL of code models: starts, checks and reads runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--role", choices=ROLES, help="start one role alone and join a run (the controller starts one)")
    top.add_argument(
        "--rendezvous", metavar="ADDRESS", help="where the run's registry listens; printed by the controller"
    )
    top.add_argument("--index", type=int, default=0, help="which rollout this is, for --role inference (default 0)")
    top.add_argument("--config", metavar="FILE", help="for --role controller: the configuration of the run")
    top.add_argument(
        "--listen",
        metavar="ADDRESS",
        default="",
        help="for --role controller: also listen on tcp://HOST:PORT (encrypted; the key file's path is printed)",
    )
    top.add_argument("--key-file", metavar="FILE", help="the run's key file, to join a tcp:// rendezvous")
    top.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help="an override, repeatable"
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    def config_command(name: str, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help)
        sub.add_argument("config", metavar="CONFIG", help="YAML file")
        sub.add_argument(
            "overrides", metavar="KEY=VALUE", nargs="*", help="such as run.dir=PATH or grpo.max_num_steps=20"
        )
        return sub

    config_command("up", "start every role on this machine and train")
    check = config_command("check", "validate everything without loading a model, and print the plan")
    check.add_argument("--json", action="store_true", help="the plan as JSON")
    resume = commands.add_parser("resume", help="go on with a run that was interrupted or crashed")
    resume.add_argument("run", metavar="RUN", help="run directory")
    inspect = commands.add_parser("inspect", help="read a run: finished, running or crashed")
    inspect.add_argument("run", metavar="RUN", help="run directory")
    inspect.add_argument(
        "--ledger", action="store_true", help="recount the lease ids from the journal; exit 1 unless exact"
    )
    inspect.add_argument(
        "--idle",
        action="store_true",
        help="from trace.json: how busy each role was, what it waited for, and the groups' way",
    )
    inspect.add_argument("--rollouts", action="store_true", help="the newest readable samples")
    inspect.add_argument("--json", action="store_true", help="as JSON")
    watch = commands.add_parser(
        "top", help="what a running run does now: longest waits, queues, handlers, dead letters"
    )
    watch.add_argument("run", metavar="RUN", help="run directory")
    watch.add_argument("--once", action="store_true", help="one look instead of one a second")
    watch.add_argument("--json", action="store_true", help="one JSON object a look")
    evaluate = commands.add_parser("eval", help="pass@1 of a checkpoint, at T=1 and greedy, through the same executor")
    evaluate.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a model directory, RUN/checkpoints/latest, or a run (its newest checkpoint)",
    )
    evaluate.add_argument("--tasks", metavar="FILE", help="task file, or functions, or repair (default: the run's own)")
    evaluate.add_argument("--split", choices=("train", "heldout"), help="only this split (default both)")
    evaluate.add_argument("--samples", type=int, default=8, help="samples a task at T=1 (default 8)")
    evaluate.add_argument(
        "--set", dest="eval_overrides", metavar="KEY=VALUE", action="append", default=[], help="an override"
    )
    evaluate.add_argument("--json", action="store_true", help="as JSON on standard output")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return _dispatch(args)
    except (ConfigError, UsageError) as error:
        print(f"dockyard-launch: {error}".replace("\n", "\n  "), file=sys.stderr)
        return USAGE
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, BrokenPipeError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)  # the reader of our output went away; nothing is left to flush
            return OK
        text = str(error).splitlines() or [""]
        print(f"dockyard-launch: {type(error).__name__}: {text[0]}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


class UsageError(Exception):
    """The command line names something that is not there, or lacks something."""


def _dispatch(args: argparse.Namespace) -> int:
    if args.role and args.command:
        raise UsageError(f"--role starts one role; it does not go with the command {args.command!r}")
    if args.role:
        return _role(args)
    match args.command:
        case "up":
            return _up(_load(args.config, args.overrides))
        case "check":
            return _check(args)
        case "resume":
            return _resume(Path(args.run))
        case "inspect":
            return _inspect_idle(args) if args.idle else _inspect(args)
        case "top":
            return _top(args)
        case "eval":
            return _eval(args)
    parser().print_help()
    return USAGE


def _tasks(config: Config) -> Any:
    from dockyard_actors.tasks.dataset import TaskFileError, load_tasks

    if Path(config.tasks.path).exists() and not Path(config.tasks.path).is_file():
        raise UsageError(f"tasks.path: {config.tasks.path} is no regular file")
    try:
        return load_tasks(config.tasks.path)
    except TaskFileError as error:
        raise UsageError(f"tasks.path: {error}") from None


def _load(path: str, overrides: list[str]) -> Config:
    """The configuration with its engine chosen; says which and why."""
    from dockyard_actors.plan import with_engine

    config, why = with_engine(load_config(Path(path), overrides))
    print(f"engine: {config.generation.engine}, because {why}", file=sys.stderr)
    return config


def _open_run(config: Config | None, resume: Path | None) -> Any:
    from dockyard_actors.observe.rundir import RunDir, RunDirError

    try:
        if resume is not None:
            return RunDir.create(resume, resume=True)
        assert config is not None
        return RunDir.create(config.run.dir, name=config.run.name)
    except RunDirError as error:
        raise UsageError(str(error)) from None


def _up(config: Config) -> int:
    from dockyard_actors.launcher import ALL_ROLES, launch
    from dockyard_actors.plan import plan

    for problem in plan(config, _tasks(config))["problems"]:
        if problem.startswith("model.source"):
            raise UsageError(problem)
        print(f"warning: {problem}", file=sys.stderr)
    with _open_run(config, None) as run_dir:
        return launch(config, run_dir, ALL_ROLES)


def _resume(path: Path) -> int:
    from dockyard_actors.config import from_resolved
    from dockyard_actors.launcher import ALL_ROLES, launch
    from dockyard_actors.observe.summary import read_summary
    from dockyard_actors.plan import with_engine
    from dockyard_actors.roles.journal import JournalDamaged, read_journal
    from dockyard_actors.roles.ledger import Event, Opened

    resolved = path / "config.resolved.yaml"
    if not resolved.is_file():
        raise UsageError(f"{path}: no run to resume there (config.resolved.yaml is missing)")
    config, why = with_engine(from_resolved(resolved.read_text()))  # the engine may have been uninstalled since
    print(f"engine: {config.generation.engine}, because {why}", file=sys.stderr)
    done = read_summary(path / "summary.json")
    if done is not None and done.status == "completed":
        print(
            f"{path} is completed ({done.steps} steps); nothing is left to do. To train on, start a run with model.source={path}/checkpoints/…"
        )
        return OK
    try:
        events, _ = read_journal(path / "ledger" / "journal.bin", Event)
    except JournalDamaged as error:
        raise UsageError(str(error)) from None
    if not events and (path / "checkpoints" / "latest").exists():
        raise UsageError(
            f"{path}: there is a checkpoint but the journal is empty or missing: restore ledger/journal.bin from a copy"
        )
    before = next((event.tasks for event in reversed(events) if isinstance(event, Opened)), None)
    tasks = _tasks(config)
    if before not in (None, tasks.sha):
        raise UsageError(
            f"tasks.path: {config.tasks.path} is not the task set that this run was started with (sha {tasks.sha[:12]}, was "
            f"{before[:12]}): its ledger names prompts of the other one. Restore the file, or start a new run"
        )
    with _open_run(None, path) as run_dir:
        return launch(config, run_dir, ALL_ROLES)


def _role(args: argparse.Namespace) -> int:
    from dockyard_actors.launcher import join, launch

    if args.role == "controller":
        if not args.config:
            raise UsageError("--role controller starts a run and needs --config FILE")
        if args.rendezvous:
            raise UsageError("--role controller makes the rendezvous address; start it without --rendezvous")
        config = _load(args.config, args.overrides)
        _tasks(config)
        with _open_run(config, None) as run_dir:
            return launch(config, run_dir, ("controller",), args.listen)
    if not args.rendezvous:
        raise UsageError(
            f"--role {args.role} joins a run and needs --rendezvous ADDRESS; the controller prints it when it starts"
        )
    return join(args.role, args.index, args.rendezvous, Path(args.key_file) if args.key_file else None)


def _check(args: argparse.Namespace) -> int:
    from dockyard_actors.plan import plan, render_plan, with_engine

    config, why = with_engine(load_config(Path(args.config), args.overrides))
    report = plan(config, _tasks(config)) | {"engine": config.generation.engine, "engine_reason": why}
    print(json.dumps(report, indent=2) if args.json else render_plan(report))
    return OK if not report["problems"] else USAGE


def _inspect(args: argparse.Namespace) -> int:
    import msgspec
    from rich.console import Console

    from dockyard_actors.observe.inspect import inspect_run, render_inspection, render_rollouts
    from dockyard_actors.observe.rundir import RunDir, RunDirError
    from dockyard_actors.roles.journal import JournalDamaged, read_journal
    from dockyard_actors.roles.ledger import Event, recount

    path = RunDir(args.run).path
    journal = RunDir(path).ledger / "journal.bin"
    audit, counts, torn, problem = None, None, 0, ""
    try:
        report = inspect_run(path)
    except RunDirError as error:
        raise UsageError(str(error)) from None
    try:
        events, torn = read_journal(journal, Event)
        audit = recount(events)
        counts = {"issued": audit.issued, **{name: len(ids) for name, ids in audit.classes.items()}}
        if not journal.is_file() or (not events and report["step"]):
            problem = f"{journal} is {'empty' if journal.is_file() else 'missing'}: nothing can be said of the ledger of this run"
        report["ledger"] = None if problem else counts
    except JournalDamaged as error:
        problem = str(error)
    if args.ledger:
        if problem or audit is None or counts is None:
            raise UsageError(problem)
        if args.json:
            print(json.dumps({**msgspec.to_builtins(audit), "counts": counts, "torn_bytes": torn}, indent=2))
        else:
            print_ledger(audit, counts, torn)
        return OK if audit.exact else FAILED
    if problem:
        report["problems"].append(problem)
    if args.json:
        print(json.dumps(report, indent=2))
    elif args.rollouts:
        render_rollouts(path, Console())
    else:
        render_inspection(report, Console())
    return OK


def _top(args: argparse.Namespace) -> int:
    import asyncio

    from rich.console import Console

    from dockyard_actors.observe.rundir import RunDir
    from dockyard_actors.observe.top import Ended, NotRunning, watch

    try:
        asyncio.run(watch(RunDir(args.run).path, Console(), once=args.once, as_lines=args.json))
    except Ended as end:
        print(end, file=sys.stderr if args.json else sys.stdout)
    except NotRunning as why:
        print(why, file=sys.stderr)
        return FAILED
    return OK


def _inspect_idle(args: argparse.Namespace) -> int:
    import msgspec
    from rich.console import Console

    from dockyard_actors.observe.idle import IdleError, idle_report, render_idle
    from dockyard_actors.observe.rundir import RunDir

    run = RunDir(args.run)
    if not run.is_run():
        raise UsageError(f"{run.path} is not a run directory (no run.lock, no config.resolved.yaml)")
    try:
        report = idle_report(run.trace)
    except IdleError as error:
        raise UsageError(str(error)) from None
    if args.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        render_idle(report, Console())
    return OK


def print_ledger(audit: Any, counts: dict[str, int], torn: int) -> None:
    print(" + ".join(f"{name} {counts[name]}" for name in counts if name != "issued") + f" = issued {counts['issued']}")
    for name, ids in audit.classes.items():
        print(f"  {name:9} {len(ids):6}  {ranges(ids)}")
    if torn:
        print(f"  the journal ends in {torn} torn bytes: a record was being written")
    for problem in audit.in_two:
        print(f"  IN TWO CLASSES: {problem}")
    if audit.in_none:
        print(f"  IN NO CLASS: {ranges(audit.in_none)}")
    print("exact: every issued lease is in exactly one class" if audit.exact else "NOT EXACT")


def ranges(ids: Sequence[int], limit: int = 12) -> str:
    """Sorted ids as 0-4, 7, 9-12; the middle of a long list is left out and says so."""
    parts: list[str] = []
    start = previous = None
    for value in [*ids, None]:
        if previous is not None and value == previous + 1:
            previous = value
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = value
    if len(parts) > limit:
        parts = [*parts[: limit // 2], f"… {len(parts) - limit} more …", *parts[-limit // 2 :]]
    return ", ".join(parts)


def _rate(value: float | None) -> str:
    return "no verdicts" if value is None else f"{value:.3f}"


def _eval(args: argparse.Namespace) -> int:
    from dockyard_actors.offline_eval import config_of, evaluate_checkpoint, resolve
    from dockyard_actors.sandbox.child import ExecutorStartError
    from dockyard_actors.tasks.dataset import TaskFileError

    if args.samples < 8:
        raise UsageError(f"--samples {args.samples}: at least 8, fewer say little about a pass rate")
    checkpoint = resolve(Path(args.checkpoint))
    config = config_of(checkpoint, args.eval_overrides)
    source = args.tasks or config.tasks.path
    try:
        report = asyncio.run(
            evaluate_checkpoint(
                checkpoint, source, args.samples, config, lambda text: print(text, file=sys.stderr), args.split
            )
        )
    except TaskFileError as error:
        raise UsageError(f"--tasks: {error}") from None
    except ExecutorStartError as error:
        print(f"dockyard-launch: {error}", file=sys.stderr)
        return FAILED
    if args.json:
        print(json.dumps(report, indent=2))
        return OK
    for split in ("train", "heldout"):
        if split in report:
            part = report[split]
            print(f"{split}: {part['tasks']} tasks, pass@1 T=1 {_rate(part['t1'])}, greedy {_rate(part['greedy'])}")
            for name, rates in sorted(part["by_task"].items(), key=lambda item: item[1].get("t1", 0.0)):
                print(
                    f"  {name:40} T=1 {rates.get('t1', float('nan')):.2f}  greedy {rates.get('greedy', float('nan')):.0f}"
                )
    print(f"all: T=1 {_rate(report['t1'])}, greedy {_rate(report['greedy'])}; isolation {report['isolation']}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
