"""Weights change between two decode steps: running groups survive it as the pause mode says, and no token of weights that did not prove
right does."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from dockyard_actors.engines.base import FinishReason, GroupResult
from dockyard_actors.roles.engine_driver import EngineStopped, PauseMode, SuspectWeights
from tests.roles.driving import TEXT, driving, generate, submit, swap, text_of
from tests.roles.world import ScriptedEngine, eventually


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_running_groups_go_on_under_the_new_weights(mode: PauseMode) -> None:
    async with driving() as (driver, engine, turnstile):
        running, output = await generate(driver)
        await turnstile.take(3)
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
        await turnstile.take(2)
        update = asyncio.ensure_future(driver.update(swap(engine, 1), "wait"))
        await asyncio.sleep(0)
        late, after = await generate(driver, 2)
        turnstile.release()
        await asyncio.gather(update, running, late)
        assert set(before.versions[0].tolist()) == {0}
        assert set(after.versions[0].tolist()) == {1}


async def test_an_update_given_up_while_it_waits_never_runs_and_what_it_held_back_goes_on() -> None:
    async with driving() as (driver, engine, turnstile):
        running, _ = await generate(driver, 1)
        await turnstile.take(1)
        update = asyncio.ensure_future(driver.update(swap(engine, 1), "wait"))
        await asyncio.sleep(0)
        turnstile.allow(1)
        await eventually(lambda: driver._draining)
        late, after = await generate(driver, 2)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        turnstile.release()
        await asyncio.gather(running, late)
        assert set(after.versions[0].tolist()) == {0}
        assert engine.version == 0


async def test_an_update_given_up_is_not_run_by_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with driving() as (driver, engine, turnstile):
        running, before = await generate(driver, 1)
        await turnstile.take(1)
        given_up = asyncio.ensure_future(driver.update(swap(engine, 1), "wait"))
        await asyncio.sleep(0)
        turnstile.allow(1)
        await eventually(lambda: driver._draining)
        given_up.cancel()
        update = asyncio.ensure_future(driver.update(swap(engine, 2), "wait"))
        await eventually(lambda: driver._calls)
        turnstile.release()
        await asyncio.gather(update, running)
        assert engine.version == 2
        assert set(before.versions[0].tolist()) == {0}
        assert len(engine.recomputed) == 1, "only the second one ran"
    assert any("update is dropped" in record.message for record in caplog.records)


async def test_suspect_weights_stop_decoding_until_better_ones_come() -> None:
    def bad() -> None:
        engine.version = 1
        raise SuspectWeights("canary")

    async with driving() as (driver, engine, turnstile):
        running, output = await generate(driver)
        await turnstile.take(2)
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


class Stepping(ScriptedEngine):
    """Test only: a question costs a decode step of everything that runs."""

    def __init__(self, texts: tuple[str, ...]):
        super().__init__(texts)
        self.ended: list[GroupResult] = []

    @property
    def unfinished(self) -> int:
        return len(self.running) + len(self.ended)

    def score(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        self.ended += super().step()
        return super().score(ids, temperature)

    def step(self) -> list[GroupResult]:
        return self._returned() + super().step()

    def abort(self, keys=None) -> list[GroupResult]:
        return self._returned() + super().abort(keys)

    def _returned(self) -> list[GroupResult]:
        ended, self.ended = self.ended, []
        return ended


@pytest.mark.parametrize("steps", [3, len(TEXT) - 1])
async def test_tokens_made_while_suspect_weights_were_tried_are_taken_back(steps: int) -> None:
    """At the later of the two points the proof itself ends the group."""

    def tried(version: int, good: bool) -> None:
        engine.update_weights({}, None, version)
        engine.score(np.arange(3))
        if not good:
            had.append(output.versions[1].tolist())
            raise SuspectWeights("canary")

    had: list[list[int]] = []
    async with driving(engine=Stepping(("ab\n", TEXT))) as (driver, engine, turnstile):
        running, output = await generate(driver)
        await turnstile.take(steps - 1)
        updates = [asyncio.ensure_future(driver.update(lambda v=v: tried(v, False), "keep")) for v in (1, 2)]
        await asyncio.sleep(0)
        turnstile.release()
        for update in updates:
            with pytest.raises(SuspectWeights):
                await update
        assert await driver.call(lambda: output.lengths.tolist()) == [3, steps]
        assert had[0] == [0] * steps + [1] + [-1] * (len(TEXT) - steps - 1), "the first of them did reach the group"
        assert had[1] == [0] * steps + [-1] * (len(TEXT) - steps), "the second found nothing in the engine"
        assert not output.tokens[1, steps:].any()
        assert not output.logprobs[1, steps:].any()
        assert (output.versions[1, steps:] == -1).all()
        await driver.update(lambda: tried(3, True), "keep")
        assert (await running).finish_reasons == (FinishReason.STOP,) * 2
        (resumed,) = engine.resumed
        assert (resumed.finish_reasons, resumed.new_tokens) == ((FinishReason.STOP, FinishReason.CUT), 3 + steps)
        assert (text_of(output, 0), text_of(output, 1)) == ("ab\n", TEXT)
        assert output.versions[1].tolist() == [0] * steps + [3] * (len(TEXT) - steps)


async def test_a_group_that_waits_behind_suspect_weights_is_cut_with_what_it_has() -> None:
    def bad() -> None:
        raise SuspectWeights("canary")

    async with driving() as (driver, _, turnstile):
        ((generation, output),) = submit(driver, 7)
        await turnstile.take(2)
        update = asyncio.ensure_future(driver.update(bad, "keep"))
        await asyncio.sleep(0)
        turnstile.release()
        with pytest.raises(SuspectWeights):
            await update
        ((late, nothing),) = submit(driver, 8)
        generation.cut()
        late.cut()
        result = await generation.result()
        assert (result.key, result.new_tokens, set(result.finish_reasons)) == (7, 6, {FinishReason.CUT})
        assert text_of(output) == TEXT[:3]
        assert (await late.result()).new_tokens == 0
        assert not nothing.lengths.any()


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


async def test_a_group_cut_behind_a_waiting_update_has_no_token() -> None:
    async with driving() as (driver, engine, turnstile):
        running, _ = await generate(driver, 1)
        await turnstile.take(1)
        update = asyncio.ensure_future(driver.update(swap(engine, 1), "wait"))
        await asyncio.sleep(0)
        ((late, output),) = submit(driver, 2)
        late.cut()
        turnstile.release()
        await asyncio.gather(update, running)
        assert (await late.result()).finish_reasons == (FinishReason.CUT,) * 2
        assert not output.lengths.any()


async def test_a_failed_step_ends_the_update_that_waited_for_it() -> None:
    async with driving() as (driver, engine, turnstile):
        running, _ = await generate(driver)
        await turnstile.take(1)
        update = asyncio.ensure_future(driver.update(swap(engine, 1), "wait"))
        await asyncio.sleep(0)
        turnstile.allow(1)
        await eventually(lambda: turnstile.taken == 2 and driver._draining)

        def broken() -> None:
            raise RuntimeError("out of memory")

        engine.before_step = broken
        turnstile.release()
        for waiting in (running, update):
            with pytest.raises(EngineStopped, match="out of memory"):
                await waiting
