"""The trainer's side of evaluations: which tasks, on which engines, with which weights.

Before and after training the rollouts evaluate; in between an evaluator does, with a copy of one version, while training and rollouts go on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Literal

from dockyard_actors.observe.metrics import EvalRecord
from dockyard_actors.observe.rollouts import RolloutSample
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.weight_routes import RouteError
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.tasks.types import Task

if TYPE_CHECKING:
    from dockyard_actors.roles.trainer import Trainer

log = logging.getLogger(__name__)

Split = Literal["train", "heldout"]
Mode = Literal["t1", "greedy"]
FINAL_EXAMPLES = 3


class Evaluations:
    """Part of the trainer actor, whose voice and engines it uses."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.config = trainer.config
        self.tasks = trainer.tasks
        self.pinned: asyncio.Task[None] | None = None  # an evaluation beside training
        self.due = 0  # the step whose evaluation waits for the evaluator
        self.put_off = 0  # evaluations put off since the last one that was made; the first of them is said

    async def run(self, when: str, version: int, step: int, examples: int = 0) -> None:
        """Pass rates of both splits at T=1 and greedily, shared out over the rollouts, which do nothing else meanwhile."""
        members = self.trainer.sync.members if self.trainer.sync is not None else self.trainer.members
        shown: list[RolloutSample] = []
        for split, mode, tasks in self._evaluations():
            if self.trainer.stop_reason:
                break
            await self.trainer.phase(f"evaluating {when}: {split} {mode}")
            with self.trainer.report.trace.waiting("evaluate", "engines"):
                wanted = examples if (split, mode) == ("heldout", "t1") or not self.tasks.heldout else 0
                shown += await self._evaluate(members, split, mode, tasks, version, step, wanted)
        if shown:
            await self.trainer.tell(m.ReportExamples(samples=tuple(shown[:FINAL_EXAMPLES])))

    def _evaluations(self) -> list[tuple[Split, Mode, tuple[Task, ...]]]:
        splits: tuple[tuple[Split, tuple[Task, ...]], ...] = (
            ("train", self._eval_train()),
            ("heldout", self.tasks.heldout[: self.config.eval.heldout_tasks]),
        )
        modes: tuple[Mode, ...] = ("t1", "greedy")
        return [(split, mode, tasks) for split, tasks in splits if tasks for mode in modes]

    async def _evaluate(
        self,
        members: list[str],
        split: Split,
        mode: Mode,
        tasks: tuple[Task, ...],
        version: int,
        step: int,
        examples: int = 0,
        again: bool = True,
    ) -> list[RolloutSample]:
        """Has one split evaluated and reports its record. Returns the examples that were asked for.

        again: whether an engine that died meanwhile is asked once more; one that pulls no weights by itself cannot answer then.
        """
        started = time.perf_counter()
        replies = await asyncio.gather(
            *(
                self.trainer.ctx.ref(name).ask(
                    m.Evaluate(
                        prompts=tuple(task.id for task in tasks[index :: len(members)]),
                        samples=self.config.eval.samples,
                        greedy=mode == "greedy",
                        seed=self.config.run.seed,
                        version=version,
                        step=step,
                        examples=examples,
                    ),
                    deadline_s=self.config.eval.timeout_s,
                    retry=again,
                )
                for index, name in enumerate(members)
            )
        )
        record = eval_record(replies, step, split, mode, time.perf_counter() - started)
        await self.trainer.tell(m.ReportEval(record=record))
        if record.masked:
            text = f"evaluation of step {step}, {split} {mode}: {record.masked} samples got no verdict and are left out"
            await self.trainer.tell(m.Warn(text=text))
        return [sample for reply in replies for sample in reply.examples]

    def when_due(self, version: int, canary: m.Canary | None, step: int) -> None:
        """Every eval.every steps, or as soon after as the evaluator is done with the evaluation before."""
        every, last = self.config.eval.every, step >= self.config.grpo.max_num_steps
        if every and step and step % every == 0 and not last:
            self.due = step
        if self.due and not last and (self.pinned is None or self.pinned.done()):
            self.pinned = self.trainer.ctx.spawn(
                self._pinned(version, canary, step, self.due), name=f"evaluate step {step}"
            )
            self.due = 0

    async def _pinned(self, version: int, canary: m.Canary | None, step: int, due: int) -> None:
        """The evaluator takes a copy of these weights and keeps it while training goes on."""
        sync = self.trainer.sync
        try:
            offer = sync.offer_to("evaluator", version) if sync is not None else None
            if offer is None:
                raise ActorError(f"version {version} is not held any more")
            await self.trainer.ctx.ref("evaluator").ask(
                m.UpdateWeights(offer=offer, canary=canary), deadline_s=self.config.weight_sync.timeout_s, retry=True
            )
            for split, mode, tasks in self._evaluations():
                if self.trainer.stop_reason:
                    return
                await self._evaluate(["evaluator"], split, mode, tasks, version, step, again=False)
        except RouteError as error:
            await self.trainer.tell(m.Warn(text=f"the evaluation of step {due} is not made: {error}"))
        except (
            ActorError
        ) as error:  # its weights were replaced before it had them, or it died: the next version will do
            log.warning("the evaluation of step %d is put off: %s", step, error)
            if not self.put_off:
                text = f"the evaluation of step {due} is put off to a later one: the evaluator could not take or keep its weights"
                await self.trainer.tell(m.Warn(text=text))
            self.put_off += 1
            self.due = self.due or due
        else:
            self.put_off = 0

    async def finish(self) -> None:
        """Waits for the evaluation that is under way, unless the run was asked to stop, and says what will not be evaluated any more."""
        if self.pinned is not None and not self.pinned.done():
            self.trainer.report("waits for the evaluator")
            stopped = asyncio.ensure_future(self.trainer.stopping.wait())
            await asyncio.wait([self.pinned, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
        if self.due and not self.trainer.stop_reason:
            await self.trainer.tell(m.Warn(text=f"the evaluation of step {self.due} was never made"))

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
