"""One engine, one compute thread, one user at a time: first come, first served.

The actor loop stays free while the engine computes, and a weight update waits for one batch at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from dockyard_actors.engines.base import Engine

T = TypeVar("T")


class EngineSeat:
    def __init__(self, engine: Engine):
        self.engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._free = asyncio.Lock()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Engine]:
        """Nobody else uses the engine, or changes its weights, inside this block."""
        async with self._free:
            yield self.engine

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Runs `function` in the compute thread. Call it while the seat is taken."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
