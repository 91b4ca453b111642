"""What every role with an engine does: load it, take weights between two decode steps, prove them, evaluate.

The engine runs in its own thread (`engine_driver.py`). New weights are used only after the delivered bytes and a canary proved right.
"""

from __future__ import annotations

import asyncio
import logging
import time

from dockyard_actors.config import Config
from dockyard_actors.engines.base import Engine, EngineError, SamplingConfig, WeightsMismatch
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.canary import LIMITS, check_canary
from dockyard_actors.roles.engine_driver import EngineDriver, SuspectWeights
from dockyard_actors.roles.evaluation import WrongVersion, evaluate
from dockyard_actors.roles.reporting import Reporter
from dockyard_actors.roles.scoring import broker_judge
from dockyard_actors.roles.weight_source import Mapped, Sent, WeightSource
from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.tasks.types import TaskSet
from dockyard_actors.transport.tensors import DataPlaneError

log = logging.getLogger(__name__)

# The agent kills at the whole supervision.stop_grace_s, the runtime cancels on_stop at its own limit: the rest is for what else must end.
STOP_SHARE = 0.4


class OlderWeights(EngineError):
    """The engine holds newer weights than the ones offered. Nothing was copied."""


class TornWeights(SuspectWeights):
    """The slot was given to another version while the engine copied it, or the delivery broke off: the engine holds parts of two versions.
    Newer weights are there, or about to be."""


class UnloadableWeights(SuspectWeights):
    """The engine failed to load weights whose bytes were right: asking again would not help."""


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
        applied = await self.driver.update(lambda: self._apply(msg), self.config.weight_sync.pause)
        self.proven = max(self.proven, applied.version)
        self.fresher.set()
        self.fresher = asyncio.Event()
        return applied

    def _apply(self, msg: m.UpdateWeights) -> m.Applied:
        """Brings the offered weights into the engine. The digest is of the bytes that were read, not of what the offer claims."""
        version, began = msg.offer.version, time.perf_counter()
        if version < self.engine.version:
            raise OlderWeights(f"weights version {version} come after {self.engine.version}")
        log.debug("sync phase copy of version %d", version)
        with self.report.trace.span("sync.copy", version=version), self.weights.opened(msg.offer) as incoming:
            self._load(version, incoming)
        mismatch = self._prove(version, msg.canary) if msg.canary is not None else -1.0
        log.debug("sync phase done for version %d", version)
        return m.Applied(version, incoming.digest, mismatch, time.perf_counter() - began)

    def _load(self, version: int, incoming: Mapped | Sent) -> None:
        recompute = self.config.weight_sync.recompute_kv_cache
        try:
            self.engine.update_weights(incoming.weights, incoming.manifest, version, recompute)
        except WeightsMismatch:
            raise
        except Exception as error:
            if incoming.lost is not None:
                raise TornWeights(f"weights version {version} broke off half-way: {incoming.lost}") from error
            raise UnloadableWeights(f"weights version {version} could not be loaded: {error}") from error
        try:
            incoming.check()
        except DataPlaneError as error:
            raise TornWeights(f"weights version {version} arrived torn: {error}") from error

    def _prove(self, version: int, canary: m.Canary) -> float:
        """The canary's mismatch in nats. Raises SuspectWeights when it is too large."""
        log.debug("sync phase canary of version %d", version)
        config = self.config.weight_sync
        limit = config.canary_limit or max(LIMITS[config.dtype], LIMITS[self.config.generation.dtype])
        with self.report.trace.span("sync.canary", version=version) as args:
            try:
                mismatch = check_canary(self.engine, canary, limit, config.recompute_kv_cache)
            except Exception as error:
                raise SuspectWeights(f"weights version {version}: {error}") from error
            args["mismatch"] = mismatch
        return mismatch

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
