"""Fresh means: every engine that still counts has said so, with the digest of the bytes it read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from dockyard_actors.roles import messages as m
from dockyard_actors.roles.synchronizer import Synced, WeightSyncFailed, WeightSynchronizer
from dockyard_actors.roles.weight_routes import RouteError, SharedMemory, choose
from dockyard_actors.roles.weight_source import digest_of
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.weights_shm import WeightRef
from tests.roles.world import eventually


class ScriptedPublisher:
    """Test only: two slots that are numbers in memory; refuses a third version while two are held, as the real one does."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.dropped = 0
        self.closed = False

    def slot(self, version: int) -> dict[str, np.ndarray]:
        assert len(self.held) < 2, f"version {version} finds both slots held by {self.held}"
        self.array = np.zeros(1)
        return {"w": self.array}

    def publish(self, version: int) -> WeightRef:
        self.held.append(version)
        return WeightRef("arena", version % 2, version, version, (int(self.array[0]),), "host", "/nowhere")

    def release(self, version: int) -> bool:
        self.held.remove(version)
        return True

    def drop_predecessors(self) -> int:
        self.dropped += 1
        return 0

    def close(self) -> None:
        self.closed = True


class Member(Actor):
    """Test only: a rollout that answers weights with what `answer` returns."""

    def __init__(self, answer: Callable[[WeightRef], m.Applied] | None = None):
        self.answer = answer or (lambda ref: m.Applied(ref.version, digest_of(ref.checksums)))
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[int] = []

    async def update(self, msg: m.UpdateWeights) -> m.Applied:
        self.asked.append(msg.offer.version)
        await self.gate.wait()
        assert isinstance(msg.offer, WeightRef)
        return self.answer(msg.offer)


def wrong_digest(ref: WeightRef) -> m.Applied:
    return m.Applied(ref.version, digest_of(ref.checksums) ^ 1)


def wrong_version(ref: WeightRef) -> m.Applied:
    return m.Applied(ref.version - 1, digest_of(ref.checksums))


def broken(ref: WeightRef) -> m.Applied:
    raise ValueError("checksum of layer 3")


@asynccontextmanager
async def syncing(*members: Member | None, timeout_s: float = 15.0) -> AsyncIterator[Any]:
    """A synchronizer and its members; None is one that never comes up."""
    async with ActorSystem() as system:
        names = [f"rollout-{i}" for i in range(len(members))]
        for name, member in zip(names, members, strict=True):
            if member is not None:
                await system.start(member, name)
        publisher = ScriptedPublisher()
        sync = Syncing(system, publisher, names, timeout_s)
        yield sync, publisher
        for member in members:
            if member is not None:
                member.gate.set()


class Syncing(WeightSynchronizer):
    """Test only: versions of one number, in shared memory; what would be computed in the trainer's thread is computed here."""

    def __init__(self, system: ActorSystem, publisher: ScriptedPublisher, names: list[str], timeout_s: float) -> None:
        def write(buffers: Mapping[str, np.ndarray]) -> None:
            buffers["w"].fill(float(len(publisher.held)))

        async def compute(function: Callable[..., Any], *args: object) -> Any:
            return function(*args)

        def make(kind: str) -> SharedMemory:
            assert kind == "shm"
            return SharedMemory(publisher, write)  # type: ignore[arg-type]

        super().__init__(system, names, make, compute, lambda version: True, timeout_s)  # type: ignore[arg-type]

    async def deliver(self, version: int) -> Synced:
        await self.prepare(version)
        return await self.sync_weights(version)


async def test_it_starts_stale_with_nothing_to_load() -> None:
    async with syncing(Member()) as (sync, _):
        assert sync.is_stale
        assert await sync.current("rollout-0") == m.NoWeights()


async def test_it_is_fresh_only_when_every_member_has_acknowledged() -> None:
    slow = Member()
    slow.gate.clear()
    async with syncing(Member(), slow) as (sync, _):
        running = asyncio.ensure_future(sync.deliver(0))
        await eventually(lambda: slow.asked)
        assert sync.is_stale
        offered = await sync.current("rollout-0")
        assert isinstance(offered, m.Weights)
        assert offered.offer.version == 0, "who joins now loads what is being sent"
        slow.gate.set()
        assert (await running).failed == ()
        assert not sync.is_stale


@pytest.mark.parametrize("answer", [wrong_digest, wrong_version, broken])
async def test_a_member_with_a_wrong_answer_is_left_out(answer: Callable[[WeightRef], m.Applied]) -> None:
    async with syncing(Member(), Member(answer)) as (sync, _):
        assert (await sync.deliver(0)).failed == ("rollout-1",)
        assert not sync.is_stale


async def test_a_member_that_does_not_answer_in_time_is_removed_and_joins_again_by_pulling() -> None:
    slow = Member()
    slow.gate.clear()
    async with syncing(slow, Member(), timeout_s=0.2) as (sync, _):
        assert (await sync.deliver(0)).failed == ("rollout-0",)
        slow.gate.set()
        assert (await sync.deliver(1)).failed == ()
        assert slow.asked == [0], "nobody waits for it"
        assert (await sync.current("rollout-0")).offer.version == 1
        assert (await sync.deliver(2)).failed == ()
        assert slow.asked == [0, 2]


@pytest.mark.parametrize("members", [(None,), (Member(wrong_digest), None)], ids=["absent", "wrong and absent"])
async def test_no_member_left_is_an_error_and_everything_stays_stale(members: tuple[Member | None, ...]) -> None:
    async with syncing(*members, timeout_s=0.2) as (sync, publisher):
        with pytest.raises(WeightSyncFailed, match=r"took weights version 0 .*weight_sync\.timeout_s"):
            await sync.deliver(0)
        assert sync.is_stale
        assert publisher.held == [0], "an engine that restarts may still load them"


async def test_the_slot_of_the_last_version_is_released_once_the_next_arrived() -> None:
    async with syncing(Member()) as (sync, publisher):
        for version in range(5):
            sync.mark_stale()
            await sync.prepare(version)
            assert sync.is_stale
            assert publisher.held == [version - 1, version][version == 0 :]
            await sync.sync_weights(version)
            assert publisher.held == [version]
        assert publisher.dropped == 5


async def test_the_digest_tells_entries_and_their_order_apart() -> None:
    assert len({digest_of((1, 2)), digest_of((2, 1)), digest_of((1, 3)), digest_of((1,))}) == 4
    assert digest_of((1, 2)) == digest_of(n for n in (1, 2))


async def test_shutdown_closes_the_publisher() -> None:
    async with syncing(Member()) as (sync, publisher):
        await sync.deliver(0)
        sync.shutdown()
        assert publisher.closed


@pytest.mark.parametrize(
    ("configured", "host", "kind"),
    [
        ("auto", "here", "shm"),
        ("auto", "there", "collective"),
        ("shm", "here", "shm"),
        ("collective", "here", "collective"),
    ],
)
def test_the_way_is_chosen_by_where_an_engine_is_unless_it_is_configured(configured: Any, host: str, kind: str) -> None:
    choice = choose(configured, "rollout-0", host, "here")
    assert choice.kind == kind
    assert choice.reason


def test_shared_memory_to_another_host_is_refused() -> None:
    with pytest.raises(RouteError, match=r"'shm' cannot reach rollout-0.* set it to auto or collective"):
        choose("shm", "rollout-0", "there", "here")
