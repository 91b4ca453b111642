"""What a run looks like from outside: snapshots for the live view, and the summary at its end.

The summary's ledger is recounted from the journal and its pass rates are read from metrics.jsonl, so that it is true also when the
controller did not live to say anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from dockyard_actors.config import Config
from dockyard_actors.observe.gain import Gains
from dockyard_actors.observe.live import RoleState, Snapshot
from dockyard_actors.observe.metrics import read_metrics
from dockyard_actors.observe.plot import reward_png
from dockyard_actors.observe.rollouts import RolloutSample, read_rollouts
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.observe.summary import (
    EvalPoint,
    LedgerCounts,
    PassRates,
    Summary,
    TokenCounts,
    Transports,
    read_summary,
    write_summary,
)
from dockyard_actors.roles.journal import read_journal
from dockyard_actors.roles.ledger import Closed, Event, recount
from dockyard_actors.roles.messages import StatusIs
from dockyard_actors.runtime.supervision import ProcessInfo

MAX_EXAMPLES = 3
NO_SIGNAL_WARNS = 0.9  # share of filtered groups beyond which a run is told to have learnt little
PREVIOUS = "summary.previous.json"  # written by RunDir.create(resume=True)
ALONE = {
    "rollout-0": "inference",
    "broker": "sandbox",
    "trainer": "trainer",
    "buffer": "buffer",
}  # role names of --role


def _facts(status: StatusIs | None) -> dict[str, str]:
    return {key: value for role in status.roles.values() for key, value in role.facts.items()} if status else {}


def _restarted(processes: Sequence[ProcessInfo]) -> tuple[str, ...]:
    return tuple(f"{p.name} restarted, {p.restarts} so far: {p.cause}" for p in processes if p.restarts)


def _phase(status: StatusIs) -> str:
    """Until the trainer says something: which roles have not joined yet."""
    missing = [flag for name, flag in ALONE.items() if name not in status.roles]
    return f"waiting for {', '.join(missing)}" if status.phase == "starting" and missing else status.phase


def _count(status: StatusIs, name: str) -> int | None:
    trainer = status.roles.get("trainer")
    return int(trainer.counters[name]) if trainer and name in trainer.counters else None


def snapshot_of(
    config: Config,
    run_dir: RunDir,
    status: StatusIs | None,
    processes: Sequence[ProcessInfo],
    eta_s: float | None,
    generated_per_s: float | None,
) -> Snapshot:
    roles = []
    for process in processes:
        said = status.roles.get(process.name) if status else None
        roles.append(
            RoleState(
                name=process.name,
                pid=process.pid or None,
                state=process.state,
                restarts=process.restarts,
                doing=said.doing if said else "",
                waits_for=said.waits_for if said else "",
                wait_s=said.wait_s if said else 0.0,
            )
        )
    if status is None:
        return Snapshot(
            run_id=run_dir.id,
            phase="starting",
            mode=config.grpo.mode,
            steps=config.grpo.max_num_steps,
            roles=tuple(roles),
            warnings=_restarted(processes),
        )
    step, facts = status.last_step, _facts(status)
    buffered = status.buffered
    return Snapshot(
        run_id=run_dir.id,
        phase=_phase(status),
        engine=facts.get("engine", ""),
        mode=config.grpo.mode,
        isolation=facts.get("isolation", ""),
        step=step.step if step else status.step,  # the newest step that is measured, so that its figures are its own
        steps=config.grpo.max_num_steps,
        reward_mean=step.reward_mean if step else None,
        pass_rate=step.pass_rate if step else None,
        evals=status.pass_rates,
        age_mean=step.age_mean if step else None,
        age_max=step.age_max if step else None,
        tokens_per_s_generated=generated_per_s,
        tokens_per_s_trained=step.tokens_per_s if step else None,
        ledger=LedgerCounts(**status.ledger),
        groups_in_flight=status.ledger["in_flight"] - buffered,
        groups_buffered=buffered,
        roles=tuple(roles),
        eta_s=eta_s,
        phase_done=_count(status, "phase_done"),
        phase_total=_count(status, "phase_total"),
        warnings=(*status.warnings, *_restarted(processes)),
    )


def summarise(
    config: Config,
    run_dir: RunDir,
    outcome: str,
    cause: str | None,
    status: StatusIs | None,
    restarts: Mapping[str, int],
    wall_s: float,
) -> tuple[Summary, list[RolloutSample]]:
    """Writes summary.json and the plot; returns the summary and examples to show."""
    events, torn = read_journal(run_dir.ledger / "journal.bin", Event)
    audit = recount(events)
    log = read_metrics(run_dir.metrics)
    facts = {**{k: str(v) for k, v in log.facts.items()}, **_facts(status)}
    warnings = list(status.warnings) if status else []
    warnings += log.problems
    if torn:
        warnings.append(f"the journal ended in {torn} torn bytes, which were cut")
    if not audit.exact:
        inexact = f"the ledger is not exact: {'; '.join([*audit.in_two, *map(str, audit.in_none)][:5])}"
        outcome, cause = "failed", f"{cause}\nbesides, {inexact}" if cause else inexact
    causes = {
        kind: dict(Counter(e.cause for e in events if isinstance(e, Closed) and e.outcome == kind))
        for kind in ("filtered", "failed")
    }
    all_restarts = dict(restarts)
    broker = status.roles.get("broker") if status else None
    if broker and broker.counters.get("executor_restarts"):
        all_restarts["executor"] = int(broker.counters["executor_restarts"])
    before = read_summary(run_dir.path / PREVIOUS)  # of the part before a resume
    silent = (status.causes.get("filtered", {}) if status else {}).get("no_signal", 0)
    if audit.issued and silent > NO_SIGNAL_WARNS * audit.issued:
        warnings.append(
            f"{silent} of {audit.issued} groups taught nothing (no_signal: all samples of a prompt got the same "
            "reward); the tasks are too hard or too easy for this model, or its warm-up is too short"
        )
    summary = Summary(
        status=outcome,  # type: ignore[arg-type]
        cause=cause,
        steps=log.steps[-1].step if log.steps else 0,
        wall_s=wall_s + (before.wall_s if before else 0.0),
        engine=facts.get("engine", config.generation.engine),
        transports=Transports(control="zmq+ipc", data="slab", weights="shm"),
        isolation=facts.get("isolation", "unknown"),
        seed=config.run.seed,
        mode=config.grpo.mode,
        model=config.model.source,
        pass_rate=PassRates.of(log),
        evaluations=EvalPoint.beside(log),
        gain=Gains.of(log),
        ledger=LedgerCounts(issued=audit.issued, **{name: len(ids) for name, ids in audit.classes.items()}),
        filtered_by_cause=causes["filtered"],
        failed_by_cause=causes["failed"],
        restarts=all_restarts,
        tokens=TokenCounts(
            generated=(status.tokens_generated if status else 0) + (before.tokens.generated if before else 0),
            trained=sum(step.tokens_trained for step in log.steps),
        ),
        warnings=tuple(warnings),
    )
    try:
        write_summary(run_dir.summary, summary)
        reward_png(run_dir)
    except OSError as error:  # a full disk must not hide how the run ended
        summary = msgspec.structs.replace(
            summary, warnings=(*summary.warnings, f"could not write to {run_dir.path}: {error}")
        )
    examples = (
        list(status.examples) if status and status.examples else read_rollouts(run_dir.rollouts)[0][-MAX_EXAMPLES:]
    )
    return summary, examples
