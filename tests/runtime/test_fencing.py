"""A process that was declared dead and lives, over real sockets: whoever knows of it serves it no more, however it dials."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import ActorError, AskTimeout
from dockyard_actors.runtime.system import ActorSystem
from tests.runtime.actors import Add, Counter


async def test_a_zombie_is_not_served_by_whom_it_dials_for_the_first_time(tmp_path: Path) -> None:
    def config(name: str) -> SystemConfig:
        return SystemConfig(
            name=name, uid=name, rendezvous=f"ipc://{tmp_path}/r", registry_s=0.1, stop_s=0.1, window=2, probe_s=0.05
        )

    async with ActorSystem(SystemConfig(ipc_prefix=f"{tmp_path}/r")) as home, ActorSystem(config("server")) as server:
        counter = Counter()
        await server.start(counter, "counter")
        async with ActorSystem(config("zombie")) as zombie:
            zombie.take = lambda update: None  # it was stopped when it was told
            assert home.registry is not None
            home.registry.declare_dead("zombie", "hung")
            async with asyncio.timeout(10.0):
                while "zombie" not in server.gone:  # noqa: ASYNC110  # state of another process
                    await asyncio.sleep(0.001)
            with pytest.raises(AskTimeout):
                await zombie.ref("counter").ask(Add(), deadline_s=0.3)
            assert server.counts.fenced == 1
            # more than its window: it asks how much waits there, and is told nothing
            asks = (zombie.ref("counter").ask(Add(), deadline_s=0.5) for _ in range(5))
            assert all(isinstance(answer, ActorError) for answer in await asyncio.gather(*asks, return_exceptions=True))
            assert server.counts.fenced > 3
            assert await server.ref("counter").ask(Add()) == 1
