"""Programs that reach for what is not theirs: files, secrets, other processes, the network, new namespaces."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.conftest import RIGHT, TOKEN, Executor, processes_of


@pytest.fixture(autouse=True)
def _the_executor_is_unharmed(executor: Executor) -> Iterator[None]:
    before = [worker["pid"] for worker in executor.call("GET", "/health")[1]["workers"]]
    yield
    assert executor.run(RIGHT)["resolved"]
    assert [worker["pid"] for worker in executor.call("GET", "/health")[1]["workers"]] == before
    assert processes_of(executor.uids) == []


def refused(executor: Executor, act: str, *errors: str) -> None:
    """The act raises one of `errors` inside the sandbox."""
    program = f"import os, socket, ctypes, signal, sys\ndef f(x):\n    {act}\n    return 'it worked'"
    verdict = executor.run(program, ["assert f(1) == 'it worked'"])
    test = verdict["tests"][0]
    assert test["outcome"] == "error", verdict
    assert any(error in test["message"] for error in errors or ("PermissionError",)), verdict


@pytest.mark.parametrize("path", ["/etc/shadow", "/etc/passwd", "/root", "/home", "/", "/proc", "/proc/1/environ", "/proc/self/environ", "/proc/self/maps", "/proc/self/mem", "/sys", "/var/log", "/tmp", "/dev/mem", "/run"])  # fmt: skip
def test_no_file_of_the_host_is_readable(executor: Executor, path: str) -> None:
    refused(
        executor,
        f"os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}, 'rb').read(1)",
        "PermissionError",
        "FileNotFoundError",
        "NotADirectoryError",
    )


def test_the_executors_environment_memory_and_descriptors_are_out_of_reach(executor: Executor) -> None:
    workers = [worker["pid"] for worker in executor.call("GET", "/health")[1]["workers"]]
    for pid in (executor.process.pid, *workers):
        for name in ("environ", "maps", "mem", "cmdline", "fd/0", "cwd", "root/etc/passwd"):
            refused(
                executor,
                f"open('/proc/{pid}/{name}', 'rb').read(1)",
                "PermissionError",
                "IsADirectoryError",
                "NotADirectoryError",
            )


def test_a_file_of_another_task_is_unreadable_through_any_name(executor: Executor) -> None:
    with tempfile.TemporaryDirectory() as directory:
        secret = Path(directory) / "secret"
        secret.write_text("of another task")
        secret.chmod(0o644)
        Path(directory).chmod(0o755)
        for name in (
            str(secret),
            f"/proc/self/root{secret}",
            f"/proc/self/fd/../../..{secret}",
            f"/usr/lib/../..{secret}",
        ):
            refused(executor, f"open({name!r}).read()", "PermissionError", "FileNotFoundError")


def test_the_way_out_of_the_library_descriptor_is_closed(executor: Executor) -> None:
    for way in ("'/../../../../etc/passwd'", "'/../../../../../etc/passwd'", "'/../../../../../../../../etc/passwd'"):
        refused(executor, f"open(sys.path[0] + {way}).read()", "PermissionError", "FileNotFoundError")


def test_the_token_is_nowhere_in_the_program_s_process(executor: Executor) -> None:
    program = f"""
import gc, os, sys
def f(x):
    needle = {TOKEN[:12]!r} + {TOKEN[12:]!r}
    seen = repr(os.environ) + repr(sys.argv) + repr(sys.path)
    seen += repr([o for o in gc.get_objects() if type(o) in (dict, list, tuple, str)])[:10_000_000]
    return needle in seen.replace(repr(f.__code__.co_consts), '')
"""
    verdict = executor.run(program, ["assert f(1) == False"])
    assert verdict["resolved"], verdict
    environment = executor.run("import os\ndef f(): return dict(os.environ)", ["assert f() == 0"])["tests"][0][
        "message"
    ]
    assert "API" not in environment


def test_hidden_tests_are_not_in_the_process_while_the_program_loads(executor: Executor) -> None:
    program = """
import gc, sys
frame = sys._getframe()
found = []
while frame:
    found.append(repr(frame.f_locals))
    frame = frame.f_back
found.append(repr([o for o in gc.get_objects() if type(o) in (dict, list, tuple)])[:10_000_000])
text = ''.join(found)
seen = ''.join(['forty', 'two']) in text
def f(x): return 42
def g(): return seen
"""
    verdict = executor.run(program, ["assert g() == False"], ["assert f('fortytwo') == 42"])
    assert verdict["resolved"], verdict


def test_expected_values_never_reach_the_program(executor: Executor) -> None:
    program = """
import gc, sys
def f(x):
    frame, found = sys._getframe(), []
    while frame:
        found.append(repr(frame.f_locals) + repr(frame.f_code.co_consts))
        frame = frame.f_back
    found.append(repr([o for o in gc.get_objects() if type(o) in (dict, list, tuple)])[:10_000_000])
    return str(int('31337') * 3) in ''.join(found)
