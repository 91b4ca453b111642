"""Two real processes and a network between them that misbehaves (encrypted tcp through a proxy): every ask ends with a reply or the right
error within its deadline, and nothing is done twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import AskTimeout
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.ref import Ref
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import Address, Peer, create_keys
from tests.faults.runtime.proxy import Proxy, Weather
from tests.runtime.actors import Add, Lump, Note, Seen, Total, Urgent

PATIENCE_S = 30.0  # a hang guard


@dataclass
class Link:
    """The client's side of the link: its system, a ref to the actor at the other end, and what is between them."""

    system: ActorSystem
    ref: Ref
    weather: Weather
    proxies: list[Proxy]
    server: int  # pid

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.cut()


@pytest.fixture
async def linked(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Link]]]:
    async with asyncio.timeout(4 * PATIENCE_S), _linked(tmp_path) as link:
        yield link


@asynccontextmanager
async def _linked(tmp_path: Path) -> AsyncIterator[Link]:
    keys = tmp_path / "keys"
    create_keys(keys)
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.runtime.server", str(keys)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        tcp = tuple(json.loads(await server.stdout.readline()))
        weather = Weather()
        async with Proxy(_port(tcp[0]), weather, 1) as user, Proxy(_port(tcp[1]), weather, 2) as control:
            door = f"tcp://127.0.0.1:{control.port}"
            config = SystemConfig(name="client", rendezvous=door, key_file=keys, retry_every_s=0.5, probe_s=0.2)
            system = ActorSystem(config)
            through = Address(tcp=(f"tcp://127.0.0.1:{user.port}", door))

            async with system:
                connect = system.transport.connect

                def proxied(address: Address) -> Peer:
                    return connect(through if address.tcp == tcp else address)

                system.transport.connect = proxied  # type: ignore[method-assign]
                system.caller.on_gone(system.primary.uid, "test: from here on through the proxy")
                system.gone.clear()
                yield Link(system, system.ref("c"), weather, [user, control], server.pid)
    finally:
        server.stdin.close()
        await asyncio.wait_for(server.wait(), PATIENCE_S)


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


async def test_delay_and_jitter_cost_time_and_nothing_else(linked: Link) -> None:
    linked.weather.delay_s = (0.05, 0.35)
    for n in range(20):
        await linked.ref.tell(Note(n=n))
    results = await asyncio.gather(*(linked.ref.ask(Add(), deadline_s=PATIENCE_S) for _ in range(20)))
    assert sorted(results) == list(range(1, 21))
    assert await linked.ref.ask(Seen(), deadline_s=PATIENCE_S) == tuple(range(20)), "in order"


async def test_thirty_percent_packet_loss_and_dying_connections_do_nothing_twice(linked: Link) -> None:
    linked.weather.loss = 0.3
    asking = [asyncio.ensure_future(linked.ref.ask(Add(), deadline_s=PATIENCE_S, retry=True)) for _ in range(40)]
    for _ in range(3):
        await asyncio.sleep(0.3)  # the weather takes its time
        linked.cut()
    assert sorted(await asyncio.gather(*asking)) == list(range(1, 41))
    linked.weather.loss = 0.0
    assert await linked.ref.ask(Total(), retry=True, deadline_s=PATIENCE_S) == 40


class Large(Message[None], frozen=True):
    body: str


async def test_a_connection_cut_in_the_middle_of_a_frame_costs_that_message_alone(linked: Link) -> None:
    await linked.ref.ask(Add())
    linked.proxies[0].cut_after(5_000)
    with pytest.raises(AskTimeout, match="client asked c#1 for Large"):
        await linked.ref.ask(Large(body="x" * 1_000_000), deadline_s=1.0)
    assert await linked.ref.ask(Add(), retry=True, deadline_s=PATIENCE_S) == 2
    assert await linked.ref.ask(Total(), deadline_s=PATIENCE_S) == 2


async def test_a_full_partition_ends_asks_by_their_deadline_and_heals(linked: Link) -> None:
    await linked.ref.ask(Add())
    linked.weather.open_up.clear()
    linked.weather.open_down.clear()
    with pytest.raises(AskTimeout, match=r"client asked c#1 for Add and had no reply after 0.3 s"):
        await linked.ref.ask(Add(), deadline_s=0.3)
    waiting = asyncio.ensure_future(linked.ref.ask(Add(), retry=True, deadline_s=PATIENCE_S))
    await asyncio.sleep(0.1)
    linked.weather.open_up.set()
    linked.weather.open_down.set()
    total = await waiting
    assert total in (2, 3), "the one that timed out may have been handled: that is what its error says"
    assert await linked.ref.ask(Total()) == total


