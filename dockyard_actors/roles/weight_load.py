"""Brings one offered version into an engine and has it prove itself: the bytes by a digest, what the engine makes of them by a canary.

Runs in the engine's thread between two decode steps; how long it takes is how long decoding stands still. Knows no actors.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dockyard_actors.config import Config
from dockyard_actors.engines.base import Engine, EngineError, WeightsMismatch
from dockyard_actors.roles.canary import LIMITS, check_canary
from dockyard_actors.roles.engine_driver import SuspectWeights
from dockyard_actors.roles.messages import Applied, Canary, Offer
from dockyard_actors.roles.weight_source import Mapped, Sent, WeightSource
from dockyard_actors.transport.tensors import DataPlaneError

log = logging.getLogger(__name__)

Span = Callable[
    ..., AbstractContextManager[dict[str, Any]]
]  # a name and what belongs to it; yields what may be added to


class OlderWeights(EngineError):
    """The engine holds newer weights than the ones offered. Nothing was copied."""


class TornWeights(SuspectWeights):
    """The slot was given to another version while the engine copied it, or the delivery broke off: the engine holds parts of two versions.
    Newer weights are there, or about to be."""


class UnloadableWeights(SuspectWeights):
    """The engine failed to load weights whose bytes were right: asking again would not help."""


def no_span(name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]:
    """For whoever keeps no timeline."""
    return contextlib.nullcontext({})


def take(
    engine: Engine,
    source: WeightSource,
    offer: Offer,
    canary: Canary | None,
    config: Config,
    span: Span = no_span,
) -> Applied:
    """Raises OlderWeights, WeightsMismatch and DataPlaneError with nothing changed; TornWeights, UnloadableWeights and SuspectWeights (the
    canary) when the engine must generate nothing before later weights proved right."""
    version, began = offer.version, time.perf_counter()
    if version < engine.version:
        raise OlderWeights(f"weights version {version} come after {engine.version}")
    log.debug("sync phase copy of version %d", version)
    with span("sync.copy", version=version), source.opened(offer) as incoming:
        _load(engine, version, incoming, config.weight_sync.recompute_kv_cache)
    mismatch = _prove(engine, version, canary, config, span) if canary is not None else -1.0
    log.debug("sync phase done for version %d", version)
    return Applied(version, incoming.digest, mismatch, time.perf_counter() - began)


def _load(engine: Engine, version: int, incoming: Mapped | Sent, recompute: bool) -> None:
    try:
        engine.update_weights(incoming.weights, incoming.manifest, version, recompute)
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


def _prove(engine: Engine, version: int, canary: Canary, config: Config, span: Span) -> float:
    """The canary's mismatch in nats. Raises SuspectWeights when it is too large."""
    log.debug("sync phase canary of version %d", version)
    sync = config.weight_sync
    limit = sync.canary_limit or max(LIMITS[sync.dtype], LIMITS[config.generation.dtype])
    with span("sync.canary", version=version) as args:
        try:
            mismatch = check_canary(engine, canary, limit, sync.recompute_kv_cache)
        except Exception as error:
            raise SuspectWeights(f"weights version {version}: {error}") from error
        args["mismatch"] = mismatch
    return mismatch
