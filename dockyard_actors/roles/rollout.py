"""The rollout role: leases prompts, samples G responses of each, has them scored, and pushes finished groups.

Tokens, logprobs and versions are written by the engine straight into a slab block; only the reference and the metadata travel. The engine
computes in one dedicated thread; new work starts while earlier groups are still being scored.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from dockyard_actors.config import Config
from dockyard_actors.engines.base import Engine, GroupOutput, GroupRequest, GroupResult, SamplingConfig
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.engine_seat import EngineSeat
from dockyard_actors.roles.evaluation import decode, evaluate
from dockyard_actors.roles.ledger import GroupMeta
from dockyard_actors.roles.reporting import Reporter
from dockyard_actors.roles.scoring import Score, broker_judge, score, to_sample
from dockyard_actors.roles.synchronizer import digest_of
from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.tasks.seeds import sample_seed
from dockyard_actors.tasks.types import Task, TaskSet
from dockyard_actors.transport.plane import Block, DataPlane, TensorRef
from dockyard_actors.transport.weights_shm import WeightReader, WeightRef

log = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0  # one long poll for work; the loop then looks again, so nothing hangs on a lost answer


class Rollout(Actor):
    """One process with one engine."""

    def __init__(self, config: Config, tasks: TaskSet, engine: Engine, plane: DataPlane, weights: WeightReader):
        self.config = config
        self.tasks = tasks.by_id()
        self.engine = engine
        self.plane = plane
        self.weights = weights
        self.sampling = SamplingConfig(
            temperature=config.generation.temperature, max_new_tokens=config.generation.max_new_tokens
        )
        self.seat = EngineSeat(engine)
        self.stopping = False

    async def on_start(self) -> None:
        self.judge = broker_judge(self.ctx, self.config.rendezvous.ask_timeout_s)
        self.report = Reporter(self, doing="loading the model")
        self.report.facts["engine"] = self.config.generation.engine
        await self.seat.run(self.engine.start)
        self.ctx.spawn(self._work(), name="work")

    async def on_stop(self) -> None:
        self.stopping = True
        self.seat.close()

    # ---- weights

    @concurrent
    async def update_weights(self, msg: m.UpdateWeights) -> m.Applied:
        async with self.seat.taken():
            self.report(f"loading weights version {msg.ref.version}")
            return await self.seat.run(self._apply, msg.ref)

    def _apply(self, ref: WeightRef) -> m.Applied:
        with self.weights.open(ref, verify=True) as views:
            self.engine.update_weights(views, self.weights.manifest(ref), ref.version)
        return m.Applied(ref.version, digest_of(ref))

    async def _pull_weights(self) -> None:
        """A restarted engine takes the newest weights itself; a first one waits until the trainer pushes version 0."""
        while self.engine.version < 0:
            reply = await self.ctx.ref("trainer").ask(
                m.CurrentWeights(rollout=self.ctx.name), deadline_s=self.config.supervision.start_timeout_s, retry=True
            )
            if isinstance(reply, m.Weights):
                await self.update_weights(m.UpdateWeights(ref=reply.ref))
            else:
                self.report("waits for the first weights")
                await asyncio.sleep(1.0)

    # ---- generation

    async def _work(self) -> None:
        await self._pull_weights()
        while not self.stopping:
            self.report("waits for room in the staleness budget")
            grants = await self.ctx.ref("controller").ask(
                m.LeasePrompts(
                    rollout=self.ctx.name,
                    incarnation=self.ctx.incarnation,
                    capacity=self.config.groups_per_batch,
                    wait_s=LEASE_WAIT_S,
                ),
                deadline_s=self.config.rendezvous.ask_timeout_s,
                retry=True,
            )
            if grants.leases:
                await self._generate(grants.leases)

    async def _generate(self, grants: tuple[m.Granted, ...]) -> None:
        tasks = [self.tasks[grant.prompt] for grant in grants]
        requests = [self._request(grant, task) for grant, task in zip(grants, tasks, strict=True)]
        blocks: list[Block] = []
        self.report(f"waits for {len(grants)} slab blocks")
        for request in requests:
            blocks.append(await self._block(request))
        outputs = [_output(block) for block in blocks]
        async with self.seat.taken() as engine:
            self.report(
                f"generating {sum(request.n for request in requests)} responses at version {self.engine.version}"
            )
            results = await self.seat.run(engine.generate, requests, outputs, self.sampling)
        self.report.count("tokens", float(sum(int(output.lengths.sum()) for output in outputs)))
        for grant, task, block, result in zip(grants, tasks, blocks, results, strict=True):
            self.ctx.spawn(self._finish(grant, task, block, result), name=f"score lease {grant.lease}")

    def _request(self, grant: m.Granted, task: Task) -> GroupRequest:
        group = self.config.grpo.num_generations_per_prompt
        seeds = tuple(sample_seed(self.config.run.seed, task.id, grant.epoch, index) for index in range(group))
        prompt = np.asarray(self.engine.tokenizer.encode(task.prompt), dtype=np.int32)
        return GroupRequest(key=grant.lease, prompt_ids=prompt, n=group, seeds=seeds, stop=task.stop)

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

    async def _finish(self, grant: m.Granted, task: Task, block: Block, result: GroupResult) -> None:
        """Ends the lease one way or the other: pushed and owned by the buffer, or closed with its cause."""
        ref: TensorRef | None = None
        try:
            async with asyncio.timeout(self.config.group.deadline_s):
                scores, texts = await self._score(task, block)
                valid = tuple(s.reward is not None for s in scores)
                if sum(valid) < self.config.group.min_size:
                    cause = f"infra: {sum(valid)} of {len(valid)} samples got a verdict, group.min_size is {self.config.group.min_size}"
                    await self._fail(grant, cause)
                    block.abort()
                    return
                meta = _meta(grant, block, scores)
                ref = block.seal()
                reply = await self.ctx.ref("buffer").ask(
                    m.PushGroup(meta=meta, ref=ref), deadline_s=self.config.group.deadline_s, retry=True
                )
        except (TimeoutError, ActorError) as error:
            # When the push itself failed, the buffer may own the group after all: then the journal keeps the lease and its block.
            cause = (
                f"deadline: {self.config.group.deadline_s:.0f} s (group.deadline_s)"
                if isinstance(error, TimeoutError)
                else f"score: {error}"
            )
            await self._fail(grant, cause)
            if ref is None:
                block.abort()
            return
        if not reply.owned:
            log.warning("lease %d was not wanted any more: %s", grant.lease, reply.why)
            self.plane.release(ref)
            return
        await self._report_samples(grant, task, meta, scores, texts)

    async def _score(self, task: Task, block: Block) -> tuple[list[Score], list[str]]:
        tokens, lengths = block.array("tokens"), block.array("lengths")
        texts = decode(self.engine, tokens, lengths)
        scores = await score(
            self.judge,
            self.config.reward.partial,
            [(task, text) for text in texts],
            self.config.sandbox.score_timeout_s,
        )
        return scores, texts

    async def _fail(self, grant: m.Granted, cause: str) -> None:
        log.warning("lease %d (%s) failed: %s", grant.lease, grant.prompt, cause)
        await self.ctx.ref("controller").ask(
            m.CloseLease(lease=grant.lease, outcome="failed", cause=cause, retry_prompt=True),
            deadline_s=self.config.supervision.start_timeout_s,
            retry=True,
        )

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
        await self.ctx.ref("controller").tell(m.ReportSamples(samples=(sample,)))

    # ---- evaluation

    @concurrent
    async def evaluate(self, msg: m.Evaluate) -> m.Evaluated:
        return await evaluate(self.judge, self.config, self.tasks, self.seat, self.report, msg)


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
