"""What a role's `main` calls: opens the process's actor system as its node agent arranged it, and ends as the agent expects.

The process dies with its agent, answers SIGTERM by stopping its actors in order, and leaves the cause of a crash in a file
that the agent reads. It knows nothing of which actors are started.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import uvloop

from dockyard_actors.runtime import guard, leash
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import PermanentError
from dockyard_actors.runtime.failures import printable, said
from dockyard_actors.runtime.status import CRASH_CODE, StopRequest
from dockyard_actors.runtime.system import ActorSystem

log = logging.getLogger("dockyard.runtime.process")

ENVIRONMENT = guard.ENVIRONMENT
Build = Callable[[ActorSystem], Awaitable[None]]


class Bootstrap(msgspec.Struct, frozen=True):
    """What an agent tells its child through the environment: names and paths, never secrets."""

    name: str
    uid: str
    agent_uid: str
    agent_pid: int
    rendezvous: str
    runtime_dir: str  # of the agent: fd server and the like
    socket_dir: str  # of this process: its sockets, guard page and cause file
    key_file: str = ""
    tcp_bind: str = ""
    allow_plain_loopback: bool = False
    registry_lost_s: float = 30.0

    def system(self) -> SystemConfig:
        return SystemConfig(
            name=self.name,
            uid=self.uid,
            agent=self.agent_uid,
            rendezvous=self.rendezvous,
            ipc_prefix=f"{self.socket_dir}/",
            key_file=Path(self.key_file) if self.key_file else None,
            tcp_bind=self.tcp_bind,
            allow_plain_loopback=self.allow_plain_loopback,
            registry_lost_s=self.registry_lost_s,
        )


class Cause(msgspec.Struct, frozen=True):
    """Why a process crashed, for its agent."""

    where: str
    error: str
    traceback: str
    permanent: bool = False  # a PermanentError: what is wrong is still wrong after a restart


def read_bootstrap() -> Bootstrap:
    """From the environment variable DOCKYARD_PROCESS. RuntimeError when there is none: the process was not started by an agent."""
    text = os.environ.get(ENVIRONMENT)
    if not text:
        raise RuntimeError(
            f"{ENVIRONMENT} is not set: role processes are started by a node agent (dockyard-launch up or --role)"
        )
    return msgspec.json.decode(text, type=Bootstrap)


def cause_path(socket_dir: str | Path) -> Path:
    return Path(socket_dir) / "cause.json"


async def run_process(build: Build, bootstrap: Bootstrap) -> StopRequest:
    """Opens the system, runs ``build`` (which starts actors), waits for the end and closes everything. Never raises for a crash:
    the StopRequest carries the cause."""
    loop = asyncio.get_running_loop()
    system = ActorSystem(bootstrap.system())
    stop: StopRequest | None = None
    try:
        async with system:
            loop.add_signal_handler(signal.SIGTERM, system.request_stop, "SIGTERM")
            loop.add_signal_handler(signal.SIGINT, system.request_stop, "SIGINT")
            building = asyncio.ensure_future(build(system))
            stopped = asyncio.ensure_future(system.wait_stop())
            await asyncio.wait((building, stopped), return_when=asyncio.FIRST_COMPLETED)
            if building.done() and not building.cancelled() and building.exception() is not None:
                system.crash(building.exception(), f"starting {bootstrap.name}")
            building.cancel()
            stop = await stopped
    except Exception as error:
        if stop is None or stop.cause is None:
            return StopRequest(f"{bootstrap.name}'s actor system", CRASH_CODE, error)
    return stop


def main_process(build: Build, last: Callable[[], None] = lambda: None) -> NoReturn:
    """The whole life of a role process: `if __name__ == "__main__": main_process(build)`. Exits 0 after an orderly stop, and calls
    `last` then, when the event loop has ended."""
    bootstrap = read_bootstrap()
    leash.die_with(bootstrap.agent_pid)
    guard.attach()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s.%(msecs)03d {bootstrap.name} %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)  # the agent asks a hung process where it is
    try:
        stop = uvloop.run(_until_stopped(build, bootstrap))
        last()
    except BaseException as error:  # last boundary of the process: leave the cause, then end
        _leave(bootstrap, StopRequest("the event loop", CRASH_CODE, error))
    log.info("%s ends: %s", bootstrap.name, stop.reason)
    sys.exit(stop.exit_code)


async def _until_stopped(build: Build, bootstrap: Bootstrap) -> StopRequest:
    stop = await run_process(build, bootstrap)
    if stop.cause is not None:
        _leave(
            bootstrap, stop
        )  # not through the loop's shutdown: it would wait for threads of a process that is broken
    return stop


def _leave(bootstrap: Bootstrap, stop: StopRequest) -> NoReturn:
    error = stop.cause
    assert error is not None
    said_text, text = said(error)
    cause = Cause(
        printable(stop.reason), f"{type(error).__name__}: {said_text}", text, isinstance(error, PermanentError)
    )
    path = cause_path(bootstrap.socket_dir)
    partial = path.with_suffix(".part")
    partial.write_bytes(msgspec.json.encode(cause))
    os.rename(partial, path)
    log.critical("%s ends: %s\n%s", bootstrap.name, stop.reason, text)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(stop.exit_code or CRASH_CODE)
