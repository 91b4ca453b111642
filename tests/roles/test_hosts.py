"""Who holds a host's memory, and what a role finds of it. `test_hosts_netns` has a run over two hosts."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dockyard_actors.roles import hosts as hosts_module
from dockyard_actors.roles.hosts import Host, HostMemory, Hosts, name_of_host
from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import load_keys
from dockyard_actors.transport.fdclient import FdServerGone
from dockyard_actors.transport.pull import HostLost, PeerLost, PeerUnreachable, PullConfig
from dockyard_actors.transport.remote import RemotePlane
from dockyard_actors.transport.slab import SlabPlane
from dockyard_actors.transport.tensors import DataPlaneError, TensorRef, WrongHost, host_id, lay_out
from tests.roles.world import PATIENCE_S, config_of

CONFIG = config_of("data_plane.backend=tcp")
TCP = AgentConfig(listen="tcp://127.0.0.1:0")


@asynccontextmanager
async def role_of(agent: NodeAgent) -> AsyncIterator[tuple[ActorSystem, Hosts]]:
    """What a role process does."""
    settings = SystemConfig(name="role", agent=agent.uid, rendezvous=agent.rendezvous, key_file=agent.key_file)
    async with ActorSystem(settings) as system:
        yield system, await Hosts.find(system, load_keys(agent.key_file).cookie)


async def test_a_run_of_one_host_shares_memory_and_serves_nobody_else() -> None:
    async with NodeAgent() as agent, HostMemory(agent, CONFIG) as memory, role_of(agent) as (_, hosts):
        assert memory.pull_server is None
        assert hosts.fd_path == memory.fd_path
        plane = hosts.plane(CONFIG, "me")
        assert isinstance(plane, SlabPlane)
        plane.close()
        with pytest.raises(WrongHost, match=r"serves no other host: its agent was given no tcp:// rendezvous"):
            await asyncio.to_thread(hosts.server_of, host_id())


async def test_where_others_may_join_blocks_are_served_and_every_plane_can_pull() -> None:
    async with NodeAgent(TCP) as agent, HostMemory(agent, CONFIG) as memory, role_of(agent) as (_, hosts):
        assert memory.pull_server is not None
        assert await asyncio.to_thread(hosts.server_of, host_id()) == memory.pull_server.address
        plane = hosts.plane(CONFIG, "me")
        assert isinstance(plane, RemotePlane)
        await asyncio.to_thread(plane.close)


async def test_an_unknown_host_is_told_apart_from_one_that_is_lost() -> None:
    async with NodeAgent(TCP) as agent, HostMemory(agent, CONFIG), role_of(agent) as (system, hosts):
        with pytest.raises(WrongHost, match="nobody in this run serves host elsewhere"):
            await asyncio.to_thread(hosts.server_of, "elsewhere")
        there = {hosts_module.FD_PATH: "", hosts_module.PULL: "192.0.2.1:1"}
        await agent.system.start(Host(), name_of_host("elsewhere"), there)
        system.directory.entries.pop(name_of_host("elsewhere"), None)  # as if the news were on its way still
        assert await asyncio.to_thread(hosts.server_of, "elsewhere") == "192.0.2.1:1"
        assert agent.system.registry is not None
        await agent.system.stop("host/elsewhere", "its cable was cut")
        watched = system.directory
        async with asyncio.timeout(10):
            while watched.alive(name_of_host("elsewhere")) is not None:
                await system.lookup(name_of_host("elsewhere"), asyncio.get_running_loop().time() + 10)
        with pytest.raises(HostLost, match=r"host elsewhere is lost, .*: its cable was cut"):
            await asyncio.to_thread(hosts.server_of, "elsewhere")


async def test_a_second_agent_of_a_host_uses_the_memory_of_the_first() -> None:
    async with NodeAgent() as agent, HostMemory(agent, CONFIG) as memory:
        settings = AgentConfig(name="second", rendezvous=agent.rendezvous)
        async with NodeAgent(settings) as second, HostMemory(second, CONFIG) as same:
            assert (same.fd_path, same.pull_server) == (memory.fd_path, None)
        SlabPlane(memory.fd_path, "me").close()  # the first still serves


async def test_two_agents_that_start_at_once_agree_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with NodeAgent() as agent:
        settings = AgentConfig(name="second", rendezvous=agent.rendezvous)
        async with NodeAgent(settings) as second, HostMemory(agent, CONFIG) as memory:
            looked, asked = hosts_module._entry, []

            async def late(*arguments):
                asked.append(arguments)
                return None if len(asked) == 1 else await looked(*arguments)

            monkeypatch.setattr(hosts_module, "_entry", late)
            async with HostMemory(second, CONFIG) as same:
                assert (same.fd_path, len(asked)) == (memory.fd_path, 2)
            assert not list(Path(second.runtime_dir).glob("fds.sock*"))


async def test_memory_whose_holder_does_not_answer_is_said() -> None:
    async with NodeAgent() as agent:
        await agent.system.start(Host(), name_of_host(host_id()), {"fd_path": "/nowhere", "pull": ""})
        with pytest.raises(FdServerGone, match="process agent holds the memory of this host and does not answer"):
            async with HostMemory(agent, CONFIG):
                pass


async def test_a_role_without_an_agent_that_holds_memory_is_refused() -> None:
    async with NodeAgent() as agent:
        with pytest.raises(WrongHost, match="no node agent of this run holds the memory"):
            async with role_of(agent):
                pass


async def test_the_end_of_a_role_cuts_what_is_on_its_way() -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, in the kernel, and says nothing
    address = "{}:{}".format(*silent.getsockname())
    async with NodeAgent(TCP) as agent, HostMemory(agent, CONFIG), role_of(agent) as (_, hosts):
        there = {hosts_module.FD_PATH: "", hosts_module.PULL: address}
        await agent.system.start(Host(), name_of_host("elsewhere"), there)
        specs, nbytes = lay_out({"x": ("uint8", (100,))})
        plane = hosts.plane(CONFIG, "me", copies=True)
        ref = TensorRef("arena", 0, 1, nbytes, specs, 0, "elsewhere", "")
        fetching = asyncio.create_task(plane.fetch([ref], 10 * PATIENCE_S))
        assert (await asyncio.to_thread(select.select, [silent], [], [], PATIENCE_S))[0]
        started = time.monotonic()
        await asyncio.to_thread(hosts.close)
        with pytest.raises((PeerLost, PeerUnreachable)):
            await fetching
        assert time.monotonic() - started < PullConfig.handshake_s
        with pytest.raises(DataPlaneError, match="is closed"):
            plane.release(ref)
    silent.close()
