from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.policy.batch import GroupRows, TrainBatch, balanced
from tests.policy.models import random_group

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6)
GROUPS = st.lists(st.tuples(st.integers(1, 12), LENGTHS), min_size=1, max_size=5)
ALPHABETS = st.sampled_from(
    [4, 5, 99]
)  # of 1 and 2 different tokens: completions that begin alike, or are each other's beginning


def build(
    shapes: list[tuple[int, list[int]]], budget: int, alphabet: int = 99
) -> tuple[list[tuple[GroupRows, int]], TrainBatch]:
    """The batch, and for each row of it a completion: its group and its index there."""
    groups = [
        random_group(prompt, lengths, [1.0 + i for i in range(len(lengths))], seed=g, vocabulary=alphabet)
        for g, (prompt, lengths) in enumerate(shapes)
    ]
    kept = [(g, i) for g in groups for i in range(len(g.lengths)) if g.lengths[i]]
    return kept, TrainBatch.build(groups, budget)


@settings(max_examples=100, deadline=None)
@given(GROUPS, st.integers(1, 80), ALPHABETS)
def test_every_token_of_every_completion_is_trained_exactly_once(shapes, budget: int, alphabet: int):
    kept, batch = build(shapes, budget, alphabet)
    assert len(batch.advantages) == len(kept)
    assert batch.masked_rows == sum(len(lengths) for _, lengths in shapes) - len(kept)
    found = torch.zeros(batch.loss_mask.shape, dtype=torch.long)
    for micro in batch.micro_batches:
        assert len(micro.input_ids) <= budget or len(micro.segments) == 1
        assert [s.start for s in micro.segments[1:]] == [s.end for s in micro.segments[:-1]]
        assert (micro.owner.diff() >= 0).all()
        for row, column, target in zip(micro.row, micro.column, micro.target, strict=True):
            assert found[micro.rows[row], column] == 0
            found[micro.rows[row], column] = target
    assert sorted(row for micro in batch.micro_batches for row in micro.rows.tolist()) == list(range(len(kept)))
    for row, (group, i) in enumerate(kept):
        assert found[row].tolist()[: group.lengths[i]] == group.tokens[i, : group.lengths[i]].tolist()
    assert (batch.loss_mask == (found > 0)).all()


@settings(max_examples=100, deadline=None)
@given(GROUPS, st.integers(1, 80), ALPHABETS)
def test_a_source_stands_right_before_its_target_and_sees_only_its_own_past(shapes, budget: int, alphabet: int):
    kept, batch = build(shapes, budget, alphabet)
    for micro in batch.micro_batches:
        for row, column, owner in zip(micro.row, micro.column, micro.owner, strict=True):
            group, i = kept[int(micro.rows[row])]
            source = micro.source[owner]
            segment = next(s for s in micro.segments if s.start <= source < s.end)
            seen = torch.nonzero(segment.barrier[source - segment.start] == 0)[:, 0] + segment.start
            past = [*group.prompt_ids, *group.tokens[i, : int(column)]]
            assert micro.input_ids[seen].tolist() == past
            assert micro.position_ids[seen].tolist() == list(range(len(past)))


@settings(max_examples=60, deadline=None)
@given(GROUPS, ALPHABETS)
def test_no_past_is_computed_twice_in_a_group_and_nothing_that_predicts_nothing(shapes, alphabet: int):
    kept, batch = build(shapes, 10_000, alphabet)
    pasts = {(id(g), tuple(g.tokens[i, :k])) for g, i in kept for k in range(1, g.lengths[i])}
    prompts = {id(g): g.prompt_ids.size for g, _ in kept}
    assert batch.packed_tokens == sum(prompts.values()) + len(pasts)
    assert sum(len(micro.source) for micro in batch.micro_batches) == len(prompts) + len(pasts)


SIZES = st.lists(st.integers(1, 30), max_size=12)


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 60))
def test_bundles_fit_hold_everything_once_and_are_no_more_than_filling_in_turn_needs(sizes, budget: int):
    bundles = balanced(sizes, budget)
    assert sorted(i for bundle in bundles for i in bundle) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in bundle) <= budget or len(bundle) == 1 for bundle in bundles)
    assert bundles == balanced(list(sizes), budget)
    turns, room = 0, -1
    for size in sorted(sizes, reverse=True):
        turns, room = (turns, room - size) if size <= room else (turns + 1, budget - size)
    assert len(bundles) <= turns


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(30, 80))
def test_the_largest_bundle_is_at_most_a_third_above_the_best_possible(sizes, budget: int):
    bundles = balanced(sizes, budget)
    choices = itertools.product(range(len(bundles)), repeat=len(sizes))
    best = min(max(np.bincount(choice, weights=sizes)) for choice in choices)
    assert max(sum(sizes[i] for i in bundle) for bundle in bundles) <= 4 / 3 * best


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


def test_micro_batches_are_as_few_as_fit_and_of_even_size():
    groups = [random_group(p, [5] * 4, range(1, 5), seed=p) for p in (70, 60, 50, 40, 30, 20, 12, 6)]
    batch = TrainBatch.build(groups, 300)
    sizes = [len(micro.input_ids) for micro in batch.micro_batches]
    assert len(sizes) == -(-batch.packed_tokens // 300) == 2
    assert max(sizes) / (sum(sizes) / 2) <= 1.05


def test_the_prompt_is_computed_once_for_all_its_completions():
    batch = TrainBatch.build(
        [random_group(100, [10] * 8, range(1, 9)), random_group(100, [10] * 8, range(1, 9))], 10_000
    )
    assert batch.packed_tokens == 2 * (100 + 8 * 9)  # the last token of a completion predicts nothing


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
