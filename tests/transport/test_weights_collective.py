"""Weights by broadcast between real processes: what arrives, from whom, and how each failure ends on both sides."""

from __future__ import annotations

import itertools
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from dockyard_actors.transport import weights_lines
from dockyard_actors.transport.tensors import checksum
from dockyard_actors.transport.torch_views import as_array
from dockyard_actors.transport.weights_buckets import WIRE_DTYPES, WrongEntries, plan
from dockyard_actors.transport.weights_collective import CollectiveError, CollectiveSender
from dockyard_actors.transport.weights_group import Group
from dockyard_actors.transport.weights_shm import WeightManifest
from tests.leaks import nothing_is_left_by_a_test
from tests.transport.weights_peer import HOST, Peer, Shapes, forking, peers, resources, tensors, wait_until

__all__ = ["nothing_is_left_by_a_test"]

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
def _peers_can_be_forked() -> Iterator[None]:
    """From a server that is there before each test, so it is nothing that a test leaves behind."""
    with forking():
        yield


@pytest.fixture(autouse=True)
def _no_thread_is_left_by_a_test(nothing_is_left_by_a_test: None) -> Iterator[None]:
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


# ---- what arrives


@pytest.mark.parametrize("engines", [1, 3])
def test_every_byte_arrives_in_the_manifests_order(start: Start, sender: MakeSender, engines: int) -> None:
    members = {f"rollout{i}": start() for i in range(engines)}
    trainer = sender()
    invite(trainer, members, 0, content=True)
    checksums = trainer.send(0, tensors(SHAPES, 0))
    expected = {name: as_array(t.to(WIRE_DTYPES[SHAPES[name][0]])) for name, t in tensors(SHAPES, 0)}
    assert checksums == tuple(checksum(array) for array in expected.values())
    for peer in members.values():
        came = peer.answer()
        assert [name for name, *_ in came] == list(SHAPES)
        for name, dtype, shape, content in came:
            assert (dtype, shape) == (str(expected[name].dtype), expected[name].shape)
            assert content == expected[name].tobytes(), name


def test_live_parameters_are_cast_on_the_way_whatever_their_layout(start: Start, sender: MakeSender) -> None:
    shapes: Shapes = {"turned": ("bfloat16", (300, 200)), "live": ("float32", (11,))}
    turned = torch.nn.Parameter(torch.randn(200, 300).T)
    live = torch.nn.Parameter(torch.randn(11))
    trainer = sender(shapes)
    engine = start()
    invite(trainer, {"rollout0": engine}, 0, shapes, content=True)
    trainer.send(0, {"turned": turned, "live": live}.items())
    (_, _, _, first), (_, _, _, second) = engine.answer()
    assert first == as_array(turned.detach().bfloat16().contiguous()).tobytes()
    assert second == as_array(live).tobytes()


@pytest.mark.parametrize("bucket_bytes", [64, 128, 4096, 1 << 20])
def test_a_plan_covers_every_byte_once_and_splits_only_what_must_be_split(bucket_bytes: int) -> None:
    sizes = [0, 1, 3, 16, 17, 31, 33, 64, 100, 1000, 5000, 5001, 0, 9]
    manifest = WeightManifest.of({f"w{i}": ("float32" if i % 2 else "bfloat16", (n,)) for i, n in enumerate(sizes)})
    buckets = plan(manifest, bucket_bytes)
    at = iter(manifest.entries)
    expected, start = next(at), 0
    for bucket in buckets:
        assert bucket.nbytes <= bucket_bytes
        split = [piece.entry.name for piece in bucket.pieces if not piece.is_whole]
        ends = [piece for piece in bucket.pieces if piece.is_last and not piece.is_whole]
        assert not ends or split == [
            ends[0].entry.name
        ]  # what is put together is handed out before the next one begins
        end = 0
        for piece in bucket.pieces:
            assert (piece.entry, piece.start) == (expected, start)
            assert piece.offset % 64 == 0
            assert piece.offset >= end
            assert piece.is_whole or piece.entry.nbytes > bucket_bytes
            end, start = piece.offset + piece.nbytes, start + piece.nbytes
            if piece.is_last:
                expected, start = next(at, expected), 0
        assert end == bucket.nbytes
    assert next(at, None) is None


@pytest.mark.parametrize("bucket_bytes", [0, -64, 100])
def test_an_odd_bucket_size_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        CollectiveSender(MANIFEST, HOST, bucket_bytes=bucket_bytes)


def test_a_dtype_that_does_not_travel_is_refused() -> None:
    with pytest.raises(ValueError, match="'ids' is int64"):
        CollectiveSender(WeightManifest.of({"ids": ("int64", (3,))}), HOST)