"""
    verdict = executor.run(program, ["assert f(1) == False"], ["assert f(2) == 94011"])
    assert [test["outcome"] for test in verdict["tests"]] == ["passed", "failed"], verdict


def test_the_executor_and_its_workers_cannot_be_signalled(executor: Executor) -> None:
    workers = [worker["pid"] for worker in executor.call("GET", "/health")[1]["workers"]]
    for pid in (executor.process.pid, *workers, os.getpid(), 1, -1, 0):
        for number in (0, 9, 15, 19):
            refused(executor, f"os.kill({pid}, {number})")
    refused(executor, "os.killpg(os.getppid(), 9)")
    refused(executor, "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)")


def test_a_program_cannot_kill_itself_like_a_host_out_of_memory(executor: Executor) -> None:
    refused(executor, "os.kill(os.getpid(), 9)")
    refused(executor, "signal.raise_signal(9)")
    refused(executor, "signal.pthread_kill(__import__('threading').get_ident(), 9)")
    verdict = executor.run("import os\ndef f(x): os.abort()")
    assert (verdict["state"], verdict["error"]) == ("ok", "ended by SIGABRT in tests[0]")


@pytest.mark.parametrize(
    "act",
    [
        "socket.socket()",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.create_connection(('127.0.0.1', 9090), 1)",
        "socket.socketpair()[0].connect('/run/docker.sock')",
        "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', '/run/docker.sock')",
        "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendmsg([b'x'], [], 0, '\\0abstract')",
        "socket.socketpair()[0].bind('\\0name')",
    ],
)
def test_there_is_no_network_and_no_named_socket(executor: Executor, act: str) -> None:
    refused(executor, act)


def test_a_listening_unix_socket_of_the_host_is_out_of_reach(executor: Executor) -> None:
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/s")
        Path(directory).chmod(0o755)
        Path(directory, "s").chmod(0o777)
        listener.listen()
        refused(executor, f"socket.socket(socket.AF_UNIX).connect('{directory}/s')")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    ("name", "number", "arguments"),
    [
        ("ptrace attach to the parent", 101, "16, os.getppid(), 0, 0"),
        ("process_vm_readv", 310, "os.getppid(), 0, 0, 0, 0, 0"),
        ("pidfd_getfd", 438, "0, 0, 0"),
        ("unshare user namespace", 272, "0x10000000"),
        ("unshare mount namespace", 272, "0x00020000"),
        ("clone user namespace", 56, "0x10000011, 0, 0, 0, 0"),
        ("fork", 57, ""),
        ("vfork by clone", 56, "0x4111, 0, 0, 0, 0"),
        ("setns", 308, "0, 0"),
        ("mount", 165, "0, 0, 0, 0, 0"),
        ("chroot", 161, "b'/'"),
        ("pivot_root", 155, "b'/', b'/'"),
        ("bpf", 321, "0, 0, 0"),
        ("perf_event_open", 298, "0, 0, 0, 0, 0"),
        ("userfaultfd", 323, "0"),
        ("io_uring_setup", 425, "1, 0"),
        ("keyctl", 250, "0, 0, 0, 0, 0"),
        ("open_by_handle_at", 304, "0, 0, 0"),
        ("shmget", 29, "0, 4096, 0o1600"),
        ("prctl to survive the parent", 157, "1, 0, 0, 0, 0"),
        ("setsid", 112, ""),
        ("setuid to root", 105, "0"),
        ("prlimit of the executor", 302, "os.getppid(), 7, 0, 0"),
        ("fcntl owner", 72, "1, 8, os.getppid()"),
        ("ioctl terminal injection", 16, "0, 0x5412, 0"),
        ("a call newer than the table", 999, ""),
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_the_kernel_refuses(executor: Executor, name: str, number: int, arguments: str) -> None:
    program = "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    program += f"def f(x): return (libc.syscall({', '.join(filter(None, [str(number), arguments]))}), errno.errorcode[ctypes.get_errno()])"
    verdict = executor.run(program, ["assert f(1) == (-1, 'EPERM')"])
    assert verdict["resolved"], (name, verdict)


def test_memory_of_the_kernel_is_not_a_way_around_the_limit(executor: Executor) -> None:
    program = """
import os, fcntl
def f(x):
    pipes = []
    try:
        while True: pipes.append(os.pipe())
    except OSError:
        pass
    try:
        fcntl.fcntl(pipes[0][0], 1031, 1 << 20)
    except PermissionError:
        return len(pipes) < 64
"""
    assert executor.run(program, ["assert f(1)"])["resolved"]


def test_many_hostile_tasks_at_once_do_not_disturb_an_honest_one(executor: Executor) -> None:
    bombs = [
        "def f(x):\n    while True: print('x' * 4096)",
        "def f(x):\n    k = []\n    while True: k.append(bytearray(1 << 20))",
    ]
    threads = [threading.Thread(target=executor.run, args=(bombs[i % 2],), kwargs={"timeout": 2.0}) for i in range(4)]
    for thread in threads:
        thread.start()
    assert executor.run(RIGHT)["resolved"]
    for thread in threads:
        thread.join()
