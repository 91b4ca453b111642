"""The rollout role: leases prompts, samples G responses of each, has them scored, and pushes finished groups.

Tokens, logprobs and versions are written by the engine straight into a slab block; only the reference and the metadata travel. The engine
computes in one dedicated thread; new work starts while earlier groups are still being scored.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from dockyard_actors.config import Config
from dockyard_actors.engines.base import Engine, GroupOutput, GroupRequest, SamplingConfig
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
from dockyard_actors.transport.tensors import ALIGNMENT, ChecksumError, DataPlaneError, checksum
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
        self.working: set[int] = set()  # leases that are neither pushed nor closed yet
        self.fresher = asyncio.Event()  # pulsed when the engine got new weights

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
            applied = await self.seat.run(self._apply, msg.ref)
        self.fresher.set()
        self.fresher = asyncio.Event()
        return applied

    def _apply(self, ref: WeightRef) -> m.Applied:
        """Copies the slot into the engine. The digest is of the bytes that were read, not of what the ref claims."""
        manifest = self.weights.manifest(ref)
        with self.weights.open(ref) as views:
            digest = digest_of(checksum(views[entry.name]) for entry in manifest.entries)
            if digest != digest_of(ref.checksums):
                raise ChecksumError(
                    f"weights version {ref.version}: the bytes in slot {ref.slot} are not those that were published"
                )
            self.engine.update_weights(views, manifest, ref.version)
            views.check()  # the slot held this version until the last byte was copied
        return m.Applied(ref.version, digest)

    async def _pull_weights(self) -> None:
        """A restarted engine takes the newest weights itself; a first one waits until the trainer pushes version 0."""
        while self.engine.version < 0:
            reply = await self.ctx.ref("trainer").ask(
                m.CurrentWeights(rollout=self.ctx.name), deadline_s=self.config.supervision.start_timeout_s, retry=True
            )
            if isinstance(reply, m.NoWeights):
                self.report("waits for the first weights")
                await self._wait_fresher(1.0)
            elif reply.ref.version > self.engine.version:  # else the trainer's own push was faster
                try:
                    await self.update_weights(m.UpdateWeights(ref=reply.ref))
                except DataPlaneError as error:
                    log.info("version %d was replaced while it was pulled (%s); asking again", reply.ref.version, error)

    async def _wait_fresher(self, seconds: float) -> None:
        """Returns when new weights arrived, or after so many seconds."""
        try:
            await asyncio.wait_for(self.fresher.wait(), seconds)
        except TimeoutError:
            return

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
                    working=tuple(self.working),
                ),
                deadline_s=self.config.supervision.start_timeout_s,
                retry=True,
            )
            self.working |= {grant.lease for grant in grants.leases}
            work = [(grant, request) for grant in grants.leases if (request := await self._accept(grant)) is not None]
            if work:
                await self._generate(work)

    async def _accept(self, grant: m.Granted) -> GroupRequest | None:
        """The request of a lease; a prompt that can never be worked on is closed alone, so that it takes no other one with it."""
        task = self.tasks.get(grant.prompt)
        if task is None:
            await self._close(grant, "filtered", "unknown_task: the task file changed since this prompt was drawn")
            return None
        prompt = np.asarray(self.engine.tokenizer.encode(task.prompt), dtype=np.int32)
        width, limit = self._width(task), self.engine.max_tokens
        if limit is not None and prompt.size + width > limit:
            await self._close(
                grant,
                "filtered",
                f"too_long: {prompt.size} prompt + {width} new tokens, the model has {limit} positions",
            )
            return None
        group = self.config.grpo.num_generations_per_prompt
        needed = 4 * (prompt.size + 3 * group * width + group) + 5 * ALIGNMENT
        if needed > self.config.data_plane.block_bytes:
            await self._close(grant, "filtered", f"too_long: {needed} bytes do not fit data_plane.block_bytes")
            return None
        seeds = tuple(sample_seed(self.config.run.seed, task.id, grant.epoch, index) for index in range(group))
        return GroupRequest(
            key=grant.lease, prompt_ids=prompt, n=group, seeds=seeds, stop=task.stop, max_new_tokens=task.max_new_tokens
        )

    def _width(self, task: Task) -> int:
        return min(self.sampling.max_new_tokens, task.max_new_tokens or self.sampling.max_new_tokens)

    async def _generate(self, work: list[tuple[m.Granted, GroupRequest]]) -> None:
        self.report(f"waits for {len(work)} slab blocks")
        blocks = [await self._block(request) for _, request in work]
        outputs = [_output(block) for block in blocks]
        requests = [request for _, request in work]
        async with self.seat.taken() as engine:
            count = sum(request.n for request in requests)
            self.report(f"generating {count} responses at version {engine.version}")
            await self.seat.run(engine.generate, requests, outputs, self.sampling)
        self.report.count("tokens", float(sum(int(output.lengths.sum()) for output in outputs)))
        for (grant, _), block in zip(work, blocks, strict=True):
            self.ctx.spawn(self._finish(grant, block), name=f"score lease {grant.lease}")

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

    async def _finish(self, grant: m.Granted, block: Block) -> None:
        """Ends the lease one way or the other: pushed and owned by the buffer, or closed with its cause."""
        task = self.tasks[grant.prompt]
        ref: TensorRef | None = None
        try:
            async with asyncio.timeout(self.config.group.deadline_s):
                scores, texts = await self._score(task, block)
                valid = sum(s.reward is not None for s in scores)
                if valid < self.config.group.min_size:
                    least = self.config.group.min_size
                    await self._fail(
                        grant, block, ref, f"infra: {valid} of {len(scores)} samples judged, group.min_size is {least}"
                    )
                    return
                meta = _meta(grant, block, scores)
                ref = block.seal()
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

    async def _fail(self, grant: m.Granted, block: Block, ref: TensorRef | None, cause: str) -> None:
        """Closes the lease as failed; its prompt gets one more try. When a push was under way the buffer may own the group after
        all: then the lease stays open and its block is the buffer's."""
        owned = await self._close(grant, "failed", cause, retry_prompt=True)
        if ref is None:
            block.abort()
        elif not owned:
            self.plane.release(ref)

    async def _close(self, grant: m.Granted, outcome: str, cause: str, retry_prompt: bool = False) -> bool:
        """Returns whether the buffer owns the group, in which case nothing was closed."""
        log.warning("lease %d (%s) %s: %s", grant.lease, grant.prompt, outcome, cause)
        reply = await self.ctx.ref("controller").ask(
            m.CloseLease(lease=grant.lease, outcome=outcome, cause=cause, retry_prompt=retry_prompt),
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

    # ---- evaluation

    @concurrent
    async def evaluate(self, msg: m.Evaluate) -> m.Evaluated:
        """Waits for the version that is to be evaluated: a restarted engine may be about to pull it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.config.weight_sync.timeout_s
        while self.engine.version < msg.version and loop.time() < until:
            await self._wait_fresher(min(1.0, until - loop.time()))
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
