"""Which prompt comes next, and how many fit the staleness budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard_actors.roles.admission import NoPrompts, PromptOrder, hand_out, room
from dockyard_actors.roles.ledger import Closed, Freed, Handed, Issued, Ledger, Stepped
from tests.roles.world import config_of, tasks_of


def issued(count: int) -> list[Issued]:
    return [Issued(i, f"train-{i}", 0, 1, "rollout-0#1", i) for i in range(count)]


@pytest.mark.parametrize(("mode", "batches"), [("sync", 1), ("async", 2)])
def test_the_budget_is_one_batch_for_each_step_of_allowed_age_and_one_more(mode: str, batches: int) -> None:
    config = config_of(f"grpo.mode={mode}")
    assert room(Ledger(), config) == batches * 2
    assert room(Ledger.replay(issued(1)), config) == batches * 2 - 1
    assert room(Ledger.replay(issued(batches * 2)), config) == 0


def test_room_is_never_negative_after_a_rollback() -> None:
    assert room(Ledger.replay(issued(9)), config_of()) == 0


@given(step=st.integers(0, 10), open_groups=st.integers(0, 6), age=st.integers(1, 4))
def test_never_more_than_the_rest_of_the_run_needs(step: int, open_groups: int, age: int) -> None:
    config = config_of(f"async_grpo.max_trajectory_age_steps={age}")
    ledger = Ledger.replay([*issued(open_groups), Stepped(step, 0, ())])
    free = room(ledger, config)
    assert 0 <= free <= (age + 1) * 2
    assert free + open_groups <= max(open_groups, (10 - step) * 2)


def test_every_epoch_holds_every_prompt_once_in_an_order_of_its_own() -> None:
    order = PromptOrder(tasks_of(train=7), seed=3)
    epochs = [[order.at(e * 7 + i) for i in range(7)] for e in range(3)]
    for number, epoch in enumerate(epochs):
        assert sorted(prompt for prompt, _ in epoch) == sorted(f"train-{i}" for i in range(7))
        assert {of for _, of in epoch} == {number}
    assert len({tuple(prompt for prompt, _ in epoch) for epoch in epochs}) == 3


def test_the_order_is_the_same_wherever_one_starts_to_read_it() -> None:
    forward, jumping = PromptOrder(tasks_of(train=5), seed=1), PromptOrder(tasks_of(train=5), seed=1)
    expected = [forward.at(i) for i in range(20)]
    assert [jumping.at(i) for i in reversed(range(20))] == expected[::-1]
    assert [PromptOrder(tasks_of(train=5), seed=2).at(i) for i in range(20)] != expected


def test_a_quarantined_prompt_is_passed_over_in_every_epoch() -> None:
    order, ledger = PromptOrder(tasks_of(train=3), seed=0), Ledger()
    bad = order.at(1)[0]
    drawn = []
    for _ in range(8):
        if len(drawn) == 1:
            ledger.quarantined.add(bad)
        event = order.issue(ledger, "rollout-0#1")
        ledger.apply(event)
        drawn.append(event.prompt)
    assert bad not in drawn[1:]
    assert len(set(drawn[1:])) == 2


def test_a_failed_prompt_comes_before_new_ones_and_takes_no_place_in_the_order() -> None:
    order, ledger = PromptOrder(tasks_of(train=5), seed=0), Ledger()
    for _ in range(2):
        ledger.apply(order.issue(ledger, "rollout-0#1"))
    ledger.apply(Closed(0, "failed", "deadline", retry=True))
    again, new = order.issue(ledger, "rollout-0#1"), None
    assert (again.prompt, again.retry_of, again.lease) == (ledger.leases[0].prompt, 0, 2)
    ledger.apply(again)
    new = order.issue(ledger, "rollout-0#1")
    assert (new.prompt, new.draw) == (order.at(2)[0], 2)


def test_no_prompt_left_is_said_with_where_to_look() -> None:
    ledger = Ledger()
    ledger.quarantined |= {"train-0", "train-1"}
    with pytest.raises(NoPrompts, match="all 2 training prompts are quarantined"):
        PromptOrder(tasks_of(train=2), seed=0).issue(ledger, "rollout-0#1")


@pytest.mark.parametrize(
    ("cause", "attempt"), [("holder_died", 2), ("rolled_back", 1), ("host_lost", 1)], ids=lambda v: str(v)
)
def test_only_the_death_of_a_holder_counts_as_an_attempt(cause: str, attempt: int) -> None:
    ledger = Ledger.replay([*issued(1), Freed(0, cause)])
    assert hand_out(ledger.leases[0], "rollout-1#1", max_attempts=3) == Handed(0, "rollout-1#1", attempt)


def test_a_lease_that_killed_too_many_holders_is_quarantined() -> None:
    ledger = Ledger.replay(issued(1))
    for expected in (2, 3):
        ledger.apply(Freed(0, "holder_died"))
        event = hand_out(ledger.leases[0], "r#1", max_attempts=3)
        assert isinstance(event, Handed)
        assert event.attempt == expected
        ledger.apply(event)
    ledger.apply(Freed(0, "holder_died"))
    ledger.apply(hand_out(ledger.leases[0], "r#1", max_attempts=3))
    assert ledger.quarantined == {"train-0"}
    assert ledger.summary()["failed"] == 1
