"""Weights change between two decode steps, running groups survive it as the pause mode says, and nobody waits for an engine that is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from dockyard_actors.engines.base import FinishReason, GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.roles.engine_driver import EngineDriver, EngineStopped, PauseMode, SuspectWeights
from tests.roles.world import PATIENCE_S, ScriptedEngine, eventually

TEXT = "abcdefgh\n"


class Turnstile:
    """Lets the engine's thread take as many steps as were allowed, then holds it at the next one."""

    def __init__(self, engine: ScriptedEngine):
        self._allowed = threading.Semaphore(0)
        self.taken = 0
        self.open = False
        engine.before_step = self._pass

    def _pass(self) -> None:
        if not self.open:
            assert self._allowed.acquire(timeout=PATIENCE_S)
        self.taken += 1

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()

    def release(self) -> None:
        self.open = True
        self.allow(1)


def group(key: int = 7) -> tuple[GroupRequest, GroupOutput]:
    return GroupRequest(key, np.array([1, 2], np.int32), 2, (0, 1)), GroupOutput.allocate(2, len(TEXT))


@asynccontextmanager
async def driving(texts: tuple[str, ...] = (TEXT,)) -> AsyncIterator[tuple[EngineDriver, ScriptedEngine, Turnstile]]:
    engine = ScriptedEngine(texts)
    turnstile = Turnstile(engine)
    driver = EngineDriver(engine, failures.append)
    failures.clear()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield driver, engine, turnstile
    finally:
        turnstile.release()
        driver.close()
        await driver.closed(PATIENCE_S)


failures: list[BaseException] = []


async def generate(driver: EngineDriver, key: int = 7):
    request, output = group(key)
    return asyncio.ensure_future(driver.generate(request, output, SamplingConfig())), output


def swap(engine: ScriptedEngine, version: int):
    def apply() -> int:
        engine.update_weights({}, None, version)
        return version

    return apply


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_running_groups_go_on_under_the_new_weights(mode: PauseMode) -> None:
    async with driving() as (driver, engine, turnstile):
        running, output = await generate(driver)
        turnstile.allow(3)
        await eventually(lambda: turnstile.taken == 3)
        update = asyncio.ensure_future(driver.update(swap(engine, 1), mode))
        await asyncio.sleep(0)  # the update is asked for while the fourth step is held
        turnstile.release()
        assert await update == 1
        result = await running
        assert result.key == 7
        assert set(result.finish_reasons) == {FinishReason.STOP}
        assert output.versions[0].tolist() == [0] * 4 + [1] * (len(TEXT) - 4)
        assert (output.logprobs[0] == -(output.versions[0] + 1.0)).all()
        assert bytes(output.tokens[0].astype(np.uint8)).decode() == TEXT


async def test_wait_lets_running_groups_end_first_and_holds_new_ones_back() -> None:
    async with driving() as (driver, engine, turnstile):
        running, before = await generate(driver, 1)
        turnstile.allow(2)
        await eventually(lambda: turnstile.taken == 2)
        update = asyncio.ensure_future(driver.update(swap(engine, 1), "wait"))
        await asyncio.sleep(0)
        late, after = await generate(driver, 2)
        turnstile.release()
        await asyncio.gather(update, running, late)
        assert set(before.versions[0].tolist()) == {0}
        assert set(after.versions[0].tolist()) == {1}


async def test_suspect_weights_stop_decoding_until_better_ones_come() -> None:
    def bad() -> None:
        engine.version = 1
        raise SuspectWeights("canary")

    async with driving() as (driver, engine, turnstile):
        running, output = await generate(driver)
        turnstile.allow(2)
        await eventually(lambda: turnstile.taken == 2)
        update = asyncio.ensure_future(driver.update(bad, "keep"))
        await asyncio.sleep(0)
        turnstile.release()
        with pytest.raises(SuspectWeights):
            await update
        steps = turnstile.taken
        assert await driver.call(lambda: engine.version) == 1, "it still answers"
        assert turnstile.taken == steps
        await driver.update(swap(engine, 2), "keep")
        await running
        assert set(output.versions[0].tolist()) == {0, 2}, "no token came from the weights that did not prove right"


async def test_an_update_that_changed_nothing_lets_the_engine_go_on() -> None:
    def refused() -> None:
        raise ValueError("does not fit")

    async with driving() as (driver, _, turnstile):
        running, output = await generate(driver)
        turnstile.release()
        with pytest.raises(ValueError, match="does not fit"):
            await driver.update(refused, "keep")
        await running
        assert set(output.versions[0].tolist()) == {0}


async def test_a_cut_group_returns_what_it_has() -> None:
    async with driving() as (driver, _, turnstile):
        running, output = await generate(driver)
        turnstile.allow(3)
        await eventually(lambda: turnstile.taken == 3)
        cut = asyncio.ensure_future(driver.cut(7))
        await asyncio.sleep(0)
        turnstile.release()
        await cut
        result = await running
        assert set(result.finish_reasons) == {FinishReason.CUT}
        assert output.lengths.tolist() == [4, 4]
        await driver.cut(7)  # once more: it is gone, nothing happens


async def test_a_group_cut_behind_a_waiting_update_has_no_token() -> None:
    async with driving() as (driver, engine, turnstile):
        running, _ = await generate(driver, 1)
        turnstile.allow(1)
        await eventually(lambda: turnstile.taken == 1)
        update = asyncio.ensure_future(driver.update(swap(engine, 1), "wait"))
        late, output = await generate(driver, 2)
        cut = asyncio.ensure_future(driver.cut(2))
        await asyncio.sleep(0)
        turnstile.release()
        await asyncio.gather(update, running, cut)
        assert (await late).finish_reasons == (FinishReason.CUT,) * 2
        assert not output.lengths.any()


async def test_a_cancelled_group_is_not_written_any_more() -> None:
    async with driving() as (driver, engine, turnstile):
        running, output = await generate(driver)
        turnstile.allow(2)
        await eventually(lambda: turnstile.taken == 2)
        running.cancel()
        await asyncio.sleep(0)
        turnstile.release()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not engine.running
        output.clear()
        other, _ = await generate(driver, 8)
        await other
        assert not output.lengths.any()


async def test_a_group_that_does_not_fit_fails_alone() -> None:
    async with driving() as (driver, engine, turnstile):
        turnstile.release()
        engine.max_tokens = 1
        misfit, _ = await generate(driver, 1)
        with pytest.raises(ValueError, match="too long"):
            await misfit
        engine.max_tokens = None
        fits, _ = await generate(driver, 2)
        await fits


async def test_a_failed_step_ends_every_wait_and_says_why() -> None:
    async with driving() as (driver, engine, _):

        def broken() -> None:
            raise RuntimeError("out of memory")

        engine.before_step = broken
        running, _ = await generate(driver)
        with pytest.raises(EngineStopped, match="RuntimeError: out of memory"):
            await running
        await eventually(lambda: failures)
        with pytest.raises(EngineStopped):
            await driver.call(lambda: None)


async def test_closing_ends_every_wait_and_the_engine() -> None:
    async with driving() as (driver, engine, turnstile):
        running, _ = await generate(driver)
        turnstile.allow(1)
        await eventually(lambda: turnstile.taken == 1)
        driver.close()
        turnstile.release()
        with pytest.raises(EngineStopped, match="closed"):
            await running
        await driver.closed(PATIENCE_S)
        assert engine.closed
