"""Groups join and leave a running engine as they are asked to, each for itself, and nobody waits for an engine that is gone."""

from __future__ import annotations

import asyncio

import pytest

from dockyard_actors.engines.base import (
    EngineError,
    FinishReason,
    GroupOutput,
    GroupRequest,
    GroupResult,
    SamplingConfig,
)
from dockyard_actors.roles.engine_driver import EngineStopped
from tests.roles.driving import TEXT, driving, failures, generate, submit, swap, text_of
from tests.roles.world import PATIENCE_S, ScriptedEngine, eventually


async def test_groups_submitted_together_join_at_one_step_in_their_order() -> None:
    async with driving() as (driver, engine, turnstile):
        joined: list[list[int]] = []
        engine.before_step, stepping = lambda: (joined.append(list(engine.running)), stepping())[1], engine.before_step
        (first, _), *rest = submit(driver, 1, 2, 3)
        await turnstile.take(2)
        late = submit(driver, 4, 5)
        turnstile.release()
        results = await asyncio.gather(first.result(), *(generation.result() for generation, _ in rest + late))
        assert [result.key for result in results] == [1, 2, 3, 4, 5]
        seen = [keys for i, keys in enumerate(joined) if i == 0 or keys != joined[i - 1]]
        assert [len(keys) for keys in seen] == [3, 5, 2], "three, then five, then the two that came later"
        assert all(keys == sorted(keys) for keys in seen)


async def test_a_cut_group_returns_what_it_has() -> None:
    async with driving() as (driver, _, turnstile):
        ((generation, output),) = submit(driver, 7)
        await turnstile.take(3)
        generation.cut()
        turnstile.release()
        result = await generation.result()
        assert set(result.finish_reasons) == {FinishReason.CUT}
        assert output.lengths.tolist() == [4, 4]
        generation.cut()  # once more: it is gone, nothing happens
        assert await generation.result() == result


async def test_cutting_or_cancelling_a_group_spares_others_of_its_key() -> None:
    async with driving() as (driver, _, turnstile):
        (cut, _), (kept, output) = submit(driver, 7, 7)
        cancelled, _ = await generate(driver, 7)
        await turnstile.take(3)
        cut.cut()
        cancelled.cancel()
        await asyncio.sleep(0)
        turnstile.release()
        assert set((await cut.result()).finish_reasons) == {FinishReason.CUT}
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert set((await kept.result()).finish_reasons) == {FinishReason.STOP}
        assert text_of(output) == TEXT


async def test_a_cancelled_group_is_not_written_any_more() -> None:
    async with driving() as (driver, engine, turnstile):
        running, output = await generate(driver)
        await turnstile.take(2)
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


async def test_a_group_cancelled_twice_still_ends_only_when_nothing_writes() -> None:
    async with driving() as (driver, engine, turnstile):
        running, _ = await generate(driver)
        await turnstile.take(2)
        for _ in range(3):
            running.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not running.done(), "the engine is in a step and writes"
        turnstile.release()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not engine.running


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


async def test_a_group_that_the_engine_refuses_fails_alone() -> None:
    class Picky(ScriptedEngine):
        def submit(
            self,
            request: GroupRequest,
            output: GroupOutput,
            sampling: SamplingConfig,
            resume: GroupResult | None = None,
        ) -> None:
            if not self.requests:
                self.requests.append(request)
                raise EngineError("not now")
            super().submit(request, output, sampling, resume)

    async with driving(engine=Picky((TEXT,))) as (driver, _, turnstile):
        turnstile.release()
        (refused, _), (taken, output) = submit(driver, 1, 2)
        with pytest.raises(EngineError, match="not now"):
            await refused.result()
        await taken.result()
        assert text_of(output) == TEXT
        assert not failures


async def test_a_failed_call_ends_every_wait_behind_it_and_says_why() -> None:
    class Broken(ScriptedEngine):
        def abort(self, keys=None):
            raise EngineError("unusable")

    async with driving(engine=Broken((TEXT,))) as (driver, engine, turnstile):
        ((running, _),) = submit(driver, 1)
        await eventually(lambda: engine.running)
        running.cut()  # raises in the engine's thread; all the rest stands in line behind it
        ((late, _),) = submit(driver, 2)
        waiting = [
            asyncio.ensure_future(awaitable)
            for awaitable in (
                running.result(),
                late.result(),
                driver.call(lambda: None),
                driver.update(swap(engine, 1), "keep"),
            )
        ]
        await asyncio.sleep(0)
        turnstile.release()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EngineStopped)
            assert "EngineError: unusable" in str(result)
        assert [type(error) for error in failures] == [EngineError]


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
        await turnstile.take(1)
        driver.close()
        turnstile.release()
        with pytest.raises(EngineStopped, match="closed"):
            await running
        await driver.closed(PATIENCE_S)
        assert engine.closed


async def test_it_says_whether_the_thread_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    async with driving() as (driver, engine, turnstile):
        running, _ = await generate(driver)
        await eventually(lambda: engine.running)
        driver.close()
        assert not await driver.closed(0.0)
        assert "still runs" in caplog.text
        turnstile.release()
        assert await driver.closed(PATIENCE_S)
        with pytest.raises(EngineStopped):
            await running
