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

import psutil
import pytest

from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.supervision import ProcessSpec, RestartPolicy
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import create_keys
from tests.runtime.actors import Add, Counter

STRANGERS = 60
PATIENCE_S = 30.0
SPIN_S = 0.8  # long enough to tell a spinning thread from an idle one


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
    import asyncio, json, os, resource, sys
    from dockyard_actors.runtime.config import SystemConfig
    from dockyard_actors.runtime.system import ActorSystem
    from tests.runtime.actors import Counter

    async def main():
        config = SystemConfig(name="home", allow_plain_loopback=True, **json.loads(sys.argv[1]))
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


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
async def test_a_process_without_descriptors_answers_whom_it_knows_and_takes_newcomers_when_it_has_some(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """It must not listen meanwhile: for want of one descriptor ZMQ's tcp listener burns a core, and its ipc listener aborts."""
    prefix = f"{tmp_path_factory.mktemp('e')}/h."
    where = {"tcp": {"tcp_bind": "tcp://127.0.0.1:0"}, "ipc": {"ipc_prefix": prefix}}[kind]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    home = await asyncio.create_subprocess_exec(sys.executable, "-c", EMFILE, json.dumps(where), **pipes)
    assert home.stdin is not None
    assert home.stdout is not None
    assert home.stderr is not None
    loop = asyncio.get_running_loop()
    try:
        process = psutil.Process(home.pid)
        async with asyncio.timeout(2 * PATIENCE_S):
            door = json.loads(await home.stdout.readline())[1] or f"ipc://{prefix}"
            config = {"rendezvous": door, "allow_plain_loopback": True}
            async with ActorSystem(SystemConfig(name="known", **config)) as known:
                assert await known.ref("c").ask(Add()) == 1
                home.stdin.write(b"\n")
                assert json.loads(await home.stdout.readline()) == errno.EMFILE
                said = (await home.stderr.readline()).decode()
                assert "nobody new may connect" in said
                assert "raise it with ulimit -n" in said
                joining = asyncio.ensure_future(ActorSystem(SystemConfig(name="new", **config)).__aenter__())
                spent, started, asks = sum(process.cpu_times()[:2]), loop.time(), 1
                while loop.time() < started + SPIN_S:
                    asks += 1
                    assert await known.ref("c").ask(Add()) == asks
                    await asyncio.sleep(0.05)
                assert sum(process.cpu_times()[:2]) - spent < 0.5 * (loop.time() - started), "it spins"
                assert not joining.done()
                home.stdin.write(b"\n")
                assert json.loads(await home.stdout.readline()) == "free"
                new = await joining
                assert await new.ref("c").ask(Add()) == asks + 1
                await new.close()
    finally:
        home.stdin.close()
        await home.communicate()
    assert home.returncode == 0


DIALS = textwrap.dedent(
    """
    import asyncio, os, resource, sys
    from dockyard_actors.runtime.config import SystemConfig
    from dockyard_actors.runtime.errors import AskTimeout
    from dockyard_actors.runtime.system import ActorSystem
    from tests.runtime.actors import Add

    async def main():
        async with ActorSystem(SystemConfig(name="caller", rendezvous=sys.argv[1])) as caller:
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
            taken = []
            try:
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
            try:
                await caller.ref("c").ask(Add(), deadline_s=0.3)
            except AskTimeout as error:
                print(error, flush=True)
            waiting = asyncio.ensure_future(caller.ref("c").ask(Add(amount=10), deadline_s=30.0))
            await asyncio.sleep(0)
            for fd in taken:
                os.close(fd)
            print(await waiting)

    asyncio.run(main())
    """
)


async def test_an_ask_that_finds_no_descriptor_to_dial_waits_for_one_within_its_deadline(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    prefix = f"{tmp_path_factory.mktemp('d')}/h."
    async with ActorSystem(SystemConfig(name="home", ipc_prefix=prefix)) as home:
        counter = Counter()
        await home.start(counter, "c")
        caller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", DIALS, f"ipc://{prefix}"), stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(2 * PATIENCE_S):
            told = (await caller.communicate())[0].decode().splitlines()
        assert "caller asked c#1 for Add" in told[0]
        assert told[1] in ("10", "11"), "whether the first one takes effect is not known"
        assert counter.total == int(told[1])


def test_a_system_that_finds_no_descriptor_says_so() -> None:
    program = textwrap.dedent(
        """
        import asyncio, os, resource
        from dockyard_actors.runtime.config import SystemConfig
        from dockyard_actors.runtime.system import ActorSystem

        async def main():
            limit = len(os.listdir("/proc/self/fd")) + 4  # fewer than are kept for peers
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
