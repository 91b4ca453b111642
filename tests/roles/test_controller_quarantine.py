"""A prompt that can never be worked on, or that kills whoever holds it, is drawn no more; a run without prompts ends with that cause."""

from __future__ import annotations

from pathlib import Path

from dockyard_actors.roles import messages as m
from tests.roles.world import assert_journal_is_the_ledger, tasks_of, world_of


def ids(grants: tuple[m.Granted, ...]) -> list[int]:
    return [grant.lease for grant in grants]


async def test_a_prompt_that_kills_its_holders_is_quarantined_and_never_drawn_again(tmp_path: Path) -> None:
    async with world_of(tmp_path, "group.max_attempts=2", tasks=tasks_of(train=3)) as world:
        (poison,) = await world.lease(1)
        await world.rollout_dies(1)
        assert (await world.lease(1, incarnation=2))[0].lease == poison.lease
        await world.rollout_dies(2)
        drawn = [grant.prompt for grant in await world.lease(4, incarnation=3)]
        assert len(drawn) == 4
        assert poison.prompt not in drawn
        assert world.ledger.leases[poison.lease].cause.startswith("quarantined: 2 rollouts died")
        assert_journal_is_the_ledger(world)


async def test_a_failed_prompt_is_issued_once_more_then_quarantined_and_never_drawn_again(tmp_path: Path) -> None:
    async with world_of(tmp_path, tasks=tasks_of(train=3)) as world:
        (first,) = await world.lease(1)
        await world.fail(first)
        (second,) = await world.lease(1)
        assert (second.prompt, second.lease) == (first.prompt, first.lease + 1)
        await world.fail(second, "infra: 0 of 2 samples")
        assert world.ledger.quarantined == {first.prompt}
        await world.restart_controller()
        drawn = [grant.prompt for grant in await world.lease(4)]
        assert first.prompt not in drawn
        assert len(drawn) == 4
        assert dict(world.ledger.causes["failed"]) == {"deadline": 1, "quarantined: infra: 0 of 2 samples": 1}


async def test_a_run_without_prompts_left_fails_once_nothing_is_under_way_any_more(tmp_path: Path) -> None:
    async with world_of(tmp_path, tasks=tasks_of(train=2)) as world:
        await world.lease(2)
        await world.lease(2, "rollout-1")
        await world.rollout_dies()
        world.ledger.quarantined |= {"train-0", "train-1"}
        granted = await world.lease(4, incarnation=2)
        assert ids(granted) == [0, 1], "what waits is given out all the same"
        for lease in range(4):
            await world.ask("controller", m.CloseLease(lease=lease, outcome="expired", cause="too_old"))
        assert await world.lease(4, incarnation=2) == ()
        assert "all 2 training prompts are quarantined" in (await world.ask("controller", m.AskStatus())).failure
        world.ledger.quarantined.clear()  # this test put them there by hand: the journal does not know
        assert_journal_is_the_ledger(world)


async def test_a_run_without_prompts_left_goes_on_while_something_is_under_way(tmp_path: Path) -> None:
    async with world_of(tmp_path, tasks=tasks_of(train=3)) as world:
        first, second, third = await world.lease(3)
        for grant in (first, second):
            message = m.CloseLease(lease=grant.lease, outcome="filtered", cause="too_long: 9", never_again=True)
            await world.ask("controller", message)
        assert world.ledger.quarantined == {first.prompt, second.prompt}
        world.ledger.quarantined.add(third.prompt)
        assert await world.lease(4) == ()
        assert (await world.ask("controller", m.AskStatus())).failure == "", "the third may still come"
        await world.push(third)
        assert await world.lease(4) == ()
        assert "quarantined" in (await world.ask("controller", m.AskStatus())).failure, "one group makes no batch"
