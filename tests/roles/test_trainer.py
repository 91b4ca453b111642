"""The training loop: what it does while a step computes, what it waits for, and how it ends. The learner and the engines are scripted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dockyard_actors.roles import messages as m
from dockyard_actors.roles.learner import StepOutcome
from dockyard_actors.roles.ledger import Stepped
from dockyard_actors.roles.trainer import Trainer
from dockyard_actors.roles.weight_routes import Kind, Route, SharedMemory
from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.runtime.errors import ActorCrashed, ActorError
from dockyard_actors.runtime.supervision import RestartProcess
from dockyard_actors.transport.plane import DataPlane, LocalPlane, TensorRef, WrongHost
from dockyard_actors.transport.pull import PeerLost
from tests.roles.test_synchronizer import Member, ScriptedPublisher, broken
from tests.roles.world import PATIENCE_S, World, assert_journal_is_the_ledger, eventually, world_of

BASE = ("weight_sync.canary=false", "eval.before=false", "eval.after=false", "grpo.max_num_steps=4")


class ScriptedLearner:
    """Test only: trains nothing. A step waits for the gate when there is one."""

    def __init__(self, plane: DataPlane) -> None:
        self.plane = plane
        self.step, self.fresh, self.needs_warmup = 0, True, False
        self.gate: threading.Semaphore | None = None
        self.training = 0
        self.batches: list[tuple[int, tuple[int, ...]]] = []
        self.saved: list[int] = []

    def load(self) -> None: ...

    def begin(self) -> None: ...

    def save(self) -> None:
        self.saved.append(self.step)

    def route(self, kind: Kind, client: Any, here: Any) -> Route:
        assert kind == "shm"
        return SharedMemory(ScriptedPublisher(), lambda buffers: None)  # type: ignore[arg-type]

    def train(self, groups: Sequence[m.OpenGroup], version: int) -> StepOutcome:
        self.training += 1
        if self.gate is not None:
            assert self.gate.acquire(timeout=PATIENCE_S)
        self.step += 1
        leases = tuple(group.meta.lease for group in groups)
        self.batches.append((version, leases))
        return StepOutcome(self.step, version, 0.0, 0.0, 0.0, 1, leases, ())


class Agent(Actor):
    """Test only: notes who was to be restarted."""

    def __init__(self) -> None:
        self.restarted: list[tuple[str, str]] = []

    async def restart(self, msg: RestartProcess) -> None:
        self.restarted.append((msg.name, msg.cause))


class Training:
    def __init__(self, world: World, learner: ScriptedLearner, members: list[Member]):
        self.world, self.learner, self.members = world, learner, members
        self.version = 0
        self.rewards = (1.0, 0.0)

    async def start(self) -> Trainer:
        world = self.world
        self.trainer = Trainer(world.config, world.tasks, self.learner, None, world.run_dir)  # type: ignore[arg-type]
        await world.system.start(self.trainer, "trainer")
        return self.trainer

    async def feed(self) -> None:
        """What rollouts do, at once and for ever: lease, generate with the newest version that the first member has, push."""
        while True:
            for grant in await self.world.lease(4, wait_s=1.0):
                version = self.members[0].asked[-1]
                try:
                    await self.world.push(grant, version, self.rewards)
                except ActorError:
                    return


@asynccontextmanager
async def training(path: Path, *overrides: str, members: Sequence[Member] = ()) -> AsyncIterator[Training]:
    async with world_of(path, *BASE, *overrides, open=False) as world:
        members = list(members) or [Member()]
        for index, member in enumerate(members):
            await world.system.start(member, f"rollout-{index}")
        run = Training(world, ScriptedLearner(world.plane), members)
        feeding = asyncio.ensure_future(run.feed())
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield run
        finally:
            feeding.cancel()
            for member in members:
                member.gate.set()
            if run.learner.gate is not None:
                for _ in range(100):
                    run.learner.gate.release()
            await asyncio.gather(feeding, return_exceptions=True)


async def test_a_run_trains_every_step_on_groups_no_older_than_allowed(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        await run.start()
        await eventually(lambda: run.world.ledger.finished == "completed")
        assert [version for version, _ in run.learner.batches] == [0, 1, 2, 3]
        assert run.world.ledger.summary()["trained"] == 8
        assert run.learner.saved[-1] == 4
        assert_journal_is_the_ledger(run.world)


async def test_the_next_batch_is_taken_while_a_step_computes(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        run.learner.gate = threading.Semaphore(0)
        trainer = await run.start()
        await eventually(lambda: len(trainer.holding) == 4)
        assert (run.learner.training, run.learner.batches) == (1, []), "the first step is still at work"
        assert sum(held.taken for held in run.world.buffer.groups.values()) == 4
        run.learner.gate.release()
        await eventually(lambda: run.learner.training == 2)


async def test_a_buffer_is_told_of_steps_that_it_may_not_have_heard_of(tmp_path: Path) -> None:
    """One that was restarted meanwhile would hand their groups out again, before the controller has it release them."""
    async with training(tmp_path) as run:
        told: list[set[int]] = []
        take = run.world.buffer.take

        async def spied(msg: m.TakeGroups) -> m.Batch:
            told.append(set(msg.holding))
            return await take(msg)

        run.world.buffer.take = spied  # type: ignore[method-assign]
        await run.start()
        await eventually(lambda: run.world.ledger.finished == "completed")
        stepped = {lease for step in run.world.journal if isinstance(step, Stepped) for lease in step.trained}
        last_taken = 2
        assert len(told[-1] & stepped) >= len(stepped) - 2 * last_taken


class LossyPlane(LocalPlane):
    """Test only: every so many fetches end with an error."""

    def __init__(self, plane: LocalPlane, every: int, error: Exception) -> None:
        self.__dict__ = plane.__dict__
        self.every, self.error = every, error
        self.fetches = 0
        self.fetched: list[TensorRef] = []

    async def fetch(self, refs: Iterable[TensorRef], deadline_s: float) -> None:
        self.fetches += 1
        if self.fetches % self.every == 0:
            raise self.error
        self.fetched += refs


async def test_a_batch_is_made_whole_when_some_of_its_groups_were_lost_with_their_host(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        plane = run.learner.plane = LossyPlane(run.world.plane, 3, PeerLost("its cable was cut"))
        await run.start()
        await eventually(lambda: run.world.ledger.finished == "completed")
        assert [len(leases) for _, leases in run.learner.batches] == [2, 2, 2, 2]
        lost = run.world.ledger.causes["failed"][m.HOST_LOST]
        assert 2 <= lost <= plane.fetches // 3
        assert len(plane.fetched) >= 8
        leases = [lease for _, batch in run.learner.batches for lease in batch]
        assert len(set(leases)) == 8
        assert all(batch == tuple(sorted(batch)) for _, batch in run.learner.batches)
        assert_journal_is_the_ledger(run.world)


async def test_an_error_that_is_no_loss_ends_the_trainer(tmp_path: Path) -> None:
    async def run_to_its_end() -> None:
        async with training(tmp_path) as run:
            run.learner.plane = LossyPlane(run.world.plane, 2, WrongHost("serves no other host"))
            await run.start()
            await run.world.system.wait_stop()

    with pytest.raises(ActorCrashed) as crash:
        await run_to_its_end()
    assert isinstance(crash.value.__cause__, WrongHost)


async def test_tensors_of_groups_without_signal_stay_where_they_are(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        plane = run.learner.plane = LossyPlane(run.world.plane, 1, PeerLost("nobody asked for it"))
        run.rewards = (1.0, 1.0)
        await run.start()
        await eventually(lambda: run.world.ledger.finished == "completed")
        assert plane.fetches == 0


async def test_in_sync_mode_nothing_is_taken_ahead_and_every_delivery_is_waited_for(tmp_path: Path) -> None:
    async with training(tmp_path, "grpo.mode=sync") as run:
        run.learner.gate = threading.Semaphore(0)
        trainer = await run.start()
        await eventually(lambda: run.learner.training == 1)
        assert (len(trainer.holding), trainer.taking) == (2, None)
        run.members[0].gate.clear()
        run.learner.gate.release()
        await eventually(lambda: run.members[0].asked == [0, 1])
        assert run.world.ledger.fresh_step == 0
        assert await run.world.lease(4, "rollout-9") == (), "engines are not fresh"
        run.members[0].gate.set()
        await eventually(lambda: run.learner.training == 2)


async def test_weights_are_delivered_while_the_next_step_computes_and_no_later(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        run.learner.gate = threading.Semaphore(0)
        trainer = await run.start()
        await eventually(lambda: len(trainer.holding) == 4)
        run.members[0].gate.clear()
        run.learner.gate.release()
        await eventually(lambda: run.learner.training == 2 and run.members[0].asked == [0, 1])
        run.learner.gate.release()
        await eventually(lambda: len(run.learner.batches) == 2)
        assert run.members[0].asked == [0, 1], (
            "a third version waits until the second has arrived: two are held at most"
        )
        run.members[0].gate.set()
        await eventually(lambda: run.members[0].asked == [0, 1, 2])


async def test_a_stop_trains_no_batch_that_was_taken_ahead(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        run.learner.gate = threading.Semaphore(0)
        trainer = await run.start()
        await eventually(lambda: len(trainer.holding) == 4)
        await run.world.ask("trainer", m.StopTraining(reason="signal"))
        run.learner.gate.release()
        await eventually(lambda: run.world.ledger.finished == "interrupted")
        assert run.learner.training == 1
        assert run.learner.saved[-1] == 1
        assert run.world.ledger.summary()["trained"] == 2
        assert run.world.ledger.summary()["in_flight"] >= 2, "what was taken ahead is in flight, for whoever resumes"


async def test_a_restarted_buffer_costs_a_living_trainer_nothing(tmp_path: Path) -> None:
    async with training(tmp_path) as run:
        run.learner.gate = threading.Semaphore(0)
        trainer = await run.start()
        await eventually(lambda: len(trainer.holding) == 4)
        await run.world.restart_buffer()
        for _ in range(4):
            run.learner.gate.release()
        await eventually(lambda: run.world.ledger.finished == "completed")
        leases = [lease for _, batch in run.learner.batches for lease in batch]
        assert len(set(leases)) == len(leases) == 8


async def test_a_member_that_fails_is_restarted_and_the_others_go_on(tmp_path: Path) -> None:
    async with training(tmp_path, "rollout.count=2", members=[Member(), Member(broken)]) as run:
        agent = Agent()
        await run.world.system.start(agent, "agent")
        await run.start()
        await eventually(lambda: run.world.ledger.finished == "completed")
        ((name, cause),) = agent.restarted
        assert name == "rollout-1"
        assert cause.startswith("did not take weights version 0: "), "without a cause supervision would not count it"
        assert any("rollout-1 did not take weights version 0" in text for text in run.world.controller.warnings)


# ---- evaluations beside training


class ScriptedEvaluator(Actor):
    """Test only: holds the version it was given, answers when the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.pinned: list[int] = []
        self.evaluated: list[tuple[int, int]] = []
        self.refuses = 0

    async def update(self, msg: m.UpdateWeights) -> m.Applied:
        if self.refuses:
            self.refuses -= 1
            raise ValueError("replaced meanwhile")
        self.pinned.append(msg.offer.version)
        return m.Applied(msg.offer.version, 0)

    @concurrent
    async def evaluate(self, msg: m.Evaluate) -> m.Evaluated:
        assert msg.version == self.pinned[-1]
        await self.gate.wait()
        self.evaluated.append((msg.step, msg.version))
        return m.Evaluated(msg.version, tuple(m.TaskResult(name, 1, 1) for name in msg.prompts), (), 0)


