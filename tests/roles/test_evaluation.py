"""Pass rates: at pinned weights only, over samples that have a verdict only. Engine and judge are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from dockyard_actors.engines.base import GroupRequest
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.engine_driver import EngineDriver
from dockyard_actors.roles.evaluation import CutShort, WrongVersion, evaluate
from dockyard_actors.roles.evaluations import eval_record
from dockyard_actors.sandbox.types import Verdict
from dockyard_actors.tasks.seeds import sample_seed
from tests.roles.driving import driving, swap
from tests.roles.world import PATIENCE_S, ScriptedEngine, config_of, eventually, tasks_of, verdict_of

TASKS = tasks_of()
PROMPTS = ("train-3", "heldout-0", "heldout-1")


async def ask(driver: EngineDriver, judge, *overrides: str, report=lambda text: None, **fields) -> m.Evaluated:
    message = {"prompts": PROMPTS, "samples": 2, "greedy": False, "seed": 1, "version": 0, "step": 4, **fields}
    return await evaluate(judge, config_of(*overrides), TASKS.by_id(), driver, report, m.Evaluate(**message))


async def run(engine: ScriptedEngine, judge, *overrides: str, **fields) -> m.Evaluated:
    failures: list[BaseException] = []
    driver = EngineDriver(engine, failures.append)
    try:
        return await ask(driver, judge, *overrides, **fields)
    finally:
        driver.close()
        await driver.closed(PATIENCE_S)
        assert not failures


async def one_passes(programs: Sequence[m.Program], deadline_s: float) -> list[Verdict]:
    return [verdict_of(passed=program.source == "x = 1\n") for program in programs]


async def no_verdict_for_two(programs: Sequence[m.Program], deadline_s: float) -> list[Verdict]:
    return [verdict_of() if program.source == "x = 1\n" else verdict_of("infra", 0) for program in programs]


async def no_verdicts(programs: Sequence[m.Program], deadline_s: float) -> list[Verdict]:
    return [verdict_of("infra", 0) for _ in programs]


async def test_passes_are_counted_by_task_in_the_order_asked() -> None:
    done = await run(ScriptedEngine(), one_passes)
    assert done.results == tuple(m.TaskResult(prompt, 1, 2) for prompt in PROMPTS)
    assert (done.version, done.masked, done.examples) == (0, 0, ())


@pytest.mark.parametrize("rows", [1, 2, 4, 128])
async def test_the_result_does_not_depend_on_how_the_tasks_were_sliced(rows: int) -> None:
    engine = ScriptedEngine()
    assert await run(engine, one_passes, f"generation.max_batch_rows={rows}") == await run(ScriptedEngine(), one_passes)
    assert [r.seeds for r in engine.requests] == [
        tuple(sample_seed(1, prompt, 1 << 30, i) for i in range(2)) for prompt in PROMPTS
    ], "and neither do the seeds, which are never those of training"


async def test_greedy_takes_one_sample_a_task() -> None:
    engine = ScriptedEngine()
    done = await run(engine, one_passes, greedy=True)
    assert [r.samples for r in done.results] == [1, 1, 1]
    assert {r.n for r in engine.requests} == {1}


async def test_a_sample_without_a_verdict_counts_neither_for_nor_against() -> None:
    done = await run(ScriptedEngine(), no_verdict_for_two)
    assert done.results == tuple(m.TaskResult(prompt, 1, 1) for prompt in PROMPTS)
    assert done.masked == 3
    record = eval_record([done], 4, "heldout", "t1", 1.0)
    assert (record.pass_rate, record.samples, record.tasks) == (1.0, 3, 3)


async def test_tasks_without_any_verdict_are_left_out_of_the_rate() -> None:
    none = await run(ScriptedEngine(), no_verdicts)
    assert eval_record([none], 0, "train", "t1", 1.0).pass_rate is None
    some = m.Evaluated(0, (m.TaskResult("a", 1, 4), m.TaskResult("b", 0, 0), m.TaskResult("c", 2, 2)), (), 0)
    assert eval_record([some], 0, "train", "t1", 1.0).pass_rate == pytest.approx((0.25 + 1.0) / 2)


@pytest.mark.parametrize("version", [-1, 1])
async def test_other_weights_are_refused_and_nothing_is_generated(version: int) -> None:
    engine = ScriptedEngine(version=version)
    with pytest.raises(WrongVersion, match=f"holds weights {version}, asked to evaluate 0"):
        await run(engine, one_passes)
    assert not engine.requests


async def test_weights_that_change_in_mid_evaluation_end_it() -> None:
    class Changing(ScriptedEngine):
        def step(self):
            done = super().step()
            self.version = 1
            return done

    with pytest.raises(WrongVersion, match=r"weights \[1\] generated while 0 was evaluated"):
        await run(Changing(), one_passes)


async def test_an_evaluation_that_ends_early_takes_nothing_from_the_next_one() -> None:
    """Nobody waits for the first one any more; it finds out when its first group has tokens of other weights, and cuts its others."""

    class Uneven(ScriptedEngine):
        def _ids(self, request: GroupRequest, row: int) -> list[int]:
            last = bytes(request.prompt_ids.astype(np.uint8)) == b"heldout-1:"
            return self.tokenizer.encode(self.texts[row] + "  " * last + "\n")

    async def judge(programs: Sequence[m.Program], deadline_s: float) -> list[Verdict]:
        return [verdict_of(passed=program.source.startswith("x = 1")) for program in programs]

    async with driving(engine=Uneven(("1  ", "2  "))) as (driver, engine, turnstile):
        cut: list[int] = []
        driver._cut, cutting = lambda job: (cut.append(job.request.key), cutting(job))[1], driver._cut
        old = asyncio.ensure_future(ask(driver, judge))
        await eventually(lambda: turnstile.held and len(engine.running) + len(driver._calls) == len(PROMPTS))
        await turnstile.take(1)
        update = asyncio.ensure_future(driver.update(swap(engine, 1), "keep"))
        await asyncio.sleep(0)
        await turnstile.take(1)
        await update
        new = asyncio.ensure_future(ask(driver, judge, version=1))
        await eventually(lambda: len(driver._calls) == len(PROMPTS))
        # The old short groups end with tokens of both weights; the long one runs on beside the new ones.
        await turnstile.take(2)
        await eventually(lambda: cut or driver._calls)
        turnstile.release()
        with pytest.raises(WrongVersion):
            await old
        assert (await new).results == tuple(m.TaskResult(prompt, 1, 2) for prompt in PROMPTS)
        assert cut, "the old long group was cut, and no new one of its key"


async def test_completions_that_were_cut_end_an_evaluation_and_are_not_judged() -> None:
    class Cutting(ScriptedEngine):
        def step(self):
            super().step()
            return self.abort()

    async def judge(programs: Sequence[m.Program], deadline_s: float) -> list[Verdict]:
        raise AssertionError("judged")

    with pytest.raises(CutShort, match="cut while they were evaluated"):
        await run(Cutting(), judge)


async def test_a_task_that_does_not_fit_the_engine_is_masked_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine, said = ScriptedEngine(), []
    engine.token_capacity = len("train-3:") + 6  # the held-out prompts are longer
    done = await run(engine, one_passes, report=said.append, examples=3)
    assert done.results == (
        m.TaskResult("train-3", 1, 2),
        m.TaskResult("heldout-0", 0, 0),
        m.TaskResult("heldout-1", 0, 0),
    )
    assert done.masked == 4
    assert said[-1] == "evaluation done; 2 of 3 tasks do not fit the engine and are left out"
    assert len([r for r in caplog.records if "do not fit the engine" in r.message]) == 1
    assert done.examples[1].reward is None
    assert "does not fit" in done.examples[1].error


async def test_a_judge_that_fails_ends_the_evaluation_with_its_own_error() -> None:
    async def gone(programs: Sequence[m.Program], deadline_s: float) -> list[Verdict]:
        raise TimeoutError("no broker")

    with pytest.raises(TimeoutError, match="no broker"):
        await run(ScriptedEngine(), gone)


async def test_generation_goes_on_while_earlier_slices_are_judged() -> None:
    engine, generated = ScriptedEngine(), asyncio.Event()

    async def waits_for_the_rest(programs: Sequence[m.Program], deadline_s: float) -> list[Verdict]:
        if len(engine.requests) == len(PROMPTS):
            generated.set()
        await generated.wait()
        return await one_passes(programs, deadline_s)

    async with asyncio.timeout(10):
        await run(engine, waits_for_the_rest, "generation.max_batch_rows=2")


async def test_examples_are_spread_over_the_tasks_and_say_what_was_judged() -> None:
    done = await run(ScriptedEngine(), one_passes, examples=3)
    assert [sample.task for sample in done.examples] == list(PROMPTS)
    assert {sample.lease for sample in done.examples} == {"evaluation"}
    assert {sample.program for sample in done.examples} == {"x = 1\n"}
    assert len((await run(ScriptedEngine(), one_passes, examples=1)).examples) == 1
