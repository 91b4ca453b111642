"""The controller: hands out prompts within the staleness budget, keeps the run ledger and its journal, and writes everything of the run
directory but checkpoints and logs. Knows no tensors and imports no torch.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from dockyard_actors.config import Config
from dockyard_actors.observe.metrics import MetricsWriter, StepRecord, read_metrics
from dockyard_actors.observe.plot import reward_png
from dockyard_actors.observe.rollouts import RolloutSample, RolloutWriter
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.observe.summary import PassRates
from dockyard_actors.observe.trace import TraceWriter
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.admission import NoPrompts, PromptOrder, hand_out, is_open, room
from dockyard_actors.roles.journal import Journal
from dockyard_actors.roles.ledger import (
    QUARANTINED,
    Buffered,
    Checkpointed,
    Closed,
    Event,
    Finished,
    Freed,
    Fresh,
    Lease,
    Ledger,
    Opened,
    Published,
    RolledBack,
    Stepped,
    Stopping,
)
from dockyard_actors.runtime.actor import Actor, Death, concurrent, control
from dockyard_actors.tasks.dataset import TaskSet

log = logging.getLogger(__name__)

PLOT_EVERY = 10  # steps between two drawings of reward.png


class Controller(Actor):
    """One per run. Rebuilt from its journal when it is restarted."""

    def __init__(self, config: Config, tasks: TaskSet, run_dir: RunDir, session: str):
        self.config = config
        self.run_dir = run_dir
        self.session = session
        self.tasks_sha = tasks.sha
        self.prompts = PromptOrder(tasks, config.run.seed)
        self.journal: Journal[Event] = Journal(run_dir.ledger / "journal.bin", Event)
        self.ledger = Ledger.replay(self.journal.recovered)
        self.metrics = MetricsWriter(run_dir.metrics)
        self.rollouts = RolloutWriter(run_dir.rollouts, per_step=config.observe.rollouts_per_step)
        self.dead: dict[str, int] = {}  # rollout → its newest incarnation that is known to be dead
        self.phase = "starting"
        self.last_step: StepRecord | None = None
        self.pass_rates = PassRates.of(read_metrics(run_dir.metrics))
        self.examples: tuple[RolloutSample, ...] = ()
        self.warnings: list[str] = []
        self.failure = ""  # why the run cannot go on; the agent ends it
        self.trace = TraceWriter(run_dir.trace, warn=self.warnings.append)
        self.roles: dict[str, m.ReportRole] = {}
        self.counters: dict[tuple[str, int], dict[str, float]] = {}  # a restarted role counts from zero
        self.said_start = bool(self.journal.recovered)
        self._changed = asyncio.Event()

    # ---- life

    async def on_start(self) -> None:
        ledger = self.ledger
        if self.journal.recovered and ledger.session != self.session:
            # The whole run was stopped: what was buffered lived in the memory of processes that are gone.
            self._record(*(Freed(lease.id, "host_lost") for lease in ledger.open.values()))
        elif self.journal.recovered:
            # Only this process was restarted; engines, trainer and buffer are as they were.
            closed = tuple(lease.id for lease in ledger.leases.values() if lease.ref and lease.id not in ledger.open)
            self.ctx.spawn(self._release(closed), name="free what the journal closed")
            self.warnings.append("the controller was restarted and rebuilt from its journal")
        self._record(Opened(self.run_dir.path.name, self.config.run.seed, self.tasks_sha, self.session))
        for index in range(self.config.rollout.count):
            self.ctx.watch(f"rollout-{index}")
        log.info("ledger %s, step %d, version %d", ledger.summary(), ledger.step, ledger.version)

    async def on_stop(self) -> None:
        self.journal.close()
        self.metrics.close()
        self.rollouts.close()
        self.trace.close()

    async def on_death(self, death: Death) -> None:
        holder = f"{death.name}#{death.incarnation}"
        lost = self.ledger.held_by(holder)
        self.dead[death.name] = max(death.incarnation, self.dead.get(death.name, 0))
        if death.clean and not lost:
            return
        self._lost(holder, death.cause, lost)

    def _lost(self, holder: str, cause: str, leases: list[Lease]) -> None:
        self._record(*(Freed(lease.id, "holder_died") for lease in leases))
        self.metrics.event("death", f"{holder}: {cause}", leases=len(leases))
        log.warning("%s died (%s); its %d leases will be handed out again", holder, cause, len(leases))
        self._wake()

    def _record(self, *events: Event) -> None:
        """Applies and journals events; they, and whatever was applied before, are durable when this returns."""
        for event in events:
            self._apply(event)
        self._commit()

    def _apply(self, event: Event) -> None:
        self.ledger.apply(event)
        self.journal.append(event)

    def _commit(self) -> None:
        try:
            self.journal.commit()
        except OSError as error:
            # The ledger in memory is ahead of the disk. Nothing is acknowledged, and the next process starts from the disk.
            self.ctx.system.crash(error, "the journal")
            raise

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- rollouts

    @concurrent
    async def lease(self, msg: m.LeasePrompts) -> m.Grants:
        loop = asyncio.get_running_loop()
        until = loop.time() + msg.wait_s
        while True:
            granted = self._grant(msg)
            left = until - loop.time()
            if granted or left <= 0:
                return m.Grants(tuple(granted))
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                continue  # the last look happens with nothing left to wait for

    def _grant(self, msg: m.LeasePrompts) -> list[m.Granted]:
        if msg.incarnation <= self.dead.get(msg.rollout, 0):
            return []  # its question outlived it: nobody would end the leases
        if lost := self.ledger.held_by_older(msg.rollout, msg.incarnation):
            self._lost(lost[0].holder, "its successor asks for work", lost)  # nobody told this controller
        holder = f"{msg.rollout}#{msg.incarnation}"
        # Granted in a reply that never arrived (this process died after it was journalled): nobody works on these.
        self._record(*(Freed(x.id, "grant_lost") for x in self.ledger.held_by(holder) if x.id not in msg.working))
        if not is_open(self.ledger, self.config):
            return []
        granted: list[m.Granted] = []
        for lease in self.ledger.waiting()[: msg.capacity]:
            self._apply(hand_out(lease, holder, self.config.group.max_attempts))
            if lease.state == "in_flight":
                granted.append(m.Granted(lease.id, lease.prompt, lease.epoch, lease.attempt))
        try:
            for _ in range(min(msg.capacity - len(granted), room(self.ledger, self.config))):
                event = self.prompts.issue(self.ledger, holder)
                self._apply(event)
                granted.append(m.Granted(event.lease, event.prompt, event.epoch, event.attempt))
        except NoPrompts as error:
            buffered = sum(lease.buffered for lease in self.ledger.open.values())
            if buffered == len(self.ledger.open) and buffered < self.config.grpo.num_prompts_per_step:
                self.failure = str(error)  # nothing is under way, and what is buffered makes no batch
        finally:
            self._commit()
        return granted

    async def close_lease(self, msg: m.CloseLease) -> m.LeaseIs:
        lease = self.ledger.open.get(msg.lease)
        if lease is None or (lease.buffered and msg.outcome == "failed"):
            self._record()
            return m.LeaseIs(owned=lease is not None)
        if msg.never_again or (msg.retry_prompt and self._tried_before(lease)):
            self._record(Closed(lease.id, msg.outcome, f"{QUARANTINED}: {msg.cause}"))
        else:
            self._record(Closed(lease.id, msg.outcome, msg.cause, retry=msg.retry_prompt))
        self._wake()
        return m.LeaseIs(owned=False)

    def _tried_before(self, lease: Lease) -> bool:
        """The prompt failed once already, and not because it lost its host."""
        return lease.retry_of >= 0 and self.ledger.leases[lease.retry_of].cause != m.HOST_LOST

    async def samples(self, msg: m.ReportSamples) -> m.Done:
        for sample in msg.samples:
            self.rollouts.write(msgspec.structs.replace(sample, step=self.ledger.step))
        return m.Done()

    # ---- buffer

    async def accept(self, msg: m.AcceptGroup) -> m.Accepted:
        lease = self.ledger.open.get(msg.meta.lease)
        if lease is None:
            return m.Accepted(False, f"lease {msg.meta.lease} is closed")
        if lease.buffered:
            self._record()
            same = lease.ref == msg.ref
            return m.Accepted(same, "" if same else f"lease {lease.id} was already filled by another push")
        self._record(Buffered(msg.meta, msg.ref))
        return m.Accepted(True)

    async def reconcile(self, msg: m.ReconcileBuffer) -> m.OpenGroups:
        self._record()  # a group that is not on disk is nobody's
        groups = [
            m.OpenGroup(lease.meta, lease.ref)
            for lease in self.ledger.open.values()
            if lease.meta is not None and lease.ref is not None
        ]
        log.info("buffer holds %d groups, the journal has %d open ones", len(msg.held), len(groups))
        return m.OpenGroups(tuple(groups))

    # ---- trainer

    async def trainer_starts(self, msg: m.TrainerStarts) -> m.Welcome:
        back = self.ledger.after(msg.step)
        if msg.step != self.ledger.step:
            self._record(RolledBack(msg.step, back))
            self.metrics.resumed(msg.step)
            log.warning("rolled back to step %d: %d leases are in flight again", msg.step, len(back))
        elif self.ledger.fresh_step >= 0:  # it publishes anew: what is generated until then would be a version older
            self._record(Fresh(self.ledger.version, -1))
        return m.Welcome(self.ledger.step, self.ledger.version, len(back))

    async def next_version(self, msg: m.NextVersion) -> m.VersionIs:
        if self.ledger.version <= msg.above:
            self._record(Published(self.ledger.version + 1))
        else:
            self._record()  # given out before, in a reply that was lost with this process
        return m.VersionIs(self.ledger.version)

    async def engines_fresh(self, msg: m.EnginesFresh) -> m.Done:
        if not self.said_start:
            self.said_start = True
            facts = {key: value for role in self.roles.values() for key, value in role.facts.items()}
            config = self.config
            self.metrics.started(
                model=config.model.source,
                algorithm=f"{config.advantage.estimator}/{config.loss.kind}",
                mode=config.grpo.mode,
                engine=facts.get("engine", config.generation.engine),
                isolation=facts.get("isolation", ""),
                seed=config.run.seed,
                steps=config.grpo.max_num_steps,
            )
        if msg.step > self.ledger.step:
            log.warning(
                "weights of step %d are those of a trainer that is gone: the run is at %d", msg.step, self.ledger.step
            )
        elif msg.step != self.ledger.fresh_step:
            self._record(Fresh(msg.version, msg.step))
        self._wake()
        return m.Done()

    async def step_done(self, msg: m.StepDone) -> m.StepAck:
        if msg.step > self.ledger.step:
            self._record(
                *(Closed(lease, "filtered", cause) for lease, cause in msg.filtered),
                Stepped(msg.step, msg.version, msg.trained),
            )
            leases = (*msg.trained, *(lease for lease, _ in msg.filtered))
            self.ctx.spawn(self._after_step(msg.step, leases), name=f"after step {msg.step}")
            self._wake()
        else:
            self._record()
        return m.StepAck(bool(self.ledger.stopping))

    async def _release(self, leases: tuple[int, ...]) -> None:
        await self.ctx.ref("buffer").ask(
            m.ReleaseGroups(leases), deadline_s=self.config.supervision.start_timeout_s, retry=True
        )

    async def _after_step(self, step: int, leases: tuple[int, ...]) -> None:
        await self._release(leases)
        if step % PLOT_EVERY == 0:
            await asyncio.to_thread(reward_png, self.run_dir)

    async def lose_groups(self, msg: m.LoseGroups) -> m.Done:
        lost = tuple(lease for lease in msg.leases if lease in self.ledger.open)
        self._record(*(Closed(lease, "failed", m.HOST_LOST, retry=True) for lease in lost))
        if lost:
            text = f"{len(lost)} groups were lost with their host and are generated anew: {msg.why}"
            log.warning("%s", text)
            self.warnings.append(text)
            self.ctx.spawn(self._release(lost), name="release what was lost")
            self._wake()
        return m.Done()

    async def report_step(self, msg: m.ReportStep) -> m.Done:
        self.last_step = msg.record
        self.metrics.write(msg.record)
        return m.Done()

    async def warn(self, msg: m.Warn) -> m.Done:
        log.warning("%s", msg.text)
        self.warnings.append(msg.text)
        return m.Done()

    async def checkpoint_done(self, msg: m.CheckpointDone) -> m.Done:
        self._record(Checkpointed(msg.step))
        return m.Done()

    async def report_eval(self, msg: m.ReportEval) -> m.Done:
        self.metrics.write(msg.record)
        self.pass_rates = PassRates.of(read_metrics(self.run_dir.metrics))
        return m.Done()

    async def report_examples(self, msg: m.ReportExamples) -> m.Done:
        self.examples = msg.samples
        for sample in msg.samples:
            self.rollouts.write(sample)
        return m.Done()

    async def report_phase(self, msg: m.ReportPhase) -> m.Done:
        self.phase = msg.phase
        return m.Done()

    async def run_finished(self, msg: m.RunFinished) -> m.Done:
        await asyncio.to_thread(reward_png, self.run_dir)
        if not self.ledger.finished:  # in one go: what closes makes room for new leases, which nobody would end
            unused = list(self.ledger.open.values()) if msg.status == "completed" else []
            self._record(*(Closed(lease.id, "expired", "run_end") for lease in unused), Finished(msg.status))
        self._wake()
        return m.Done()

    # ---- everyone

    @control
    async def report_role(self, msg: m.ReportRole) -> m.Done:
        self.roles[msg.role] = msg
        self.counters[msg.role, msg.incarnation] = msg.counters
        return m.Done()

    async def report_spans(self, msg: m.ReportSpans) -> m.Done:
        self.trace.append(msg.role, msg.incarnation, msg.spans)
        return m.Done()

    @control
    async def status(self, msg: m.AskStatus) -> m.StatusIs:
        return m.StatusIs(
            phase=self.phase,
            step=self.ledger.step,
            version=self.ledger.version,
            ledger=self.ledger.summary(),
            buffered=sum(lease.buffered for lease in self.ledger.open.values()),
            causes={name: dict(causes) for name, causes in self.ledger.causes.items()},
            last_step=self.last_step,
            pass_rates=self.pass_rates,
            roles=self.roles,
            warnings=tuple(self.warnings),
            tokens_generated=int(sum(c.get("tokens", 0.0) for c in self.counters.values())),
            finished=self.ledger.finished,
            failure=self.failure,
            examples=self.examples if self.ledger.finished else (),
        )

    @concurrent
    async def stop_run(self, msg: m.StopRun) -> m.Done:
        if not self.ledger.stopping:
            self._record(Stopping(msg.reason))
        self.phase = f"stopping: {msg.reason}"
        self.metrics.event("stop", msg.reason)
        return await self.ctx.ref("trainer").ask(
            m.StopTraining(msg.reason), deadline_s=self.config.supervision.drain_s, retry=True
        )
