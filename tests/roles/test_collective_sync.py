"""A collective delivery costs only those who spoil it: the others have the version, and nobody waits for who will not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from dockyard_actors.roles import messages as m
from dockyard_actors.roles.synchronizer import WeightSyncFailed, WeightSynchronizer
from dockyard_actors.roles.weight_routes import Collective, Kind
from dockyard_actors.roles.weight_source import digest_of
from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.tensors import checksum
from dockyard_actors.transport.weights_collective import CollectiveReceiver, CollectiveSender
from dockyard_actors.transport.weights_shm import WeightManifest
from tests.roles.world import PATIENCE_S, eventually

TIMEOUT_S = 4 * PATIENCE_S  # nobody waits for it: the tests would not end in time
SHAPES = {"embed": ("float32", (64, 16)), "head": ("bfloat16", (33,))}


class Engine(Actor):
    """Test only: takes weights as an engine does, in a thread, and can be told to spoil it."""

    def __init__(self, spoil: Callable[[m.Invitation], None] = lambda offer: None, flip: int = 0) -> None:
        self.spoil, self.flip = spoil, flip
        self.taken: list[int] = []
        self.receiver = CollectiveReceiver()

    @concurrent
    async def update(self, msg: m.UpdateWeights) -> m.Applied:
        assert isinstance(msg.offer, m.Invitation)
        self.spoil(msg.offer)
        sums = await asyncio.to_thread(self._take, msg.offer)
        self.taken.append(msg.offer.version)
        return m.Applied(msg.offer.version, digest_of(sums) ^ self.flip)

    def _take(self, offer: m.Invitation) -> list[int]:
        arrays = self.receiver.receive(offer.meeting, offer.manifest, offer.version)
        return [checksum(array) for _, array in arrays]


class Owner:
    """Test only: stands for the trainer: its context, compute thread and parameters."""

    def __init__(self, system: ActorSystem, members: list[str]) -> None:
        self.system = system
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.parameters = {name: torch.randn(shape) for name, (_, shape) in SHAPES.items()}
        self.live = True
        self.newer = False  # the parameters are already those of the next version, which is not prepared yet
        self.tasks: list[asyncio.Task[Any]] = []
        self.sync = WeightSynchronizer(
            self,  # type: ignore[arg-type]
            members,
            self._make,
            self._compute,
            lambda version: self.live and not (self.newer and version == 0),
            TIMEOUT_S,
            transport="collective",
        )

    def ref(self, name: str) -> Any:
        return self.system.ref(name)

    def spawn(self, work: Any, name: str) -> None:
        self.tasks.append(asyncio.create_task(work, name=name))

    def _make(self, kind: Kind) -> Collective:
        sender = CollectiveSender(WeightManifest.of(SHAPES), "127.0.0.1", bucket_bytes=1024, timeout_s=TIMEOUT_S)
        return Collective(sender, lambda: iter(self.parameters.items()))

    async def _compute(self, function: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)

    async def deliver(self, version: int) -> tuple[str, ...]:
        await self.sync.prepare(version)
        return (await self.sync.sync_weights(version)).failed


@asynccontextmanager
async def owning(*engines: Engine) -> AsyncIterator[tuple[Owner, ActorSystem]]:
    async with asyncio.timeout(PATIENCE_S), ActorSystem() as system:
        for index, engine in enumerate(engines):
            await system.start(engine, f"rollout-{index}")
        owner = Owner(system, [f"rollout-{index}" for index in range(len(engines))])
        try:
            yield owner, system
        finally:
            owner.sync.shutdown()
            for engine in engines:
                engine.receiver.close()
            await asyncio.gather(*owner.tasks, return_exceptions=True)
            owner.thread.shutdown()


def refuse(offer: m.Invitation) -> None:
    raise ValueError("the model has no head")


async def test_all_have_it_and_the_parameters_may_change_once_it_is_sent() -> None:
    engines = Engine(), Engine(), Engine()
    async with owning(*engines) as (owner, _):
        for version in range(3):
            assert await owner.deliver(version) == ()
            assert owner.sync.sent.is_set()
        assert [engine.taken for engine in engines] == [[0, 1, 2]] * 3


async def test_who_refuses_at_once_is_left_out_and_the_others_do_not_wait_for_it() -> None:
    engines = Engine(), Engine(refuse), Engine()
    async with owning(*engines) as (owner, _):
        assert await owner.deliver(0) == ("rollout-1",)
        assert await owner.deliver(1) == ()
        assert [engine.taken for engine in engines] == [[0, 1], [], [0, 1]]


async def test_who_read_other_bytes_is_left_out() -> None:
    async with owning(Engine(), Engine(flip=1)) as (owner, _):
        assert await owner.deliver(0) == ("rollout-1",)


async def test_nobody_left_is_an_error_on_both_sides() -> None:
    async with owning(Engine(refuse)) as (owner, _):
        await owner.sync.prepare(0)
        with pytest.raises(WeightSyncFailed, match="the model has no head"):
            await owner.sync.sync_weights(0)
        assert owner.sync.is_stale
        assert owner.sync.sent.is_set(), "nobody reads the parameters any more"


async def test_who_comes_late_is_sent_the_present_version() -> None:
    late = Engine()
    async with owning(Engine()) as (owner, system):
        await owner.deliver(0)
        await system.start(late, "rollout-7")
        try:
            assert await owner.sync.current("rollout-7") == m.NoWeights(), "it is pushed"
            await eventually(lambda: late.taken == [0])
            assert await owner.deliver(1) == ()
            assert late.taken == [0, 1]
        finally:
            late.receiver.close()


async def test_who_comes_while_the_parameters_change_gets_the_next_version() -> None:
    late = Engine()
    async with owning(Engine()) as (owner, system):
        await owner.deliver(0)
        owner.live = False
        await system.start(late, "rollout-7")
        try:
            assert await owner.sync.current("rollout-7") == m.NoWeights()
            await asyncio.gather(*owner.tasks)
            assert late.taken == []
            owner.live = True
            assert await owner.deliver(1) == ()
            assert late.taken == [1]
        finally:
            late.receiver.close()


async def test_newer_parameters_never_go_under_an_older_number() -> None:
    late = Engine()
    async with owning(Engine()) as (owner, system):
        await owner.deliver(0)
        owner.newer = True
        await system.start(late, "rollout-7")
        try:
            assert await owner.sync.current("rollout-7") == m.NoWeights()
            await asyncio.gather(*owner.tasks)
            assert late.taken == []
            assert await owner.deliver(1) == ()
            assert late.taken == [1]
        finally:
            late.receiver.close()
