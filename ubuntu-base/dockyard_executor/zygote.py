"""A fork server: one warm, pristine interpreter that forks, confines, watches and reaps one program at a time.

Promises that its own process never runs a line of a program, that the tests are not in its memory when it forks, and that
nothing of a task is alive when its report is sent. Judges nothing: reports bytes and an exit status.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
import types
from typing import Any, NoReturn

# Loaded before forking, so that programs import them at no cost; others are read from disk.
PRELOAD = ["abc", "array", "asyncio", "bisect", "collections", "collections.abc", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "numbers", "operator", "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading", "time", "traceback", "types", "typing", "unicodedata", "uuid"]  # fmt: skip
READY = b"ready\n"  # the child's confinement is complete; nothing of the program has been read yet
EXIT_SETUP = 96


class Server:
    """Reads runs from `control`, tests from `secrets`, and answers on `control`. See worker.py for the other side."""

    def __init__(self, control: socket.socket, secrets: socket.socket, settings: dict[str, Any]) -> None:
        from dockyard_executor import isolation, runner  # loaded under the descriptor path, see main

        self._runner = runner
        self._control, self._secrets = control, secrets
        self._settings = settings
        isolation.become_subreaper()
        parts = isolation.probe(settings["uid"])
        self._uid = settings["uid"] if parts.uid else None
        self._library = settings["library_fd"]
        ruleset = (
            isolation.landlock_ruleset([self._library, *isolation.READABLE], list(isolation.WRITABLE))
            if parts.landlock
            else None
        )
        with open("/proc/self/statm") as statm:
            own_bytes = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        self._confinement = isolation.Confinement(
            parts=parts,
            uid=settings["uid"],
            ruleset=ruleset,
            address_space=own_bytes + settings["memory_bytes"],
            threads=settings["threads"],
            open_files=settings["open_files"],
            parent_pid=os.getpid(),
        )
        self.hello = {"pid": os.getpid(), "level": parts.level, "isolated": parts.isolated, "remedy": parts.remedy}

    def serve(self) -> None:
        """Until the executor closes its end."""
        send_frame(self._control, json.dumps(self.hello).encode())
        forget_the_executor()
        gc.collect()
        gc.freeze()  # what exists now is shared by all forks and not walked by their collections
        while True:
            try:
                request = json.loads(receive_frame(self._control))
            except EOFError:
                return
            if "cancel" in request:
                continue  # came too late: the run it meant has been answered
            report, blobs = self._run(request)
            send_frame(self._control, json.dumps(report).encode(), *blobs)

    def _run(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        timeout_s = request["timeout"]
        cpu_s = math.ceil(timeout_s) + self._settings["cpu_headroom_s"]
        command_r, command_w = os.pipe()
        event_r, event_w = os.pipe()
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._child(command_r, event_w, out_w, err_w, cpu_s)
        for descriptor in (command_r, event_w, out_w, err_w):
            os.close(descriptor)
        watch = _Watch(self._settings, pid, command_w, event_r, out_r, err_r)
        try:
            program = receive_frame(self._control)
            watch.deliver(struct.pack("=I", len(program)) + program)
            watch.until(start + timeout_s, self._control, self._secrets)
        finally:
            watch.kill()
            _, status, usage = os.wait4(pid, 0)
            survivors = self._sweep()
            watch.drain()
            watch.close()
        if not watch.tests_delivered:
            receive_frame(self._secrets)  # of this run: must not meet the next one
        report = {
            "status": status,
            "ended": watch.ended or ("" if watch.ready else "setup"),
            "seconds": time.monotonic() - start,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "cpu_limit_s": cpu_s,
            "survivors": survivors,
        }
        return report, [bytes(watch.events), watch.tail(out_r), watch.tail(err_r)]

    def _child(self, commands: int, events: int, out: int, err: int, cpu_s: int) -> NoReturn:
        try:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            self._confinement.confine(cpu_s, keep=tuple(sorted((0, 1, 2, commands, events, self._library))))
            os.write(events, READY)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
            os._exit(EXIT_SETUP)
        self._runner.run(commands, events, self._settings["value_bytes"])

    def _sweep(self) -> int:
        """Ends and reaps every descendant that is left. A confined program has none: it cannot make processes."""
        found = 0
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid:
                found += 1
                continue
            if self._uid is not None:
                kill_uid(self._uid)
            for child in children_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
            found += 1


class _Watch:
    """One child from its fork to its end: feeds its command pipe, reads its output within limits."""

    def __init__(
        self, settings: dict[str, Any], pid: int, command_w: int, event_r: int, out_r: int, err_r: int
    ) -> None:
        self._settings = settings
        self._pidfd = os.pidfd_open(pid)
        self._command, self._event = command_w, event_r
        self._tails = {out_r: bytearray(), err_r: bytearray()}
        self._output = 0
        self._pending = memoryview(b"")
        self._prefix = bytearray()
        self._open = {event_r, out_r, err_r}
        self.events = bytearray()
        self.ended = ""
        self.ready = False
        self.loaded = False
        self.tests_delivered = False
        for descriptor in (command_w, event_r, out_r, err_r):
            os.set_blocking(descriptor, False)

    def deliver(self, data: bytes) -> None:
        self._pending = memoryview(data)

    def until(self, deadline: float, control: socket.socket, secrets: socket.socket) -> None:
        """Returns when the child has ended or must end (`ended` says why). `deadline` on the monotonic clock."""
        poll = select.poll()
        for descriptor in (*self._open, self._pidfd, control.fileno()):
            poll.register(descriptor, select.POLLIN)
        writing = False  # registered only while there is something to write: a closed reader would be reported for ever
        while not self.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                self.ended = "timeout"
                return
            if bool(self._pending) != writing:
                writing = not writing
                poll.register(self._command, select.POLLOUT) if writing else poll.unregister(self._command)
            ready = dict(poll.poll(math.ceil(left * 1000)))
            for descriptor in [d for d in self._open if d in ready]:
                self._read(descriptor)
                if descriptor not in self._open:
                    poll.unregister(descriptor)
            if self.loaded and not self.tests_delivered:
                self.tests_delivered = True
                data = receive_frame(secrets)
                self._pending = memoryview(bytes(self._pending) + struct.pack("=I", len(data)) + data)
            if self._pending:
                self._write()
            if control.fileno() in ready:
                receive_frame(control)  # a cancellation, or EOFError: the executor is gone
                self.ended = "cancelled"
            if self._pidfd in ready:
                return

    def _write(self) -> None:
        try:
            self._pending = self._pending[os.write(self._command, self._pending) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the child closed its end: it gets no more, its exit tells the rest
            self._pending = memoryview(b"")

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._open.discard(descriptor)
        elif descriptor == self._event:
            self._take_events(data)
        else:
            self._output += len(data)
            tail = self._tails[descriptor]
            tail += data
            limit = self._settings["output_tail_bytes"]
            if len(tail) > 2 * limit:
                del tail[:-limit]
            if self._output > self._settings["output_bytes"]:
                self.ended = self.ended or "output"

    def _take_events(self, data: bytes) -> None:
        if not self.loaded:
            self._prefix += data
            expected = READY + b"loaded\n"
            self.ready = self.ready or self._prefix.startswith(READY)
            if self._prefix.startswith(expected):
                self.loaded = True
                data = bytes(self._prefix[len(expected) :])
            elif expected.startswith(self._prefix):
                return
            else:
                self.ended = self.ended or "channel"
                return
        self.events += data
        if len(self.events) > self._settings["event_bytes"]:
            self.ended = self.ended or "events"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # ended by itself
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def drain(self) -> None:
        """What was written before the end. Everyone who could write has been reaped."""
        ended = self.ended
        while self._open and (not self.ended or self.ended == ended):
            before = self._output, len(self.events), len(self._prefix), len(self._open)
            for descriptor in list(self._open):
                self._read(descriptor)
            if before == (self._output, len(self.events), len(self._prefix), len(self._open)):
                return

    def tail(self, descriptor: int) -> bytes:
        return bytes(self._tails[descriptor][-self._settings["output_tail_bytes"] :])

    def close(self) -> None:
        for descriptor in (self._command, self._event, *self._tails, self._pidfd):
            os.close(descriptor)


def kill_uid(uid: int) -> None:
    """SIGKILL to every process of the uid, from a child that has that uid."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def children_of(parent: int) -> list[int]:
    """Process ids whose parent is `parent`."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(name))
    return found


def send_frame(connection: socket.socket, *frames: bytes) -> None:
    connection.sendall(b"".join(struct.pack("=I", len(frame)) + frame for frame in frames))


def receive_frame(connection: socket.socket) -> bytes:
    """One frame. Raises EOFError when the other side closed."""
    (size,) = struct.unpack("=I", _receive(connection, 4))
    return _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the executor closed its end")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_library_by_descriptor() -> int:
    """Makes imports go through an open descriptor of the standard library, and returns that descriptor.

    A program's uid may lack the right to walk to the library (an interpreter below a private home); through the
    descriptor no directory above it is walked. Landlock still decides what may be opened.
    """
    library = os.path.dirname(os.__file__)
    descriptor = os.open(library, os.O_PATH | os.O_DIRECTORY)
    path = f"/proc/self/fd/{descriptor}"
    if not os.path.isdir(path + "/"):
        raise RuntimeError("the executor needs /proc to be mounted")
    sys.path[:] = [path, path + "/lib-dynload"]
    for module in list(sys.modules.values()):
        inside = getattr(module, "__path__", None)
        if isinstance(inside, list):
            inside[:] = [path + item.removeprefix(library) if item.startswith(library) else item for item in inside]
    return descriptor


def forget_the_executor() -> None:
    """Takes this package out of what a program finds by name. Once, here: in each fork it would cost page copies."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "dockyard_executor"]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")


def main(argv: list[str]) -> None:
    """argv: control descriptor, secrets descriptor, settings as JSON."""
    control, secrets = (socket.socket(fileno=int(text)) for text in argv[:2])
    settings = json.loads(argv[2])
    package_directory = sys.path[0]
    from dockyard_executor import isolation

    isolation.set_parent_death_signal(settings["executor_pid"])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the executor, which closes `control` when it is time
    import dockyard_executor.runner
    import dockyard_executor.values  # noqa: F401

    settings["library_fd"] = read_library_by_descriptor()
    for name in PRELOAD:
        __import__(name)
    assert package_directory not in sys.path
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=False)  # type: ignore[union-attr]
    sys.argv[:] = ["program.py"]
    os.chdir("/")
    try:
        Server(control, secrets, settings).serve()
    except EOFError:
        return  # in the middle of a run: the executor is gone, the run was ended and reaped
