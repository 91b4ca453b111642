"""The buffer's promises: acknowledged means owned, age is enforced at the taking, and nothing is lost with a process."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from dockyard_actors.roles import messages as m
from dockyard_actors.roles.buffer import Held, choose
from dockyard_actors.roles.ledger import Buffered
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.errors import RemoteError
from dockyard_actors.transport.plane import StaleRef
from dockyard_actors.transport.tensors import TensorRef
from tests.roles.world import eventually, meta_of, world_of

REF = TensorRef("arena", 0, 1, 64, (), 0, "host", "/nowhere")


def held(lease: int, version: int) -> Held:
    return Held(meta_of(m.Granted(lease, f"p{lease}", 0, 1), version), REF)


def test_the_oldest_versions_are_chosen_first_and_come_in_the_order_of_their_leases() -> None:
    groups = [held(0, 5), held(1, 3), held(2, 4), held(3, 3), held(4, 4)]
    for seed in range(20):
        random.Random(seed).shuffle(groups)
        assert [h.meta.lease for h in choose(groups, 3)] == [1, 2, 3]
        assert [h.meta.lease for h in choose(groups, 4)] == [1, 2, 3, 4]


async def test_a_push_is_acknowledged_only_after_the_journal_has_it(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        (grant,) = await world.lease(1)
        assert await world.push(grant) == m.Pushed(True)
        event = world.journal[-1]
        assert isinstance(event, Buffered)
        assert event.meta == world.buffer.groups[grant.lease].meta


async def test_a_push_is_not_acknowledged_while_the_controller_is_away(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        (grant,) = await world.lease(1)
        await world.system.stop("controller")
        push = asyncio.ensure_future(world.push(grant))
        await eventually(lambda: any(wait.message == "AcceptGroup" for wait in world.system.waits()))
        assert not push.done()
        assert not world.buffer.groups
        await world.start_controller()
        assert await push == m.Pushed(True)


async def test_a_repeated_push_is_harmless(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        (grant,) = await world.lease(1)
        message = m.PushGroup(meta=meta_of(grant), ref=world.sealed())
        replies = await asyncio.gather(*(world.ask("buffer", message) for _ in range(4)))
        assert replies == [m.Pushed(True)] * 4
        assert sum(isinstance(event, Buffered) for event in world.journal) == 1
        assert await world.take(1) == [grant.lease]
        assert await world.ask("buffer", message) == m.Pushed(True)
        assert await world.take(1) == [], "a repeated push brings no group back that was taken"


async def test_a_group_whose_lease_is_closed_is_not_wanted(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        (grant,) = await world.lease(1)
        await world.fail(grant)
        assert await world.push(grant) == m.Pushed(False, "lease 0 is closed")
        assert not world.buffer.groups


async def test_a_batch_is_given_only_when_it_is_whole(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(2)
        await world.push(grants[0])
        reply = await world.ask("buffer", m.TakeGroups(count=2, version=0, max_age=1, wait_s=0.0))
        assert reply == m.Batch((), 1)
        waiting = asyncio.ensure_future(world.take(2, wait_s=15.0))
        await world.push(grants[1])
        assert await waiting == [0, 1]


async def test_a_group_too_old_at_the_taking_is_expired_counted_and_its_block_freed(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(3)
        refs = [world.sealed() for _ in grants]
        for grant, ref, version in zip(grants, refs, (0, 1, 2), strict=True):
            await world.ask("buffer", m.PushGroup(meta=meta_of(grant, version), ref=ref))
        assert await world.take(2, version=2, max_age=1) == [1, 2], "an age of exactly max_age may be trained"
        assert dict(world.ledger.causes["expired"]) == {"too_old": 1}
        with pytest.raises(StaleRef):
            world.plane.get(refs[0])
        assert world.plane.stats().ready == 2
        assert len(await world.lease(9)) == 2, "the place it had in the budget is free again"


async def test_what_grows_too_old_while_the_trainer_waits_for_more_is_expired_at_the_next_taking(
    tmp_path: Path,
) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(2)
        await world.push(grants[0], version=0)
        assert await world.take(2, version=1, max_age=1) == []
        await world.push(grants[1], version=2)
        assert await world.take(2, version=2, max_age=1) == []
        assert world.ledger.summary()["expired"] == 1
        assert await world.take(1, version=2, max_age=1) == [1]


async def test_sync_trains_nothing_but_the_present_version(tmp_path: Path) -> None:
    async with world_of(tmp_path, "grpo.mode=sync") as world:
        grants = await world.lease(2)
        await world.push(grants[0], version=0)
        await world.push(grants[1], version=1)
        assert await world.take(1, version=1, max_age=0) == [1]
        assert world.ledger.leases[0].state == "expired"


async def test_two_takings_never_get_the_same_group(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        for grant in await world.lease(4):
            await world.push(grant)
        batches = await asyncio.gather(*(world.take(2) for _ in range(3)))
        assert sorted(batches) == [[], [0, 1], [2, 3]]


async def test_a_dead_trainers_groups_come_back(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        for grant in await world.lease(3):
            await world.push(grant)
        assert await world.take(2) == [0, 1]
        await world.trainer_dies()
        assert await world.take(2) == [0, 1]


async def test_of_a_dead_trainers_groups_those_that_the_journal_closed_do_not_come_back(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        for grant in await world.lease(4):
            await world.push(grant)
        await world.take(2)
        world.controller._after_step = lambda step, leases: asyncio.sleep(0)  # type: ignore[method-assign]  # it dies before
        await world.step([0], filtered=[1])
        await world.trainer_dies()
        assert world.plane.stats().ready == 2
        assert await world.take(2) == [2, 3]


async def test_a_dead_trainer_that_still_waits_for_a_batch_gets_none(tmp_path: Path) -> None:
    """Nobody would train or return those groups, and with the budget used up the run would stand still."""
    async with world_of(tmp_path, "grpo.mode=sync") as world:
        grants = await world.lease(2)
        waiting = asyncio.ensure_future(world.take(2, wait_s=0.5))
        await world.push(grants[0])
        await world.trainer_dies()
        await world.push(grants[1])
        assert await waiting == []
        assert await world.take(2) == [0, 1]


async def test_what_the_next_trainer_took_already_is_not_given_twice(tmp_path: Path) -> None:
    """The buffer asks a controller that is being restarted what is open; meanwhile the next trainer takes its first batch."""
    async with world_of(tmp_path) as world:
        for grant in await world.lease(4):
            await world.push(grant)
        assert await world.take(2) == [0, 1]
        await world.system.stop("controller")
        death = asyncio.ensure_future(world.trainer_dies())
        await eventually(lambda: any(wait.message == "ReconcileBuffer" for wait in world.system.waits()))
        assert await world.take(2) == [2, 3]
        await world.start_controller()
        await death
        assert await world.take(4) == []
        assert await world.take(2) == [0, 1]


async def test_a_restarted_buffer_takes_back_every_open_group_from_the_journal(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(4)
        for grant in grants[:3]:
            await world.push(grant)
        await world.take(1)
        await world.step([0])
        await eventually(lambda: 0 not in world.buffer.groups)
        await world.restart_buffer()
        assert sorted(world.buffer.groups) == [1, 2]
        batch = await world.ask("buffer", m.TakeGroups(count=2, version=0, max_age=1, wait_s=0.0))
        for group in batch.groups:
            with world.plane.get(group.ref, verify=True) as fields:
                assert fields["tokens"].tolist() == [[1] * 3] * 2
        assert await world.push(grants[3]) == m.Pushed(True)


async def test_releasing_twice_frees_once(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        for grant in await world.lease(2):
            await world.push(grant)
        await world.step([0])
        for _ in range(2):
            await world.ask("buffer", m.ReleaseGroups((0, 7)))
            assert world.plane.stats().ready == 1


async def test_a_release_that_comes_after_a_rollback_drops_nothing_that_was_pushed_anew(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        (grant,) = await world.lease(1)
        await world.push(grant)
        await world.step([grant.lease])
        await eventually(lambda: not world.buffer.groups)
        await world.ask("controller", m.TrainerStarts(step=0))
        await world.publish()
        (again,) = await world.lease(1, working=())
        assert again.lease == grant.lease
        await world.push(again)
        await world.ask("buffer", m.ReleaseGroups((grant.lease,)))
        assert list(world.buffer.groups) == [grant.lease]


async def test_a_group_that_comes_while_older_ones_are_closed_is_not_too_old_either(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(3)
        await world.push(grants[0])
        close = world.controller.close_lease

        async def meanwhile(msg: m.CloseLease) -> m.LeaseIs:
            for grant, version in ((grants[1], 0), (grants[2], 2)):
                world.buffer.groups[grant.lease] = Held(meta_of(grant, version), world.sealed())
            return await close(msg)

        world.controller.close_lease = meanwhile
        assert await world.take(1, version=2, max_age=1) == [grants[2].lease]


async def test_a_lost_answer_of_the_journal_brings_nothing_back_that_a_living_trainer_holds(tmp_path: Path) -> None:
    async with world_of(tmp_path, "supervision.start_timeout_s=0.3") as world:
        grants = await world.lease(3)
        for grant in grants[:2]:
            await world.push(grant)
        assert await world.take(2) == [0, 1]
        accept, gate = world.controller.accept, asyncio.Event()

        async def late(msg: m.AcceptGroup) -> m.Accepted:
            reply = await accept(msg)
            await gate.wait()
            return reply

        world.controller.accept = late  # type: ignore[method-assign]
        push = asyncio.ensure_future(world.push(grants[2]))
        await eventually(lambda: any(wait.message == "ReconcileBuffer" for wait in world.system.waits()))
        gate.set()
        assert await push == m.Pushed(True), "the journal has it"
        assert sorted(world.buffer.groups) == [0, 1, 2]
        assert await world.take(3) == []
        assert await world.take(1) == [2]


class GivingUpController(Actor):
    """Test only: takes its time to accept a group."""

    def __init__(self) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()
        self.accepted: list[m.OpenGroup] = []

    async def reconcile(self, msg: m.ReconcileBuffer) -> m.OpenGroups:
        return m.OpenGroups(())

    async def report_role(self, msg: m.ReportRole) -> m.Done:
        return m.Done()

    async def accept(self, msg: m.AcceptGroup) -> m.Accepted:
        self.asked.set()
        await self.answer.wait()
        self.accepted.append(m.OpenGroup(msg.meta, msg.ref))
        return m.Accepted(True)


async def test_a_group_that_the_journal_owns_is_held_though_its_pusher_gave_up_waiting(tmp_path: Path) -> None:
    async with world_of(tmp_path, buffer=False) as world:
        (grant,) = await world.lease(1)
        await world.system.stop("controller")
        controller = GivingUpController()
        await world.system.start(controller, "controller")
        await world.start_buffer()
        push = asyncio.ensure_future(world.push(grant))
        await controller.asked.wait()
        push.cancel()
        await asyncio.gather(push, return_exceptions=True)
        controller.answer.set()
        await eventually(lambda: controller.accepted)
        await eventually(lambda: grant.lease in world.buffer.groups)


async def test_a_refusal_of_the_journal_is_the_pushers_to_know(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        (grant,) = await world.lease(1)

        def full() -> None:
            raise OSError(28, "No space left on device")

        world.controller._commit = full  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match="No space left on device"):
            await world.push(grant)
        assert not world.buffer.groups
        del world.controller._commit


async def test_a_restarted_buffer_gives_no_group_twice_that_a_living_trainer_holds(tmp_path: Path) -> None:
    """The trainer holds the batch that it trains and the one that it asked for meanwhile; the journal knows of neither."""
    async with world_of(tmp_path, "async_grpo.max_trajectory_age_steps=2") as world:
        for grant in await world.lease(6):
            await world.push(grant)
        first = await world.take(2)
        second = await world.take(2, holding=tuple(first))
        await world.restart_buffer()
        third = await world.take(2, holding=(*first, *second))
        assert sorted([*first, *second, *third]) == [0, 1, 2, 3, 4, 5]
        assert await world.take(2, version=9, holding=(*first, *second, *third)) == []
        assert world.ledger.summary()["expired"] == 0, "what is held is not expired either"


async def test_the_late_question_of_a_dead_trainer_takes_nothing(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        for grant in await world.lease(4):
            await world.push(grant)
        await world.trainer_dies()
        late = m.TakeGroups(count=2, version=0, max_age=1, wait_s=0.0, incarnation=1, holding=(0, 1, 2, 3))
        assert await world.ask("buffer", late) == m.Batch((), 0)
        assert await world.take(4) == [0, 1, 2, 3]
