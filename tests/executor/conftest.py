"""One real executor for the tests of a session, and a plain blocking client that shares nothing with the product's."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOKEN = "token-that-no-program-may-see"


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("executor", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Executor:
    """A running `python -m dockyard_executor`."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, launcher: list[str] | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="dyx-"))
        self.socket = self.directory / "s"
        self.log_path = self.directory / "log"
        command = [*(launcher or [sys.executable]), "-m", "dockyard_executor", "--socket", str(self.socket), *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "API_TOKEN": TOKEN, **(env or {})},
            text=True,
        )
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:  # until it says that it listens, or ends
            self.lines.append(line)
            if "listening on" in line:
                break

    @property
    def uids(self) -> range:
        first = 20_000 + (self.process.pid % 600) * 64
        return range(first, first + 64)

    def call(
        self, method: str, path: str, body: Any = None, token: str | None = TOKEN
    ) -> tuple[int, Any, dict[str, str]]:
        connection = UnixConnection(self.socket)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read()), dict(response.headers)
        finally:
            connection.close()

    def run(
        self,
        program: str,
        tests: list[str] | None = None,
        hidden_tests: list[str] | None = None,
        timeout: float = 5.0,
        **query: str,
    ) -> dict[str, Any]:
        """The finished verdict."""
        body = {
            "request_id": query.get("request_id", uuid.uuid4().hex),
            "program": program,
            "tests": ["assert f(1) == 2"] if tests is None else tests,
            "hidden_tests": hidden_tests or [],
            "timeout": timeout,
        }
        status, verdict, _ = self.call("POST", "/task/submit?wait=50", body)
        assert status == 200, (status, verdict)
        return verdict

    def ended(self, by: int = signal.SIGTERM) -> int:
        """The exit status after the signal (0: none is sent), with the whole log in `lines`."""
        if by and self.process.poll() is None:
            self.process.send_signal(by)
        assert self.process.stderr is not None
        self.lines += self.process.stderr.readlines()
        status = self.process.wait(30)
        return status

    def stop(self) -> int:
        """SIGTERM; the exit status. Nothing may be left."""
        status = self.ended() if self.process.returncode is None else self.process.returncode
        assert self.process.stderr is not None
        self.process.stderr.close()
        assert not self.socket.exists(), (status, self.lines)
        assert processes_of(self.uids) == []
        shutil.rmtree(self.directory)
        return status


def processes_of(uids: range) -> list[int]:
    """Living processes of these uids (an orphan that is dead waits for init, which is nobody's here)."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if (
                path.name.isdigit()
                and path.stat().st_uid in uids
                and path.joinpath("stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            ):
                found.append(int(path.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
    return found


@pytest.fixture(scope="package")
def executor() -> Iterator[Executor]:
    running = Executor()
    assert running.process.poll() is None, running.lines
    yield running
    assert running.stop() == 0


@pytest.fixture
def own_executor() -> Iterator[Any]:
    """Starts further executors with other settings; each is stopped at the end."""
    started: list[Executor] = []

    def start(*arguments: str, **options: Any) -> Executor:
        started.append(Executor(*arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.stop()


RIGHT = "def f(x):\n    return x + 1\n"