async def test_an_evaluation_holds_nothing_up_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    async with training(tmp_path, "eval.every=1") as run:
        evaluator = ScriptedEvaluator()
        evaluator.gate.clear()
        await run.world.system.start(evaluator, "evaluator")
        await run.start()
        await eventually(lambda: len(run.learner.batches) == 4)
        assert evaluator.pinned == [1], "one version is held until it is evaluated"
        evaluator.gate.set()
        await eventually(lambda: run.world.ledger.finished == "completed")
        assert set(evaluator.evaluated) == {(1, 1)}
        assert any("evaluation of step 3 was never made" in text for text in run.world.controller.warnings)


async def test_an_evaluation_that_cannot_be_made_is_put_off_and_said_once(tmp_path: Path) -> None:
    async with training(tmp_path, "eval.every=2", "grpo.max_num_steps=6") as run:
        evaluator = ScriptedEvaluator()
        evaluator.refuses = 1
        await run.world.system.start(evaluator, "evaluator")
        run.learner.gate = threading.Semaphore(0)
        await run.start()
        for number in range(1, 7):
            run.learner.gate.release()
            await eventually(lambda number=number: len(run.learner.batches) == number)
            await eventually(lambda: run.trainer.evaluations.pinned is None or run.trainer.evaluations.pinned.done())
        await eventually(lambda: run.world.ledger.finished == "completed")
        steps = {step for step, _ in evaluator.evaluated}
        assert steps
        assert steps <= {3, 4, 5}, "made at a later step, under its number"
        said = [text for text in run.world.controller.warnings if "put off" in text]
        assert len(said) == 1


async def test_a_stop_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    async with training(tmp_path, "eval.every=1") as run:
        evaluator = ScriptedEvaluator()
        evaluator.gate.clear()
        await run.world.system.start(evaluator, "evaluator")
        await run.start()
        await eventually(lambda: run.learner.step == 4 and "evaluator" in run.trainer.report.doing)
        await run.world.ask("trainer", m.StopTraining(reason="signal"))
        await eventually(lambda: run.world.ledger.finished)
        evaluator.gate.set()
