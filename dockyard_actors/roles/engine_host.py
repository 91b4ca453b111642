"""What every role with an engine does: load it, take weights between two decode steps, prove them, evaluate.

The engine runs in its own thread (`engine_driver.py`). New weights are used only after the delivered bytes and a canary proved right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dockyard_actors.config import Config
from dockyard_actors.engines.base import Engine, SamplingConfig
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.engine_driver import EngineDriver
from dockyard_actors.roles.evaluation import WrongVersion, evaluate
from dockyard_actors.roles.reporting import Reporter
from dockyard_actors.roles.scoring import broker_judge
from dockyard_actors.roles.weight_load import OlderWeights, TornWeights, take
from dockyard_actors.roles.weight_source import WeightSource
from dockyard_actors.runtime import memory
from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.tasks.types import TaskSet
from dockyard_actors.transport.tensors import DataPlaneError

log = logging.getLogger(__name__)

# The agent kills at the whole supervision.stop_grace_s, the runtime cancels on_stop at its own limit: the rest is for what else must end.
STOP_SHARE = 0.4


class EngineHost(Actor):
    """One process with one engine. Subclasses say what it generates for."""

    def __init__(self, config: Config, tasks: TaskSet, engine: Engine, weights: WeightSource):
        self.config = config
        self.tasks = tasks.by_id()
        self.engine = engine
        self.weights = weights
        self.sampling = SamplingConfig(
            temperature=config.generation.temperature, max_new_tokens=config.generation.max_new_tokens
        )
        self.proven = -1  # version of the newest weights that proved right; the engine's own may be suspect
        self.fresher = asyncio.Event()  # pulsed when the engine got new weights

    async def on_start(self) -> None:
        self.judge = broker_judge(self.ctx, self.config.rendezvous.ask_timeout_s)
        self.report = Reporter(self, doing="loading the model")
        self.report.facts["engine"] = self.config.generation.engine
        self.driver = EngineDriver(self.engine, self._engine_failed, self._engine_was_busy)
        await self.driver.call(self.engine.start)
        self.proven = self.engine.version

    async def on_stop(self) -> None:
        self.driver.close()
        grace_s = min(self.config.supervision.stop_grace_s, self.ctx.system.config.stop_s)
        if await self.driver.closed(STOP_SHARE * grace_s):
            self.weights.close()  # the engine's thread was the one that used it

    def _engine_failed(self, error: BaseException) -> None:
        """A decode step raised: nothing can be said of the engine any more. Its agent starts another process."""
        self.ctx.system.crash(error, "the engine")

    def _engine_was_busy(self, start_s: float, end_s: float, groups: int, tokens: int) -> None:
        self.report.trace.add("generate", start_s, end_s, groups=groups, tokens=tokens, version=self.engine.version)

    # ---- weights

    @concurrent
    async def update_weights(self, msg: m.UpdateWeights) -> m.Applied:
        """Decoding pauses as weight_sync.pause says and goes on only with weights that proved right. Raises OlderWeights,
        WeightsMismatch and DataPlaneError with nothing changed; TornWeights, UnloadableWeights and SuspectWeights (the canary) leave
        decoding paused."""
        try:
            applied = await self.driver.update(lambda: self._apply(msg), self.config.weight_sync.pause)
        except Exception as error:
            await asyncio.to_thread(self.weights.decline, msg.offer, str(error))
            raise
        self.proven = max(self.proven, applied.version)
        self.fresher.set()
        self.fresher = asyncio.Event()
        return applied

    def _apply(self, msg: m.UpdateWeights) -> m.Applied:
        self.engine.prepare_for_generation()  # it may sleep still: the trainer that should have woken it died
        return take(self.engine, self.weights, msg.offer, msg.canary, self.config, self.report.trace.span)

    @concurrent
    async def sleep(self, msg: m.Sleep) -> m.Memory:
        """Nothing is generated from here until weights have come and proved right."""
        return await self.driver.sleep(lambda: self._measured("sleep", self.engine.sleep))

    @concurrent
    async def prepare_for_generation(self, msg: m.PrepareForGeneration) -> m.Memory:
        return await self.driver.call(self._measured, "wake up", self.engine.prepare_for_generation)

    def _measured(self, what: str, function: Callable[[], None]) -> m.Memory:
        log.debug("sync phase %s", what)
        with self.report.trace.span(f"sync.{what}") as args:
            before = memory.resident()
            function()
            change = memory.Change(before, memory.resident())
            args |= {"bytes_before": change.before, "bytes_after": change.after}
        self.report.facts["memory"] = f"{what} {change}"
        self.report("sleeps: the trainer has the device" if what == "sleep" else "waits for new weights")
        return m.Memory(change.before, change.after)

    async def pull_weights(self) -> None:
        """A restarted engine takes the newest weights itself; a first one waits until the trainer pushes version 0. Returns when some
        weights proved right. Raises WeightsMismatch, UnloadableWeights and SuspectWeights: the next try would end the same way."""
        while self.proven < 0:
            reply = await self.ctx.ref("trainer").ask(
                m.CurrentWeights(rollout=self.ctx.name), deadline_s=self.config.supervision.start_timeout_s, retry=True
            )
            if isinstance(reply, m.NoWeights):
                self.report("waits for the first weights")
                await self.wait_fresher(1.0)
            elif self.proven < 0:  # else the trainer's own push was faster
                try:
                    await self.update_weights(m.UpdateWeights(offer=reply.offer, canary=reply.canary))
                except (DataPlaneError, OlderWeights, TornWeights) as error:  # most likely replaced while it was pulled
                    log.warning("weights version %d could not be pulled, asking again: %s", reply.offer.version, error)
                    self.report("waits for weights that can be pulled")
                    await self.wait_fresher(1.0)

    async def wait_fresher(self, seconds: float) -> None:
        """Returns when new weights arrived, or after so many seconds."""
        try:
            await asyncio.wait_for(self.fresher.wait(), seconds)
        except TimeoutError:
            return

    # ---- evaluation

    @concurrent
    async def evaluate(self, msg: m.Evaluate) -> m.Evaluated:
        """Waits for the version that is to be evaluated to prove right: a restarted engine may be about to pull it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.config.weight_sync.timeout_s
        while self.proven < msg.version and loop.time() < until:
            await self.wait_fresher(min(1.0, until - loop.time()))
        if self.proven < msg.version:
            raise WrongVersion(f"weights {msg.version} did not prove right here within weight_sync.timeout_s")
        return await evaluate(self.judge, self.config, self.tasks, self.driver, self.report, msg)
