"""Trainer and engine have one device in turn: who does what, in which order, and what a death in between costs. Learner and engine are
scripted, everything between them is real."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dockyard_actors.engines.base import EngineError
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.learner import StepOutcome
from dockyard_actors.roles.rollout import Rollout
from dockyard_actors.roles.trainer import Trainer
from dockyard_actors.roles.weight_routes import Kind, Route, SharedMemory
from dockyard_actors.roles.weight_source import WeightSource
from dockyard_actors.runtime.actor import Death
from dockyard_actors.runtime.memory import Change
from dockyard_actors.transport.plane import DataPlane
from dockyard_actors.transport.weights_shm import WeightRef
from tests.roles.driving import TEXT, driving, generate, swap
from tests.roles.test_rollout import ScriptedWeights, passes_when_one, ref_of
from tests.roles.test_synchronizer import ScriptedPublisher
from tests.roles.test_trainer import BASE, Agent, ScriptedLearner
from tests.roles.world import PATIENCE_S, ScriptedBroker, ScriptedEngine, World, eventually, world_of

COLOCATED = ("grpo.mode=sync", "weight_sync.colocated=true", "grpo.max_num_steps=3", "weight_sync.timeout_s=15")
TURN = ("sleep", "onload", "train", "offload", "wake up")


class Publisher(ScriptedPublisher):
    """Test only: the bytes that ScriptedWeights reads."""

    def publish(self, version: int) -> WeightRef:
        super().publish(version)
        return ref_of(version)


class Learner(ScriptedLearner):
    """Test only: writes what it does into the list of its engine."""

    def __init__(self, plane: DataPlane, calls: list[str]) -> None:
        super().__init__(plane)
        self.calls = calls

    def route(self, kind: Kind, client: Any, here: Any) -> Route:
        return SharedMemory(Publisher(), lambda buffers: None)  # type: ignore[arg-type]

    def offload(self) -> Change:
        self.calls.append("offload")
        return Change(2, 1)

    def onload(self) -> Change:
        self.calls.append("onload")
        return Change(1, 2)

    def train(self, groups: Sequence[m.OpenGroup], version: int) -> StepOutcome:
        self.calls.append("train")
        return super().train(groups, version)


class Sleepless(ScriptedEngine):
    """Test only: cannot give its memory back."""

    def sleep(self) -> None:
        raise EngineError("no sleep mode here")


class Colocated:
    def __init__(self, world: World):
        self.world = world
        self.calls: list[str] = []
        self.gate: threading.Semaphore | None = None
        self.trainer: Trainer
        self.learner: Learner
        self.rollout: Rollout

    async def start_trainer(self) -> None:
        self.learner = Learner(self.world.plane, self.calls)
        self.learner.gate = self.gate
        self.trainer = Trainer(self.world.config, self.world.tasks, self.learner, None, self.world.run_dir)  # type: ignore[arg-type]
        await self.world.system.start(self.trainer, "trainer")

    async def start_rollout(self, engine: ScriptedEngine | None = None) -> ScriptedEngine:
        world, engine = self.world, engine or ScriptedEngine(version=-1)
        engine.calls = self.calls
        source = WeightSource(ScriptedWeights())  # type: ignore[arg-type]
        self.rollout = Rollout(world.config, world.tasks, engine, world.plane, source)
        await world.system.start(self.rollout, "rollout-0")
        return engine

    async def completed(self) -> None:
        await eventually(lambda: self.world.ledger.finished == "completed")


@asynccontextmanager
async def colocated(path: Path, *overrides: str, gate: bool = False) -> AsyncIterator[Colocated]:
    async with world_of(path, *BASE, *COLOCATED, *overrides, open=False) as world:
        run = Colocated(world)
        run.gate = threading.Semaphore(0) if gate else None
        await world.system.start(ScriptedBroker(passes_when_one), "broker")
        await world.system.start(Agent(), "agent")
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield run
        finally:
            for _ in range(100 if run.gate is not None else 0):
                run.gate.release()  # type: ignore[union-attr]


async def test_one_has_the_device_at_a_time_and_weights_come_to_an_engine_that_is_awake(tmp_path: Path) -> None:
    async with colocated(tmp_path) as run:
        await run.start_rollout()
        await run.start_trainer()
        await run.completed()
        turns = [call for step in (1, 2, 3) for call in (*TURN, f"weights {step}")]
        assert run.calls == ["offload", "weights 0", *turns]
        assert run.world.ledger.summary() == {
            "issued": 6, "trained": 6, "expired": 0, "filtered": 0, "failed": 0, "in_flight": 0
        }  # fmt: skip
        told = run.trainer.report.facts["memory"]
        assert all(what in told for what in ("rollout-0 sleep", "rollout-0 wake up", "optimizer on", "optimizer off"))
        assert run.rollout.report.facts["memory"].startswith("wake up ")


async def test_without_colocation_nobody_sleeps(tmp_path: Path) -> None:
    async with colocated(tmp_path, "weight_sync.colocated=false") as run:
        await run.start_rollout()
        await run.start_trainer()
        await run.completed()
        assert run.calls == ["weights 0", "train", "weights 1", "train", "weights 2", "train", "weights 3"]


async def test_an_engine_that_restarts_while_the_trainer_has_the_device_is_awake_and_works_on(
    tmp_path: Path, caplog
) -> None:
    async with colocated(tmp_path, gate=True) as run:
        assert run.gate is not None
        await run.start_rollout()
        await run.start_trainer()
        await eventually(lambda: run.calls[-1:] == ["train"])
        await run.world.system.stop("rollout-0")
        await run.start_rollout()
        await eventually(lambda: run.calls[-1] == "weights 0")
        assert "rollout-0 was restarted while the trainer has the device" in caplog.text
        for _ in range(3):
            run.gate.release()
        await run.completed()
        turns = [call for step in (2, 3) for call in (*TURN, f"weights {step}")]
        assert run.calls[-len(turns) - 2 :] == ["offload", "weights 1", *turns], "the new one did not have to wake up"


async def test_an_engine_sleeps_on_while_its_trainer_restarts_and_wakes_with_the_weights_of_the_next(
    tmp_path: Path,
) -> None:
    async with colocated(tmp_path, gate=True) as run:
        assert run.gate is not None
        engine = await run.start_rollout()
        await run.start_trainer()
        await eventually(lambda: run.calls[-1:] == ["train"])
        dying, before = run.gate, len(run.calls)
        run.gate = None
        await run.world.system.stop("trainer")
        dying.release()
        await run.world.buffer.on_death(Death("trainer", 1, "killed by SIGKILL"))
        assert not engine.awake
        await run.start_trainer()
        await run.completed()
        after = run.calls[before:]
        assert after[:3] == ["offload", "wake up", "weights 1"]
        assert run.world.ledger.summary()["trained"] == 6


async def test_an_engine_that_cannot_sleep_is_told_about_and_trained_beside(tmp_path: Path) -> None:
    async with colocated(tmp_path) as run:
        await run.start_rollout(Sleepless(version=-1))
        await run.start_trainer()
        await run.completed()
        assert any("rollout-0 could not sleep" in text for text in run.world.controller.warnings)
        assert run.calls[-4:] == ["onload", "train", "offload", "weights 3"]


async def test_groups_that_run_when_the_engine_is_put_to_sleep_go_on_behind_their_tokens_with_the_next_weights() -> (
    None
):
    async with driving() as (driver, engine, turnstile):
        running, output = await generate(driver, 1)
        await turnstile.take(3)
        asleep = asyncio.ensure_future(driver.sleep(engine.sleep))
        await asyncio.sleep(0)  # it is asked for while the fourth step is held
        turnstile.release()
        await asleep
        late, other = await generate(driver, 2)
        await driver.call(engine.prepare_for_generation)
        assert (engine.unfinished, running.done(), late.done()) == (0, False, False), "it waits for weights"
        await driver.update(swap(engine, 1), "keep")
        await asyncio.gather(running, late)
        assert output.versions[0].tolist() == [0] * 4 + [1] * (len(TEXT) - 4)
        assert set(other.versions[0].tolist()) == {1}
