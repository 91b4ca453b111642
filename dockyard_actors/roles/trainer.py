"""The trainer role: takes batches no older than allowed, steps the policy, and puts new weights into the engines.

`run` is the whole training loop, readable from top to bottom. In async mode the next batch is asked for and the last weights are delivered
while a step computes; in sync mode each waits for the other. The policy computes in one dedicated thread; this actor only routes. Rewards
and ages are read from metadata: the tensors of groups without signal are never touched.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dockyard_actors.config import Config
from dockyard_actors.observe.metrics import StepRecord
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.canary import MOST_TOKENS, canary_of
from dockyard_actors.roles.colocation import Colocation
from dockyard_actors.roles.evaluations import FINAL_EXAMPLES, Evaluations
from dockyard_actors.roles.learner import Learner, StepOutcome, teaching
from dockyard_actors.roles.reporting import Reporter
from dockyard_actors.roles.synchronizer import WeightSynchronizer
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.runtime.supervision import RestartProcess
from dockyard_actors.tasks.types import TaskSet
from dockyard_actors.transport.fdclient import FdClient
from dockyard_actors.transport.pull import HostLost, PeerLost, PeerUnreachable, PullTimeout
from dockyard_actors.transport.tensors import StaleRef

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
TOLD_STEPS = (
    32  # the buffer is told of the leases of so many last steps: it may be late to hear of them from the controller
)
# What says that a group's host, or the memory that it had, is gone or out of reach. Anything else is a mistake, and ends the run.
LOST = (HostLost, PeerLost, PeerUnreachable, PullTimeout, StaleRef)
TAKE_WAIT_S = 2.0  # one long poll for a batch; between two the trainer looks whether it was asked to stop


class StoppedInWarmup(Exception):
    """The run was asked to stop before its first checkpoint: nothing is kept."""


class Trainer(Actor):
    """One process; later the first of several ranks."""

    def __init__(self, config: Config, tasks: TaskSet, learner: Learner, fd_client: FdClient, run_dir: RunDir):
        self.config = config
        self.tasks = tasks
        self.learner = learner
        self.fd_client = fd_client
        self.run_dir = run_dir
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")
        self.sync: WeightSynchronizer | None = None
        self.members = [f"rollout-{index}" for index in range(config.rollout.count)]
        self.stop_reason = ""
        self.stopping = asyncio.Event()
        self.published = -1  # the step whose parameters are the newest version
        self.version = -1  # the newest that was ever given out, as far as this process knows
        self.holding: set[int] = set()  # leases that were taken and are not stepped yet
        self.stepped: deque[tuple[int, ...]] = deque(maxlen=TOLD_STEPS)  # ... and of the last steps
        self.computing = False
        self.admitting = False  # deliveries open admission; not before the first evaluation is over
        self.delivery: asyncio.Task[None] | None = None
        self.taking: asyncio.Task[tuple[m.OpenGroup, ...] | None] | None = None

    async def on_start(self) -> None:
        self.report = Reporter(self, doing="loading the model")
        self.evaluations = Evaluations(self)
        self.colocation = Colocation(self)
        self.ctx.spawn(self.run(), name="training loop")

    async def on_stop(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        if self.sync is not None:
            self.sync.shutdown()

    # ---- the loop

    async def run(self) -> None:
        learner, steps = self.learner, self.config.grpo.max_num_steps
        await self.phase("loading the model")
        await self.compute(learner.load)
        if learner.needs_warmup:
            await self.phase("warm-up")
            try:
                with self.report.trace.span("warm_up"):
                    await self.compute(learner.warm_up, self._warmup_progress)
            except StoppedInWarmup:
                await self.tell(m.RunFinished(status="interrupted"))
                return
        if learner.fresh:
            await self.compute(learner.begin)
        await self.colocation.leave()
        await self.join()
        version = await self.publish()
        await self.delivered()
        if learner.step == 0 and self.config.eval.before:
            await self.evaluations.run("before", version, learner.step)
        await self.open_admission(version)
        await self.phase("training")
        while learner.step < steps:
            clock = PhaseClock()
            groups = await self.next_batch(version)
            if groups is None or self.stop_reason:
                break
            clock.lap("wait_batch")
            outcome = await self.train(groups, version)
            clock.lap("train")
            version = await self.publish(trained=groups)
            clock.lap("sync")
            if learner.step % self.config.checkpoint.every == 0 and learner.step < steps:
                await self.checkpoint()
                clock.lap("checkpoint")
            await self.tell(m.ReportStep(record=step_record(outcome, groups, version, clock)))
        await self.delivered()
        await self.checkpoint()
        await self.evaluations.finish()
        if not self.stop_reason and self.config.eval.after:
            await self.evaluations.run("after", version, learner.step, examples=FINAL_EXAMPLES)
        status = "interrupted" if self.stop_reason else "completed"
        self.report("finished")
        await self.report.flush()
        await self.tell(m.RunFinished(status=status))

    # ---- parts of the loop

    async def compute(self, function: Callable[..., T], *args: object) -> T:
        """Runs in the policy's thread, so that this process answers pings while it computes."""
        self.computing = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)
        finally:
            self.computing = False

    async def tell(self, message: m.Message[R]) -> R:
        """Asks the controller for something that has the same effect however often it arrives."""
        return await self.ctx.ref("controller").ask(
            message, deadline_s=self.config.supervision.start_timeout_s, retry=True
        )

    async def phase(self, name: str) -> None:
        self.report(name)
        self.report.counters = {}
        await self.tell(m.ReportPhase(phase=name))

    def _warmup_progress(self, step: int, steps: int, loss: float) -> None:
        """Called from the compute thread; raising is the way to stop there."""
        if self.stop_reason:
            raise StoppedInWarmup(f"at step {step} of {steps}")
        self.report(f"warm-up step {step} of {steps}, loss {loss:.3f}")
        self.report.counters |= {"phase_done": step, "phase_total": steps}

    async def join(self) -> None:
        """Says where the checkpoint stands: what the journal has beyond it goes back in flight."""
        welcome = await self.tell(m.TrainerStarts(step=self.learner.step))
        self.version = welcome.newest_version
        if welcome.rolled_back:
            log.warning("resumed at step %d; %d leases were put back in flight", welcome.step, welcome.rolled_back)

    async def publish(self, trained: tuple[m.OpenGroup, ...] = ()) -> int:
        """Gives the present weights a version that never was and starts their delivery. Returns the version.

        Waits for the delivery before: two versions are held at most. In sync mode it waits for its own as well.
        """
        trace, written = self.report.trace, time.time()
        with trace.waiting("sync", "engines"):
            await self.delivered()
        version = self.version = (await self.tell(m.NextVersion(above=self.version))).version
        if self.sync is None:
            self.sync = self._synchronizer()
        self.sync.mark_stale()
        self.report(f"writing weights version {version}")
        self.published = self.learner.step
        with trace.span("write_weights", version=version):
            await self.sync.prepare(version)
            canary = await self.compute(self._canary) if self.config.weight_sync.canary else None
        delivery = self._deliver(self.sync, version, canary, self.learner.step, written, trained)
        self.delivery = self.ctx.spawn(delivery, name=f"deliver version {version}")
        await self.sync.sent.wait()  # the parameters must not change before
        if self.config.max_age == 0:
            self.report(f"waits until every engine holds version {version}")
            with trace.waiting("sync", "engines"):
                await self.delivered()
        return version

    def _synchronizer(self) -> WeightSynchronizer:
        config, address = self.config, self.ctx.system.transport.address
        return WeightSynchronizer(
            self.ctx,
            self.members,
            make=lambda kind: self.learner.route(kind, self.fd_client, address),
            compute=self.compute,
            live=lambda version: version == self.version and self.learner.step == self.published,
            timeout_s=config.weight_sync.timeout_s,
            transport=config.weight_sync.transport,
            always=("shm",) if config.eval.every else (),
        )

    async def delivered(self) -> None:
        """Every engine holds the newest weights, or is being restarted. Raises what the delivery raised."""
        if self.delivery is not None:
            await self.delivery
            self.delivery = None

    async def _deliver(
        self,
        sync: WeightSynchronizer,
        version: int,
        canary: m.Canary | None,
        step: int,
        since_s: float,
        trained: tuple[m.OpenGroup, ...],
    ) -> None:
        synced = await sync.sync_weights(version, canary)
        self.report.facts["sync"] = f"paused {synced.paused_s * 1e3:.0f} ms, canary {synced.mismatch:.2g} nats"
        for name in synced.failed:
            await self.tell(m.Warn(text=f"{name} did not take weights version {version} and is restarted"))
            self.ctx.spawn(self._restart(name, version), name=f"restart {name}")
        if self.admitting:
            await self.tell(m.EnginesFresh(version=version, step=step))
        now = time.time()
        for group in trained:
            self.report.trace.add("sync", since_s, now, lease=group.meta.lease, version=version)
        self.evaluations.when_due(version, canary, step)

    async def open_admission(self, version: int) -> None:
        self.admitting = True
        await self.tell(m.EnginesFresh(version=version, step=self.learner.step))

    def _canary(self) -> m.Canary:
        """In the compute thread: the first prompts of the task set under the weights that are published."""
        temperature = self.config.generation.temperature
        ids = self.learner.canary_ids(self.tasks.train or self.tasks.heldout, MOST_TOKENS)
        logprobs = self.learner.policy.canary(ids, temperature, self.config.weight_sync.dtype)
        return canary_of(ids, logprobs, temperature)

    async def _restart(self, name: str, version: int) -> None:
        """An engine that took no weights would generate stale groups: its agent replaces it, and it joins again by pulling.

        That counts as a crash of the engine: one that never takes its weights ends the run as any crash loop does.
        """
        cause = f"did not take weights version {version}: the trainer's log has its answer"
        for agent in ("agent", f"agent/{name}"):
            try:
                await self.ctx.ref(agent).ask(
                    RestartProcess(name=name, cause=cause), deadline_s=self.config.supervision.start_timeout_s
                )
                return
            except ActorError as error:
                log.info("%s does not restart %s: %s", agent, name, error)
        log.error("nobody restarts %s", name)

    async def current_weights(self, msg: m.CurrentWeights) -> m.Weights | m.NoWeights:
        self.colocation.restarted(msg.rollout)
        return await self.sync.current(msg.rollout) if self.sync is not None else m.NoWeights()

    async def next_batch(self, version: int) -> tuple[m.OpenGroup, ...] | None:
        """The batch that was asked for during the last step, or one that is asked for now; None when the run was asked to stop."""
        taking = self.taking or self.ctx.spawn(self.take(version), name=f"take a batch for version {version}")
        self.taking = None
        with self.report.trace.waiting("wait_batch", "buffer"):
            return await taking

    def prefetch(self, version: int) -> None:
        """Asks for the batch of the next step, which will be trained from `version`."""
        if self.config.max_age > 0 and self.learner.step + 1 < self.config.grpo.max_num_steps:
            self.taking = self.ctx.spawn(self.take(version), name=f"take a batch for version {version}")

    async def take(self, version: int) -> tuple[m.OpenGroup, ...] | None:
        """A batch no older than allowed at `version`, its tensors on this host; or None when the run was asked to stop."""
        count = self.config.grpo.num_prompts_per_step
        here: list[m.OpenGroup] = []
        while not self.stop_reason:
            batch = await self.ctx.ref("buffer").ask(
                m.TakeGroups(
                    count=count - len(here),
                    version=version,
                    max_age=self.config.max_age,
                    wait_s=TAKE_WAIT_S,
                    incarnation=self.ctx.incarnation,
                    holding=(*self.holding, *itertools.chain.from_iterable(self.stepped)),
                ),
                deadline_s=self.config.supervision.start_timeout_s,
                retry=True,
            )
            if batch.groups:
                self.holding |= {group.meta.lease for group in batch.groups}
                here += await self.fetch(batch.groups)
                if len(here) == count:
                    return tuple(sorted(here, key=lambda group: group.meta.lease))
            elif not self.computing:
                self.report(f"waits for a batch: {len(here) + batch.ready} of {count} groups are ready")
        return None

    async def fetch(self, groups: tuple[m.OpenGroup, ...]) -> list[m.OpenGroup]:
        """The groups that can be trained: what teaches is brought to this host, and what is lost with its own is given up."""
        plane, limit = self.learner.plane, self.config.data_plane.fetch_timeout_s
        wanted = [g for g, teaches in zip(groups, teaching([g.meta for g in groups]), strict=True) if teaches]
        came = await asyncio.gather(*(plane.fetch([g.ref], limit) for g in wanted), return_exceptions=True)
        lost = {g.meta.lease: e for g, e in zip(wanted, came, strict=True) if isinstance(e, BaseException)}
        if not lost:
            return list(groups)
        for error in lost.values():
            if not isinstance(error, LOST):
                raise error
        await self.tell(m.LoseGroups(leases=tuple(lost), why=str(next(iter(lost.values())))))
        self.holding -= set(lost)
        return [group for group in groups if group.meta.lease not in lost]

    async def train(self, groups: tuple[m.OpenGroup, ...], version: int) -> StepOutcome:
        """One optimizer step; the ledger knows it when this returns."""
        self.report(f"training step {self.learner.step + 1}")
        self.prefetch(version + 1)
        async with self.colocation.device():
            started = time.time()
            with self.report.trace.span("train", step=self.learner.step + 1, version=version, groups=len(groups)):
                outcome = await self.compute(self.learner.train, groups, version)
            for group in groups:
                self.report.trace.add("train", started, time.time(), lease=group.meta.lease, step=outcome.step)
        ack = await self.tell(
            m.StepDone(step=self.learner.step, version=version, trained=outcome.trained, filtered=outcome.filtered)
        )
        stepped = (*outcome.trained, *(lease for lease, _ in outcome.filtered))
        self.stepped.append(stepped)
        self.holding -= set(stepped)
        for group in groups:  # the journal has them; the blocks themselves are the buffer's to release
            self.learner.plane.forget(group.ref)
        if ack.stop:
            self.stop("asked to stop")
        return outcome

    async def checkpoint(self) -> None:
        self.report(f"writing the checkpoint of step {self.learner.step}")
        with self.report.trace.span("checkpoint", step=self.learner.step):
            await self.compute(self.learner.save)
        await self.tell(m.CheckpointDone(step=self.learner.step))

    async def stop_training(self, msg: m.StopTraining) -> m.Done:
        self.stop(msg.reason)
        return m.Done()

    def stop(self, reason: str) -> None:
        """The step under way ends, nothing else begins."""
        self.stop_reason = self.stop_reason or reason
        self.stopping.set()


def step_record(outcome: StepOutcome, groups: tuple[m.OpenGroup, ...], version: int, clock: PhaseClock) -> StepRecord:
    metas = [group.meta for group in groups]
    rewards = [r for meta in metas for r, valid in zip(meta.rewards, meta.valid, strict=True) if valid]
    resolved = [r for meta in metas for r, valid in zip(meta.resolved, meta.valid, strict=True) if valid]
    ages = [outcome.version - meta.oldest_version for meta in metas]
    return StepRecord(
        step=outcome.step,
        version=version,
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        pass_rate=sum(resolved) / len(resolved) if resolved else None,
        loss=outcome.loss,
        grad_norm=outcome.grad_norm,
        lr=outcome.lr,
        entropy=outcome.diagnostics.get("entropy/mean"),
        age_mean=sum(ages) / len(ages),
        age_max=max(ages),
        tokens_trained=outcome.tokens,
        groups=len(groups),
        groups_no_signal=len(outcome.filtered),
        tokens_per_s=outcome.tokens / max(clock.total, 1e-9),
        seconds=dict(clock.laps),
        diagnostics=dict(outcome.diagnostics),
    )


class PhaseClock:
    """Where the wall time of a step went, in seconds by phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._start
