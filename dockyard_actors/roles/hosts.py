"""Where each host of a run has its shared memory: the node agent's side that serves it, and a role's side that finds it.

One agent a host holds the memory and says so in the registry; others on that host use it. Where the run listens on tcp it also serves
sealed blocks to other hosts. What dies with that agent is known to be lost at once. Knows no tensors and no weights.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from contextlib import AsyncExitStack
from types import TracebackType

from dockyard_actors.config import Config
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.agent import NodeAgent
from dockyard_actors.runtime.directory import Entry
from dockyard_actors.runtime.errors import ActorError, NameTaken
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import load_keys
from dockyard_actors.transport.fdclient import FdClient, FdServerGone
from dockyard_actors.transport.fdserver import FdServer
from dockyard_actors.transport.pull import HostLost, PullConfig
from dockyard_actors.transport.pull_server import PullServer
from dockyard_actors.transport.remote import RemotePlane
from dockyard_actors.transport.slab import SlabConfig, SlabPlane
from dockyard_actors.transport.tensors import DataPlaneError, WrongHost, host_id

log = logging.getLogger(__name__)

FD_PATH, PULL = "fd_path", "pull"  # what the registry keeps of a host
FIND_S = 10.0  # a lookup is one round trip to the registry; a busy host is slow to schedule it


def name_of_host(host: str) -> str:
    """Its name in the registry; it lives as long as the agent that holds the host's memory."""
    return f"host/{host}"


class Host(Actor):
    """Stands in the registry for a host's memory. It is asked nothing: what there is to know is in its entry."""


class HostMemory:
    """``async with HostMemory(agent, config) as memory``: this host's shared memory, held here or by the agent that came first.

    `fd_path` is the fd server's socket, `pull_server` what other hosts pull from (None on a run of one host, or when another agent
    serves). `FdServerGone` when that agent does not answer; `NoBackend` when `data_plane.backend` asks for what is not installed; `OSError` when nothing can be bound.
    """

    def __init__(self, agent: NodeAgent, config: Config) -> None:
        self._agent = agent
        self._config = config
        self.fd_path = ""
        self.pull_server: PullServer | None = None

    async def __aenter__(self) -> HostMemory:
        self._open = AsyncExitStack()
        known = await _entry(self._agent.system, host_id(), FIND_S)
        if known is None or not known.alive:
            try:
                await self._hold()
                return self
            except NameTaken:  # another agent of this host was a moment faster
                self.pull_server = None
                known = await _entry(self._agent.system, host_id(), FIND_S)
        if known is None:
            raise WrongHost(f"nobody serves the memory of host {host_id()}")
        self.fd_path, holder = known.meta[FD_PATH], known.meta["process"]
        try:
            await asyncio.to_thread(FdClient(self.fd_path).list_arenas)
        except FdServerGone as error:
            raise FdServerGone(
                f"process {holder} holds the memory of this host and does not answer ({error}): if it is dead, start again "
                "when the run has noticed"
            ) from None
        log.info("process %s holds the memory of this host: when it ends, the memory is gone", holder)
        return self

    async def _hold(self) -> None:
        agent = self._agent
        async with AsyncExitStack() as opened:
            fds = FdServer(agent.runtime_dir)
            await fds.start()
            opened.push_async_callback(fds.close)
            if agent.host:
                cookie = load_keys(agent.key_file).cookie
                pulls = PullServer(fds.path, cookie, pull_config(self._config, bind=f"{agent.host}:0"))
                opened.push_async_callback(asyncio.to_thread, pulls.close)
                self.pull_server = pulls
            address = self.pull_server.address if self.pull_server is not None else ""
            await agent.system.start(Host(), name_of_host(host_id()), {FD_PATH: fds.path, PULL: address})
            self.fd_path = fds.path
            self._open = opened.pop_all()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()


class Hosts:
    """A role's side: its own host's memory, and the way to that of others. `await Hosts.find(system, cookie)`.

    cookie: of the run, proves to other hosts that we are of it.
    """

    def __init__(self, system: ActorSystem, cookie: str, here: Entry) -> None:
        self._system = system
        self._cookie = cookie
        self._loop = asyncio.get_running_loop()
        self.fd_path = here.meta[FD_PATH]
        self.several = bool(here.meta[PULL])  # the run may have other hosts
        self._planes: list[RemotePlane] = []

    @classmethod
    async def find(cls, system: ActorSystem, cookie: str) -> Hosts:
        """`WrongHost` when nobody serves this host's memory, `ActorError` when the registry does not answer."""
        here = await _entry(system, host_id(), FIND_S)
        if here is None or not here.alive:
            raise WrongHost(f"no node agent of this run holds the memory of host {host_id()}")
        return cls(system, cookie, here)

    def plane(self, config: Config, owner: str, copies: bool = False) -> SlabPlane | RemotePlane:
        """The data plane of a process. copies: it produces nothing, its own blocks are for what it fetches."""
        slab = SlabConfig(
            blocks=config.data_plane.blocks, block_bytes=config.data_plane.block_bytes, outlives=not copies
        )
        local = SlabPlane(self.fd_path, owner, slab)
        if not self.several:
            return local
        self._planes.append(RemotePlane(local, self._cookie, self.server_of, pull_config(config)))
        return self._planes[-1]

    def close(self) -> None:
        """When the event loop has ended: has the last releases sent and cuts what is on its way, which would hold up the end of the
        process until its own deadline."""
        while self._planes:
            try:
                self._planes.pop().close()
            except DataPlaneError as error:
                log.warning("a data plane was not closed in order: %s", error)

    def server_of(self, host: str) -> str:
        """HOST:PORT of a host's pull server. For any thread but the event loop's. `HostLost`, `WrongHost`."""
        entry = self._system.directory.entries.get(name_of_host(host))
        if entry is None:  # news of it may be on its way still
            asking = asyncio.run_coroutine_threadsafe(_entry(self._system, host, FIND_S), self._loop)
            try:
                entry = asking.result(FIND_S)
            except (ActorError, concurrent.futures.TimeoutError) as error:
                raise WrongHost(f"the registry does not say who serves host {host}: {error}") from None
        if entry is None:
            raise WrongHost(f"nobody in this run serves host {host}")
        if not entry.alive:
            raise HostLost(f"host {host} is lost, and what lay in its memory: {entry.cause}")
        if not entry.meta[PULL]:
            raise WrongHost(f"host {host} serves no other host: its agent was given no tcp:// rendezvous")
        return entry.meta[PULL]


def pull_config(config: Config, bind: str = PullConfig.bind) -> PullConfig:
    backend = config.data_plane.backend
    assert backend != "none", "config.refusals"
    return PullConfig(backend=backend, bind=bind, transfer_s=config.data_plane.fetch_timeout_s)


async def _entry(system: ActorSystem, host: str, within_s: float) -> Entry | None:
    return await system.lookup(name_of_host(host), asyncio.get_running_loop().time() + within_s)
