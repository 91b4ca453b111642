"""Weights are used when they proved right and not before, an engine that starts pulls them, and evaluations wait for theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dockyard_actors.engines.base import WeightsMismatch
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.evaluator import Evaluator
from dockyard_actors.roles.weight_load import UnloadableWeights
from dockyard_actors.roles.weight_source import WeightSource, digest_of
from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.runtime.errors import RemoteError
from tests.roles.test_rollout import ScriptedWeights, passes_when_one, ref_of, rolling
from tests.roles.world import ScriptedBroker, ScriptedEngine, World, eventually, world_of


class ScriptedTrainer(Actor):
    """Test only: what a rollout that starts is told to load."""

    def __init__(self) -> None:
        self.reply: m.Weights | m.NoWeights = m.NoWeights()
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    @concurrent
    async def current(self, msg: m.CurrentWeights) -> m.Weights | m.NoWeights:
        reply = self.reply
        self.asked += 1
        await self.gate.wait()
        return reply


async def test_a_restarted_rollout_pulls_the_newest_weights_before_it_works(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, engine=ScriptedEngine(version=-1)) as run:
        trainer = ScriptedTrainer()
        trainer.reply = m.Weights(ref_of(5))
        await run.world.system.start(trainer, "trainer")
        await eventually(lambda: run.world.buffer.groups)
        assert {held.meta.oldest_version for held in run.world.buffer.groups.values()} == {5}


async def test_it_acknowledges_weights_with_the_digest_of_what_it_read(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, open=False) as run:
        applied = await run.world.ask("rollout-0", m.UpdateWeights(offer=ref_of(3)))
        assert (applied.version, applied.digest, applied.mismatch) == (3, digest_of(ref_of(3).checksums), -1.0)
        assert run.engine.version == 3


async def test_bytes_that_are_not_those_published_are_refused_and_the_engine_keeps_its_weights(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, open=False) as run:
        torn = msgspec.structs.replace(ref_of(3), checksums=(1,))
        with pytest.raises(RemoteError, match="not those that were published"):
            await run.world.ask("rollout-0", m.UpdateWeights(offer=torn))
        assert run.engine.version == 0


async def test_weights_that_were_pulled_late_never_replace_newer_ones(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, engine=ScriptedEngine(version=-1), open=False) as run:
        trainer = ScriptedTrainer()
        trainer.reply = m.Weights(ref_of(1))
        trainer.gate.clear()
        await run.world.system.start(trainer, "trainer")
        await eventually(lambda: trainer.asked)
        await run.world.ask("rollout-0", m.UpdateWeights(offer=ref_of(2)))
        trainer.gate.set()
        await eventually(lambda: "budget" in run.rollout.report.doing)
        assert run.engine.version == 2


def evaluation(version: int) -> m.Evaluate:
    return m.Evaluate(prompts=("heldout-0", "heldout-1"), samples=2, greedy=False, seed=0, version=version, step=0)


async def test_an_evaluation_of_other_weights_is_refused_by_name(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, engine=ScriptedEngine(version=9), open=False) as run:
        with pytest.raises(RemoteError, match="the engine holds weights 9, asked to evaluate 8") as error:
            await run.world.ask("rollout-0", evaluation(8))
        assert error.value.type == "WrongVersion"


async def test_a_rollout_restarted_in_mid_evaluation_loads_its_weights_first(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, engine=ScriptedEngine(version=-1), open=False) as run:
        asked = asyncio.ensure_future(run.world.ask("rollout-0", evaluation(4)))
        trainer = ScriptedTrainer()
        trainer.reply = m.Weights(ref_of(4))
        trainer.gate.clear()
        await run.world.system.start(trainer, "trainer")
        await eventually(lambda: trainer.asked)
        trainer.gate.set()
        assert [r.passed for r in (await asked).results] == [1, 1]


async def test_an_evaluator_keeps_its_version_and_takes_no_work(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        await world.system.start(ScriptedBroker(passes_when_one), "broker")
        engine = ScriptedEngine(version=-1)
        evaluator = Evaluator(world.config, world.tasks, engine, WeightSource(ScriptedWeights()))  # type: ignore[arg-type]
        await world.system.start(evaluator, "evaluator")
        await world.ask("evaluator", m.UpdateWeights(offer=ref_of(3)))
        assert [r.passed for r in (await world.ask("evaluator", evaluation(3))).results] == [1, 1]
        assert world.ledger.summary()["issued"] == 0


# ---- weights that do not prove right


class Waiting(Evaluator):
    """Test only: `pull_weights` is called by the test; each wait for fresher weights is counted, and ends at once."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.waits = 0

    async def wait_fresher(self, seconds: float) -> None:
        self.waits += 1
        assert self.waits < 100, "it never ends"
        await asyncio.sleep(0)


