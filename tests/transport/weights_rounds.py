"""What the tests of weights by broadcast share: models, a trainer in the test's own process, and rounds that have to go right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from dockyard_actors.transport.weights_collective import CollectiveSender
from dockyard_actors.transport.weights_shm import WeightManifest
from tests.leaks import nothing_is_left_by_a_test
from tests.transport.weights_peer import HOST, Peer, Shapes, forking, peers, resources, tensors, wait_until

BUCKET = 4096
LONG_S = 10.0  # never to be waited for, but by what gloo still does behind the scenes
SHORT_S = 2.5  # meant to pass
MIB = 1 << 20
SHAPES: Shapes = {
    "embed": ("bfloat16", (3 * BUCKET // 2 + 5,)),  # a little more than three buckets
    "norm": ("float32", (7,)),
    "odd": ("bfloat16", (3, 5, 7)),
    "empty": ("float32", (0, 4)),
    "scalar": ("float32", ()),
    "exact": ("float32", (BUCKET // 4,)),
    "head": ("float32", (BUCKET // 4 * 2, 2)),
    "last": ("float32", (BUCKET // 2,)),
}
MANIFEST = WeightManifest.of(SHAPES)
Start = Callable[[], Peer]


@pytest.fixture(autouse=True, scope="module")
def peers_can_be_forked() -> Iterator[None]:
    """From a server that is there before each test, so it is nothing that a test leaves behind."""
    with forking():
        yield


@pytest.fixture(autouse=True)
def no_thread_is_left_by_a_test(nothing_is_left_by_a_test: None) -> Iterator[None]:
    before = resources()[1]
    yield
    wait_until(lambda: resources()[1] <= before)


@pytest.fixture
def start() -> Iterator[Start]:
    with peers() as start:
        yield start


@pytest.fixture
def sender() -> Iterator[Callable[..., CollectiveSender]]:
    made: list[CollectiveSender] = []

    def make(shapes: Shapes = SHAPES, timeout_s: float = LONG_S, bucket_bytes: int = BUCKET) -> CollectiveSender:
        manifest = WeightManifest.of(shapes)
        made.append(CollectiveSender(manifest, HOST, bucket_bytes=bucket_bytes, timeout_s=timeout_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


MakeSender = Callable[..., CollectiveSender]


def invite(
    sender: CollectiveSender, members: dict[str, Peer], version: int, shapes: Shapes = SHAPES, **more: Any
) -> str:
    """Tell everybody to receive. Returns the epoch."""
    meetings = sender.meet(list(members))
    for name, peer in members.items():
        peer.tell("receive", meeting=msgspec.to_builtins(meetings[name]), shapes=shapes, version=version, **more)
    return meetings[next(iter(members))].epoch


def deliver(sender: CollectiveSender, members: dict[str, Peer], version: int, shapes: Shapes = SHAPES) -> str:
    """A whole round that has to go right. Returns the epoch."""
    epoch = invite(sender, members, version, shapes)
    checksums = sender.send(version, tensors(shapes, version))
    for peer in members.values():
        assert tuple(peer.answer()) == checksums
    return epoch


__all__ = ["no_thread_is_left_by_a_test", "nothing_is_left_by_a_test", "peers_can_be_forked", "sender", "start"]
