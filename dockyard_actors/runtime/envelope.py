"""What travels between actor systems: tagged envelopes around a message body that only the addressed actor decodes.

Deadlines are relative (clocks differ between hosts). Unknown trailing fields are ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec

SYSTEM = "@system"  # the pseudo-actor in every process that the runtime itself answers


class Ask(msgspec.Struct, tag=0, array_like=True, gc=False):
    id: int  # unique in the asking process; a retry reuses it
    dst: str
    incarnation: int
    src: str
    kind: str  # message class name
    ttl: float  # seconds left when it was sent
    keep: bool  # may be sent again: the callee must remember its reply
    body: msgspec.Raw
    trace: int = 0  # one id for everything that a first ask or tell leads to
    credit: int = 0  # of a stream: items that may be on their way at first
    seq: int = 0  # counts the sender's messages to this actor on this lane; one that comes again is dropped


class Tell(msgspec.Struct, tag=1, array_like=True, gc=False):
    dst: str
    incarnation: int
    src: str
    kind: str
    body: msgspec.Raw
    trace: int = 0
    seq: int = 0


class Reply(msgspec.Struct, tag=2, array_like=True, gc=False):
    id: int
    body: msgspec.Raw


class Fail(msgspec.Struct, tag=3, array_like=True, gc=False):
    """Answer to an ask that has no reply. ``code`` is one of the constants below."""

    id: int
    code: str
    error: str = ""  # exception type of what the handler raised
    text: str = ""
    trace: str = ""


class Credit(msgspec.Struct, tag=4, array_like=True, gc=False):
    """So many messages and bytes of this sender has the actor taken out of its mailbox, in all: a lost one is made good by the next."""

    dst: str
    incarnation: int
    count: int
    size: int = 0  # bytes of their envelopes


class Lost(msgspec.Struct, tag=5, array_like=True, gc=False):
    """A tell could not be delivered; the sender counts a dead letter."""

    dst: str
    incarnation: int
    kind: str
    reason: str


class Ping(msgspec.Struct, tag=6, array_like=True, gc=False):
    seq: int


class Pong(msgspec.Struct, tag=7, array_like=True, gc=False):
    seq: int


class Cancel(msgspec.Struct, tag=8, array_like=True, gc=False):
    """The asker gave up: a concurrent handler or a stream of this ask is cancelled, a queued ask is skipped."""

    id: int
    dst: str


class Item(msgspec.Struct, tag=9, array_like=True, gc=False):
    """One item of a stream; its `Reply` at the end says how many there were."""

    id: int
    number: int  # from 0; NO_ITEM: only asks whether somebody still reads
    body: msgspec.Raw
    dst: str = ""  # of NO_ITEM: the actor that asks


class More(msgspec.Struct, tag=10, array_like=True, gc=False):
    """The reader of a stream has taken so many items in all: a lost one is made good by the next, a repeated one changes nothing."""

    id: int
    dst: str
    count: int


class Probe(msgspec.Struct, tag=11, array_like=True, gc=False):
    """A sender has waited for room: messages or credit may have been lost with a connection. Follows what was sent before it."""

    dst: str
    incarnation: int
    number: int  # of the probe: only the answer to the last one counts


class Level(msgspec.Struct, tag=12, array_like=True, gc=False):
    """Answer to `Probe`: so many messages and bytes of this sender wait in the mailbox; everything else is free again."""

    dst: str
    incarnation: int
    number: int
    waiting: int
    size: int
    taken: int  # as `Credit.count`, and
    taken_size: int  # `Credit.size`, at this moment


Envelope = Ask | Tell | Reply | Fail | Credit | Lost | Ping | Pong | Cancel | Item | More | Probe | Level

NO_ITEM = -1

RAISED = "raised"  # the handler raised
TYPED = "typed"  # ... a WireError, which the asker may know by its name
STALE = "stale"  # other incarnation
UNKNOWN = "unknown"  # no such actor here
NOT_UNDERSTOOD = "not-understood"  # no handler, or the body does not decode
STOPPED = "stopped"  # the actor stopped before it came to this ask
ABANDONED = "abandoned"  # the actor stopped while it was handling this ask
FULL = "full"  # no room, although the sender's window allowed it

decode = msgspec.msgpack.Decoder(Envelope).decode


def raw(value: Any) -> msgspec.Raw:
    """Puts a value where a body goes; it is encoded with the envelope in one pass."""
    return value
