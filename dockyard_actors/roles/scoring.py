"""From completions to rewards: parse the answer, run the program in a sandbox, turn the verdict into a number.

Identical programs of one call run once. A sample without a verdict (infrastructure) is masked, never reward 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from dockyard_actors.observe.rollouts import RolloutSample, TestLine
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


Judge = Callable[[Sequence[m.Program], float], Awaitable[Sequence[Verdict]]]
"""Gets one verdict a program, in order, within so many seconds."""


def broker_judge(ctx: ActorContext, slack_s: float) -> Judge:
    """Verdicts from the broker; raises ActorError when it gave no answer `slack_s` after the deadline it was given."""

    async def judge(programs: Sequence[m.Program], deadline_s: float) -> Sequence[Verdict]:
        message = m.ScorePrograms(programs=tuple(programs), deadline_s=deadline_s)
        reply = await ctx.ref("broker").ask(message, deadline_s=deadline_s + slack_s, retry=True)
        return reply.verdicts

    return judge


async def score(judge: Judge, partial: float, items: Sequence[tuple[Task, str]], deadline_s: float) -> list[Score]:
    """Judges (task, completion text) pairs, in order; `partial` is reward.partial. Raises what `judge` raises."""
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
        verdicts = dict(zip(programs, await judge(list(programs.values()), deadline_s), strict=True))
    return [_score(partial, answer, verdicts.get(request_id)) for answer, request_id in zip(answers, ids, strict=True)]


def _score(partial: float, answer: str | MalformedAnswer, verdict: Verdict | None) -> Score:
    if isinstance(answer, MalformedAnswer):
        return Score(0.0, False, "", answer.reason, None)
    if verdict is None:
        raise AssertionError("a program was sent and no verdict came back")
    reward = reward_of(verdict.state, verdict.passed, verdict.total, partial=partial)
    if reward == 1.0 and not verdict.resolved:
        reward = 0.0  # every test passed and then the program broke a limit: no solution
    return Score(reward, verdict.resolved, answer, "", verdict)


def to_sample(
    task: Task, text: str, scored: Score, *, step: int, lease: int, sample: int, versions: tuple[int, ...]
) -> RolloutSample:
    """What people read of one judged completion. `lease` -1: an evaluation's, which is no lease."""
    verdict = scored.verdict
    return RolloutSample(
        step=step,
        lease=str(lease) if lease >= 0 else "evaluation",
        task=task.id,
        sample=sample,
        split=task.split,
        prompt=task.prompt,
        completion=text,
        program=scored.program or None,
        verdict=verdict.state if verdict else "malformed",
        reward=scored.reward,
        tests=tuple(TestLine(name=t.name, outcome=t.outcome, hidden=t.hidden, message=t.message) for t in verdict.tests)
        if verdict
        else (),
        error=(verdict.error or "") if verdict else scored.malformed,
        stdout=verdict.stdout if verdict else "",
        stderr=verdict.stderr if verdict else "",
        versions=versions,
        seconds=verdict.seconds if verdict else None,
    )
