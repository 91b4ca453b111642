"""Brings new weights into every engine and proves that they arrived.

Starts stale; fresh once every member acknowledged the version with a digest of the bytes it read and a canary that came out right. A
member that does not is removed (its caller has it restarted) and joins again by pulling (`CurrentWeights`); with no member left it raises
and stays stale.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from dockyard_actors.roles.messages import Applied, Canary, NoWeights, UpdateWeights, Weights
from dockyard_actors.runtime.actor import ActorContext
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.transport.weights_shm import WeightPublisher, WeightRef

log = logging.getLogger(__name__)

WriteWeights = Callable[[dict[str, np.ndarray]], None]


class WeightSyncFailed(RuntimeError):
    """No engine took the new weights: nothing could be generated with them."""


@dataclass(frozen=True)
class Synced:
    """How a delivery went. failed: members that are left out now. mismatch: the largest canary mean |Δ| in nats, -1 without a canary.
    paused_s: the longest that an engine's decoding stood still."""

    failed: tuple[str, ...]
    mismatch: float
    paused_s: float


def digest_of(checksums: Iterable[int]) -> int:
    """One number for all entries' checksums, in manifest order: what trainer and engine compare."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(tuple(checksums)))


class WeightSynchronizer:
    """Trainer's side. `members` are rollout names; the transport is double-buffered shared memory."""

    def __init__(self, ctx: ActorContext, publisher: WeightPublisher, members: list[str], timeout_s: float):
        self._ctx = ctx
        self._publisher = publisher
        self.members = list(members)
        self._timeout_s = timeout_s
        self._current: tuple[WeightRef, Canary | None] | None = None
        self._stale = True

    @property
    def is_stale(self) -> bool:
        return self._stale

    def mark_stale(self) -> None:
        self._stale = True

    def current(self, member: str) -> Weights | NoWeights:
        """What an engine that starts now has to load; from the next sync on it is a member."""
        if member not in self.members:
            self.members.append(member)
        return Weights(*self._current) if self._current else NoWeights()

    def write(self, version: int, write: WriteWeights) -> WeightRef:
        """Fills the free slot (called in the compute thread: it copies the whole model) and seals it with checksums."""
        write(self._publisher.slot(version))
        return self._publisher.publish(version)

    async def sync_weights(self, ref: WeightRef, canary: Canary | None = None) -> Synced:
        """Raises WeightSyncFailed when no member acknowledged `ref.version` within the timeout."""
        previous, self._current = self._current, (ref, canary)
        members = list(self.members)
        message = UpdateWeights(ref=ref, canary=canary)
        replies = await asyncio.gather(
            *(self._ctx.ref(name).ask(message, deadline_s=self._timeout_s, retry=True) for name in members),
            return_exceptions=True,
        )
        failed: list[str] = []
        applied: list[Applied] = []
        for name, reply in zip(members, replies, strict=True):
            if isinstance(reply, Applied) and reply.version == ref.version and reply.digest == digest_of(ref.checksums):
                applied.append(reply)
                continue
            if isinstance(reply, BaseException) and not isinstance(reply, ActorError):
                raise reply
            log.warning("%s did not take weights version %d: %s", name, ref.version, reply)
            failed.append(name)
        if not applied:
            raise WeightSyncFailed(
                f"none of {', '.join(members)} took weights version {ref.version} within {self._timeout_s:g} s "
                f"(last answer: {replies[-1]!r}); their logs say why. weight_sync.timeout_s is the limit"
            )
        if previous is not None:
            self._publisher.release(previous[0].version)
        self._publisher.drop_predecessors()
        self.members = [name for name in self.members if name not in failed]
        self._stale = False
        return Synced(tuple(failed), max(a.mismatch for a in applied), max(a.paused_s for a in applied))

    def shutdown(self) -> None:
        self._publisher.close()
