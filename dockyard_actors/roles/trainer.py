"""The trainer role: takes batches no older than allowed, steps the policy, and puts new weights into the engines.

`run` is the whole training loop, readable from top to bottom. The policy computes in one dedicated thread; this actor only routes. Rewards
and ages are read from metadata: the tensors of groups without signal are never touched.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from dockyard_actors.config import Config
from dockyard_actors.observe.metrics import EvalRecord, StepRecord
from dockyard_actors.observe.rollouts import RolloutSample
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.learner import Learner, StepOutcome
from dockyard_actors.roles.reporting import Reporter
from dockyard_actors.roles.synchronizer import WeightSynchronizer
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.runtime.supervision import RestartProcess
from dockyard_actors.tasks.types import Task, TaskSet
from dockyard_actors.transport.fdclient import FdClient

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Split = Literal["train", "heldout"]
Mode = Literal["t1", "greedy"]
TAKE_WAIT_S = 2.0  # one long poll for a batch; between two the trainer looks whether it was asked to stop
FINAL_EXAMPLES = 3


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

    async def on_start(self) -> None:
        self.report = Reporter(self, doing="loading the model")
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
                await self.compute(learner.warm_up, self._warmup_progress)
            except StoppedInWarmup:
                await self.tell(m.RunFinished(status="interrupted"))
                return
        if learner.fresh:
            await self.compute(learner.begin)
        await self.join()
        version = await self.publish()
        if learner.step == 0 and self.config.eval.before:
            await self.evaluate("before", version)
        await self.tell(m.EnginesFresh(version=version))
        await self.phase("training")
        while learner.step < steps:
            clock = PhaseClock()
            groups = await self.take(version)
            if groups is None:
                break
            clock.lap("wait_batch")
            outcome = await self.train(groups, version)
            clock.lap("train")
            version = await self.publish()
            clock.lap("sync")
            if learner.step % self.config.checkpoint.every == 0 and learner.step < steps:
                await self.checkpoint()
                clock.lap("checkpoint")
            await self.tell(m.ReportStep(record=step_record(outcome, groups, version, clock)))
            if self.config.eval.every and learner.step % self.config.eval.every == 0 and learner.step < steps:
                await self.evaluate(f"at step {learner.step}", version)
                await self.phase("training")
            await self.tell(m.EnginesFresh(version=version))
        await self.checkpoint()
        if not self.stop_reason and self.config.eval.after:
            await self.evaluate("after", version, examples=FINAL_EXAMPLES)
        status = "interrupted" if self.stop_reason else "completed"
        self.report("finished")
        await self.tell(m.RunFinished(status=status))

    # ---- parts of the loop

    async def compute(self, function: Callable[..., T], *args: object) -> T:
        """Runs in the policy's thread, so that this process answers pings while it computes."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)

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
        if welcome.rolled_back:
            log.warning("resumed at step %d; %d leases were put back in flight", welcome.step, welcome.rolled_back)

    async def publish(self) -> int:
        """Gives the present weights a version that never was, and every engine the weights. Returns the version."""
        version = (await self.tell(m.NextVersion())).version
        if self.sync is None:
            publisher = await self.compute(self.learner.publisher, self.fd_client, self.config.weight_sync.dtype)
            self.sync = WeightSynchronizer(self.ctx, publisher, self.members, self.config.weight_sync.timeout_s)
        self.sync.mark_stale()
        self.report(f"writing weights version {version}")
        ref = await self.compute(self.sync.write, version, self.learner.write_weights)
        self.report(f"waits until every engine holds version {version}")
        failed = await self.sync.sync_weights(ref)
        for name in failed:
            await self.tell(m.Warn(text=f"{name} did not take weights version {version} and is restarted"))
            self.ctx.spawn(self._restart(name), name=f"restart {name}")
        return version

    async def _restart(self, name: str) -> None:
        """An engine that took no weights would generate stale groups: its agent replaces it, and it joins again by pulling."""
        for agent in ("agent", f"agent/{name}"):
            try:
                await self.ctx.ref(agent).ask(
                    RestartProcess(name=name), deadline_s=self.config.supervision.start_timeout_s
                )
                return
            except ActorError as error:
                log.info("%s does not restart %s: %s", agent, name, error)
        log.error("nobody restarts %s", name)

    async def current_weights(self, msg: m.CurrentWeights) -> m.Weights | m.NoWeights:
        return self.sync.current(msg.rollout) if self.sync is not None else m.NoWeights()

    async def take(self, version: int) -> tuple[m.OpenGroup, ...] | None:
        """The next batch, or None when the run was asked to stop. Who is waited for shows in the live view."""
        count = self.config.grpo.num_prompts_per_step
        while not self.stop_reason:
            batch = await self.ctx.ref("buffer").ask(
                m.TakeGroups(count=count, version=version, max_age=self.config.max_age, wait_s=TAKE_WAIT_S),
                deadline_s=self.config.supervision.start_timeout_s,
                retry=True,
            )
            if batch.groups:
                return batch.groups
            self.report(f"waits for a batch: {batch.ready} of {count} groups are ready")
        return None

    async def train(self, groups: tuple[m.OpenGroup, ...], version: int) -> StepOutcome:
        """One optimizer step; the ledger knows it when this returns."""
        self.report(f"training step {self.learner.step + 1}")
        outcome = await self.compute(self.learner.train, groups, version)
        ack = await self.tell(
            m.StepDone(step=self.learner.step, version=version, trained=outcome.trained, filtered=outcome.filtered)
        )
        if ack.stop and not self.stop_reason:
            self.stop_reason = "asked to stop"
        return outcome

    async def checkpoint(self) -> None:
        self.report(f"writing the checkpoint of step {self.learner.step}")
        await self.compute(self.learner.save)
        await self.tell(m.CheckpointDone(step=self.learner.step))

    async def stop_training(self, msg: m.StopTraining) -> m.Done:
        self.stop_reason = msg.reason
        return m.Done()

    # ---- evaluation

    async def evaluate(self, when: str, version: int, examples: int = 0) -> None:
        """Pass rates of both splits at T=1 and greedily, shared out over the rollouts."""
        shown: list[RolloutSample] = []
        splits: tuple[tuple[Split, tuple[Task, ...]], ...] = (
            ("train", self._eval_train()),
            ("heldout", self.tasks.heldout[: self.config.eval.heldout_tasks]),
        )
        modes: tuple[Mode, ...] = ("t1", "greedy")
        for split, tasks in splits:
            for mode in modes:
                if not tasks or self.stop_reason:
                    continue
                members = self.sync.members if self.sync is not None else self.members
                await self.phase(f"evaluating {when}: {split} {mode}")
                started = time.perf_counter()
                replies = await asyncio.gather(
                    *(
                        self.ctx.ref(name).ask(
                            m.Evaluate(
                                prompts=tuple(task.id for task in tasks[index :: len(members)]),
                                samples=self.config.eval.samples,
                                greedy=mode == "greedy",
                                seed=self.config.run.seed,
                                version=version,
                                step=self.learner.step,
                                examples=examples
                                if (split, mode) == ("heldout", "t1") or not self.tasks.heldout
                                else 0,
                            ),
                            deadline_s=self.config.eval.timeout_s,
                            retry=True,
                        )
                        for index, name in enumerate(members)
                    )
                )
                shown += [sample for reply in replies for sample in reply.examples]
                record = eval_record(replies, self.learner.step, split, mode, time.perf_counter() - started)
                await self.tell(m.ReportEval(record=record))
                if record.masked:
                    text = f"evaluation {when}, {split} {mode}: {record.masked} samples got no verdict and are left out"
                    await self.tell(m.Warn(text=text))
        if shown:
            await self.tell(m.ReportExamples(samples=tuple(shown[:FINAL_EXAMPLES])))

    def _eval_train(self) -> tuple[Task, ...]:
        """A fixed, seeded choice of training tasks."""
        chosen = list(self.tasks.train)
        random.Random(self.config.run.seed).shuffle(chosen)
        return tuple(sorted(chosen[: self.config.eval.train_tasks], key=lambda task: task.id))


def eval_record(
    replies: list[m.Evaluated],
    step: int,
    split: Split,
    mode: Mode,
    seconds: float,
) -> EvalRecord:
    """pass_rate is the mean over tasks of the share of samples that resolved; tasks without any verdict are left out."""
    rates = {r.prompt_id: r.passed / r.samples for reply in replies for r in reply.results if r.samples}
    return EvalRecord(
        step=step,
        split=split,
        mode=mode,
        pass_rate=sum(rates.values()) / len(rates) if rates else None,
        samples=sum(r.samples for reply in replies for r in reply.results),
        tasks=len(rates),
        seconds=seconds,
        by_task=dict(rates),
        masked=sum(reply.masked for reply in replies),
    )


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
