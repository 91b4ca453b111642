from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dockyard_actors.algorithms.advantages import group_advantages, has_signal
from dockyard_actors.algorithms.types import AdvantageConfig
from tests.algorithms import reference

CONFIGS = [
    AdvantageConfig(estimator="grpo"),
    AdvantageConfig(estimator="grpo", std="sample"),
    AdvantageConfig(estimator="dr_grpo"),
    AdvantageConfig(estimator="rloo"),
    AdvantageConfig(estimator="rloo", normalize_by_std=True),
    AdvantageConfig(estimator="rloo", normalize_by_std=True, std="sample"),
]
rewards_st = st.floats(-3, 3, allow_nan=False, width=32)


def one_group(rewards: list[float], config: AdvantageConfig, dtype=torch.float32) -> list[float]:
    return group_advantages(torch.tensor([rewards], dtype=dtype), None, config)[0].tolist()


@st.composite
def groups(draw):
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    size = shape[0] * shape[1]
    rewards = draw(st.lists(rewards_st, min_size=size, max_size=size))
    valid = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return torch.tensor(rewards).reshape(shape), torch.tensor(valid).reshape(shape)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@given(groups())
@settings(max_examples=60, deadline=None)
def test_estimators_equal_the_float64_reference(config, drawn):
    rewards, valid = drawn
    want = reference.advantages(
        rewards.tolist(), valid.tolist(), config.estimator, config.std, config.eps, config.normalize_by_std
    )
    got = group_advantages(rewards, valid, config)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "rewards", "want"),
    [
        (CONFIGS[0], [1] + [0] * 7, [2.6458] + [-0.37796] * 7),
        (CONFIGS[1], [1] + [0] * 7, [2.4749] + [-0.35355] * 7),
        (CONFIGS[0], [1, 0], [1.0, -1.0]),
        (CONFIGS[1], [1, 0], [0.70711, -0.70711]),
        (CONFIGS[3], [1] + [0] * 7, [1.0] + [-1 / 7] * 7),
        (CONFIGS[0], [1, 2, 3, 4], [-1.3416, -0.4472, 0.4472, 1.3416]),
        (CONFIGS[2], [1, 2, 3, 4], [-1.5, -0.5, 0.5, 1.5]),
    ],
)
def test_reference_values(config, rewards, want):
    assert one_group(rewards, config) == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("reward", [0.1, 0.7, 5 / 7, 0.0, -1e8, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_rewards_give_exactly_zero(config, reward, dtype):
    for size in (2, 3, 7, 8):
        assert one_group([reward] * size, config, dtype) == [0.0] * size


@pytest.mark.parametrize("config", CONFIGS[:2], ids=str)
def test_one_good_among_nearly_thirds_does_not_explode(config):
    got = one_group([1.0] + [0.3] * 7, config)
    assert got == pytest.approx(one_group([1.0] + [0.0] * 7, config), abs=1e-4)


def test_a_large_common_offset_costs_no_precision():
    got = one_group([1e6 + 1, 1e6 + 2, 1e6 + 3, 1e6 + 4], CONFIGS[0])
    assert got == pytest.approx([-1.3416, -0.4472, 0.4472, 1.3416], abs=1e-4)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_group_with_fewer_than_two_valid_rewards_is_never_trained_on_its_raw_reward(config):
    rewards = torch.tensor([[1.0, 0.0, 0.0], [1.0, float("nan"), 7.0]])
    valid = torch.tensor([[True, False, False], [False, False, False]])
    assert group_advantages(rewards, valid, config).tolist() == [[0.0] * 3] * 2
    assert has_signal(rewards, valid).tolist() == [False, False]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_an_invalid_response_changes_nothing_for_the_others(config):
    with_hole = group_advantages(
        torch.tensor([[1.0, float("nan"), 0.0, 0.5]]), torch.tensor([[True, False, True, True]]), config
    )
    assert with_hole[0, 1] == 0
    assert with_hole[0, [0, 2, 3]].tolist() == one_group([1.0, 0.0, 0.5], config)


def test_a_valid_reward_that_is_not_finite_is_refused_by_place():
    with pytest.raises(ValueError, match="group 1, response 0 is nan"):
        group_advantages(torch.tensor([[0.0, 1.0], [float("nan"), 1.0]]), None, CONFIGS[0])


@pytest.mark.parametrize("rewards", [torch.zeros(4), torch.zeros(2, 0)])
def test_rewards_of_a_wrong_shape_are_refused(rewards):
    with pytest.raises(ValueError, match="must have shape"):
        group_advantages(rewards, None, CONFIGS[0])
    with pytest.raises(ValueError, match="valid has shape"):
        group_advantages(torch.zeros(2, 2), torch.ones(2, 3, dtype=torch.bool), CONFIGS[0])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@given(st.lists(st.integers(0, 20), min_size=2, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_advantages_sum_to_zero_keep_the_order_and_follow_their_response(config, rewards, random):
    got = one_group(rewards, config)
    assert sum(got) == pytest.approx(0, abs=1e-4)
    for a, reward_a in zip(got, rewards, strict=True):
        for b, reward_b in zip(got, rewards, strict=True):
            assert (a > b) == (reward_a > reward_b) or a == pytest.approx(b)
    order = random.sample(range(len(rewards)), len(rewards))
    assert one_group([rewards[i] for i in order], config) == pytest.approx([got[i] for i in order], abs=1e-5)


@given(st.lists(st.integers(0, 20), min_size=2, max_size=8), st.integers(-50, 50), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_grpo_ignores_offset_and_scale_and_dr_grpo_ignores_offset(rewards, offset, scale):
    assume(max(rewards) > min(rewards))
    moved = [scale * reward + offset for reward in rewards]
    assert one_group(moved, CONFIGS[0]) == pytest.approx(one_group(rewards, CONFIGS[0]), abs=1e-4)
    assert one_group(moved, CONFIGS[2]) == pytest.approx([scale * a for a in one_group(rewards, CONFIGS[2])], abs=1e-3)


@given(groups())
@settings(max_examples=60, deadline=None)
def test_a_group_has_signal_exactly_when_some_advantage_is_not_zero(drawn):
    rewards, valid = drawn
    moved = group_advantages(rewards.double(), valid, CONFIGS[2])
    signal = has_signal(rewards, valid)
    assert not moved[~signal].any()
    # float32 output may round the advantage of rewards that differ by a denormal to 0.
    clear = signal & (torch.where(valid, rewards, -9).amax(-1) - torch.where(valid, rewards, 9).amin(-1) > 1e-30)
    assert moved[clear].any(-1).all()
