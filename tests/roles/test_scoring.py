"""From completions to rewards, with a scripted judge."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from dockyard_actors.roles import messages as m
from dockyard_actors.roles.scoring import score, to_sample
from dockyard_actors.sandbox.types import Verdict
from dockyard_actors.tasks.types import Task
from tests.roles.world import tasks_of, verdict_of

TASK, OTHER = tasks_of().train[:2]
PATCH = Task(id="patch", split="train", prompt="", prefix="a\nb\n", answer="patch", tests=("assert True",))


class Judge:
    """Test only: `verdicts` by program text, else a pass."""

    def __init__(self, **verdicts: Verdict):
        self.verdicts, self.asked, self.deadlines = verdicts, [], []

    async def __call__(self, programs: Sequence[m.Program], deadline_s: float) -> list[Verdict]:
        self.asked.append(list(programs))
        self.deadlines.append(deadline_s)
        return [self.verdicts.get(program.source.strip().replace(" = ", "_"), verdict_of()) for program in programs]


async def test_identical_programs_run_once_and_every_sample_gets_its_verdict() -> None:
    judge = Judge(x_2=verdict_of(passed=0))
    texts = ["1\n", "2\n", "1\nmore", "1\n", "2\n"]
    scores = await score(judge, 0.3, [(TASK, text) for text in texts], 7.0)
    assert [s.reward for s in scores] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert [p.source for p in judge.asked[0]] == ["x = 1\n", "x = 2\n"]
    assert judge.deadlines == [7.0]


async def test_the_same_program_for_other_tests_is_another_request() -> None:
    judge = Judge()
    more = msgspec.structs.replace(TASK, hidden_tests=("assert x",))
    await score(judge, 0.3, [(TASK, "1\n"), (OTHER, "1\n"), (more, "1\n")], 1.0)
    assert len({program.request_id for program in judge.asked[0]}) == 3
    again = Judge()
    await score(again, 0.3, [(TASK, "1\n")], 1.0)
    assert again.asked[0][0].request_id == judge.asked[0][0].request_id, "and its own id is the same whoever asks"


async def test_without_a_verdict_a_sample_is_masked_and_never_zero() -> None:
    judge = Judge(x_2=verdict_of("infra", 0))
    scores = await score(judge, 0.3, [(TASK, "1\n"), (TASK, "2\n")], 1.0)
    assert [s.reward for s in scores] == [1.0, None]


@pytest.mark.parametrize("state", ["timeout", "untrusted", "integrity_failure"])
async def test_an_answer_at_fault_is_zero(state: str) -> None:
    (only,) = await score(Judge(x_1=verdict_of(state, 1)), 0.3, [(TASK, "1\n")], 1.0)
    assert (only.reward, only.resolved) == (0.0, False)


async def test_some_tests_passed_are_worth_their_share_of_the_partial_reward() -> None:
    (only,) = await score(Judge(x_1=verdict_of(passed=2, total=3)), 0.6, [(TASK, "1\n")], 1.0)
    assert only.reward == pytest.approx(0.4)


async def test_a_malformed_answer_is_zero_without_execution() -> None:
    judge = Judge()
    scores = await score(judge, 0.3, [(PATCH, "no hunk"), (PATCH, "-a\n+c"), (PATCH, "-z\n+c")], 1.0)
    assert [s.reward for s in scores] == [0.0, 1.0, 0.0]
    assert [p.source for p in judge.asked[0]] == ["c\nb\n"]
    assert "does not apply" in scores[2].malformed
    assert (await score(judge, 0.3, [(PATCH, "")], 1.0))[0].reward == 0.0
    assert len(judge.asked) == 1, "with nothing to run nobody is asked"


async def test_a_judge_that_fails_is_not_a_reward() -> None:
    async def judge(programs: Sequence[m.Program], deadline_s: float) -> list[Verdict]:
        raise TimeoutError("no broker")

    with pytest.raises(TimeoutError, match="no broker"):
        await score(judge, 0.3, [(TASK, "1\n")], 1.0)


async def test_a_readable_sample_says_what_ran_or_why_nothing_did() -> None:
    good, bad = await score(Judge(), 0.3, [(TASK, "1\n"), (PATCH, "no hunk")], 1.0)
    shown = to_sample(TASK, "1\n", good, step=3, lease=7, sample=0, versions=(2,))
    assert (shown.verdict, shown.program, shown.reward, shown.lease) == ("ok", "x = 1\n", 1.0, "7")
    shown = to_sample(PATCH, "no hunk", bad, step=3, lease=-1, sample=0, versions=(2,))
    assert (shown.verdict, shown.program, shown.reward, shown.lease) == ("malformed", None, 0.0, "evaluation")
    assert shown.error == bad.malformed
