"""How weights get from the trainer to an engine, chosen from where the two are.

On one host a version is written once into shared memory and every engine maps it. To another host it is sent: all engines there take part in
one collective delivery, straight from the trainer's live parameters, which therefore must not change meanwhile. Blocking code for the
trainer's compute thread; knows no actors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

from dockyard_actors.roles.messages import Invitation, Offer
from dockyard_actors.transport.weights_collective import CollectiveSender
from dockyard_actors.transport.weights_shm import WeightPublisher, WeightRef

log = logging.getLogger(__name__)

Kind = Literal["shm", "collective"]
WriteWeights = Callable[[Mapping[str, np.ndarray]], None]
StreamWeights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class RouteError(RuntimeError):
    """No way for weights from this trainer to that engine; the text says what would be one."""


class Choice(NamedTuple):
    """Which way, and why."""

    kind: Kind
    reason: str


def choose(configured: Literal["auto", "shm", "collective"], name: str, host: str, here: str) -> Choice:
    """The way to the engine ``name`` on host ``host`` (see `transport.base.host_id`). Raises RouteError when the configured one cannot be."""
    if configured == "shm" and host != here:
        raise RouteError(
            f"weight_sync.transport: 'shm' cannot reach {name}, which is on another host than the trainer ({host}, not {here}): "
            "set it to auto or collective"
        )
    if configured == "auto":
        same = host == here
        return Choice("shm", "it shares the trainer's host") if same else Choice("collective", "it is on another host")
    return Choice(configured, f"weight_sync.transport is {configured!r}")


class Route(Protocol):
    """One way. A version is prepared, offered to engines, transferred while they take it, and settled when they all have it."""

    copies: bool  # a version stays as it was prepared, whatever happens to the parameters

    def prepare(self, version: int) -> None:
        """Whatever can be done before engines are told."""
        ...

    def offers(self, version: int, members: Sequence[str]) -> Mapping[str, Offer]:
        """What each of them has to be told. Those offered before and not transferred to are not waited for any more."""
        ...

    def transfer(self, version: int) -> tuple[int, ...]:
        """Returns the checksums of every entry, in manifest order, once all who were offered the version can do without the parameters.
        Raises CollectiveError."""
        ...

    def settle(self, version: int) -> None:
        """Every engine that counts holds ``version``: older ones may go."""
        ...

    def close(self) -> None: ...


class SharedMemory:
    """Two slots: one is read while the other is written. Raises what `WeightPublisher` does."""

    copies = True

    def __init__(self, publisher: WeightPublisher, write: WriteWeights) -> None:
        self._publisher = publisher
        self._write = write
        self._refs: dict[int, WeightRef] = {}

    def prepare(self, version: int) -> None:
        self._write(self._publisher.slot(version))
        self._refs[version] = self._publisher.publish(version)

    def offers(self, version: int, members: Sequence[str]) -> Mapping[str, Offer]:
        return dict.fromkeys(members, self._refs[version])

    def transfer(self, version: int) -> tuple[int, ...]:
        return self._refs[version].checksums

    def settle(self, version: int) -> None:
        for older in [known for known in self._refs if known < version]:
            self._publisher.release(older)
            del self._refs[older]
        self._publisher.drop_predecessors()

    def close(self) -> None:
        self._publisher.close()


class Collective:
    """A process group of the trainer and the engines that were offered the version. Raises what `CollectiveSender` does."""

    copies = False

    def __init__(self, sender: CollectiveSender, stream: StreamWeights) -> None:
        self._sender = sender
        self._stream = stream

    def prepare(self, version: int) -> None:
        """Nothing: the parameters are read while they are sent."""

    def offers(self, version: int, members: Sequence[str]) -> Mapping[str, Offer]:
        met = self._sender.meet(members)
        return {name: Invitation(version, self._sender.manifest, meeting) for name, meeting in met.items()}

    def transfer(self, version: int) -> tuple[int, ...]:
        return self._sender.send(version, self._stream())

    def settle(self, version: int) -> None:
        """Nothing is kept of a version."""

    def close(self) -> None:
        self._sender.close()
