"""What is refused when a group is taken in, and what it is when it is resumed; the same for every engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dockyard_actors.engines.base import FinishReason, GroupOutput, GroupRequest, GroupResult, SamplingConfig
from dockyard_actors.engines.groups import LiveGroup

SAMPLING = SamplingConfig(max_new_tokens=8)
REQUEST = GroupRequest(3, np.arange(5, dtype=np.int32), 3, (-1, 0, 1))
BEFORE = GroupResult(3, (FinishReason.CUT, FinishReason.EOS, FinishReason.CUT), 5, 9)


def written(*lengths: int) -> GroupOutput:
    output = GroupOutput.allocate(3, 8)
    output.tokens.fill(7)
    output.lengths[:] = lengths
    return output


def test_a_new_group_has_cleared_buffers_and_all_its_completions_before_it():
    output = written(4, 2, 3)
    group = LiveGroup(REQUEST, output, SAMPLING)
    assert (output.tokens == 0).all()
    assert (group.limit, group.waiting, group.ended) == (8, [0, 1, 2], False)
    assert group.result() == GroupResult(3, (FinishReason.CUT,) * 3, 5, 0)
    assert [group.seed(i) for i in range(3)] == [2**64 - 1, 0, 1]


@pytest.mark.parametrize(("own", "limit"), [(None, 8), (3, 3), (20, 8)])
def test_a_group_can_only_lower_the_limit(own: int | None, limit: int):
    assert LiveGroup(replace(REQUEST, max_new_tokens=own), written(0, 0, 0), SAMPLING).limit == limit


@pytest.mark.parametrize("longest", [None, 13, 12])
def test_it_may_be_as_long_as_the_engine_takes_and_no_longer(longest: int | None):
    output = written(0, 0, 0)
    if longest == 12:
        with pytest.raises(ValueError, match="5 given \\+ 8 new tokens exceed the engine's 12 positions"):
            LiveGroup(REQUEST, output, SAMPLING, longest=longest)
        assert (output.tokens == 7).all()
    else:
        LiveGroup(REQUEST, output, SAMPLING, longest=longest)


def test_resumed_completions_go_on_those_that_ended_stay_and_those_without_room_are_full():
    output = written(4, 2, 3)
    group = LiveGroup(REQUEST, output, SAMPLING, BEFORE)
    assert (output.tokens == 7).all()
    assert group.waiting == [0, 2]
    assert group.result() == BEFORE
    shorter = LiveGroup(REQUEST, output, SamplingConfig(max_new_tokens=4), BEFORE)
    assert shorter.waiting == [2]
    assert shorter.reasons == [FinishReason.LENGTH, FinishReason.EOS, None]
    assert LiveGroup(REQUEST, output, SamplingConfig(max_new_tokens=3), BEFORE).ended


@pytest.mark.parametrize(
    ("misfit", "lengths", "reason"),
    [
        (replace(BEFORE, key=4), (4, 2, 3), "key 4"),
        (replace(BEFORE, finish_reasons=BEFORE.finish_reasons[:1]), (4, 2, 3), "completions 1"),
        (replace(BEFORE, prompt_tokens=6), (4, 2, 3), "prompt tokens 6"),
        (BEFORE, (4, 2, 4), "new tokens 9, request and output have 10"),
        (BEFORE, (9, 0, 0), "beyond its output"),
        (BEFORE, (-1, 5, 5), "beyond its output"),
    ],
)
def test_a_result_that_does_not_belong_here_is_refused(misfit: GroupResult, lengths: tuple[int, int, int], reason: str):
    output = written(*lengths)
    with pytest.raises(ValueError, match=reason):
        LiveGroup(REQUEST, output, SAMPLING, misfit)
    assert (output.tokens == 7).all()
