"""Verdict to reward: whole, partial, zero, masked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard_actors.tasks.rewards import ZERO_STATES, reward_of


def test_all_tests_passed_is_one_and_some_is_a_share_of_partial():
    assert reward_of("ok", 3, 3) == 1.0
    assert reward_of("ok", 2, 3) == pytest.approx(0.2)
    assert reward_of("ok", 0, 3) == 0.0
    assert reward_of("ok", 3, 6, partial=1.0) == 0.5
    assert reward_of("ok", 5, 6, partial=0.0) == 0.0


@pytest.mark.parametrize("state", ZERO_STATES)
def test_an_answer_at_fault_or_not_believed_earns_nothing_even_if_tests_passed(state):
    assert reward_of(state, 3, 3) == 0.0


def test_a_malformed_answer_earns_nothing_without_a_verdict():
    assert reward_of(None, malformed=True) == 0.0


def test_an_infrastructure_failure_is_masked_and_never_zero():
    assert reward_of("infra", 0, 3) is None
    assert reward_of("infra") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fine", 1, 1), "unknown verdict state 'fine'"),
        ((None, 1, 1), "unknown verdict state None"),
        (("ok", 0, 0), "0 of 0"),
        (("ok", 4, 3), "4 of 3"),
        (("ok", -1, 3), "-1 of 3"),
    ],
)
def test_an_impossible_verdict_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        reward_of(*arguments)


def test_partial_outside_the_unit_interval_is_refused():
    with pytest.raises(ValueError, match="partial"):
        reward_of("ok", 1, 2, partial=1.5)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0, 1))
def test_a_reward_is_in_the_unit_interval_and_never_above_a_whole_solution(counts, partial):
    passed, total = counts
    reward = reward_of("ok", passed, total, partial=partial)
    assert reward is not None
    assert 0.0 <= reward <= 1.0
    assert (passed == total) <= (reward == 1.0)
