"""Weights by broadcast between real processes: what arrives, who meets, what it costs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from dockyard_actors.transport import weights_lines
from dockyard_actors.transport.tensors import checksum
from dockyard_actors.transport.torch_views import as_array
from dockyard_actors.transport.weights_buckets import WIRE_DTYPES, plan
from dockyard_actors.transport.weights_collective import CollectiveSender
from dockyard_actors.transport.weights_group import Group
from dockyard_actors.transport.weights_shm import WeightManifest
from tests.transport.weights_peer import HOST, Shapes, resources, tensors
from tests.transport.weights_rounds import (
    BUCKET,
    LONG_S,
    MANIFEST,
    MIB,
    SHAPES,
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
