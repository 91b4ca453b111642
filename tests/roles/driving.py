"""A driver and a scripted engine whose steps a test allows one by one: so it knows in which one it does what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from dockyard_actors.engines.base import GroupOutput, GroupRequest, SamplingConfig
from dockyard_actors.roles.engine_driver import EngineDriver
from tests.roles.world import PATIENCE_S, ScriptedEngine, eventually

TEXT = "abcdefgh\n"


class Turnstile:
    """Lets the engine's thread take as many steps as were allowed, then holds it at the next one.

    A step counts as taken when it begins: what is asked then may come before or behind the next one. `take` leaves no such choice.
    """

    def __init__(self, engine: ScriptedEngine):
        self._allowed = threading.Semaphore(0)
        self.taken = 0
        self.held = False  # at the step after those taken: the one before has ended, and what is asked now comes behind this one
        self.open = False
        engine.before_step = self._pass

    def _pass(self) -> None:
        if not self.open:
            self.held = True
            assert self._allowed.acquire(timeout=PATIENCE_S)
            self.held = False
        self.taken += 1

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()

    async def take(self, steps: int) -> None:
        """Lets the engine take that many more steps, and waits until it is held at the one behind them."""
        taken = self.taken + steps
        self.allow(steps)
        await eventually(lambda: self.held and self.taken == taken)

    def release(self) -> None:
        self.open = True
        self.allow(1)


def group(key: int = 7) -> tuple[GroupRequest, GroupOutput]:
    return GroupRequest(key, np.array([1, 2], np.int32), 2, (0, 1)), GroupOutput.allocate(2, len(TEXT))


@asynccontextmanager
async def driving(
    engine: ScriptedEngine | None = None,
) -> AsyncIterator[tuple[EngineDriver, ScriptedEngine, Turnstile]]:
    engine = engine or ScriptedEngine((TEXT,))
    turnstile = Turnstile(engine)
    driver = EngineDriver(engine, failures.append)
    failures.clear()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield driver, engine, turnstile
    finally:
        turnstile.release()
        driver.close()
        await driver.closed(PATIENCE_S)


failures: list[BaseException] = []


SAMPLING = SamplingConfig(max_new_tokens=len(TEXT))


async def generate(driver: EngineDriver, key: int = 7):
    request, output = group(key)
    return asyncio.ensure_future(driver.generate(request, output, SAMPLING)), output


def submit(driver: EngineDriver, *keys: int):
    """(generation, output) a group."""
    groups = [group(key) for key in keys]
    return list(zip(driver.submit(groups, SAMPLING), [output for _, output in groups], strict=True))


def text_of(output: GroupOutput, row: int = 0) -> str:
    return bytes(output.tokens[row, : output.lengths[row]].astype(np.uint8)).decode()


def swap(engine: ScriptedEngine, version: int):
    def apply() -> int:
        engine.update_weights({}, None, version)
        return version

    return apply
