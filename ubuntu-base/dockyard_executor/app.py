"""The HTTP API: validation, authentication, long-polls. Everything else is the service's."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from typing import Any

from aiohttp import web

from dockyard_executor import judge
from dockyard_executor.config import ExecutorConfig
from dockyard_executor.service import DifferentRequest, Draining, QueueFull, Request, Service, Task
from dockyard_executor.verdict import Test

SERVICE = web.AppKey("service", Service)
RETRY_AFTER_S = 1  # a full queue of trivial programs moves on within a second
_FIELDS = {"request_id", "program", "tests", "hidden_tests", "timeout"}


class BadRequest(ValueError):
    """The message names the field."""


def make_app(service: Service) -> web.Application:
    app = web.Application(client_max_size=service.config.max_body_bytes, middlewares=[_errors, _authenticate])
    app[SERVICE] = service
    app.add_routes(
        [
            web.post("/task/submit", _submit),
            web.get("/task/{id}", _status),
            web.get("/task/{id}/result", _result),
            web.delete("/task/{id}", _delete),
            web.get("/health", _health),
        ]
    )
    return app


def _error(status: int, message: str, **headers: str) -> web.Response:
    return web.json_response({"error": message}, status=status, headers=headers)


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(400, str(error))
    except DifferentRequest as error:
        return _error(409, str(error))
    except QueueFull:
        return _error(429, f"the queue is full ({request.app[SERVICE].config.queue_limit} tasks wait)", **retry)
    except Draining:
        return _error(503, "the executor is ending", **retry)
    except web.HTTPException as error:
        return _error(error.status, error.text or error.reason)


@web.middleware
async def _authenticate(request: web.Request, handler: Any) -> web.StreamResponse:
    token = request.app[SERVICE].config.token
    if token is not None and request.path != "/health":
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token.encode()):
            return _error(401, "the Authorization header must carry the executor's token: Bearer TOKEN")
    return await handler(request)


def parse_request(body: bytes, config: ExecutorConfig) -> Request:
    """Validates a submission. Raises BadRequest naming the field, the value's fault and what would be right."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object")
    unknown = sorted(set(data) - _FIELDS)
    if unknown:
        raise BadRequest(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}")
    for name in ("request_id", "program"):
        if not isinstance(data.get(name), str):
            raise BadRequest(f"{name} must be a string" if name in data else f"{name} is missing")
    if not 0 < len(data["request_id"]) <= 256:
        raise BadRequest("request_id must have 1 to 256 characters")
    timeout = data.get("timeout")
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, (int, float))
        or not 0 < timeout <= config.limits.max_timeout_s
    ):
        raise BadRequest(f"timeout must be a number of seconds above 0 and at most {config.limits.max_timeout_s:g}")
    tests = [*_tests(data, "tests", hidden=False), *_tests(data, "hidden_tests", hidden=True)]
    if not tests:
        raise BadRequest("tests and hidden_tests are both empty: there would be no verdict")
    if len(tests) > config.max_tests:
        raise BadRequest(f"tests: {len(tests)} of them, at most {config.max_tests} are accepted")
    return Request(data["request_id"], data["program"], tuple(tests), float(timeout))


def _tests(data: dict[str, Any], name: str, hidden: bool) -> list[Test]:
    sources = data.get(name, [])
    if not isinstance(sources, list):
        raise BadRequest(f"{name} must be a list of statements")
    tests = []
    for index, source in enumerate(sources):
        if not isinstance(source, str):
            raise BadRequest(f"{name}[{index}] must be a string")
        try:
            judge.parse(source)
        except judge.BadTest as error:
            raise BadRequest(f"{name}[{index}]: {error}") from error
        tests.append(Test(f"{name}[{index}]", source, hidden))
    return tests


def _wait_s(request: web.Request) -> float:
    text = request.query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadRequest(f"wait is {text!r}: must be a number of seconds, 0 or more")
    return min(seconds, request.app[SERVICE].config.max_wait_s)


async def _answer(task: Task, wait_s: float) -> web.Response:
    if task.result is None and wait_s:
        try:
            async with asyncio.timeout(wait_s):
                await task.done.wait()
        except TimeoutError:
            pass  # the answer is "not yet"
    if task.result is None:
        return web.json_response({"task_id": task.task_id, "status": task.status}, status=202)
    return web.json_response({"task_id": task.task_id, **task.result, "status": task.status})


async def _submit(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    wait_s = _wait_s(request)
    task = await service.submit(parse_request(await request.read(), service.config))
    return await _answer(task, wait_s)


def _task(request: web.Request) -> Task:
    task = request.app[SERVICE].find(request.match_info["id"])
    if task is None:
        raise web.HTTPNotFound(
            text=f"no task {request.match_info['id']!r}: unknown, or its result is older than it is kept"
        )
    return task


async def _status(request: web.Request) -> web.Response:
    task = _task(request)
    return web.json_response({"task_id": task.task_id, "status": task.status})


async def _result(request: web.Request) -> web.Response:
    return await _answer(_task(request), _wait_s(request))


async def _delete(request: web.Request) -> web.Response:
    task = _task(request)
    await request.app[SERVICE].cancel(task)
    return web.json_response({"task_id": task.task_id, "status": task.status})


async def _health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    workers = [{"pid": worker.pid, "alive": worker.alive, "starts": worker.starts} for worker in service.workers]
    body = {
        "status": "ok" if all(worker.alive for worker in service.workers) else "degraded",
        "isolation": service.isolation,
        "workers": workers,
        "queued": service.queued,
        "queue_limit": service.config.queue_limit,
        "running": service.running,
        "counts": dict(service.counts),
    }
    return web.json_response(body)
