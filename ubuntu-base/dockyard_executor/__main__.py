"""`python -m dockyard_executor --socket PATH` or `--port 9090`: one executor until SIGTERM, SIGINT or its parent's end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from aiohttp import web

from dockyard_executor.app import make_app
from dockyard_executor.config import ConfigError, ExecutorConfig, from_env
from dockyard_executor.isolation import become_subreaper, set_parent_death_signal
from dockyard_executor.service import CannotIsolate, Service
from dockyard_executor.worker import WorkerDied

log = logging.getLogger("dockyard_executor")
EXIT_CONFIG, EXIT_CANNOT_ISOLATE = 2, 3


def parse_arguments(argv: list[str]) -> ExecutorConfig:
    parser = argparse.ArgumentParser(prog="dockyard_executor", description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--socket", type=Path, help="listen on this unix socket (mode 0600)")
    where.add_argument("--port", type=int, help="listen on TCP (default 9090; API_PORT)")
    parser.add_argument("--host", help="address for --port (default 127.0.0.1; API_HOST); others need API_TOKEN")
    parser.add_argument("--workers", type=int, help="programs run at the same time (default 2; WORKERS)")
    parser.add_argument("--queue-limit", type=int, help="tasks that may wait (QUEUE_LIMIT)")
    parser.add_argument(
        "--drain", type=float, dest="drain_s", help="seconds for accepted tasks on SIGTERM (DRAIN_SECONDS)"
    )
    parser.add_argument(
        "--allow-weak", action="store_true", help="run even where the host cannot isolate; every result says `weak`"
    )
    parser.add_argument("--parent-pid", type=int, help="end when this parent process ends")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="LOG_LEVEL")
    arguments = vars(parser.parse_args(argv))
    arguments["allow_weak"] = arguments["allow_weak"] or None
    return from_env(os.environ, **arguments)


async def serve(config: ExecutorConfig) -> None:
    """Runs until a signal. Raises CannotIsolate or WorkerDied when it cannot start, OSError when the address is taken."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service = Service(config)
    await service.start()
    # handlers are left their time to answer the last long-polls after the drain
    runner = web.AppRunner(make_app(service), access_log=None, shutdown_timeout=config.drain_s)
    bound = False
    try:
        await runner.setup()
        site = _listen(runner, config)
        bound = True
        await site.start()
        log.info("listening on %s: %d workers, isolation %s", config.address, config.workers, service.isolation)
        await stop.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _end_at_once, config, 128 + number)
        log.info("draining: %d queued, %d running", service.queued, service.running)
    finally:
        await service.stop()
        await runner.cleanup()
        if bound and config.socket is not None:  # else it may be another executor's
            config.socket.unlink(missing_ok=True)


def _end_at_once(config: ExecutorConfig, status: int) -> None:
    """A second signal: workers and programs die with this process, so only the socket is left to remove."""
    if config.socket is not None:
        config.socket.unlink(missing_ok=True)
    os._exit(status)


def _listen(runner: web.AppRunner, config: ExecutorConfig) -> web.BaseSite:
    if config.socket is None:
        return web.TCPSite(runner, config.host, config.port)
    remove_stale(config.socket)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(config.socket))
    config.socket.chmod(0o600)
    return web.SockSite(runner, listener)


def remove_stale(path: Path) -> None:
    """Removes a socket that nobody listens on any more. Raises OSError when somebody does or when it is no socket."""
    if not path.is_socket():
        if path.exists():
            raise FileExistsError(f"{path} exists and is no socket")
        return
    with socket.socket(socket.AF_UNIX) as attempt:
        try:
            attempt.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(f"another executor listens on {path}")


def main(argv: list[str] | None = None) -> int:
    try:
        config = parse_arguments(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"dockyard_executor: {error}", file=sys.stderr)
        return EXIT_CONFIG
    os.environ.pop("API_TOKEN", None)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    try:
        if config.parent_pid:
            set_parent_death_signal(config.parent_pid)
        become_subreaper()
        asyncio.run(serve(config))
    except CannotIsolate as error:
        print(f"dockyard_executor: {error}", file=sys.stderr)
        return EXIT_CANNOT_ISOLATE
    except (WorkerDied, OSError) as error:
        print(f"dockyard_executor: cannot start on {config.address}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