async def test_a_reply_held_on_the_way_back_is_had_without_doing_it_again(linked: Link) -> None:
    await linked.ref.ask(Add())
    linked.weather.open_down.clear()
    waiting = asyncio.ensure_future(linked.ref.ask(Add(amount=10), retry=True, deadline_s=PATIENCE_S))
    await asyncio.sleep(1.2)  # it is sent again meanwhile, twice
    linked.weather.open_down.set()
    assert await waiting == 11
    assert await linked.ref.ask(Total()) == 11


async def test_a_half_open_connection_is_noticed_and_made_anew(linked: Link) -> None:
    """The way is dead and nobody says so: no FIN, no RST. Heartbeats notice, and what is asked again goes another way."""
    await linked.ref.ask(Add())
    connections = linked.proxies[0].connections
    for proxy in linked.proxies:
        proxy.weather = Weather()  # new connections are sound
    linked.weather.open_up.clear()  # those that exist swallow everything
    linked.weather.open_down.clear()
    assert await linked.ref.ask(Add(), retry=True, deadline_s=PATIENCE_S) == 2
    assert linked.proxies[0].connections > connections


async def test_control_messages_pass_a_flood_of_a_slow_consumer_and_neither_side_grows_with_it(linked: Link) -> None:
    """Every message takes the handler a while: what the sender is ahead waits, within the window, in neither's memory."""
    body, flood = "x" * (16 << 10), 2_000
    before = {pid: _peak_bytes(pid) for pid in (os.getpid(), linked.server)}

    async def pour() -> None:
        for _ in range(flood):
            await linked.ref.tell(Lump(body=body, seconds=0.001), deadline_s=PATIENCE_S)

    pouring = asyncio.ensure_future(pour())
    behind, past = [], []
    while not pouring.done():
        behind.append(await _seconds(linked.ref.ask(Total(), deadline_s=PATIENCE_S)))
        past += [await _seconds(linked.ref.ask(Urgent(), deadline_s=PATIENCE_S)) for _ in range(5)]
    await pouring
    assert median(past) < median(behind) / 4, "a control message waits for nothing that the flood brought"
    for pid, bytes_before in before.items():
        assert _peak_bytes(pid) - bytes_before < flood * len(body) / 2


async def _seconds(ask: Awaitable[object]) -> float:
    started = asyncio.get_running_loop().time()
    await ask
    return asyncio.get_running_loop().time() - started


def _peak_bytes(pid: int) -> int:
    """The most that the process has had in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


async def test_a_request_held_on_its_way_is_done_once_however_often_it_is_repeated(linked: Link) -> None:
    await linked.ref.ask(Add())
    linked.weather.open_up.clear()
    asked = linked.proxies[0].taken
    waiting = asyncio.ensure_future(linked.ref.ask(Add(amount=10), retry=True, deadline_s=PATIENCE_S))
    await asyncio.sleep(1.2)  # it is sent again meanwhile, twice
    assert linked.proxies[0].taken > asked, "the proxy has it"
    assert not waiting.done()
    linked.weather.open_up.set()
    assert await waiting == 11
    assert await linked.ref.ask(Total()) == 11


async def test_what_a_stopped_process_is_asked_is_had_when_it_goes_on(linked: Link) -> None:
    """SIGSTOP and CONT of a process on another host, shorter than its lease: nobody calls it dead, and nothing is done twice."""
    await linked.ref.ask(Add())
    os.kill(linked.server, signal.SIGSTOP)
    try:
        waiting = asyncio.ensure_future(linked.ref.ask(Add(), retry=True, deadline_s=PATIENCE_S))
        with pytest.raises(AskTimeout, match=r"client asked c#1 for Total and had no reply after 1 s"):
            await linked.ref.ask(Total(), deadline_s=1.0)
        assert not waiting.done()
    finally:
        os.kill(linked.server, signal.SIGCONT)
    assert await waiting == 2
    assert await linked.ref.ask(Total(), deadline_s=PATIENCE_S) == 2
