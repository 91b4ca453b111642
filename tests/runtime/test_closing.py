"""However an actor system is closed, twice at once or by somebody who is cancelled meanwhile: afterwards everything is closed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.directory import ProcessRecord
from dockyard_actors.runtime.registry import Join, Joined
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import Address
from tests.runtime.actors import Add, Counter


class Lingering(Actor):
    """Takes as long to stop as it is let."""

    def __init__(self) -> None:
        self.stopping, self.go_on = asyncio.Event(), asyncio.Event()

    async def on_stop(self) -> None:
        self.stopping.set()
        await self.go_on.wait()


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[ActorSystem]:
    async with ActorSystem(SystemConfig(ipc_prefix=f"{tmp_path}/r")) as home:
        yield home


def member(tmp_path: Path) -> ActorSystem:
    return ActorSystem(SystemConfig(name="member", rendezvous=f"ipc://{tmp_path}/r", stop_s=60.0))


def place(system: ActorSystem) -> Path:
    return Path(system.config.ipc_prefix)


async def test_who_is_cancelled_while_it_closes_leaves_nothing_open(home: ActorSystem, tmp_path: Path) -> None:
    system, first, last = member(tmp_path), Lingering(), Counter()

    async def work() -> None:
        async with system:
            await system.start(last, "last to stop")
            await system.start(first, "first to stop")
            await asyncio.Event().wait()

    working = asyncio.ensure_future(work())
    async with asyncio.timeout(10.0):
        while "first to stop" not in system.cells:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert await home.ref("last to stop").ask(Add(), retry=True) == 1  # it has a task now
        assert place(system).exists()
        working.cancel()
        await first.stopping.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert not place(system).exists()
        await system.close()  # which is done
        while any(task.get_name().startswith("last to stop") for task in asyncio.all_tasks()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_whoever_closes_returns_when_it_is_closed(home: ActorSystem, tmp_path: Path) -> None:
    system, actor = member(tmp_path), Lingering()
    await system.__aenter__()
    await system.start(actor, "a")
    closing = [asyncio.ensure_future(system.close()) for _ in range(2)]
    await actor.stopping.wait()
    assert not any(close.done() for close in closing)
    actor.go_on.set()
    for close in asyncio.as_completed(closing):
        await close
        assert not place(system).exists()
    assert home.registry is not None
    assert system.config.uid not in home.registry.processes, "it said goodbye"


async def test_a_registry_that_is_closed_in_a_hurry_watches_nobody_any_longer(tmp_path: Path) -> None:
    system, actor = ActorSystem(SystemConfig(ipc_prefix=f"{tmp_path}/r", stop_s=60.0)), Lingering()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        await system.__aenter__()
        assert system.registry is not None
        host = system.transport.address.host
        record = ProcessRecord("other", "other", other.pid, host, Address(host, f"{tmp_path}/other"))
        assert isinstance(await system.registry.join(Join(process=record)), Joined)
        await system.start(actor, "a")
        closing = asyncio.ensure_future(system.close())
        await actor.stopping.wait()
        for _ in range(3):
            closing.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await closing
        # the descriptors of its watches are looked for after the test
        other.communicate(b"\n")
