"""Pass rates at pinned weights: the rollout's engine generates, the broker's executor judges.

Generation and scoring overlap slice by slice. Nothing of an evaluation touches the ledger: its samples are not leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import numpy as np

from dockyard_actors.config import Config
from dockyard_actors.engines.base import Engine, GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.engine_seat import EngineSeat
from dockyard_actors.roles.scoring import Judge, Score, score, to_sample
from dockyard_actors.tasks.seeds import sample_seed
from dockyard_actors.tasks.types import Task

EVAL_EPOCH = 1 << 30  # keeps evaluation seeds apart from those of training


class WrongVersion(RuntimeError):
    """The engine holds other weights than the ones to be evaluated."""


async def evaluate(
    judge: Judge,
    config: Config,
    by_id: Mapping[str, Task],
    seat: EngineSeat,
    report: Callable[[str], None],
    msg: m.Evaluate,
) -> m.Evaluated:
    """Generates `samples` responses a task (one when greedy) and counts those that resolved. Raises WrongVersion."""
    n = 1 if msg.greedy else msg.samples
    sampling = SamplingConfig(max_new_tokens=config.generation.max_new_tokens, greedy=msg.greedy)
    per_slice = max(1, config.generation.max_batch_rows // n)
    tasks = [by_id[name] for name in msg.prompts]
    scoring: list[asyncio.Task[list[Score]]] = []
    texts: list[str] = []
    group = asyncio.TaskGroup()
    async with _plainly(), group:
        for start in range(0, len(tasks), per_slice):
            part = tasks[start : start + per_slice]
            async with seat.taken() as engine:
                if engine.version != msg.version:
                    raise WrongVersion(f"the engine holds weights {engine.version}, asked to evaluate {msg.version}")
                report(f"evaluating task {start + 1} of {len(tasks)}, {'greedy' if msg.greedy else 'T=1'}")
                new = await seat.run(_generate, engine, part, n, sampling, msg.seed)
            items = [(part[i // n], text) for i, text in enumerate(new)]
            texts += new
            scoring.append(group.create_task(score(judge, config.reward.partial, items, config.eval.timeout_s)))
    report("evaluation done")
    return _summarise(tasks, n, [s for part in scoring for s in part.result()], texts, msg)


@asynccontextmanager
async def _plainly() -> AsyncIterator[None]:
    """Raises the first error of a task group as itself: it crosses the wire, where its type and text are all that is seen."""
    try:
        yield
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


def _generate(engine: Engine, tasks: list[Task], n: int, sampling: SamplingConfig, seed: int) -> list[str]:
    requests = [
        GroupRequest(
            key=key,
            prompt_ids=np.asarray(engine.tokenizer.encode(task.prompt), dtype=np.int32),
            n=n,
            seeds=tuple(sample_seed(seed, task.id, EVAL_EPOCH, index) for index in range(n)),
            stop=task.stop,
            max_new_tokens=task.max_new_tokens,
        )
        for key, task in enumerate(tasks)
    ]
    outputs = [GroupOutput.allocate(n, sampling.max_new_tokens) for _ in tasks]
    engine.generate(requests, outputs, sampling)
    return [text for output in outputs for text in decode(engine, output.tokens, output.lengths)]


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
