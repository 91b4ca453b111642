"""Pass rates at pinned weights: an engine generates, the broker's executor judges.

Groups are generated together and judged as they end. Nothing of an evaluation touches the ledger: its samples are not leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import numpy as np

from dockyard_actors.config import Config
from dockyard_actors.engines.base import Engine, FinishReason, GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.engine_driver import EngineDriver
from dockyard_actors.roles.scoring import Judge, Score, score, to_sample
from dockyard_actors.tasks.seeds import sample_seed
from dockyard_actors.tasks.types import Task

log = logging.getLogger(__name__)

EVAL_EPOCH = 1 << 30  # keeps evaluation seeds apart from those of training


class WrongVersion(RuntimeError):
    """The engine holds other weights than the ones to be evaluated."""


class DoesNotFit(ValueError):
    """The engine refused a prompt, or what may follow it."""


class CutShort(RuntimeError):
    """A completion was ended from outside: what it would have become is not known, so nothing of it counts."""


async def evaluate(
    judge: Judge,
    config: Config,
    by_id: Mapping[str, Task],
    driver: EngineDriver,
    report: Callable[[str], None],
    msg: m.Evaluate,
) -> m.Evaluated:
    """Generates `samples` responses a task (one when greedy) and counts those that resolved; samples of a task that does not fit the engine
    are masked. Raises WrongVersion when the engine holds other weights, at the start or for any token; CutShort."""
    n = 1 if msg.greedy else msg.samples
    sampling = SamplingConfig(max_new_tokens=config.generation.max_new_tokens, greedy=msg.greedy)
    tasks = [by_id[name] for name in msg.prompts]
    done, misfits = 0, []
    if driver.engine.version != msg.version:
        raise WrongVersion(f"the engine holds weights {driver.engine.version}, asked to evaluate {msg.version}")

    async def one(key: int, task: Task) -> tuple[list[Score], list[str]]:
        nonlocal done
        async with room:
            try:
                texts = await _generate(driver, _request(driver.engine, key, task, n, msg.seed), sampling, msg.version)
            except DoesNotFit as error:
                misfits.append(f"{task.id}: {error}")
                return [Score(None, False, "", f"does not fit the engine: {error}", None)] * n, [""] * n
        done += 1
        report(f"evaluated {done} of {len(tasks)} tasks, {'greedy' if msg.greedy else 'T=1'}")
        scores = await score(judge, config.reward.partial, [(task, text) for text in texts], config.eval.timeout_s)
        return scores, texts

    # Twice what the engine decodes together: the rest waits here, where it costs nothing.
    room = asyncio.Semaphore(max(1, 2 * config.generation.max_batch_rows // n))
    async with _plainly(), asyncio.TaskGroup() as group:
        judged = [group.create_task(one(key, task)) for key, task in enumerate(tasks)]
    left_out = f"; {len(misfits)} of {len(tasks)} tasks do not fit the engine and are left out" if misfits else ""
    if misfits:
        log.warning("evaluation%s, such as %s", left_out, misfits[0])
    report(f"evaluation done{left_out}")
    scores = [score for task in judged for score in task.result()[0]]
    texts = [text for task in judged for text in task.result()[1]]
    return _summarise(tasks, n, scores, texts, msg)


@asynccontextmanager
async def _plainly() -> AsyncIterator[None]:
    """Raises the first error of a task group as itself: it crosses the wire, where its type and text are all that is seen."""
    try:
        yield
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


def _request(engine: Engine, key: int, task: Task, n: int, seed: int) -> GroupRequest:
    return GroupRequest(
        key=EVAL_EPOCH + key,
        prompt_ids=np.asarray(engine.tokenizer.encode(task.prompt), dtype=np.int32),
        n=n,
        seeds=tuple(sample_seed(seed, task.id, EVAL_EPOCH, index) for index in range(n)),
        stop=task.stop,
        max_new_tokens=task.max_new_tokens,
    )


async def _generate(driver: EngineDriver, request: GroupRequest, sampling: SamplingConfig, version: int) -> list[str]:
    output = GroupOutput.allocate(request.n, sampling.max_new_tokens)
    try:
        result = await driver.generate(request, output, sampling)
    except ValueError as error:
        raise DoesNotFit(str(error)) from error
    if FinishReason.CUT in result.finish_reasons:
        raise CutShort(f"completions of group {request.key} were cut while they were evaluated")
    used = np.arange(output.versions.shape[1])[None, :] < output.lengths[:, None]
    others = set(output.versions[used].tolist()) - {version}
    if others:
        raise WrongVersion(f"weights {sorted(others)} generated while {version} was evaluated")
    return decode(driver.engine, output.tokens, output.lengths)


def decode(engine: Engine, tokens: np.ndarray, lengths: np.ndarray) -> list[str]:
    """Texts of tokens (n, S) with lengths (n,), without end-of-sequence and other special tokens."""
    rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    return engine.tokenizer.batch_decode(rows, skip_special_tokens=True)


def _summarise(tasks: list[Task], n: int, scores: list[Score], texts: list[str], msg: m.Evaluate) -> m.Evaluated:
    results, masked = [], 0
    for index, task in enumerate(tasks):
        mine = scores[index * n : (index + 1) * n]
        valid = [s for s in mine if s.reward is not None]
        masked += n - len(valid)
        results.append(m.TaskResult(task.id, sum(s.resolved for s in valid), len(valid)))
    step = max(1, len(tasks) // max(1, msg.examples))
    examples = tuple(
        to_sample(task, texts[i * n], scores[i * n], step=msg.step, lease=-1, sample=0, versions=(msg.version,))
        for i, task in list(enumerate(tasks))[::step]
    )[: msg.examples]
    return m.Evaluated(msg.version, tuple(results), examples, masked)
