"""What may travel, and that it arrives as it left."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dockyard_actors.runtime import envelope as wire
from dockyard_actors.runtime.actor import Actor, concurrent, handlers_of
from dockyard_actors.runtime.mailbox import Remembered
from dockyard_actors.runtime.message import (
    Message,
    MessageTypeError,
    decoder,
    encoder,
    fingerprint,
    reply_decoder,
    reply_type,
)
from dockyard_actors.runtime.ref import Ref
from tests.runtime.actors import Counter, Exhausted, Granted, Lease, Note, Scale, Waiter

ids = st.integers(0, 2**63 - 1)
text = st.text(max_size=30)
bodies = st.binary(max_size=100).map(lambda data: msgspec.Raw(msgspec.msgpack.encode(data)))
envelopes = st.one_of(
    st.builds(wire.Ask, ids, text, ids, text, text, st.floats(0, 1e6), st.booleans(), bodies),
    st.builds(wire.Tell, text, ids, text, text, bodies),
    st.builds(wire.Reply, ids, bodies),
    st.builds(wire.Fail, ids, text, text, text, text),
    st.builds(wire.Credit, text, ids, ids),
    st.builds(wire.Lost, text, ids, text, text),
    st.builds(wire.Ping, ids),
    st.builds(wire.Pong, ids),
    st.builds(wire.Cancel, ids, text),
)


def fields(envelope: wire.Envelope) -> list:
    return [bytes(v) if isinstance(v, msgspec.Raw) else v for v in msgspec.structs.astuple(envelope)]


@given(envelopes)
def test_every_envelope_arrives_as_it_left(envelope: wire.Envelope) -> None:
    arrived = wire.decode(memoryview(encoder.encode(envelope)))
    assert type(arrived) is type(envelope)
    assert fields(arrived) == fields(envelope)


@given(st.binary(max_size=80))
def test_junk_is_a_decoding_error_and_nothing_else(junk: bytes) -> None:
    try:
        wire.decode(junk)
    except msgspec.MsgspecError:
        return


def test_an_envelope_with_more_fields_than_we_know_is_understood() -> None:
    assert wire.decode(msgspec.msgpack.encode([6, 41, "from a newer peer"])) == wire.Ping(41)


@given(
    npst.arrays(
        dtype=st.sampled_from(["int32", "float32", "bool", "uint8", "int64", "float64"]),
        shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    )
)
def test_arrays_travel_with_dtype_and_shape_and_come_back_as_their_own_memory(values: np.ndarray) -> None:
    sent = (
        encoder.encode(Scale(values=values, factor=1.0))
        if values.dtype != bool
        else encoder.encode(Scale(values=values, factor=0))
    )
    arrived = decoder(Scale).decode(sent).values
    assert (arrived.dtype, arrived.shape) == (values.dtype, values.shape)
    np.testing.assert_array_equal(arrived, values)
    assert arrived.flags.writeable


def test_the_wire_form_of_an_array_is_not_a_list() -> None:
    thousand = np.arange(1000, dtype=np.int32)
    assert len(encoder.encode(Scale(values=thousand, factor=1.0))) < 4000 + 60


def test_objects_in_arrays_and_unknown_types_are_refused() -> None:
    with pytest.raises(MessageTypeError, match="numbers and booleans only"):
        encoder.encode(Scale(values=np.array([object()]), factor=1.0))
    with pytest.raises(MessageTypeError, match="cannot go over the wire"):
        encoder.encode({"x": object()})
    forged = msgspec.msgpack.encode(
        {"type": "Scale", "factor": 1.0, "values": msgspec.msgpack.Ext(1, b"\x04" + msgspec.msgpack.encode(["|O", []]))}
    )
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        decoder(Scale).decode(forged)


def test_a_union_reply_is_decoded_to_the_member_that_was_sent() -> None:
    decode = reply_decoder(Lease)
    assert decode(encoder.encode(Granted(4))) == Granted(4)
    assert decode(encoder.encode(Exhausted("no"))) == Exhausted("no")
    assert reply_type(Note) is type(None)


class Grand(Lease, frozen=True):
    pass


class Nothing(msgspec.Struct):
    pass


class Untagged(Message[Nothing | Granted], frozen=True):
    pass


class Numbers(Message[None], frozen=True):
    ids: list[int]


class Nested(Message[tuple[Numbers, ...]], frozen=True):
    pass


class NoReply(Message, frozen=True):
    pass


def test_the_reply_type_is_inherited_and_missing_ones_are_named() -> None:
    assert reply_type(Grand) == Granted | Exhausted
    with pytest.raises(MessageTypeError, match="NoReply names no reply type"):
        reply_type(NoReply)


@pytest.mark.parametrize(
    ("kind", "text"), [(Numbers, r"Numbers\.ids is a list of numbers"), (Nothing | Granted, "tagged")]
)
def test_types_that_cannot_travel_well_are_refused_by_name(kind: object, text: str) -> None:
    with pytest.raises(MessageTypeError, match=text):
        decoder(kind)
    with pytest.raises(MessageTypeError, match="list of numbers"):
        reply_decoder(Nested)


class Twice(Actor):
    async def one(self, msg: Note) -> None: ...
    async def two(self, msg: Note) -> None: ...


class Mistaken(Actor):
    @concurrent
    async def one(self, msg: int) -> None: ...


class BadReplies(Actor):
    async def one(self, msg: Untagged) -> Nothing: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("actor", "text"),
    [(Twice, "handles Note twice"), (Mistaken, "no Message subclass"), (BadReplies, "Untagged|Nothing")],
)
def test_handlers_that_cannot_work_are_found_when_the_actor_starts(actor: type[Actor], text: str) -> None:
    with pytest.raises(MessageTypeError, match=text):
        handlers_of(actor)


def test_handlers_are_found_by_their_annotation_and_marks() -> None:
    table = handlers_of(Waiter)
    assert table["Block"].concurrent
    assert not handlers_of(Counter)["Block"].concurrent
    assert table["Urgent"].control
    assert not table["Add"].control
    assert fingerprint([Lease, Note]) == fingerprint([Note, Lease]) != fingerprint([Lease])


@given(st.lists(st.integers(0, 20), max_size=200), st.integers(1, 5))
def test_remembered_replies_stay_bounded_and_a_running_ask_is_never_forgotten(
    requests: list[int], capacity: int
) -> None:
    table = Remembered(capacity, 1 << 20)
    table.begin(("p", 999))
    for request in requests:
        key = ("p", request)
        if table.seen(key) is None:
            table.begin(key)
            assert table.seen(key) == Remembered.RUNNING
            table.answer(key, b"%d" % request)
        assert table.seen(key) == b"%d" % request
        assert len(table) <= capacity + 1
    assert table.seen(("p", 999)) == Remembered.RUNNING


def test_remembered_replies_are_bounded_in_bytes_and_go_with_their_asker() -> None:
    table = Remembered(100, 1000)
    for request in range(10):
        table.answer(("p", request), bytes(300))
        table.answer(("q", request), bytes(1))
    assert table.size <= 1000
    assert table.seen(("p", 9)) == bytes(300)
    table.forget("p")
    assert table.seen(("p", 9)) is None
    assert table.seen(("q", 9)) == bytes(1)
    assert table.size == len(table)
    table.answer(("p", 11), bytes(5000))
    assert table.seen(("p", 11)) == bytes(5000), "the newest stays whatever its size"


class Ask(Message[int], frozen=True):
    pass


class Sync(Actor):
    def ask(self, msg: Ask) -> int:
        return 1


class Two(Actor):
    async def ask(self, msg: Ask, extra: int) -> int:
        return extra


class Bare(Actor):
    async def ask(self, msg):
        return 1


class Contradicts(Actor):
    async def ask(self, msg: Ask) -> str:
        return ""


class Optional(Actor):
    async def ask(self, msg: Ask) -> int | None:
        return None


class HasHelpers(Actor):
    async def ask(self, msg: Ask) -> int:
        return self.really(msg, 1)

    def really(self, msg: Ask, extra: int) -> int:
        return extra

    async def wait(self, seconds) -> None: ...


@pytest.mark.parametrize(
    ("actor", "text"),
    [
        (Sync, r"Sync\.ask takes Ask, which nothing here handles, and is not async"),
        (Two, r"Two\.ask takes Ask, which nothing here handles, and takes 2 parameters"),
        (Bare, r"Bare\.ask\(msg\) looks like a handler but names no message"),
        (Contradicts, r"Contradicts\.ask returns str, but the reply of Ask is int"),
        (Optional, r"Optional\.ask returns NoneType, but the reply of Ask is int"),
    ],
)
def test_methods_that_were_meant_to_handle_something_are_found_when_the_actor_starts(
    actor: type[Actor], text: str
) -> None:
    with pytest.raises(MessageTypeError, match=text):
        handlers_of(actor)


def test_helpers_that_take_a_message_are_no_mistake() -> None:
    assert list(handlers_of(HasHelpers)) == ["Ask"]


class CarriesRef(Message[None], frozen=True):
    to: Ref


class RepliesRef(Message[Ref], frozen=True):
    pass


class Parameter:
    pass


Parameter.__module__ = "torch.nn.parameter"


class RepliesTensor(Message[tuple[Parameter, ...]], frozen=True):
    pass


def test_what_cannot_travel_is_named_with_its_message_and_the_way_out() -> None:
    with pytest.raises(MessageTypeError, match=r"CarriesRef\.to is a Ref: send its name"):
        reply_decoder(CarriesRef)
    with pytest.raises(MessageTypeError, match=r"reply of RepliesRef: .*Ref: send its name"):
        reply_decoder(RepliesRef)
    with pytest.raises(MessageTypeError, match=r"reply of RepliesTensor: .*Parameter: use tensor\.numpy\(\)"):
        reply_decoder(RepliesTensor)
