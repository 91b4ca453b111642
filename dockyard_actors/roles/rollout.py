"""The rollout role: leases prompts, samples G responses of each, has them scored, and pushes finished groups.

The groups of one grant join the engine's running batch together, so that in sync mode a run repeats bit by bit; from there every group goes
its own way in a task of its own, and its verdicts are awaited while the engine generates for others. Tokens, logprobs and versions are written by the engine straight into a slab block; only the
reference and the metadata travel.
"""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np

from dockyard_actors.config import Config
from dockyard_actors.engines.base import Engine, FinishReason, GroupOutput, GroupRequest, GroupResult
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.engine_driver import EngineStopped, Generation
from dockyard_actors.roles.engine_host import EngineHost
from dockyard_actors.roles.evaluation import decode
from dockyard_actors.roles.ledger import GroupMeta
from dockyard_actors.roles.scoring import Score, score, to_sample
from dockyard_actors.roles.weight_source import WeightSource
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.tasks.seeds import sample_seed
from dockyard_actors.tasks.types import Task, TaskSet
from dockyard_actors.transport.plane import Block, DataPlane, TensorRef
from dockyard_actors.transport.tensors import ALIGNMENT

log = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0  # one long poll for work; the loop then looks again, so nothing hangs on a lost answer


class Rollout(EngineHost):
    """One process with one engine."""

    def __init__(self, config: Config, tasks: TaskSet, engine: Engine, plane: DataPlane, weights: WeightSource):
        super().__init__(config, tasks, engine, weights)
        self.plane = plane
        self.stopping = False
        self.working: set[int] = set()  # leases that are neither pushed nor closed yet
        self.generating = 0  # groups between their lease and their last token
        self.slots = max(1, config.generation.max_batch_rows // config.grpo.num_generations_per_prompt)
        self.slot_free = asyncio.Event()

    async def on_start(self) -> None:
        await super().on_start()
        self.ctx.spawn(self._work(), name="work")

    async def on_stop(self) -> None:
        self.stopping = True
        await super().on_stop()

    # ---- generation

    async def _work(self) -> None:
        """Leases as many groups as the engine has room for, whatever earlier ones still wait for."""
        await self.pull_weights()
        while not self.stopping:
            if self.generating >= self.slots:
                self.slot_free.clear()
                await self.slot_free.wait()
                continue
            if not self.generating:
                self.report("waits for room in the staleness budget")
            with self.report.trace.waiting("wait_budget", "controller"):
                grants = await self.ctx.ref("controller").ask(
                    m.LeasePrompts(
                        rollout=self.ctx.name,
                        incarnation=self.ctx.incarnation,
                        capacity=min(self.slots - self.generating, self.config.groups_per_batch),
                        wait_s=LEASE_WAIT_S,
                        working=tuple(self.working),
                    ),
                    deadline_s=self.config.supervision.start_timeout_s,
                    retry=True,
                )
            await self._begin(sorted(grants.leases, key=lambda grant: grant.lease))

    async def _begin(self, grants: list[m.Granted]) -> None:
        """Has the groups of one grant join the engine together, in the order of their leases: which of them share a decode step does not
        depend on how fast anything here is."""
        granted_s = time.time()
        self.working |= {grant.lease for grant in grants}
        self.generating += len(grants)
        ready: list[tuple[m.Granted, GroupRequest, Block]] = []
        for grant in grants:
            request = await self._accept(grant)
            if request is None:
                self._slot_left()
            else:
                ready.append((grant, request, await self._block(request)))
        if not ready:
            return
        try:
            generations = self.driver.submit([(request, _output(block)) for _, request, block in ready], self.sampling)
        except EngineStopped as error:
            log.info("%d leases are left to whoever gets them next: %s", len(ready), error)
            for _, _, block in ready:
                block.abort()
            self.stopping = True
            return
        self.report(f"generates {self.generating} groups at version {self.engine.version}")
        for (grant, _, block), generation in zip(ready, generations, strict=True):
            self.report.trace.add("lease", granted_s, time.time(), lease=grant.lease)
            self.ctx.spawn(self._carry(grant, block, generation), name=f"lease {grant.lease}")

    def _slot_left(self) -> None:
        self.generating -= 1
        self.slot_free.set()

    async def _carry(self, grant: m.Granted, block: Block, generation: Generation) -> None:
        """One group from its first token to the buffer, or to its end with a cause."""
        try:
            result = await self._sample(grant, generation)
        except EngineStopped as error:
            log.info("lease %d is left to whoever gets it next: %s", grant.lease, error)
            return
        except ValueError as error:  # the engine knows limits that `_accept` does not
            block.abort()
            await self._never(grant, f"too_long: {error}")
            return
        finally:
            self._slot_left()
        await self._finish(grant, block, result)

    async def _sample(self, grant: m.Granted, generation: Generation) -> GroupResult:
        """What was generated within group.deadline_s; the rest is cut."""

        def cut() -> None:
            log.warning("lease %d is cut: group.deadline_s = %g s", grant.lease, self.config.group.deadline_s)
            generation.cut()

        with self.report.trace.span("generate", lease=grant.lease) as args:
            deadline = asyncio.get_running_loop().call_later(self.config.group.deadline_s, cut)
            try:
                result = await generation.result()
            finally:
                deadline.cancel()
            args |= {"prompt": grant.prompt, "tokens": result.new_tokens, "version": self.engine.version}
        self.report.count("tokens", float(result.new_tokens))
        return result

    async def _accept(self, grant: m.Granted) -> GroupRequest | None:
        """The request of a lease; a prompt that can never be worked on is closed alone, so that it takes no other one with it."""
        task = self.tasks.get(grant.prompt)
        if task is None:
            await self._never(grant, "unknown_task: the task file changed since this prompt was drawn")
            return None
        prompt = np.asarray(self.engine.tokenizer.encode(task.prompt), dtype=np.int32)
        width, limit = self._width(task), self.engine.max_tokens
        if limit is not None and prompt.size + width > limit:
            await self._never(
                grant, f"too_long: {prompt.size} prompt + {width} new tokens, the engine has {limit} positions"
            )
            return None
        group = self.config.grpo.num_generations_per_prompt
        needed = 4 * (prompt.size + 3 * group * width + group) + 5 * ALIGNMENT
        if needed > self.config.data_plane.block_bytes:
            await self._never(grant, f"too_long: {needed} bytes do not fit data_plane.block_bytes")
            return None
        seeds = tuple(sample_seed(self.config.run.seed, task.id, grant.epoch, index) for index in range(group))
        return GroupRequest(
            key=grant.lease, prompt_ids=prompt, n=group, seeds=seeds, stop=task.stop, max_new_tokens=task.max_new_tokens
        )

    def _width(self, task: Task) -> int:
        return min(self.sampling.max_new_tokens, task.max_new_tokens or self.sampling.max_new_tokens)

    async def _block(self, request: GroupRequest) -> Block:
        block = await self.plane.alloc(
            {
                "prompt": ("int32", (len(request.prompt_ids),)),
                **GroupOutput.fields(request.n, self.sampling.max_new_tokens),
            },
            deadline_s=self.config.data_plane.alloc_timeout_s,
        )
        block.array("prompt")[:] = request.prompt_ids
        return block

    # ---- from responses to a pushed group

    async def _finish(self, grant: m.Granted, block: Block, result: GroupResult) -> None:
        """Ends the lease one way or the other: pushed and owned by the buffer, or closed with its cause."""
        task = self.tasks[grant.prompt]
        ref: TensorRef | None = None
        try:
            async with asyncio.timeout(self.config.group.deadline_s):
                with self.report.trace.span("score", lease=grant.lease):
                    scores, texts = await self._score(task, block, result)
                valid = sum(s.reward is not None for s in scores)
                if valid < self.config.group.min_size:
                    least = self.config.group.min_size
                    cut = result.finish_reasons.count(FinishReason.CUT)
                    late = f", {cut} were cut at group.deadline_s" if cut else ""
                    await self._fail(
                        grant,
                        block,
                        ref,
                        f"{'deadline' if cut else 'infra'}: {valid} of {len(scores)} samples judged{late}, group.min_size is {least}",
                    )
                    return
                meta = _meta(grant, block, scores)
                ref = block.seal()
                with self.report.trace.span("push", lease=grant.lease):
                    reply = await self.ctx.ref("buffer").ask(
                        m.PushGroup(meta=meta, ref=ref), deadline_s=self.config.group.deadline_s, retry=True
                    )
        except ActorError as error:
            await self._fail(grant, block, ref, f"{'push' if ref else 'score'}: {error}")
            return
        except TimeoutError:
            limit = self.config.group.deadline_s
            await self._fail(
                grant, block, ref, f"deadline: not scored and pushed within group.deadline_s = {limit:.0f} s"
            )
            return
        self.working.discard(grant.lease)
        if not reply.owned:
            log.warning("lease %d was not wanted any more: %s", grant.lease, reply.why)
            self.plane.release(ref)
            return
        await self._report_samples(grant, task, meta, scores, texts)

    async def _score(self, task: Task, block: Block, result: GroupResult) -> tuple[list[Score], list[str]]:
        """A sample that was cut has no reward: it is masked, never a failure of the model."""
        texts = decode(self.engine, block.array("tokens"), block.array("lengths"))
        whole = [i for i, reason in enumerate(result.finish_reasons) if reason is not FinishReason.CUT]
        judged = await score(
            self.judge,
            self.config.reward.partial,
            [(task, texts[i]) for i in whole],
            self.config.sandbox.score_timeout_s,
        )
        scores = [Score(None, False, "", "cut at group.deadline_s", None)] * len(texts)
        for i, one in zip(whole, judged, strict=True):
            scores[i] = one
        return scores, texts

    async def _fail(self, grant: m.Granted, block: Block, ref: TensorRef | None, cause: str) -> None:
        """Closes the lease as failed; its prompt gets one more try. When a push was under way the buffer may own the group after
        all: then the lease stays open and its block is the buffer's."""
        owned = await self._close(grant, "failed", cause, retry_prompt=True)
        if ref is None:
            block.abort()
        elif not owned:
            self.plane.release(ref)

    async def _never(self, grant: m.Granted, cause: str) -> None:
        """Closes the lease of a prompt that can never be worked on: it is not drawn again."""
        await self._close(grant, "filtered", cause, never_again=True)

    async def _close(
        self, grant: m.Granted, outcome: str, cause: str, retry_prompt: bool = False, never_again: bool = False
    ) -> bool:
        """Returns whether the buffer owns the group, in which case nothing was closed."""
        log.warning("lease %d (%s) %s: %s", grant.lease, grant.prompt, outcome, cause)
        reply = await self.ctx.ref("controller").ask(
            m.CloseLease(
                lease=grant.lease, outcome=outcome, cause=cause, retry_prompt=retry_prompt, never_again=never_again
            ),
            deadline_s=self.config.supervision.start_timeout_s,
            retry=True,
        )
        self.working.discard(grant.lease)
        return reply.owned

    async def _report_samples(
        self, grant: m.Granted, task: Task, meta: GroupMeta, scores: list[Score], texts: list[str]
    ) -> None:
        """One readable sample of each group: its best for odd leases, its last for even ones."""
        best = max(range(len(scores)), key=lambda i: scores[i].reward or 0.0)
        chosen = best if grant.lease % 2 else len(scores) - 1
        sample = to_sample(
            task,
            texts[chosen],
            scores[chosen],
            step=-1,
            lease=grant.lease,
            sample=chosen,
            versions=tuple(sorted({meta.oldest_version, meta.newest_version})),
        )
        try:
            await self.ctx.ref("controller").tell(m.ReportSamples(samples=(sample,)))
        except ActorError as error:  # a readable sample is not worth a run
            log.warning("a sample of lease %d is not recorded: %s", grant.lease, error)
            self.report.count("samples_lost", 1)


def _output(block: Block) -> GroupOutput:
    return GroupOutput(
        tokens=block.array("tokens"),
        logprobs=block.array("logprobs"),
        versions=block.array("versions"),
        lengths=block.array("lengths"),
    )


def _meta(grant: m.Granted, block: Block, scores: list[Score]) -> GroupMeta:
    lengths = block.array("lengths")
    used = np.arange(block.array("tokens").shape[1])[None, :] < lengths[:, None]
    versions = block.array("versions")[used]
    return GroupMeta(
        lease=grant.lease,
        prompt=grant.prompt,
        epoch=grant.epoch,
        attempt=grant.attempt,
        rewards=tuple(s.reward if s.reward is not None else 0.0 for s in scores),
        valid=tuple(s.reward is not None for s in scores),
        lengths=tuple(int(n) for n in lengths),
        prompt_tokens=int(block.array("prompt").shape[0]),
        oldest_version=int(versions.min()),
        newest_version=int(versions.max()),
        resolved=tuple(s.resolved for s in scores),
    )
