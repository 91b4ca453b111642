"""Resources that run out, and strangers at the port: clear errors, no spinning, and whoever was there goes on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.supervision import ProcessSpec, RestartPolicy
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import create_keys
from tests.runtime.actors import Add, Counter

STRANGERS = 60
PATIENCE_S = 30.0


async def test_strangers_who_connect_and_say_nothing_are_cut_and_delay_nobody(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    create_keys(keys)
    config = SystemConfig(name="home", tcp_bind="tcp://127.0.0.1:0", key_file=keys, handshake_s=0.3)
    async with ActorSystem(config) as home:
        await home.start(Counter(), "c")
        door = home.transport.address.tcp[1]
        port = int(door.rpartition(":")[2])
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(STRANGERS)]
        for n, (_, writer) in enumerate(strangers):
            writer.write(
                b"\xff" if n % 2 else b"GET / HTTP/1.1\r\n"
            )  # the beginning of ZMTP's greeting, and something else
        async with ActorSystem(SystemConfig(name="away", rendezvous=door, key_file=keys)) as away:
            assert await away.ref("c").ask(Add()) == 1
            async with asyncio.timeout(PATIENCE_S):
                for reader, writer in strangers:
                    with contextlib.suppress(ConnectionError):
                        while await reader.read(1 << 10):  # ZMQ's own greeting, then the end
                            pass
                    writer.close()
            assert await away.ref("c").ask(Add()) == 2
        assert home.counts.malformed == 0


EMFILE = textwrap.dedent(
    """
    import asyncio, json, os, resource, socket, sys, time
    from dockyard_actors.runtime.config import SystemConfig
    from dockyard_actors.runtime.system import ActorSystem
    from tests.runtime.actors import Counter

    async def main():
        config = SystemConfig(name="home", tcp_bind="tcp://127.0.0.1:0", allow_plain_loopback=True)
        async with ActorSystem(config) as home:
            await home.start(Counter(), "c")
            print(json.dumps(home.transport.address.tcp), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            taken = []
            try:
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError as error:
                print(json.dumps(error.errno), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            for fd in taken:
                os.close(fd)
            print(json.dumps("free"), flush=True)
            await asyncio.to_thread(sys.stdin.readline)

    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    asyncio.run(main())
    """
)


async def test_a_process_without_descriptors_answers_whom_it_knows_and_takes_newcomers_when_it_has_some() -> None:
    """ZMQ's own thread tries to accept the newcomer again and again meanwhile, which costs a core: it offers no way to make it pause."""
    home = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", EMFILE), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert home.stdin is not None
    assert home.stdout is not None
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            door = json.loads(await home.stdout.readline())[1]
            config = {"rendezvous": door, "allow_plain_loopback": True}
            async with ActorSystem(SystemConfig(name="known", **config)) as known:
                assert await known.ref("c").ask(Add()) == 1
                home.stdin.write(b"\n")
                assert json.loads(await home.stdout.readline()) == errno.EMFILE
                joining = asyncio.ensure_future(ActorSystem(SystemConfig(name="new", **config)).__aenter__())
                for n in range(2, 5):
                    assert await known.ref("c").ask(Add()) == n
                home.stdin.write(b"\n")
                assert json.loads(await home.stdout.readline()) == "free"
                new = await joining
                assert await new.ref("c").ask(Add()) == 5
                await new.close()
    finally:
        home.stdin.close()
        await home.wait()


def test_a_system_that_finds_no_descriptor_says_so() -> None:
    program = textwrap.dedent(
        """
        import asyncio, os, resource
        from dockyard_actors.runtime.config import SystemConfig
        from dockyard_actors.runtime.system import ActorSystem

        async def main():
            limit = len(os.listdir("/proc/self/fd")) + 4
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            async with ActorSystem(SystemConfig(name="home", tcp_bind="tcp://127.0.0.1:0", allow_plain_loopback=True)):
                print("opened")

        asyncio.run(main())
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert "Too many open files" in done.stderr.splitlines()[-1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "dockyard-test", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small disk needs root: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


async def test_a_process_that_cannot_start_for_want_of_disk_says_so_and_leaves_nothing(small_disk: Path) -> None:
    async with NodeAgent(AgentConfig(runtime_parent=small_disk)) as agent:
        with contextlib.suppress(OSError), (small_disk / "full").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 1_024)
        spec = ProcessSpec("role", [sys.executable, "-c", ""], {}, RestartPolicy(), small_disk / "role.log", 1.0)
        with pytest.raises(OSError, match="No space left on device"):
            await agent.spawn(spec)
        assert not any(process.pid for process in agent.processes())


def test_the_limit_of_descriptors_is_as_the_tests_found_it() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft > 100, "the limits above were set in processes of their own"
