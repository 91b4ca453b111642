from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.policy.batch import GroupRows, TrainBatch
from tests.policy.models import random_group

GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=6)), min_size=1, max_size=5
)


def build(shapes: list[tuple[int, list[int]]], budget: int) -> tuple[list[GroupRows], TrainBatch]:
    groups = [
        random_group(prompt, lengths, [1.0 + i for i in range(len(lengths))], seed=g)
        for g, (prompt, lengths) in enumerate(shapes)
    ]
    return groups, TrainBatch.build(groups, budget)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 80))
def test_every_token_of_every_completion_is_trained_exactly_once(shapes, budget: int):
    groups, batch = build(shapes, budget)
    kept = [(g, i) for g in groups for i in range(len(g.lengths)) if g.lengths[i]]
    assert len(batch.advantages) == len(kept)
    assert batch.masked_rows == sum(len(g.lengths) for g in groups) - len(kept)
    found = torch.zeros(batch.loss_mask.shape, dtype=torch.long)
    covered = 0
    for micro in batch.micro_batches:
        assert micro.first_row == covered
        covered = micro.last_row
        assert len(micro.input_ids) <= budget or len(micro.segments) == 1
        assert [s.start for s in micro.segments[1:]] == [s.end for s in micro.segments[:-1]]
        for row, column, target in zip(micro.row, micro.column, micro.target, strict=True):
            assert found[micro.first_row + row, column] == 0
            found[micro.first_row + row, column] = target
    assert covered == len(kept)
    for row, (group, i) in enumerate(kept):
        assert found[row].tolist()[: group.lengths[i]] == group.tokens[i, : group.lengths[i]].tolist()
    assert (batch.loss_mask == (found > 0)).all()


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 80))
def test_a_source_stands_right_before_its_target_and_sees_only_its_own_past(shapes, budget: int):
    groups, batch = build(shapes, budget)
    kept = [(g, i) for g in groups for i in range(len(g.lengths)) if g.lengths[i]]
    for micro in batch.micro_batches:
        for row, column, source in zip(micro.row, micro.column, micro.source, strict=True):
            group, i = kept[micro.first_row + int(row)]
            segment = next(s for s in micro.segments if s.start <= source < s.end)
            seen = torch.nonzero(segment.barrier[source - segment.start] == 0)[:, 0] + segment.start
            past = [*group.prompt_ids, *group.tokens[i, : int(column)]]
            assert micro.input_ids[seen].tolist() == past
            assert micro.position_ids[seen].tolist() == list(range(len(past)))


def test_identical_completions_become_one_row_with_their_number_as_weight():
    group = random_group(5, [4] * 6, [1.0, 1.0, 1.0, -1.0, 1.0, 2.0])
    group.tokens[[1, 2, 3, 4]] = group.tokens[0]
    group.versions[2] = 1  # sampled by other weights: another row
    batch = TrainBatch.build([group], 1000)
    assert batch.row_weights.tolist() == [3.0, 1.0, 1.0, 1.0]
    assert batch.advantages.tolist() == [1.0, 1.0, -1.0, 2.0]
    assert batch.merged_rows == 2
    assert batch.sampled_tokens == 24
    assert batch.loss_mask.sum() == 16


def test_completions_without_a_verdict_and_groups_without_signal_are_counted_and_left_out():
    masked = random_group(5, [3, 4, 5], [1.0, -1.0, 9.0])
    masked = GroupRows(**{**vars(masked), "valid": np.array([True, True, False])})
    flat = random_group(5, [3, 4, 5], [0.0, 0.0, 0.0])
    batch = TrainBatch.build([masked, flat], 1000)
    assert (batch.groups, batch.skipped_groups, batch.masked_rows) == (1, 1, 1)
    assert batch.advantages.tolist() == [1.0, -1.0]
    empty = TrainBatch.build([flat], 1000)
    assert (empty.micro_batches, empty.loss_mask.shape) == ((), (0, 0))


def test_the_prompt_is_computed_once_for_all_its_completions():
    batch = TrainBatch.build(
        [random_group(100, [10] * 8, range(1, 9)), random_group(100, [10] * 8, range(1, 9))], 10_000
    )
    assert batch.packed_tokens == 2 * (100 + 80)


def test_nothing_of_the_callers_buffers_is_kept():
    group = random_group(5, [3, 4], [1.0, -1.0])
    batch = TrainBatch.build([group], 1000)
    before = [batch.behaviour_logprobs.clone(), batch.micro_batches[0].input_ids.clone(), batch.versions.clone()]
    for array in (group.tokens, group.behaviour_logprobs, group.prompt_ids, group.versions):
        array.fill(0)
    after = [batch.behaviour_logprobs, batch.micro_batches[0].input_ids, batch.versions]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["behaviour_logprobs", "versions", "lengths", "advantages"])
def test_a_misfit_names_the_group_and_the_field(name: str):
    good = random_group(5, [3, 4], [1.0, -1.0])
    bad = GroupRows(**{**vars(good), name: getattr(good, name)[:1]})
    with pytest.raises(ValueError, match=f"group 1: {name}"):
        TrainBatch.build([good, bad], 1000)
