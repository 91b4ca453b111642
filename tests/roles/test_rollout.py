"""A rollout ends every lease it holds one way or the other, and its blocks with it. Engine and broker are scripted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dockyard_actors.observe.rollouts import read_rollouts
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.rollout import Rollout
from dockyard_actors.roles.weight_source import WeightSource
from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.sandbox.types import Verdict
from dockyard_actors.tasks.seeds import sample_seed
from dockyard_actors.tasks.types import TaskSet
from dockyard_actors.transport.tensors import StaleRef, checksum
from dockyard_actors.transport.weights_shm import WeightManifest, WeightRef
from tests.roles.world import (
    PATIENCE_S,
    ScriptedBroker,
    ScriptedEngine,
    World,
    eventually,
    tasks_of,
    verdict_of,
    world_of,
)


class ScriptedWeights:
    """Test only: weights of one number, the version."""

    def __init__(self, torn: int = 0):
        self.torn = torn  # how many of the next reads find their slot overwritten at the end

    def open(self, ref: WeightRef) -> Any:
        self.torn -= 1
        return _Views(self.torn >= 0, w=weights_of(ref.version))

    def manifest(self, ref: WeightRef) -> WeightManifest:
        return WeightManifest.of({"w": ("float32", (1,))})


class _Views(dict[str, np.ndarray]):
    def __init__(self, torn: bool, **arrays: np.ndarray):
        super().__init__(arrays)
        self.torn = torn

    def __enter__(self) -> _Views:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def check(self) -> None:
        if self.torn:
            raise StaleRef("slot 0 moved on")


def weights_of(version: int) -> np.ndarray:
    return np.array([version], dtype=np.float32)


def ref_of(version: int) -> WeightRef:
    return WeightRef("arena", version % 2, version, version, (checksum(weights_of(version)),), "host", "/nowhere")


class Rolling:
    def __init__(self, world: World, rollout: Rollout, engine: ScriptedEngine, broker: ScriptedBroker):
        self.world, self.rollout, self.engine, self.broker = world, rollout, engine, broker

    def free(self) -> int:
        return self.world.plane.stats().free


async def passes_when_one(program: m.Program) -> Verdict:
    return verdict_of(passed=program.source == "x = 1\n")


async def never(program: m.Program) -> Verdict:
    await asyncio.Event().wait()
    raise AssertionError


async def infra(program: m.Program) -> Verdict:
    return verdict_of("infra", 0)


@asynccontextmanager
async def rolling(
    path: Path,
    judge: Callable[[m.Program], Awaitable[Verdict]],
    *overrides: str,
    engine: ScriptedEngine | None = None,
    tasks: TaskSet | None = None,
    buffer: Actor | None = None,
    open: bool = True,
    weights: ScriptedWeights | None = None,
    kind: type[Rollout] = Rollout,
) -> AsyncIterator[Rolling]:
    async with world_of(path, *overrides, tasks=tasks, buffer=buffer is None, open=open) as world:
        if buffer is not None:
            await world.system.start(buffer, "buffer")
        engine, broker = engine or ScriptedEngine(), ScriptedBroker(judge)
        await world.system.start(broker, "broker")
        source = WeightSource(weights or ScriptedWeights())  # type: ignore[arg-type]
        rollout = kind(world.config, world.tasks, engine, world.plane, source)
        await world.system.start(rollout, "rollout-0")
        yield Rolling(world, rollout, engine, broker)


async def test_groups_are_written_in_place_scored_and_owned_by_the_buffer(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one) as run:
        world = run.world
        await eventually(lambda: len(world.buffer.groups) == 4)
        batch = await world.ask("buffer", m.TakeGroups(count=4, version=0, max_age=1, wait_s=0.0))
        for group in batch.groups:
            meta = group.meta
            assert (meta.rewards, meta.valid, meta.resolved) == ((1.0, 0.0), (True, True), (True, False))
            assert (meta.lengths, meta.oldest_version, meta.newest_version) == ((2, 2), 0, 0)
            with world.plane.get(group.ref, verify=True) as fields:
                assert bytes(fields["prompt"].astype(np.uint8)).decode() == f"{meta.prompt}:"
                assert fields["tokens"][:, :3].tolist() == [[49, 10, 0], [50, 10, 0]]
                assert fields["logprobs"][:, :3].tolist() == [[-1, -1, 0]] * 2
        await eventually(lambda: len(read_rollouts(world.run_dir.rollouts)[0]) == 4)


async def test_a_sample_is_seeded_by_prompt_epoch_and_index_alone(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, "run.seed=7") as run:
        await eventually(lambda: len(run.engine.requests) >= 4)
        for request in run.engine.requests:
            lease = run.world.ledger.leases[request.key]
            assert request.seeds == tuple(sample_seed(7, lease.prompt, lease.epoch, i) for i in range(2))


async def test_a_tasks_own_token_limit_holds_in_training_too(tmp_path: Path) -> None:
    made = tasks_of()
    limited = msgspec.structs.replace(
        made, train=tuple(msgspec.structs.replace(task, max_new_tokens=3) for task in made.train)
    )
    async with rolling(tmp_path, passes_when_one, tasks=limited) as run:
        await eventually(lambda: run.engine.requests)
        assert {request.max_new_tokens for request in run.engine.requests} == {3}


async def test_a_prompt_that_fits_no_model_or_is_gone_is_closed_alone_with_its_reason(tmp_path: Path) -> None:
    made = tasks_of()
    long = msgspec.structs.replace(made.train[0], prompt="x" * 90)
    engine = ScriptedEngine()
    engine.max_tokens = 80
    tasks = msgspec.structs.replace(made, train=(long, *made.train[1:4]))
    async with rolling(tmp_path, passes_when_one, engine=engine, tasks=tasks) as run:
        del run.rollout.tasks["train-1"]
        ledger = run.world.ledger
        await eventually(lambda: len(run.world.buffer.groups) == 4)
        causes = {lease.prompt: lease.cause for lease in ledger.leases.values() if lease.state == "filtered"}
        assert set(causes) <= {"train-0", "train-1"}
        assert causes["train-0"].startswith("quarantined: too_long: 90 prompt + 6 new tokens")
        assert causes.get("train-1", "quarantined: unknown_task").startswith("quarantined: unknown_task")
        assert ledger.summary()["failed"] == 0


async def test_a_prompt_that_only_the_engine_knows_not_to_fit_is_closed_alone_and_frees_its_block(
    tmp_path: Path,
) -> None:
    made = tasks_of()
    long = msgspec.structs.replace(made.train[0], prompt="x" * 90)
    engine = ScriptedEngine()
    engine.token_capacity = 80
    tasks = msgspec.structs.replace(made, train=(long, *made.train[1:4]))
    async with rolling(tmp_path, passes_when_one, engine=engine, tasks=tasks) as run:
        await eventually(lambda: len(run.world.buffer.groups) == 4)
        causes = {lease.cause for lease in run.world.ledger.leases.values() if lease.state == "filtered"}
        assert len(causes) == 1
        assert causes.pop().startswith("quarantined: too_long: group")
        assert run.free() == 16 - 4
        assert run.rollout.generating == 0


async def test_the_groups_of_a_grant_join_at_one_step_in_the_order_of_their_leases(tmp_path: Path) -> None:
    """However long the second of them takes to find a block."""
    together: list[int] = []
    engine = ScriptedEngine()
    engine.before_step = lambda: together.append(len(engine.running))

    class Slow(Rollout):
        async def _block(self, request: Any) -> Any:
            block = await super()._block(request)
            for _ in range(3):
                await self.driver.call(lambda: None)  # the engine had the time for a step
            return block

    async with rolling(tmp_path, passes_when_one, engine=engine, kind=Slow) as run:
        await eventually(lambda: len(run.world.buffer.groups) == 4)
        leases = [run.world.ledger.leases[lease] for lease in sorted(run.world.ledger.leases)]
        seeds = [tuple(sample_seed(0, lease.prompt, lease.epoch, i) for i in range(2)) for lease in leases]
        assert [request.seeds for request in engine.requests] == seeds
        assert together[0] == 2, "both groups of the first grant"


async def test_scoring_that_is_late_fails_the_group_with_its_cause_and_frees_the_block(tmp_path: Path) -> None:
    async with rolling(tmp_path, never, "group.deadline_s=0.2") as run:
        ledger = run.world.ledger
        await eventually(lambda: ledger.summary()["failed"] >= 4)
        assert all("deadline" in cause and "group.deadline_s" in cause for cause in ledger.causes["failed"])
        await eventually(lambda: run.free() + len(ledger.open) >= 16)
        assert run.world.plane.stats().ready == 0


async def test_scoring_that_fails_fails_the_group_with_its_cause_and_frees_the_block(tmp_path: Path) -> None:
    async def broken(program: m.Program) -> Verdict:
        if run.world.ledger.summary()["issued"] > 8:
            return await never(program)
        raise ValueError("the broker's own error")

    async with rolling(tmp_path, broken) as run:
        ledger = run.world.ledger
        await eventually(lambda: ledger.summary()["failed"] >= 4)
        assert all("the broker's own error" in cause for cause in ledger.causes["failed"])
        await eventually(lambda: run.free() == 16 - len(ledger.open))


async def test_a_group_with_too_few_verdicts_fails_as_infra_and_its_prompt_is_tried_once_more(tmp_path: Path) -> None:
    async def first_two_groups(program: m.Program) -> Verdict:
        return await (infra if len(run.broker.asked) <= 4 and program.source == "x = 2\n" else passes_when_one)(program)

    async with rolling(tmp_path, first_two_groups) as run:
        world = run.world
        await eventually(lambda: len(world.buffer.groups) == 4)
        failed = [lease for lease in world.ledger.leases.values() if lease.state == "failed"]
        assert failed
        assert all(lease.cause.startswith("infra: 1 of 2 samples") for lease in failed)
        assert {lease.prompt for lease in failed} <= {held.meta.prompt for held in world.buffer.groups.values()}
        assert run.free() == 16 - 4


async def test_a_group_with_enough_verdicts_is_kept_with_the_others_masked(tmp_path: Path) -> None:
    async def judge(program: m.Program) -> Verdict:
        return await (infra if program.source == "x = 3\n" else passes_when_one)(program)

    engine = ScriptedEngine(("1\n", "2\n", "3\n"))
    async with rolling(tmp_path, judge, "grpo.num_generations_per_prompt=3", engine=engine) as run:
        await eventually(lambda: run.world.buffer.groups)
        meta = next(iter(run.world.buffer.groups.values())).meta
        assert (meta.rewards, meta.valid) == ((1.0, 0.0, 0.0), (True, True, False))
        assert run.world.ledger.summary()["failed"] == 0


class DeafBuffer(Actor):
    """Test only: never answers a push; with `journal` the group is owned all the same."""

    def __init__(self, journal: bool):
        self.journal = journal

    @concurrent
    async def push(self, msg: m.PushGroup) -> m.Pushed:
        if self.journal:
            await self.ctx.ref("controller").ask(m.AcceptGroup(meta=msg.meta, ref=msg.ref), deadline_s=PATIENCE_S)
        await asyncio.Event().wait()
        return m.Pushed(False)


async def test_a_push_without_answer_fails_the_group_and_frees_its_block_when_nobody_owns_it(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, "group.deadline_s=0.3", buffer=DeafBuffer(journal=False)) as run:
        ledger = run.world.ledger
        await eventually(lambda: ledger.summary()["failed"] >= 4)
        await eventually(lambda: run.world.plane.stats().ready <= len(ledger.open))
        assert all("deadline" in cause for cause in ledger.causes["failed"])


async def test_a_push_without_answer_leaves_lease_and_block_to_the_journal_when_it_has_them(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, "group.deadline_s=0.3", buffer=DeafBuffer(journal=True)) as run:
        ledger = run.world.ledger
        await eventually(lambda: len(ledger.open) == 4 and all(lease.buffered for lease in ledger.open.values()))
        tasks = [t for t in asyncio.all_tasks() if "/lease " in t.get_name()]
        await asyncio.wait(tasks)
        assert ledger.summary()["failed"] == 0
        for lease in ledger.open.values():
            assert lease.ref is not None
            run.world.plane.get(lease.ref, verify=True).release()


async def test_a_group_that_is_not_wanted_any_more_frees_its_block(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def gated(program: m.Program) -> Verdict:
        await gate.wait()
        return await passes_when_one(program)

    async with rolling(tmp_path, gated) as run:
        await eventually(lambda: len(run.world.ledger.open) == 4)
        await run.world.ask("controller", m.RunFinished(status="completed"))
        gate.set()
        await eventually(lambda: run.free() == 16)
        assert not run.world.buffer.groups
        assert run.world.ledger.summary()["issued"] == 4, "nothing was handed out at the end"


# ---- in flight


async def test_late_samples_are_cut_and_the_group_fails_when_too_few_are_whole(tmp_path: Path) -> None:
    class Endless(ScriptedEngine):
        def step(self) -> list[Any]:
            time.sleep(0.01)  # as long as a decode step takes
            return []

    async with rolling(tmp_path, passes_when_one, "group.deadline_s=0.3", engine=Endless()) as run:
        ledger = run.world.ledger
        await eventually(lambda: ledger.summary()["failed"] >= 2)
        for cause in ledger.causes["failed"]:
            assert "deadline: 0 of 2 samples judged, 2 were cut at group.deadline_s" in cause
        await eventually(lambda: run.free() == 16 - len(ledger.open))


async def test_weights_that_come_while_groups_run_are_in_their_later_tokens(tmp_path: Path) -> None:
    """The group's age counts from its oldest token."""
    held, passed = threading.Semaphore(0), []

    def turnstile() -> None:
        passed.append(held.acquire(timeout=PATIENCE_S))

    engine = ScriptedEngine(("11\n", "22\n"))
    engine.before_step = turnstile
    async with rolling(tmp_path, passes_when_one, engine=engine) as run:
        await eventually(lambda: engine.requests)
        held.release()
        await eventually(lambda: len(passed) == 1)
        update = asyncio.ensure_future(run.world.ask("rollout-0", m.UpdateWeights(offer=ref_of(5))))
        await eventually(lambda: run.rollout.driver._updating.locked())
        for _ in range(20):
            held.release()
        await update
        await eventually(lambda: len(run.world.buffer.groups) == 4)
        metas = [held.meta for held in run.world.buffer.groups.values()]
        assert (0, 5) in {(meta.oldest_version, meta.newest_version) for meta in metas}
        assert {meta.newest_version for meta in metas} == {5}
        engine.before_step = lambda: None
        for _ in range(20):
            held.release()
