"""A child executor, and a scripted server that stands in for an executor in trouble."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dockyard_actors.sandbox.child import ExecutorProcess, ExecutorProcessConfig

RIGHT = "def f(x):\n    return x + 1\n"


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough a path for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="dys-"))
    yield path
    assert [entry.name for entry in path.iterdir() if entry.is_socket()] == []
    shutil.rmtree(path)


@pytest.fixture
async def child(directory: Path) -> AsyncIterator[ExecutorProcess]:
    """Not started yet; stopped at the end."""
    process = ExecutorProcess(
        ExecutorProcessConfig(socket_path=directory / "s", log_path=directory / "log", workers=1, drain_s=1.0)
    )
    yield process
    await process.stop()


Answer = Callable[[web.Request], Any]


class Scripted:
    """Answers each submit by the next of `script`: (status, JSON) or "drop" (closes the connection)."""

    def __init__(self, script: list[Any]) -> None:
        self.script = script
        self.request_ids: list[str] = []
        self.headers: list[dict[str, str]] = []

    async def submit(self, request: web.Request) -> web.StreamResponse:
        self.request_ids.append((await request.json())["request_id"])
        self.headers.append(dict(request.headers))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if step == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        status, body = step
        return web.json_response(body, status=status, headers={"Retry-After": "0"} if status == 429 else None)

    async def result(self, request: web.Request) -> web.StreamResponse:
        return await self.submit_without_id()

    async def submit_without_id(self) -> web.StreamResponse:
        status, body = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return web.json_response(body, status=status)


@pytest.fixture
async def scripted(directory: Path) -> AsyncIterator[Any]:
    """`await scripted([...])` gives (server, socket path)."""
    runners: list[web.AppRunner] = []

    async def start(script: list[Any]) -> tuple[Scripted, Path]:
        server = Scripted(script)
        app = web.Application()
        app.add_routes([web.post("/task/submit", server.submit), web.get("/task/{id}/result", server.result)])
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        path = directory / "scripted"
        await web.UnixSite(runner, str(path)).start()
        runners.append(runner)
        return server, path

    yield start
    for runner in runners:
        await runner.cleanup()
    (directory / "scripted").unlink(missing_ok=True)
