"""Two hosts, as the kernel sees them: namespaces of their own, joined by a veth that can be counted, slowed down and cut."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dockyard_actors.transport.fdserver import FdServer
from dockyard_actors.transport.plane import TensorRef
from dockyard_actors.transport.pull import PeerLost, PeerUnreachable, PullConfig, PullTimeout
from dockyard_actors.transport.remote import RemotePlane
from dockyard_actors.transport.slab import SlabConfig, SlabPlane
from tests.transport.pull_peer import COOKIE, MIB, Host, payload
from tests.transport.slab_peer import serving, wait_until
from tests.transport.test_pull import BACKENDS, needs_ucx

pytestmark = pytest.mark.netns

WAIT_S = 60.0
PORT = 7411
BLOCKS = 2
BLOCK = 24 * MIB
SIZE = 16 * MIB
SLOW = "40mbit"  # SIZE takes more than 3 seconds


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Net:
    namespace: str
    here: str  # name of our end of the veth
    there: str
    subnet: str

    @property
    def address(self) -> str:
        return f"{self.subnet}.2:{PORT}"

    def received(self) -> int:
        """Bytes that came over the veth."""
        return int(Path(f"/sys/class/net/{self.here}/statistics/rx_bytes").read_text())

    def slow(self) -> None:
        limit = ["root", "tbf", "rate", SLOW, "burst", "64kb", "latency", "100ms"]
        command = ["tc", "-n", self.namespace, "qdisc", "add", "dev", self.there, *limit]
        subprocess.run(command, check=True, capture_output=True)

    def fast(self) -> None:
        command = ["tc", "-n", self.namespace, "qdisc", "del", "dev", self.there, "root"]
        subprocess.run(command, check=False, capture_output=True)  # it may never have been slow

    def cut(self) -> None:
        ip("link", "set", self.here, "down")

    def join(self) -> None:
        ip("link", "set", self.here, "up")


@pytest.fixture(scope="module")
def wire() -> Iterator[Net]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root and iproute2")
    name = secrets.token_hex(3)
    net = Net(f"dy-{name}", f"dyh{name}", f"dyt{name}", f"10.231.{secrets.randbelow(250)}")
    try:
        ip("netns", "add", net.namespace)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        ip("link", "add", net.here, "type", "veth", "peer", "name", net.there, "netns", net.namespace)
        ip("addr", "add", f"{net.subnet}.1/24", "dev", net.here)
        ip("-n", net.namespace, "addr", "add", f"{net.subnet}.2/24", "dev", net.there)
        ip("link", "set", net.here, "up")
        for device in (net.there, "lo"):
            ip("-n", net.namespace, "link", "set", device, "up")
        yield net
    finally:
        subprocess.run(["ip", "link", "del", net.here], check=False, capture_output=True)
        ip("netns", "del", net.namespace)


@pytest.fixture
def net(wire: Net, backend: str) -> Iterator[Net]:
    yield wire
    wire.join()
    wire.fast()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def host(net: Net, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Its host id is the real one, which has the namespace in it."""
    host = Host(
        tmp_path_factory.mktemp("there"),
        host_id=None,
        bind=net.address,
        backend=backend,
        blocks=BLOCKS + 1,
        block_bytes=BLOCK,
        namespace=net.namespace,
    )
    yield host
    host.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FdServer]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def plane(net: Net, backend: str, server: FdServer) -> Iterator[RemotePlane]:
    local = SlabPlane(server.path, "me", SlabConfig(blocks=BLOCKS, block_bytes=BLOCK))
    config = PullConfig(backend=backend, attempts=1, handshake_s=2.0)  # type: ignore[arg-type]
    plane = RemotePlane(local, COOKIE, lambda host_id: net.address, config)
    yield plane
    plane.close()


async def test_the_chosen_transport_carries_the_bytes_over_the_wire(
    net: Net, host: Host, plane: RemotePlane, backend: str
) -> None:
    before, total = net.received(), 0
    for seed in range(2 * BLOCKS):
        ref = host.ref(seed, SIZE)
        assert ref.host_id != plane._local.host_id
        await plane.fetch([ref], WAIT_S)
        assert np.array_equal(plane.get(ref, verify=True)["x"], payload(seed, SIZE))
        plane.release(ref)
        wait_until(lambda: host("info")["free"] == BLOCKS + 1)
        total += ref.nbytes
    assert plane.pull_stats().received_bytes == host("info")["sent"] == {backend: total}
    assert total <= net.received() - before < 1.2 * total


