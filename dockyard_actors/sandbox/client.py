"""The only way to a verdict: an HTTP client of one executor, over a unix socket or a URL.

Promises that a verdict returned is about the program: `infra`, lost connections and full queues are tried again under the same
request id until the deadline and then raised. Knows nothing of isolation or grading.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from dockyard_actors.sandbox.types import Health, Verdict


class ExecutorError(RuntimeError):
    """Something between us and an executor went wrong for good; the message names the executor and the request."""


class ExecutorUnavailable(ExecutorError):
    """No verdict before the deadline: the program stays unjudged."""


class ExecutorRefused(ExecutorError):
    """The executor will never take this request (400, 401, 404, 409, 413); trying again is no use."""


@dataclass(frozen=True)
class ClientConfig:
    """Times in seconds."""

    poll_s: float = 20.0  # one long-poll; short enough to notice a lost executor behind a silent network
    health_s: float = 5.0  # an executor that does not say its state within this counts as not answering
    backoff_s: float = 0.05  # first pause before trying again; doubled each time
    backoff_max_s: float = 1.0  # a restarted executor is back within about a second
    connections: int = 128  # open requests at one time, above any sensible number of workers


class _Retry(Exception):
    """This attempt brought no verdict; says why."""

    def __init__(self, cause: str, wait_s: float = 0.0) -> None:
        super().__init__(cause)
        self.wait_s = wait_s


class _Accepted(msgspec.Struct):
    task_id: str
    status: str


class ExecutorClient:
    """One executor at `socket_path` or `base_url`; an async context manager. Safe for many concurrent calls on one loop."""

    def __init__(
        self,
        socket_path: str | Path | None = None,
        base_url: str | None = None,
        token: str | None = None,
        config: ClientConfig | None = None,
    ) -> None:
        if (socket_path is None) == (base_url is None):
            raise ValueError("give either socket_path or base_url")
        self.name = f"unix:{socket_path}" if socket_path is not None else str(base_url)
        self._socket = None if socket_path is None else str(socket_path)
        self._base = "http://executor" if base_url is None else base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._config = config or ClientConfig()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def run_program(
        self,
        request_id: str,
        program: str,
        tests: Sequence[str],
        hidden_tests: Sequence[str],
        timeout_s: float,
        deadline_s: float,
    ) -> Verdict:
        """The verdict on `program` (source text) under `tests` and `hidden_tests` (one Python statement each).

        `timeout_s` is the program's own wall time; `deadline_s`, counted from this call, is how long to try to get a verdict,
        waiting in the executor's queue included. The same `request_id` never grades twice. Raises ExecutorUnavailable after
        the deadline and ExecutorRefused when the request itself is wrong. Never returns `infra`.
        """
        body = msgspec.json.encode(
            {
                "request_id": request_id,
                "program": program,
                "tests": list(tests),
                "hidden_tests": list(hidden_tests),
                "timeout": timeout_s,
            }
        )
        what = f"a verdict on {request_id!r}"
        start = time.monotonic()
        pause, attempts, cause = self._config.backoff_s, 0, "never tried"
        while (left := start + deadline_s - time.monotonic()) > 0:
            attempts += 1
            try:
                async with asyncio.timeout(left):
                    return await self._attempt(body, what, start + deadline_s)
            except TimeoutError:
                cause = cause if attempts > 1 else "no answer"
                break
            except _Retry as retry:
                cause = str(retry)
                wait_s = max(pause, retry.wait_s)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
                cause = f"{type(error).__name__}: {error}"
                wait_s = pause
            await asyncio.sleep(min(wait_s, max(0.0, start + deadline_s - time.monotonic())))
            pause = min(2 * pause, self._config.backoff_max_s)
        waited = time.monotonic() - start
        raise ExecutorUnavailable(
            f"executor {self.name} gave no verdict: waited {waited:.1f} s for {what}, {attempts} attempts, last: {cause}"
        )

    async def _attempt(self, body: bytes, what: str, deadline: float) -> Verdict:
        status, data = await self._call("POST", "/task/submit", what, self._wait_s(deadline), body)
        while status == 202:
            accepted = msgspec.json.decode(data, type=_Accepted)
            status, data = await self._call("GET", f"/task/{accepted.task_id}/result", what, self._wait_s(deadline))
        raw: dict[str, Any] = msgspec.json.decode(data)
        raw["seconds"] = raw.get("execution_time", 0.0)
        verdict = msgspec.convert(raw, Verdict)
        if verdict.state == "infra":
            raise _Retry(f"infra: {verdict.error}")
        return verdict

    def _wait_s(self, deadline: float) -> float:
        return max(0.0, min(self._config.poll_s, deadline - time.monotonic()))

    async def _call(
        self, method: str, path: str, what: str, wait_s: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else None
        async with self._open().request(
            method, self._base + path, params={"wait": f"{wait_s:.3f}"}, data=body, headers=headers
        ) as response:
            data = await response.read()
        if response.status in (200, 202):
            return response.status, data
        message = _message(data)
        if response.status in (429, 503):
            raise _Retry(f"{response.status} {message}", _seconds(response.headers.get("Retry-After")))
        if response.status >= 500 or response.status == 404:  # 404: the executor restarted and has forgotten the task
            raise _Retry(f"{response.status} {message}")
        raise ExecutorRefused(f"executor {self.name} refused {what}: {response.status} {message}")

    async def health(self) -> Health:
        """Raises ExecutorUnavailable when it does not answer within `health_s`."""
        try:
            async with asyncio.timeout(self._config.health_s), self._open().get(self._base + "/health") as response:
                raw = msgspec.json.decode(await response.read())
        except (TimeoutError, aiohttp.ClientError, ConnectionError, msgspec.DecodeError) as error:
            cause = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ExecutorUnavailable(
                f"executor {self.name} does not say its health within {self._config.health_s:g} s: {cause}"
            ) from error
        return msgspec.convert({**raw, "workers": len(raw["workers"])}, Health)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            limit = self._config.connections
            connector = (
                aiohttp.UnixConnector(self._socket, limit=limit)
                if self._socket is not None
                else aiohttp.TCPConnector(limit=limit)
            )
            # every call has a deadline of its own
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session


def _message(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return data[:200].decode("utf-8", "replace")


def _seconds(text: str | None) -> float:
    return float(text) if text is not None and text.isdigit() else 0.0
