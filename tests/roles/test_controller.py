"""The controller's promises, asked through messages, with the journal on disk as the judge."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dockyard_actors.roles import messages as m
from dockyard_actors.roles.ledger import Checkpointed, Handed, Opened, Published, RolledBack, Stepped
from dockyard_actors.runtime.errors import RemoteError
from tests.roles.world import assert_journal_is_the_ledger, eventually, held, meta_of, state_of, world_of


def ids(grants: tuple[m.Granted, ...]) -> list[int]:
    return [grant.lease for grant in grants]


@pytest.mark.parametrize(("mode", "open_at_once"), [("sync", 2), ("async", 4)])
async def test_no_more_groups_are_open_than_the_budget_allows(tmp_path: Path, mode: str, open_at_once: int) -> None:
    async with world_of(tmp_path, f"grpo.mode={mode}") as world:
        assert ids(await world.lease(3)) == list(range(min(3, open_at_once)))
        assert ids(await world.lease(9)) == list(range(3, open_at_once))
        assert await world.lease(9) == ()
        for lease in held(world.ledger):
            await world.push(m.Granted(lease.id, lease.prompt, lease.epoch, lease.attempt))
        assert await world.lease(9) == (), "a buffered group is as open as one in flight"
        assert len(await world.take(2)) == 2
        assert await world.lease(9) == (), "so is one that the trainer took and has not stepped"
        await world.step([0, 1])
        await world.publish()
        assert ids(await world.lease(9)) == [open_at_once, open_at_once + 1]


async def test_the_end_of_the_run_is_counted_in_the_budget(tmp_path: Path) -> None:
    async with world_of(tmp_path, "grpo.max_num_steps=1") as world:
        assert len(await world.lease(9)) == 2


async def test_nothing_is_admitted_before_the_first_weights(tmp_path: Path) -> None:
    async with world_of(tmp_path, open=False) as world:
        assert await world.lease(4) == ()
        await world.publish()
        assert len(await world.lease(4)) == 4


async def test_in_sync_mode_nothing_is_admitted_between_a_step_and_fresh_engines(tmp_path: Path) -> None:
    async with world_of(tmp_path, "grpo.mode=sync") as world:
        await world.lease(2)
        await world.step([0, 1])
        assert await world.lease(4) == ()
        version = (await world.ask("controller", m.NextVersion(above=world.ledger.version))).version
        assert await world.lease(4) == ()
        await world.ask("controller", m.EnginesFresh(version=version, step=1))
        assert len(await world.lease(4)) == 2


async def test_engines_that_lag_a_step_behind_get_a_batch_less(tmp_path: Path) -> None:
    async with world_of(tmp_path, "async_grpo.max_trajectory_age_steps=2") as world:
        await world.lease(2)
        await world.step([0, 1])
        assert len(await world.lease(9)) == 4, "what they generate now is a step older when its turn comes"
        await world.publish()
        assert len(await world.lease(9)) == 2
        await world.step([2, 3])
        await world.step([4, 5])
        await world.step([6, 7])
        assert await world.lease(9) == (), "three steps behind, nothing could be trained any more"


@pytest.mark.parametrize("published", [False, True], ids=["before the weights", "while engines load"])
async def test_a_controller_restarted_between_step_and_fresh_engines_admits_nothing_either(
    tmp_path: Path, published: bool
) -> None:
    async with world_of(tmp_path, "grpo.mode=sync") as world:
        await world.lease(2)
        await world.step([0, 1])
        if published:
            await world.ask("controller", m.NextVersion(above=world.ledger.version))
        await world.restart_controller()
        assert await world.lease(4) == ()
        await world.publish()
        assert len(await world.lease(4)) == 2
        await world.restart_controller()
        await world.step([2, 3])
        await world.publish()
        await world.restart_controller()
        assert len(await world.lease(4)) == 2, "the engines are as fresh as before its restart"


async def test_a_waiting_rollout_gets_work_as_soon_as_there_is_some(tmp_path: Path) -> None:
    async with world_of(tmp_path, open=False) as world:
        waiting = asyncio.ensure_future(world.lease(2, wait_s=15.0))
        await world.publish()
        assert ids(await waiting) == [0, 1]


async def test_leases_of_a_dead_holder_go_to_others_with_the_next_attempt(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        first = await world.lease(2, "rollout-0")
        other = await world.lease(1, "rollout-1")
        await world.push(first[0])
        await world.rollout_dies()
        again = await world.lease(4, "rollout-1")
        assert again[0] == m.Granted(first[1].lease, first[1].prompt, first[1].epoch, 2), "what was pushed is safe"
        assert len(again) == 2, "and the budget counts it once"
        assert {lease.id for lease in held(world.ledger)} == {*ids(other), *ids(again)}
        assert_journal_is_the_ledger(world)


async def test_a_dead_incarnation_that_still_waits_for_work_gets_none(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        await world.lease(4)
        waiting = asyncio.ensure_future(world.lease(4, wait_s=0.3))
        await eventually(lambda: world.controller._changed._waiters)
        await world.rollout_dies()
        assert await waiting == (), "nobody would ever end those leases"
        assert [(g.lease, g.attempt) for g in await world.lease(4, incarnation=2)] == [(i, 2) for i in range(4)]


async def test_a_death_that_nobody_saw_is_noticed_when_the_next_incarnation_asks(tmp_path: Path) -> None:
    """Controller and rollout are killed together: the restarted controller watches a living rollout and hears of no death."""
    async with world_of(tmp_path) as world:
        await world.lease(4)
        await world.restart_controller()
        assert [(g.lease, g.attempt) for g in await world.lease(4, incarnation=2)] == [(i, 2) for i in range(4)]
        assert await world.lease(4, incarnation=2) == ()


async def test_leases_granted_in_a_reply_that_got_lost_are_granted_again(tmp_path: Path) -> None:
    """The controller died between journal and answer: the rollout is alive and has never heard of them."""
    async with world_of(tmp_path) as world:
        await world.lease(3)
        await world.restart_controller()
        again = await world.lease(2, working=(1,))
        assert [(grant.lease, grant.attempt) for grant in again] == [(0, 1), (2, 1)]
        assert world.ledger.summary()["issued"] == 3
        assert_journal_is_the_ledger(world)


async def test_a_run_that_was_asked_to_stop_admits_nothing_across_a_restart_until_it_is_resumed(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        stopping = asyncio.ensure_future(world.ask("controller", m.StopRun(reason="Ctrl-C")))
        await eventually(lambda: world.ledger.stopping)
        assert await world.lease(2) == ()
        stopping.cancel()
        await world.restart_controller()
        assert await world.lease(2) == ()
        assert await world.step([]) == m.StepAck(True), "and the trainer hears of it with its next step"
        await world.restart_controller("session-2")
        await world.publish()
        assert len(await world.lease(2)) == 2


async def test_the_end_of_a_run_is_known_across_a_restart(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        await world.ask("controller", m.RunFinished(status="completed"))
        await world.restart_controller()
        assert (await world.ask("controller", m.AskStatus())).finished == "completed"
        assert await world.lease(2) == ()


async def test_the_death_of_a_holder_does_not_cost_a_prompt_its_second_try(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        (first,) = await world.lease(1)
        await world.rollout_dies()
        (handed,) = await world.lease(1, incarnation=2)
        assert (handed.lease, handed.attempt) == (first.lease, 2)
        await world.fail(handed)
        assert not world.ledger.quarantined
        assert (await world.lease(1, incarnation=2))[0].prompt == first.prompt


async def test_closing_a_lease_again_changes_nothing(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        (grant,) = await world.lease(1)
        await world.fail(grant)
        before = len(world.journal)
        await world.fail(grant, "something else")
        assert len(world.journal) == before
        assert dict(world.ledger.causes["failed"]) == {"deadline": 1}


async def test_a_rollout_cannot_fail_a_group_that_the_buffer_owns(tmp_path: Path) -> None:
    """Its push was acknowledged late: the group is in the buffer, and a trainer may hold it."""
    async with world_of(tmp_path) as world:
        grants = await world.lease(2)
        for grant in grants:
            await world.push(grant)
        taken = await world.take(2)
        await world.fail(grants[0], "score: no answer to the push")
        assert await world.step(taken) == m.StepAck(False)
        assert world.ledger.summary() == {
            "issued": 2, "trained": 2, "expired": 0, "filtered": 0, "failed": 0, "in_flight": 0
        }  # fmt: skip


async def test_groups_lost_with_their_host_are_failed_released_and_drawn_again_without_blame(tmp_path: Path) -> None:
    async with world_of(tmp_path, "grpo.mode=sync") as world:
        first, second = await world.lease(2)
        for grant in (first, second):
            await world.push(grant)
        await world.take(2)
        for _ in range(2):  # told twice, counted once
            await world.ask("controller", m.LoseGroups(leases=(first.lease,), why="its cable was cut"))
        assert world.ledger.summary() == {
            "issued": 2, "trained": 0, "expired": 0, "filtered": 0, "failed": 1, "in_flight": 1,
        }  # fmt: skip
        assert world.ledger.causes["failed"] == {m.HOST_LOST: 1}
        assert world.controller.warnings == [
            "1 groups were lost with their host and are generated anew: its cable was cut"
        ]
        await eventually(lambda: list(world.buffer.groups) == [second.lease])
        (again,) = await world.lease(2)
        assert again.prompt == first.prompt
        await world.fail(again)
        assert not world.ledger.quarantined, "this was its first try that says something about the prompt"
        (third,) = await world.lease(2)
        assert third.prompt == first.prompt
        await world.fail(third)
        assert world.ledger.quarantined == {first.prompt}
        assert_journal_is_the_ledger(world)


async def test_a_step_told_twice_counts_once(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        await world.lease(4)
        message = m.StepDone(step=1, version=0, trained=(0, 1), filtered=((2, "no_signal"),))
        assert await world.ask("controller", message) == m.StepAck(False)
        await world.publish()
        before = len(world.journal)
        assert await world.ask("controller", message) == m.StepAck(False)
        assert len(world.journal) == before
        assert world.ledger.fresh_step == 1, "and the repetition does not close admission"
        assert world.ledger.summary()["trained"] == 2
        await world.restart_controller()
        assert await world.ask("controller", message) == m.StepAck(False)
        assert world.ledger.summary()["trained"] == 2


async def test_a_step_frees_the_blocks_of_its_groups(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        for grant in await world.lease(3):
            await world.push(grant)
        await world.take(2)
        await world.step([0], filtered=[1])
        await eventually(lambda: set(world.buffer.groups) == {2})
        assert world.plane.stats().ready == 1


async def test_blocks_of_a_step_are_freed_though_the_controller_died_before_it_told_the_buffer(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        for grant in await world.lease(2):
            await world.push(grant)
        await world.take(2)
        world.controller.ctx.spawn, spawn = (lambda work, name: work.close()), world.controller.ctx.spawn  # type: ignore[method-assign]
        await world.step([0], filtered=[1])
        world.controller.ctx.spawn = spawn  # type: ignore[method-assign]
        await world.restart_controller()
        await eventually(lambda: not world.buffer.groups)
        assert world.plane.stats().ready == 0


async def test_a_step_that_names_a_closed_lease_is_refused_and_trains_nothing(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(2)
        await world.fail(grants[0])
        with pytest.raises(RemoteError, match="is already failed"):
            await world.step([1, 0])
        assert world.ledger.summary()["trained"] == 0
        assert world.ledger.step == 0


async def test_a_trainer_that_starts_behind_the_journal_puts_later_leases_back_in_flight(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        for step in range(3):
            await world.lease(2)
            await world.step([2 * step, 2 * step + 1], version=step)
            await world.publish()
            if step == 0:
                await world.ask("controller", m.CheckpointDone(step=1))
        welcome = await world.ask("controller", m.TrainerStarts(step=1))
        assert welcome == m.Welcome(1, 3, 4)
        assert await world.lease(9) == (), "its weights are not out yet"
        assert await world.ask("controller", m.TrainerStarts(step=1)) == m.Welcome(1, 3, 0)
        assert await world.publish() == 4, "a version never repeats"
        again = await world.lease(9)
        assert [(g.lease, g.attempt) for g in again] == [(2, 1), (3, 1), (4, 1), (5, 1)]
        assert world.ledger.rolled_back == 4
        assert [e for e in world.journal if isinstance(e, RolledBack | Checkpointed)] == [
            Checkpointed(1),
            RolledBack(1, (2, 3, 4, 5)),
        ]
        await world.step([2, 3])
        assert_journal_is_the_ledger(world)


async def test_rebuilt_in_mid_run_the_state_is_the_same_and_work_goes_on(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(4)
        await world.push(grants[0])
        await world.push(grants[1])
        await world.fail(grants[2])
        await world.step([grants[0].lease])
        await world.publish()
        before = state_of(world.ledger)
        await world.restart_controller()
        assert state_of(world.ledger) == before
        assert isinstance(world.journal[-1], Opened)
        assert (await world.lease(1))[0].prompt == grants[2].prompt
        assert await world.take(1) == [grants[1].lease]
        assert_journal_is_the_ledger(world)


async def test_a_new_session_frees_every_lease_buffered_ones_included(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(4)
        await world.push(grants[0])
        await world.system.stop("buffer")
        await world.restart_controller("session-2")
        assert [lease.id for lease in world.ledger.waiting()] == [0, 1, 2, 3]
        assert await world.lease(4) == (), "the engines of this session have no weights yet"
        await world.start_buffer()
        assert not world.buffer.groups
        assert await world.publish() == 1
        assert [(g.lease, g.attempt) for g in await world.lease(9)] == [(i, 1) for i in range(4)]
        assert_journal_is_the_ledger(world)


async def test_a_completed_run_leaves_nothing_in_flight(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(4)
        await world.push(grants[0])
        await world.step([grants[1].lease])
        finished = m.RunFinished(status="completed")
        await world.ask("controller", finished)
        await world.ask("controller", finished)
        assert world.ledger.summary() == {
            "issued": 4, "trained": 1, "expired": 3, "filtered": 0, "failed": 0, "in_flight": 0
        }  # fmt: skip
        assert dict(world.ledger.causes["expired"]) == {"run_end": 3}
        assert not (await world.push(grants[2])).owned, "what comes late is not wanted"
        assert await world.lease(4) == ()
        assert_journal_is_the_ledger(world)


async def test_an_interrupted_run_keeps_its_leases_for_the_resume(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        await world.lease(3)
        await world.ask("controller", m.RunFinished(status="interrupted"))
        assert world.ledger.summary()["in_flight"] == 3


async def test_a_push_is_owned_once_and_only_while_its_lease_is_open(tmp_path: Path) -> None:
    async with world_of(tmp_path, buffer=False) as world:
        (grant,) = await world.lease(1)
        accept = m.AcceptGroup(meta=meta_of(grant), ref=world.sealed())
        assert await world.ask("controller", accept) == m.Accepted(True)
        before = len(world.journal)
        assert await world.ask("controller", accept) == m.Accepted(True)
        assert len(world.journal) == before
        other = await world.ask("controller", m.AcceptGroup(meta=meta_of(grant), ref=world.sealed()))
        assert (other.owned, other.why) == (False, "lease 0 was already filled by another push")
        await world.step([0])
        assert (await world.ask("controller", accept)).why == "lease 0 is closed"


async def test_a_version_is_journalled_before_it_is_told(tmp_path: Path) -> None:
    async with world_of(tmp_path, open=False) as world:
        assert (await world.ask("controller", m.NextVersion(above=world.ledger.version))).version == 0
        assert world.journal[-1] == Published(0)
        await world.restart_controller()
        assert (await world.ask("controller", m.NextVersion(above=world.ledger.version))).version == 1


async def test_a_version_whose_reply_was_lost_is_told_again(tmp_path: Path) -> None:
    async with world_of(tmp_path, open=False) as world:
        assert (await world.ask("controller", m.NextVersion(above=-1))).version == 0
        await world.restart_controller()
        assert (await world.ask("controller", m.NextVersion(above=-1))).version == 0
        assert (await world.ask("controller", m.NextVersion(above=0))).version == 1


async def test_a_trainer_that_starts_closes_admission_until_its_own_weights_are_out(tmp_path: Path) -> None:
    """It publishes the same weights anew: what is generated until then would be a version older for nothing."""
    async with world_of(tmp_path) as world:
        await world.ask("controller", m.TrainerStarts(step=0))
        assert await world.lease(4) == ()
        await world.publish()
        assert len(await world.lease(4)) == 4


async def test_fresh_engines_of_a_trainer_that_is_gone_open_nothing(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        await world.lease(2)
        await world.step([0, 1])
        await world.ask("controller", m.TrainerStarts(step=0))
        await world.ask("controller", m.EnginesFresh(version=1, step=1))
        assert await world.lease(4) == ()


async def test_status_counts_what_the_journal_counts(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(3)
        await world.push(grants[0])
        await world.rollout_dies()
        await world.lease(1, "rollout-1")
        status = await world.ask("controller", m.AskStatus())
        assert status.ledger == world.ledger.summary()
        assert status.buffered == 1
        assert sum(isinstance(event, Handed) for event in world.journal) == 1
        assert not any(isinstance(event, Stepped) for event in world.journal)
