"""The safe for arenas: who may have what, and what stays when somebody dies."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dockyard_actors.transport.arena import ArenaFds
from dockyard_actors.transport.fdserver import (
    ArenaRefused,
    ArenaUnknown,
    FdClient,
    FdConfig,
    FdServer,
    FdServerGone,
    FdServerTimeout,
)
from tests.transport.slab_peer import ANSWER_S, serving

PAGE = mmap.PAGESIZE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FdServer]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def client(server: FdServer) -> FdClient:
    return FdClient(server.path)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def make(client: FdClient, name: str = "a", sealed: bool = True) -> ArenaFds:
    fds = client.create_arena(name, 4 * PAGE, PAGE, owner="r")
    if sealed:
        client.seal_arena(name)
    return fds


def test_a_sealed_arena_can_only_be_mapped_read_only(client: FdClient) -> None:
    mine = make(client, sealed=False)
    writable = mmap.mmap(mine.data, 4 * PAGE)
    client.seal_arena("a")
    writable[:5] = b"hello"
    theirs = client.open_arena("a")
    for fd in (mine.data, theirs.data):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4 * PAGE)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        for size in (PAGE, 8 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with mmap.mmap(theirs.data, 4 * PAGE, prot=mmap.PROT_READ) as readable:
        assert readable[:5] == b"hello"
    writable.close()
    mine.close()
    theirs.close()


def test_the_control_page_cannot_change_its_size(client: FdClient) -> None:
    fds = make(client)
    with pytest.raises(PermissionError):
        os.ftruncate(fds.ctl, 0)
    fds.close()


def test_an_arena_is_not_handed_out_before_it_is_sealed(client: FdClient) -> None:
    make(client, sealed=False).close()
    with pytest.raises(ArenaRefused, match="still being set up"):
        client.open_arena("a")
    client.seal_arena("a")
    client.open_arena("a").close()


def test_an_unknown_arena_is_told_apart_and_dropping_it_again_does_nothing(client: FdClient) -> None:
    make(client).close()
    assert client.drop_arena("a")
    assert not client.drop_arena("a")
    assert not client.reap_arena("a")
    assert not client.retire_arena("a")
    with pytest.raises(ArenaUnknown, match="never created, or dropped"):
        client.open_arena("a")


@pytest.mark.parametrize(
    ("name", "data_bytes", "block_bytes", "why"),
    [
        ("../a", PAGE, PAGE, "must match"),
        ("", PAGE, PAGE, "must match"),
        ("b", PAGE, PAGE // 2, "whole pages"),
        ("b", PAGE, 2 * PAGE, "do not divide"),
        ("b", PAGE + 1, PAGE, "whole pages"),
        ("taken", PAGE, PAGE, "exists already"),
        ("b", 1 << 62, PAGE, "exceed the limit"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    tmp_path: Path, name: str, data_bytes: int, block_bytes: int, why: str
) -> None:
    with serving(tmp_path, FdConfig(max_bytes=1 << 20)) as server:
        client = FdClient(server.path)
        make(client, "taken").close()
        before = server.stats()
        with pytest.raises(ArenaRefused, match=why):
            client.create_arena(name, data_bytes, block_bytes)
        assert server.stats() == before


def test_garbage_is_answered_and_harms_nobody(server: FdServer, client: FdClient) -> None:
    for garbage in (b"\xc1", os.urandom(1000), b"\x81\xa4type\xa5Nobdy"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(server.path)
            connection.send(garbage)
            assert b"malformed request" in connection.recv(4096)
    assert server.stats().refused == 3
    make(client).close()


def test_a_peer_that_says_nothing_is_hung_up_on(tmp_path: Path) -> None:
    with serving(tmp_path, FdConfig(request_s=0.05)) as server:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(server.path)
            assert connection.recv(1) == b""
        make(FdClient(server.path)).close()


def test_a_peer_of_another_user_is_refused(server: FdServer, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    # Open wide what the private directory normally prevents, so that only the credentials are left to refuse.
    opened = [
        path for path in [tmp_path, *tmp_path.parents] if path.stat().st_uid == os.geteuid() and path != Path("/")
    ]
    modes = {path: path.stat().st_mode for path in opened}
    try:
        for path in opened:
            path.chmod(modes[path] | 0o055)
        os.chmod(server.path, 0o777)
        code = (
            "import socket, sys, os; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
            "c = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); c.settimeout(30); c.connect(sys.argv[1]);"
            "c.send(bytes([0x81, 0xa4]) + b'type' + bytes([0xaa]) + b'ListArenas'); print(c.recv(4096))"
        )
        peer = subprocess.run(
            [sys.executable, "-I", "-c", code, server.path],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
        )
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert "uid 65534 may not use the arenas of uid 0" in peer.stdout
    assert server.stats().refused == 1


async def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="0700"):
        await FdServer(tmp_path).start()


async def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir(mode=0o700)
    with pytest.raises(ValueError, match="shorter runtime directory"):
        await FdServer(deep).start()


async def test_two_servers_never_share_a_socket_and_a_dead_one_leaves_it_free(server: FdServer, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="already serves"):
        await FdServer(tmp_path).start()
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(other / "fds.sock"))
    second = FdServer(other)
    await second.start()
    await second.close()
    await second.close()
    assert list(other.iterdir()) == []


async def test_the_loop_that_serves_can_ask_without_waiting_for_itself(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    server = FdServer(tmp_path)
    await server.start()
    client = FdClient(server.path)
    make(client).close()
    assert [arena.name for arena in client.list_arenas()] == ["a"]
    assert await asyncio.to_thread(client.drop_arena, "a")
    await server.close()


def test_nobody_at_the_socket_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(FdServerGone, match=f"process {os.getpid()} asked the fd server at .* for Open"):
        FdClient(str(tmp_path / "fds.sock")).open_arena("a")


def test_a_server_that_hangs_is_a_timeout_and_not_a_hang(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hung:
        hung.bind(str(tmp_path / "fds.sock"))
        hung.listen(1)
        client = FdClient(str(tmp_path / "fds.sock"), call_s=0.05)
        for _ in range(4):  # the later ones find the backlog full
            with pytest.raises(FdServerTimeout, match=r"no answer within 0\.05 s"):
                client.open_arena("a")


def test_many_threads_asking_at_once_are_all_answered(server: FdServer) -> None:
    client = FdClient(server.path)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                name = f"{number}.{turn}"
                make(client, name).close()
                client.open_arena(name).close()
                assert client.drop_arena(name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert server.stats().arenas == 0
    assert server.stats().dropped == 160


def test_a_closed_server_leaves_no_descriptor_and_no_file(tmp_path: Path) -> None:
    before = descriptors()
    with serving(tmp_path) as server:
        client = FdClient(server.path)
        for number in range(5):
            make(client, str(number)).close()
        client.retire_arena("0")
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []
    assert not [name for name in os.listdir("/dev/shm") if "dockyard" in name]
