"""Speaks HTTP with a vLLM server for a thread that blocks: calls with a deadline, and completions that stream into one queue.
Sockets live in an event loop and thread of its own. Every error names the server, the route and the seconds or the server's words; the
key it may need is never part of one. Knows routes and JSON, no groups and no weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import threading
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from dockyard_actors.engines import vllm_boot
from dockyard_actors.engines.base import EngineError

T = TypeVar("T")

GENERATE = "/inference/v1/generate"
HEALTH = "/health"
KEY_VARIABLE = "VLLM_API_KEY"  # as vLLM's own
LINE_BYTES = 1 << 20  # of one event of a stream; a token's is a few hundred
SHOWN = 500  # characters of the server's words in an error
RETRY_S = 0.2  # between two looks at a server that starts
GRACE_S = 5.0  # for the loop of this thread beyond the deadline that it keeps itself


SERVER_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
SERVER_FLAGS = (
    "--enable-scale-out",  # the route that takes and gives token ids
    "--no-async-scheduling",
    "--worker-extension-cls",
    vllm_boot.EXTENSION,
    "--weight-transfer-config",
    json.dumps({"backend": vllm_boot.BACKEND}),
)
"""What a server needs beside its model; this package must be importable there, by the same user on the same host."""


@dataclass(frozen=True)
class VLLMHTTPConfig:
    """url: of the server, http://host:port or unix:/path; its routes for weights ask for no key, so nobody else should reach it.
    fd_path: socket of the fd server that keeps the run's shared memory. model: its name there; None: the only one it serves.
    api_key_file: None: VLLM_API_KEY of the environment, if any. max_batch_rows: requests that the server is given at once.
    Seconds: connect_s, for a server that still starts; call_s, for a call; update_s, for loading weights; silence_s, without a
    token from the server while it has requests; step_s, after which a step without one returns.
    """

    url: str
    fd_path: str
    model: str | None = None
    api_key_file: str | None = None
    max_batch_rows: int = 128
    connect_s: float = 300.0
    call_s: float = 60.0
    update_s: float = 300.0
    silence_s: float = 120.0
    step_s: float = 0.1

    def __post_init__(self) -> None:
        if not re.match(r"(https?://|unix:/)[^/]", self.url):
            raise ValueError(f"engine.url: {self.url!r} is neither http://host:port nor unix:/path")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:
                raise ValueError(f"engine.{field.name}: {value!r} must be > 0")


class ServerRefused(EngineError):
    """The server answered that the request is wrong (4xx): it goes on, and nothing was done."""


class Span(msgspec.Struct):
    """Tokens [start, end) were drawn from weights of this version."""

    version: str
    start: int
    end: int


class TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]


class Choice(msgspec.Struct):
    """What a completion got since the last one. weight_versions: of all its tokens, once it is finished."""

    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class Answer(msgspec.Struct):
    """Of GENERATE: one event of a stream, or everything. prompt_logprobs: by token id as text, one for every token but the first."""

    choices: list[Choice] = []
    prompt_logprobs: list[dict[str, TokenValue] | None] | None = None
    error: Any = None


class TokenValue(msgspec.Struct):
    logprob: float


class VLLMClient:
    """One server's client.

    url: http://host:port or unix:/path. key_file: file that holds the API key; None: the environment's VLLM_API_KEY, if any.
    """

    def __init__(self, url: str, key_file: str | None = None) -> None:
        self.url = url
        socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._base = "http://server" if socket is not None else url.rstrip("/")
        self._headers = _authorization(key_file)
        self._events: queue.SimpleQueue[tuple[str, Choice | EngineError]] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # the loop's own
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-http", daemon=True)
        self._thread.start()
        self._session = self._wait(self._open(socket), GRACE_S, "opening")

    # For the thread that blocks.

    def call(self, route: str, body: Any = None, *, timeout_s: float, method: str = "POST") -> bytes:
        """The body of the answer. Raises ServerRefused for a 4xx, EngineError for everything else that is no answer."""
        return self._wait(self._call(method, route, body, timeout_s), timeout_s, route)

    def generate(self, body: dict[str, Any], timeout_s: float) -> Answer:
        """Everything that a request brings. Raises as `call`."""
        return self._decode(GENERATE, self.call(GENERATE, body, timeout_s=timeout_s))

    def stream(self, name: str, body: dict[str, Any]) -> None:
        """Starts a completion, whose events come to `events` under this name until the finished one or an error."""
        self._loop.call_soon_threadsafe(self._start, name, {**body, "stream": True})

    def events(self, timeout_s: float) -> list[tuple[str, Choice | EngineError]]:
        """What came until now, in order; waits so long for the first. What comes meanwhile is for the next call: it may come as fast."""
        found: list[tuple[str, Choice | EngineError]] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait())
            found += [self._events.get_nowait() for _ in range(self._events.qsize())]
        return found

    def cancel(self, names: Iterable[str]) -> None:
        """Ends these streams, in the server too: it aborts what nobody listens to. Their events may still be in the queue."""
        self._loop.call_soon_threadsafe(self._cancel, list(names))

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server says that it is healthy."""
        until, problem = time.monotonic() + timeout_s, ""
        while (left := until - time.monotonic()) > 0:
            try:
                self.call(HEALTH, method="GET", timeout_s=left)
                return
            except EngineError as error:
                problem = str(error)
            time.sleep(min(RETRY_S, max(0.0, until - time.monotonic())))
        raise EngineError(f"the vLLM server at {self.url} did not become ready within {timeout_s:g} s: {problem}")

    def close(self) -> None:
        """Ends every stream. Idempotent."""
        if not self._loop.is_closed():
            with contextlib.suppress(EngineError):
                self._wait(self._close(), GRACE_S, "closing")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE_S)
            if not self._thread.is_alive():
                self._loop.close()

    def _wait(self, answer: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        try:
            return future.result(timeout_s + GRACE_S)
        except TimeoutError as error:
            future.cancel()
            raise EngineError(f"the vLLM server at {self.url}: {what} took longer than {timeout_s:g} s") from error

    def _decode(self, route: str, data: bytes) -> Answer:
        try:
            answer = msgspec.json.decode(data, type=Answer)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url}{route} answered something else ({error}): {_words(data)}") from error
        if answer.error is not None or not answer.choices:
            raise EngineError(f"{self.url}{route} failed: {_words(data)}")
        return answer

    # In the loop.

    async def _open(self, socket: str | None) -> aiohttp.ClientSession:
        connector = aiohttp.UnixConnector(socket, limit=0) if socket is not None else aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)  # every call has a deadline of its own
        return aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=timeout, read_bufsize=LINE_BYTES, trust_env=False
        )

    async def _close(self) -> None:
        tasks = list(self._tasks.values())
        self._cancel(list(self._tasks))
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _call(self, method: str, route: str, body: Any, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s), self._request(method, route, body) as response:
                data = await response.read()
        except TimeoutError as error:
            raise EngineError(f"{self.url}{route} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{self.url}{route} is gone: {type(error).__name__}: {error}") from error
        self._check(route, response.status, data)
        return data

    def _request(self, method: str, route: str, body: Any) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        return self._session.request(
            method, self._base + route, data=data, headers={"Content-Type": "application/json"}
        )

    def _check(self, route: str, status: int, data: bytes) -> None:
        if status >= 400:
            kind = ServerRefused if status < 500 else EngineError
            raise kind(f"{self.url}{route} answered {status}: {_words(data)}")

    def _start(self, name: str, body: dict[str, Any]) -> None:
        task = self._tasks[name] = self._loop.create_task(self._stream(name, body))
        task.add_done_callback(lambda done: self._tasks.pop(name, None))

    def _cancel(self, names: list[str]) -> None:
        for name in names:
            if (task := self._tasks.get(name)) is not None:
                task.cancel()

    async def _stream(self, name: str, body: dict[str, Any]) -> None:
        finished = False
        try:
            async with self._request("POST", GENERATE, body) as response:
                if response.status >= 400:
                    self._check(GENERATE, response.status, await response.read())
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        choice = self._decode(GENERATE, line.removeprefix(b"data: ")).choices[0]
                        self._events.put((name, choice))
                        finished |= choice.finish_reason is not None
            if not finished:
                raise EngineError(f"{self.url}{GENERATE} ended a stream before its completion had ended")
        except EngineError as error:
            self._events.put((name, error))
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a line without end
            if not finished:
                gone = EngineError(f"{self.url}{GENERATE} is gone: {type(error).__name__}: {error}")
                self._events.put((name, gone))


def _authorization(key_file: str | None) -> dict[str, str]:
    try:
        key = Path(key_file).read_text().strip() if key_file is not None else os.environ.get(KEY_VARIABLE, "")
    except OSError as error:
        raise EngineError(f"engine.api_key_file: {error}") from error
    return {"Authorization": f"Bearer {key}"} if key else {}


def _words(data: bytes) -> str:
    """What the server says, as it says it."""
    try:
        said = msgspec.json.decode(data)["error"]
        return str(said["message"] if isinstance(said, dict) else said)[:SHOWN]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return data.decode("utf-8", "replace")[:SHOWN]
