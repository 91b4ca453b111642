"""Weights by broadcast when somebody dies, stops, never comes or means something else: how it ends on both sides, and what comes next."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch

from dockyard_actors.transport.weights_buckets import WrongEntries
from dockyard_actors.transport.weights_collective import CollectiveError, CollectiveSender
from tests.transport.weights_peer import Failure, Peer, Shapes, tensors
from tests.transport.weights_rounds import (
    LONG_S,
    MIB,
    SHAPES,
    SHORT_S,
    MakeSender,
    Start,
    deliver,
    invite,
    no_thread_is_left_by_a_test,
    nothing_is_left_by_a_test,
    peers_can_be_forked,
    sender,
    start,
)

__all__ = ["no_thread_is_left_by_a_test", "nothing_is_left_by_a_test", "peers_can_be_forked", "sender", "start"]

LARGE: Shapes = {f"w{i}": ("float32", (MIB,)) for i in range(8)}  # one bucket each, more than sockets hold on their own
LARGE_BUCKET = 4 * MIB
ENGINE_POINTS = ["start", "Hello", "Address", "Accepted", "entry 0", "entry 2"]
LAST_ENTRY = f"entry {len(LARGE) - 1}"
TRAINER_POINTS = ["Welcome", "Addresses", "Header", "broadcast 0", "broadcast 2"]


def failed_send(trainer: CollectiveSender, version: int, within_s: float, shapes: Shapes = SHAPES) -> CollectiveError:
    began = time.monotonic()
    with pytest.raises(CollectiveError) as failure:
        trainer.send(version, tensors(shapes, version))
    assert time.monotonic() - began < within_s
    assert failure.value.version == version
    return failure.value


@pytest.mark.parametrize("point", [*ENGINE_POINTS[1:], LAST_ENTRY])
def test_an_engine_that_is_killed_ends_the_delivery_at_once(start: Start, sender: MakeSender, point: str) -> None:
    members = {"rollout0": start(), "rollout1": start(), "rollout2": start()}
    trainer, dies = sender(LARGE, bucket_bytes=LARGE_BUCKET), members["rollout1"]
    dies("fail", point=point, number=signal.SIGKILL)
    invite(trainer, members, 0, LARGE)
    error = failed_send(trainer, 0, LONG_S / 2, LARGE)
    assert "rollout1" in error.who
    dies.wait_dead()
    del members["rollout1"]
    for peer in members.values():
        ended_as_it_had_to(peer, point)
        assert peer.took_s < LONG_S / 2
    deliver(trainer, members, 0, LARGE)


def ended_as_it_had_to(peer: Peer, point: str) -> None:
    """With an error, but who has everything when another one fails is done."""
    if point == LAST_ENTRY:
        assert len(peer.answer()) == len(LARGE)
    else:
        assert peer.failure().error["version"] == 0


def test_an_engine_that_is_killed_when_it_has_everything_spoils_only_the_next_meeting(
    start: Start, sender: MakeSender
) -> None:
    members = {"rollout0": start(), "rollout1": start()}
    trainer, dies = sender(), members["rollout1"]
    dies("fail", point="end", number=signal.SIGKILL)
    epoch = invite(trainer, members, 0)
    trainer.send(0, tensors(SHAPES, 0))
    members["rollout0"].answer()
    dies.wait_dead()
    assert trainer.meet(["rollout0", "rollout1"])["rollout0"].epoch != epoch
    del members["rollout1"]
    deliver(trainer, members, 1)


@pytest.mark.parametrize("point", [*ENGINE_POINTS, LAST_ENTRY])
def test_an_engine_that_is_stopped_is_waited_for_no_longer_than_the_timeout(
    start: Start, sender: MakeSender, point: str
) -> None:
    members = {"rollout0": start(), "rollout1": start()}
    trainer, stops = sender(LARGE, SHORT_S, LARGE_BUCKET), members["rollout1"]
    stops("fail", point=point, number=signal.SIGSTOP)
    invite(trainer, members, 0, LARGE)
    error = failed_send(trainer, 0, 2 * SHORT_S, LARGE)
    assert "rollout1" in error.who
    ended_as_it_had_to(members["rollout0"], point)
    assert members["rollout0"].took_s < 2 * SHORT_S
    stops.wait_stopped()
    deliver(trainer, {"rollout0": members["rollout0"]}, 0, LARGE)
    stops.resume()
    ended_as_it_had_to(stops, point)
    deliver(trainer, members, 1, LARGE)


def test_an_engine_that_never_comes_is_named(start: Start, sender: MakeSender) -> None:
    trainer, comes = sender(timeout_s=SHORT_S), start()
    meetings = trainer.meet(["rollout0", "rollout1", "rollout2"])
    comes.tell("receive", meeting=msgspec.to_builtins(meetings["rollout1"]), shapes=SHAPES, version=0)
    error = failed_send(trainer, 0, 2 * SHORT_S)
    assert (error.who, error.phase) == (("rollout0", "rollout2"), "the meeting")
    assert comes.failure().error["who"] == ("the trainer",)


def test_an_engine_that_does_not_come_to_its_group_again_is_named(start: Start, sender: MakeSender) -> None:
    members = {"rollout0": start(), "rollout1": start()}
    trainer = sender(timeout_s=SHORT_S)
    deliver(trainer, members, 0)
    meetings = trainer.meet(list(members))
    members["rollout0"].tell("receive", meeting=msgspec.to_builtins(meetings["rollout0"]), shapes=SHAPES, version=1)
    error = failed_send(trainer, 1, 2 * SHORT_S)
    assert (error.who, error.phase) == (("rollout1",), "the header")
    members["rollout0"].failure()
    deliver(trainer, members, 1)


def told_to_send(start: Start, timeout_s: float, point: str, number: int) -> tuple[Peer, Peer]:
    """A trainer with a fault and an engine."""
    trainer, engine = start(), start()
    trainer("trainer", shapes=LARGE, bucket_bytes=LARGE_BUCKET, timeout_s=timeout_s)
    trainer("parameters", shapes=LARGE, seed=0)
    trainer("fail", point=point, number=number)
    meeting = trainer("meet", members=["rollout0"])["rollout0"]
    engine.tell("receive", meeting=meeting, shapes=LARGE, version=0)
    trainer.tell("send", version=0)
    return trainer, engine


@pytest.mark.parametrize("point", TRAINER_POINTS)
def test_an_engine_ends_at_once_when_the_trainer_is_killed(start: Start, point: str) -> None:
    trainer, engine = told_to_send(start, LONG_S, point, signal.SIGKILL)
    trainer.wait_dead()
    failure = engine.failure()
    assert failure.error["who"] == ("the trainer",)
    assert engine.took_s < LONG_S / 2


@pytest.mark.parametrize("point", TRAINER_POINTS)
def test_an_engine_waits_for_a_stopped_trainer_no_longer_than_the_timeout(start: Start, point: str) -> None:
    trainer, engine = told_to_send(start, SHORT_S, point, signal.SIGSTOP)
    trainer.wait_stopped()
    assert engine.failure().error["who"] == ("the trainer",)
    assert engine.took_s < 2 * SHORT_S
    trainer.resume()
    assert trainer.failure().error["who"] == ("rollout0",)


OTHERS: list[Shapes] = [
    {**SHAPES, "odd": ("bfloat16", (3, 35))},
    {**SHAPES, "odd": ("float32", (3, 5, 7))},
    dict(reversed(SHAPES.items())),
]


@pytest.mark.parametrize("shapes", OTHERS, ids=["shape", "dtype", "order"])
def test_another_manifest_is_refused_before_a_weight_moves(start: Start, sender: MakeSender, shapes: Shapes) -> None:
    trainer, right, wrong = sender(), start(), start()
    meetings = {name: msgspec.to_builtins(meeting) for name, meeting in trainer.meet(["right", "wrong"]).items()}
    right.tell("receive", meeting=meetings["right"], shapes=SHAPES, version=0)
    wrong.tell("receive", meeting=meetings["wrong"], shapes=shapes, version=0)
    asked: list[str] = []
    with pytest.raises(CollectiveError, match="the same model or dtype") as failure:
        trainer.send(0, ((asked.append(name) or name, tensor) for name, tensor in tensors(SHAPES, 0)))
    assert (failure.value.who, failure.value.phase, asked) == (("wrong",), "the header", [])
    assert "the same model or dtype" in str(wrong.failure())
    assert "the same model or dtype" in str(right.failure())
    deliver(trainer, {"right": right, "wrong": wrong}, 0)


def test_another_version_is_refused_before_a_weight_moves(start: Start, sender: MakeSender) -> None:
    trainer, engine = sender(), start()
    invite(trainer, {"rollout0": engine}, 4)
    with pytest.raises(CollectiveError, match="sends version 5 where version 4 is expected") as failure:
        trainer.send(5, tensors(SHAPES, 0))
    assert failure.value.phase == "the header"
    assert "sends version 5 where version 4 is expected" in str(engine.failure())


def test_an_engine_that_leaves_early_ends_the_delivery(start: Start, sender: MakeSender) -> None:
    trainer, leaves, stays = sender(), start(), start()
    deliver(trainer, {"leaves": leaves, "stays": stays}, 0)
    meetings = trainer.meet(["leaves", "stays"])
    leaves.tell("receive", meeting=msgspec.to_builtins(meetings["leaves"]), shapes=SHAPES, version=1, only=2)
    stays.tell("receive", meeting=msgspec.to_builtins(meetings["stays"]), shapes=SHAPES, version=1)
    error = failed_send(trainer, 1, LONG_S / 2)
    assert error.who == ("leaves",)
    assert "left early" in str(error)
    assert len(leaves.answer()) == 2
    stays.failure()
    deliver(trainer, {"leaves": leaves, "stays": stays}, 1)


@pytest.mark.parametrize("before", [0, 1], ids=["a new group", "a group in use"])
def test_an_engine_that_declines_ends_the_delivery_at_once(start: Start, sender: MakeSender, before: int) -> None:
    trainer, members = sender(), {"declines": start(), "takes": start()}
    for version in range(before):
        deliver(trainer, members, version)
    meetings = {name: msgspec.to_builtins(meeting) for name, meeting in trainer.meet(list(members)).items()}
    members["declines"].tell("decline", meeting=meetings["declines"], reason="newer weights are here")
    members["takes"].tell("receive", meeting=meetings["takes"], shapes=SHAPES, version=before)
    error = failed_send(trainer, before, LONG_S / 2)
    assert error.who == ("declines",)
    assert "newer weights are here" in str(error)
    members["declines"].answer()
    members["takes"].failure()
    trainer.close()
    with pytest.raises(Failure, match="cannot be reached"):
        members["declines"]("decline", meeting=meetings["declines"], reason="nobody hears it")
    deliver(trainer, members, before)


WRONG: list[tuple[Sequence[str], str]] = [
    ([*list(SHAPES)[:3]], "goes on with 'empty'"),
    ([*list(SHAPES)[:2], "head", *list(SHAPES)[3:]], "what came is 'head'"),
    ([*SHAPES, "last"], "after the manifest's last entry"),
]


@pytest.mark.parametrize(("names", "says"), WRONG, ids=["too few", "another", "one twice"])
def test_tensors_that_are_not_the_manifests_are_refused(
    start: Start, sender: MakeSender, names: Sequence[str], says: str
) -> None:
    trainer, engine = sender(), start()
    parameters = dict(tensors(SHAPES, 0))
    invite(trainer, {"rollout0": engine}, 0)
    with pytest.raises(WrongEntries, match=says):
        trainer.send(0, ((name, parameters[name]) for name in names))
    assert says in str(engine.failure())
    deliver(trainer, {"rollout0": engine}, 0)


def test_what_iterating_the_tensors_raises_is_raised(start: Start, sender: MakeSender) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(tensors(SHAPES, 0), 2)
        raise RuntimeError("shards cannot be gathered")

    trainer, engine = sender(), start()
    invite(trainer, {"rollout0": engine}, 0)
    with pytest.raises(RuntimeError, match="shards cannot be gathered"):
        trainer.send(0, failing())
    assert "shards cannot be gathered" in str(engine.failure())
    deliver(trainer, {"rollout0": engine}, 0)
