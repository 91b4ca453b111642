"""A primary node agent that is killed and started again with its old keys: the secondary's processes are part of the run again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.supervision import ListProcesses, Shutdown
from dockyard_actors.runtime.system import ActorSystem
from tests.runtime.actors import Add, Block, Open, Pid
from tests.runtime.test_agents import UP_S, alive, eventually, launch

__all__ = ["launch"]


async def test_a_secondarys_processes_live_on_without_their_primary_and_join_the_next_one(
    launch, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    primary = await launch(roles=["near"], listen="tcp://127.0.0.1:0", key_file=str(keys))
    address = primary.ready["rendezvous"]
    secondary = await launch(
        name="host2", rendezvous=address, roles=["far", "also"], key_file=str(keys), registry_lost_s=UP_S
    )
    far, also = secondary.ready["pids"]

    def config() -> SystemConfig:
        return SystemConfig(name="view", rendezvous=address, key_file=keys)

    async with ActorSystem(config()) as view:
        membership = view.membership
        assert membership is not None
        assert await view.ref("far").ask(Add()) == 1
        pending = asyncio.ensure_future(view.ref("far").ask(Block(), deadline_s=UP_S))
        near = asyncio.ensure_future(view.ref("near").ask(Block(), deadline_s=UP_S))
        os.kill(primary.process.pid, signal.SIGKILL)
        await asyncio.wait((near,))
        assert "its node agent is gone" in str(near.exception())
        await eventually(lambda: membership.down)
        assert await view.ref("far").ask(Add()) == 2
        os.kill(also, signal.SIGKILL)  # its agent restarts it; the new one joins when there is a registry
        again = await launch(roles=["near"], listen=address, key_file=str(keys), settle_s=UP_S)
        await eventually(lambda: not membership.down)
        assert await view.ref("far").ask(Add()) == 3
        await view.ref("far").ask(Open())
        await pending
        async with ActorSystem(config()) as late:
            assert await late.ref("far").ask(Pid(), retry=True) == far
            assert await late.ref("near").ask(Pid(), retry=True) == again.ready["pids"][0]
            assert await late.ref("also").ask(Pid(), retry=True, deadline_s=UP_S) != also
            assert {n: late.directory.entries[n].incarnation for n in ("far", "also", "near", "agent")} == {
                "far": 1,
                "also": 2,
                "near": 2,
                "agent": 2,
            }
            processes = await late.ref("agent/host2").ask(ListProcesses())
            assert [(p.name, p.state, p.restarts) for p in processes.processes] == [
                ("far", "running", 0),
                ("also", "running", 1),
            ]
        await view.ref("agent").ask(Shutdown(reason="the test is over"))
    assert (await again.end())[0] == 0
    assert (await secondary.end())[0] == 0
    assert not alive([far, also])
