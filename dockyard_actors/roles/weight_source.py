"""Where an engine's new weights come from: a slot of shared memory on this host, or a delivery that the trainer sends to several at once.

Either way the engine is handed arrays, and what it read is summed up in a digest. Blocking; knows no engine and no actors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import xxhash

from dockyard_actors.engines.base import WeightArrays
from dockyard_actors.roles.messages import Invitation, Offer
from dockyard_actors.transport.blocks import Fields
from dockyard_actors.transport.tensors import ChecksumError, DataPlaneError, checksum
from dockyard_actors.transport.weights_collective import CollectiveError, CollectiveReceiver
from dockyard_actors.transport.weights_shm import WeightManifest, WeightReader, WeightRef


def digest_of(checksums: Iterable[int]) -> int:
    """One number for all entries' checksums, in manifest order: what trainer and engine compare."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(tuple(checksums)))


class Mapped:
    """Weights in a slot, whose bytes were found to be those that were published. Raises what `WeightReader` does."""

    lost = None  # a slot is there or it is not

    def __init__(self, ref: WeightRef, manifest: WeightManifest, views: Fields) -> None:
        self.manifest = manifest
        self.weights: WeightArrays = views
        self._views = views
        self.digest = digest_of(checksum(views[entry.name]) for entry in manifest.entries)
        if self.digest != digest_of(ref.checksums):
            raise ChecksumError(
                f"weights version {ref.version}: the bytes in slot {ref.slot} are not those that were published"
            )

    def check(self) -> None:
        """The slot held this version until now. Raises DataPlaneError."""
        self._views.check()


class Sent:
    """Weights that come as a stream; the first of them has come. lost: why the stream ended before its end."""

    def __init__(self, manifest: WeightManifest, arrays: Iterator[tuple[str, np.ndarray]]) -> None:
        self.manifest = manifest
        self.lost: DataPlaneError | None = None
        self._checksums: list[int] = []
        first = list(itertools.islice(arrays, 1))
        self.weights: WeightArrays = self._summed(itertools.chain(first, arrays))

    @property
    def digest(self) -> int:
        """Of what the engine was handed."""
        return digest_of(self._checksums)

    def check(self) -> None:
        """Nothing came after the last one. What is missing has been noticed by the engine."""

    def _summed(self, arrays: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        try:
            for name, array in arrays:
                self._checksums.append(checksum(array))
                yield name, array
        except DataPlaneError as error:
            self.lost = error
            raise


class WeightSource:
    """One engine's. Raises what `WeightReader` and `CollectiveReceiver` do."""

    def __init__(self, reader: WeightReader, receiver: CollectiveReceiver | None = None) -> None:
        self._reader = reader
        self._receiver = receiver or CollectiveReceiver()

    @contextlib.contextmanager
    def opened(self, offer: Offer) -> Iterator[Mapped | Sent]:
        """The offered weights, once it is certain that they are there. Until then nothing can have reached the engine."""
        if isinstance(offer, Invitation):
            arrays = self._receiver.receive(offer.meeting, offer.manifest, offer.version)
            with contextlib.closing(arrays):  # left early, the others hear of it
                yield Sent(offer.manifest, arrays)
        else:
            manifest = self._reader.manifest(offer)
            with self._reader.open(offer) as views:
                yield Mapped(offer, manifest, views)

    def decline(self, offer: Offer, reason: str) -> None:
        """Tells who waits for this engine at a meeting that it does not come. Not while the offer is open."""
        if isinstance(offer, Invitation):
            with contextlib.suppress(CollectiveError):  # nobody waits any more
                self._receiver.decline(offer.meeting, reason)

    def close(self) -> None:
        """Leaves the group of engines that it met. Idempotent."""
        self._receiver.close()