class Refusing(ScriptedEngine):
    """Test only: fails to load weights with `error`."""

    def __init__(self, error: Exception):
        super().__init__(version=-1)
        self.error = error

    def update_weights(self, views: Any, manifest: Any, version: int, recompute_kv_cache: bool = True) -> None:
        raise self.error


@asynccontextmanager
async def pulling(
    path: Path, reply: m.Weights, engine: ScriptedEngine | None = None, weights: ScriptedWeights | None = None
) -> AsyncIterator[tuple[World, Waiting, ScriptedTrainer]]:
    async with world_of(path) as world:
        trainer = ScriptedTrainer()
        trainer.reply = reply
        await world.system.start(trainer, "trainer")
        engine = engine or ScriptedEngine(version=-1)
        source = WeightSource(weights or ScriptedWeights())  # type: ignore[arg-type]
        host = Waiting(world.config, world.tasks, engine, source)
        await world.system.start(host, "evaluator")
        yield world, host, trainer


async def test_weights_that_were_pulled_torn_are_pulled_again_before_anything_is_generated(tmp_path: Path) -> None:
    async with rolling(
        tmp_path, passes_when_one, engine=ScriptedEngine(version=-1), weights=ScriptedWeights(torn=1)
    ) as run:
        trainer = ScriptedTrainer()
        trainer.reply = m.Weights(ref_of(5))
        await run.world.system.start(trainer, "trainer")
        await eventually(lambda: run.world.buffer.groups)
        assert trainer.asked == 2
        assert {held.meta.oldest_version for held in run.world.buffer.groups.values()} == {5}


async def test_a_pull_pauses_between_tries_that_may_end_better(tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(ref_of(3), checksums=(1,))
    async with pulling(tmp_path, m.Weights(wrong)) as (_, host, trainer):
        pull = asyncio.ensure_future(host.pull_weights())
        await eventually(lambda: trainer.asked >= 3)
        trainer.reply = m.Weights(ref_of(3))
        await pull
        assert host.waits == trainer.asked - 1
        assert (host.proven, host.engine.version) == (3, 3)


@pytest.mark.parametrize("error", [WeightsMismatch("layer 3 is missing"), RuntimeError("out of memory")])
async def test_a_pull_that_cannot_end_better_raises(tmp_path: Path, error: Exception) -> None:
    async with pulling(tmp_path, m.Weights(ref_of(3)), engine=Refusing(error)) as (_, host, trainer):
        with pytest.raises(type(error) if isinstance(error, WeightsMismatch) else UnloadableWeights, match=str(error)):
            await asyncio.wait_for(host.pull_weights(), 5)
        assert (trainer.asked, host.proven) == (1, -1)


@pytest.mark.parametrize(
    ("engine", "weights", "type", "text"),
    [
        (ScriptedEngine, lambda: ScriptedWeights(torn=1), "TornWeights", "arrived torn: slot 0 moved on"),
        (
            lambda: Refusing(RuntimeError("out of memory")),
            ScriptedWeights,
            "UnloadableWeights",
            "could not be loaded: out of memory",
        ),
        (lambda: Refusing(WeightsMismatch("w is missing")), ScriptedWeights, "WeightsMismatch", "w is missing"),
        (lambda: ScriptedEngine(version=9), ScriptedWeights, "OlderWeights", "version 3 come after 9"),
    ],
)
async def test_why_weights_were_not_taken_is_told_by_type_and_text(
    tmp_path: Path, engine: Any, weights: Any, type: str, text: str
) -> None:
    async with pulling(tmp_path, m.Weights(ref_of(3)), engine=engine(), weights=weights()) as (world, host, _):
        before = host.proven
        with pytest.raises(RemoteError, match=text) as error:
            await world.ask("evaluator", m.UpdateWeights(offer=ref_of(3)))
        assert error.value.type == type
        assert host.proven == before


async def test_a_role_waits_for_its_engine_no_longer_than_it_has_before_it_is_killed(tmp_path: Path) -> None:
    async with rolling(tmp_path, passes_when_one, "supervision.stop_grace_s=0.5", open=False) as run:
        waited: list[float] = []
        closed = run.rollout.driver.closed

        async def spy(timeout_s: float) -> bool:
            waited.append(timeout_s)
            return await closed(timeout_s)

        run.rollout.driver.closed = spy  # type: ignore[method-assign]
        await run.world.system.stop("rollout-0")
        assert 0 < waited[0] < 0.5
        assert run.engine.closed
