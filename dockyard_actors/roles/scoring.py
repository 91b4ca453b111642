"""From completions to rewards: parse the answer, run the program in a sandbox, turn the verdict into a number.

Identical programs of one call run once. A sample without a verdict (infrastructure) is masked, never reward 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from dockyard_actors.config import Config
from dockyard_actors.roles import messages as m
from dockyard_actors.runtime.actor import ActorContext
from dockyard_actors.sandbox.types import Verdict
from dockyard_actors.tasks.answer import MalformedAnswer, build_program
from dockyard_actors.tasks.rewards import reward_of
from dockyard_actors.tasks.types import Task


class Score(msgspec.Struct, frozen=True):
    """One completion judged. `reward` None: no verdict could be had, the sample is masked."""

    reward: float | None
    resolved: bool
    program: str
    malformed: str
    verdict: Verdict | None


def _request_id(task: Task, program: str) -> str:
    """The same program for the same tests is the same request, whoever asks."""
    tests = "\0".join((*task.tests, "", *task.hidden_tests))
    return hashlib.blake2b(f"{task.id}\0{program}\0{tests}".encode(), digest_size=16).hexdigest()


async def score(ctx: ActorContext, config: Config, items: Sequence[tuple[Task, str]], deadline_s: float) -> list[Score]:
    """Judges (task, completion text) pairs, in order. Raises ActorError when the broker gave no answer within `deadline_s`."""
    answers = [build_program(task, text) for task, text in items]
    programs: dict[str, m.Program] = {}
    ids: list[str] = []
    for (task, _), answer in zip(items, answers, strict=True):
        if isinstance(answer, MalformedAnswer):
            ids.append("")
            continue
        request_id = _request_id(task, answer)
        ids.append(request_id)
        programs[request_id] = m.Program(request_id, answer, task.tests, task.hidden_tests)
    verdicts: dict[str, Verdict] = {}
    if programs:
        reply = await ctx.ref("broker").ask(
            m.ScorePrograms(programs=tuple(programs.values()), deadline_s=deadline_s), deadline_s=deadline_s, retry=True
        )
        verdicts = dict(zip(programs, reply.verdicts, strict=True))
    return [_score(config, answer, verdicts.get(request_id)) for answer, request_id in zip(answers, ids, strict=True)]


def _score(config: Config, answer: str | MalformedAnswer, verdict: Verdict | None) -> Score:
    if isinstance(answer, MalformedAnswer):
        return Score(0.0, False, "", answer.reason, None)
    if verdict is None:
        raise AssertionError("a program was sent and no verdict came back")
    reward = reward_of(verdict.state, verdict.passed, verdict.total, partial=config.reward.partial)
    return Score(reward, verdict.resolved, answer, "", verdict)


def to_sample(lease: int, task: Task, text: str, scored: Score, versions: tuple[int, int]) -> m.Sample:
    """What people read of one judged completion."""
    return m.Sample(
        lease=lease,
        prompt_id=task.id,
        prompt=task.prompt,
        completion=text,
        program=scored.program,
        reward=scored.reward if scored.reward is not None else 0.0,
        valid=scored.reward is not None,
        verdict=scored.verdict,
        malformed=scored.malformed,
        versions=versions,
    )