def test_the_next_bucket_is_packed_while_one_is_under_way(
    start: Start, sender: MakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: Shapes = {f"w{i}": ("float32", (BUCKET // 4,)) for i in range(3)}
    happened: list[str] = []
    broadcast, finish = Group.broadcast, Group.await_broadcast

    def noting_broadcast(group: Group, buffer: torch.Tensor, until: float) -> None:
        happened.append("broadcast")
        broadcast(group, buffer, until)

    def noting_finish(group: Group, until: float) -> None:
        happened.append("await")
        finish(group, until)

    def noting_entries() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(shapes, 0):
            happened.append(f"pack {name}")
            yield name, tensor

    monkeypatch.setattr(Group, "broadcast", noting_broadcast)
    monkeypatch.setattr(Group, "await_broadcast", noting_finish)
    trainer, engine = sender(shapes), start()
    invite(trainer, {"rollout0": engine}, 0, shapes)
    assert trainer.send(0, noting_entries()) == tuple(engine.answer())
    for number in (1, 2):
        packed = happened.index(f"pack w{number}")
        assert happened[:packed].count("broadcast") == number
        assert happened[packed + 1 : packed + 3] == ["await", "broadcast"]


# ---- who meets


def test_a_group_is_used_again_as_long_as_its_members_stay(start: Start, sender: MakeSender) -> None:
    members = {"rollout0": start(), "rollout1": start()}
    trainer = sender()
    epochs = {deliver(trainer, members, version) for version in range(4)}
    backwards = dict(reversed(members.items()))
    assert epochs == {deliver(trainer, backwards, 4)}
    with pytest.raises(ValueError, match="each of them once"):
        trainer.meet(["rollout0", "rollout0"])
    with pytest.raises(ValueError, match="each of them once"):
        trainer.meet([])


def test_members_come_and_go(start: Start, sender: MakeSender) -> None:
    names = ["rollout0", "rollout1", "rollout2"]
    everybody = {name: start() for name in names}
    trainer = sender()
    rounds = [
        ["rollout0", "rollout1"],
        ["rollout0"],
        ["rollout2"],
        names,
        ["rollout1", "rollout2"],
    ]  # the third one joins alone
    epochs = [
        deliver(trainer, {name: everybody[name] for name in members}, version) for version, members in enumerate(rounds)
    ]
    assert len(set(epochs)) == len(rounds)


def test_who_is_gone_between_two_versions_makes_a_new_group(start: Start, sender: MakeSender) -> None:
    trainer, stays, dies = sender(), start(), start()
    first = deliver(trainer, {"rollout0": stays, "rollout1": dies}, 0)
    dies.kill()
    assert deliver(trainer, {"rollout0": stays, "rollout1": start()}, 1) != first


def test_a_meeting_that_was_left_lets_nobody_in_again(start: Start, sender: MakeSender) -> None:
    trainer, engine = sender(), start()
    old = trainer.meet(["rollout0"])["rollout0"]
    trainer.meet(["rollout1"])
    engine.tell("receive", meeting=msgspec.to_builtins(old), shapes=SHAPES, version=0)
    assert engine.failure().error["phase"] == "the meeting"
    trainer.close()
    with pytest.raises(ValueError, match="meet"):
        trainer.send(0, tensors(SHAPES, 0))


def test_strangers_change_nothing(start: Start, sender: MakeSender) -> None:
    trainer, engine = sender(), start()
    meeting = trainer.meet(["rollout0"])["rollout0"]
    strange = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        weights_lines._LENGTH.pack(3) + b"\xc1\xc1\xc1",
        _frame(weights_lines.Hello("wrong", 1)),
        _frame(weights_lines.Hello(meeting.epoch, 0)),
        _frame(weights_lines.Hello(meeting.epoch, 2)),
        _frame(weights_lines.Welcome()),
    ]
    strange += [b""] * weights_lines.STRANGERS  # who say nothing
    connections = [socket.create_connection((meeting.host, meeting.port)) for _ in strange]
    try:
        for connection, says in zip(connections, strange, strict=True):
            connection.sendall(says)
        deliver(trainer, {"rollout0": engine}, 0)
        assert all(connection.recv(100) == b"" for connection in connections)
    finally:
        for connection in connections:
            connection.close()


def _frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return weights_lines._LENGTH.pack(len(body)) + body


# ---- how it fails

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


# ---- what it costs


def test_neither_side_ever_needs_more_than_two_buckets(start: Start) -> None:
    bucket = 8 * MIB
    small: Shapes = {f"w{i}": ("bfloat16", (bucket // 8,)) for i in range(20 * 4)}  # 20 buckets, four entries each
    sends, receives = _peaks(start, small, bucket)
    assert sends <= 2.5
    assert receives <= 2.5


def test_an_engine_needs_the_largest_entry_once_more_when_it_exceeds_a_bucket(start: Start) -> None:
    bucket = 8 * MIB
    large: Shapes = {f"w{i}": ("bfloat16", (bucket * 3 // 2,)) for i in range(6)}  # three buckets each, eighteen in all
    sends, receives = _peaks(start, large, bucket)
    assert sends <= 2.5
    assert receives <= 5.5


def _peaks(start: Start, shapes: Shapes, bucket: int) -> tuple[float, float]:
    """The most that a trainer and an engine needed for a first delivery, in buckets."""
    trainer, engine = start(), start()
    for number, (which, size) in enumerate(
        ((SHAPES, BUCKET), (shapes, bucket))
    ):  # the first one loads what is loaded once
        trainer("trainer", shapes=which, bucket_bytes=size, timeout_s=LONG_S)
        trainer("parameters", shapes=which, seed=0)
        meeting = trainer("meet", members=["rollout0"])["rollout0"]
        engine.tell("peak", of="receive", meeting=meeting, shapes=which, version=number)
        sends = trainer("peak", of="send", version=number)
        receives = engine.answer()
        trainer("close")
    assert min(sends, receives) > bucket  # else it is not what was measured
    return sends / bucket, receives / bucket


def test_fifty_deliveries_leave_nothing_behind_on_either_side(start: Start, sender: MakeSender) -> None:
    trainer, members = sender(), {"rollout0": start(), "rollout1": start()}
    one = {"rollout0": members["rollout0"]}
    seen: list[list[tuple[int, int]]] = []
    for version in range(50):
        deliver(
            trainer, one if version % 5 == 4 else members, version
        )  # every fifth makes a group, and the next another
        if version % 5 == 0:
            seen.append([resources(), *(peer("resources") for peer in members.values())])
    assert seen[1:] == seen[:-1]


def test_what_travels_is_known_without_torch() -> None:
    code = "import sys, dockyard_actors.transport.weights_lines as l; l.Meeting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=LONG_S * 6, check=False).returncode == 0