async def test_a_sender_killed_in_the_middle_is_an_error_at_once(net: Net, host: Host, plane: RemotePlane) -> None:
    started, fetching = await half(net, host, plane, WAIT_S)
    host.kill()
    with pytest.raises(PeerLost):
        await fetching
    assert time.monotonic() - started < WAIT_S / 4
    recycled(plane)


async def test_a_cut_link_costs_the_deadline_and_the_next_pull_works(net: Net, host: Host, plane: RemotePlane) -> None:
    _, fetching = await half(net, host, plane, 2.0)
    net.cut()
    with pytest.raises((PullTimeout, PeerLost)):
        await fetching
    recycled(plane)
    with pytest.raises(PeerUnreachable, match="nobody answers"):
        await plane.fetch([host.ref(2, 1000)], WAIT_S)
    net.join()
    wait_until(lambda: host("info")["connections"] == 0)  # its end of the cut connection timed out, too
    ref = msgspec.convert(host("again"), TensorRef)
    # Its UCX worker may first find out that it has a dead connection to ours.
    plane._puller._config = dataclasses.replace(plane._puller._config, attempts=4)
    await plane.fetch([ref], WAIT_S)
    assert np.array_equal(plane.get(ref, verify=True)["x"], payload(1, SIZE))


async def test_a_stopped_sender_costs_the_deadline(net: Net, host: Host, plane: RemotePlane) -> None:
    _, fetching = await half(net, host, plane, 2.0)
    host.stop()
    with pytest.raises(PullTimeout, match="not done within"):
        await fetching
    recycled(plane)


async def test_nobody_listening_there_is_said(net: Net, plane: RemotePlane) -> None:
    ref = TensorRef("arena", 0, 1, 0, (), 0, "there", "")
    with pytest.raises(PeerUnreachable, match=f"nobody answers at {net.address}"):
        await plane.fetch([ref], WAIT_S)
    recycled(plane)


@needs_ucx
async def test_a_link_that_is_gone_costs_other_links_nothing(
    wire: Net, server: FdServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A UCX worker that knew all links would tell peers of all, and they would pick one that is gone. The last test: no link is left."""
    local = SlabPlane(server.path, "me", SlabConfig(blocks=BLOCKS, block_bytes=BLOCK))
    hosts: dict[str, Host] = {}
    plane = RemotePlane(local, COOKIE, lambda host: hosts[host].address, PullConfig(backend="ucx", attempts=1))

    async def pulled(name: str, **where: str) -> TensorRef:
        directory = tmp_path_factory.mktemp(name)
        hosts[name] = Host(directory, host_id=name, backend="ucx", block_bytes=BLOCK, **where)
        ref = hosts[name].ref(1, SIZE)
        await plane.fetch([ref], WAIT_S)
        assert np.array_equal(plane.get(ref, verify=True)["x"], payload(1, SIZE))
        plane.release(ref)
        return ref

    try:
        far = await pulled("far", bind=wire.address, namespace=wire.namespace)
        ip("link", "del", wire.here)
        near = await pulled("near")
        assert plane.pull_stats().received_bytes == {"ucx": far.nbytes + near.nbytes}
    finally:
        for host in hosts.values():
            host.kill()
        plane.close()


async def half(net: Net, host: Host, plane: RemotePlane, deadline_s: float) -> tuple[float, asyncio.Task[None]]:
    """A pull of which some bytes have come and most have not."""
    ref = host.ref(1, SIZE)
    warm = host.ref(0, 1000)  # connects
    await plane.fetch([warm], WAIT_S)
    plane.release(warm)
    net.slow()
    before = net.received()
    started = time.monotonic()
    fetching = asyncio.create_task(plane.fetch([ref], deadline_s))
    while net.received() - before < MIB:
        assert not fetching.done()
        await asyncio.sleep(0.01)  # counters of the kernel ring no bell
    assert not fetching.done()
    return started, fetching


def recycled(plane: RemotePlane) -> None:
    """No block is lost, and nobody writes into one any more."""
    wait_until(lambda: plane.pull_stats().quarantined == 0)
    wait_until(lambda: plane.stats().free == BLOCKS)
