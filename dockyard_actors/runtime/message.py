"""Messages and their replies: a message type names its reply type, so `await ref.ask(msg)` is typed.

Everything travels as msgpack; numpy arrays as an extension type (dtype, shape, bytes), never as lists of numbers.
It knows nothing about who sends what to whom.
"""

from __future__ import annotations

import hashlib
import sys
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

R = TypeVar("R")
I = TypeVar("I")  # noqa: E741  # the item of a stream

_ARRAY_EXT = 1
_ARRAY_KINDS = frozenset("biuf")  # bool, int, uint, float: plain bytes with no objects behind them


class Message(msgspec.Struct, Generic[R], frozen=True, kw_only=True, tag=True):
    """Base of all messages: ``class Lease(Message[Granted | Exhausted], frozen=True)``; `R` is the reply type.

    The class name is the message's name on the wire. Unknown fields are ignored, so a newer peer may add some with defaults.
    Reply types in a union must be tagged structs (``tag=True``). Arrays are declared as ``np.ndarray``.
    """


class Stream(Message[None], Generic[I], frozen=True, kw_only=True, tag=True):
    """Base of messages that are answered by any number of items: ``class Lines(Stream[Line], frozen=True)``.

    Its handler is an async generator; `ref.stream(msg)` reads it.
    """


class MessageTypeError(TypeError):
    """A message or reply type cannot go over the wire as declared; the text says which and how to declare it."""


@cache
def reply_type(kind: type[Message[Any]]) -> Any:
    """The reply type `R` that a message class was declared with (of a stream: its item type). MessageTypeError when there is none."""
    if issubclass(kind, Stream):
        return item_type(kind)
    return _argument(kind, Message, "reply type", "Message[ReplyType]")


@cache
def item_type(kind: type[Stream[Any]]) -> Any:
    """The item type `I` that a stream was declared with. MessageTypeError when there is none."""
    return _argument(kind, Stream, "item type", "Stream[ItemType]")


def _argument(kind: type, generic: Any, what: str, example: str) -> Any:
    for cls in kind.__mro__:
        for base in getattr(cls, "__orig_bases__", ()):
            if typing.get_origin(base) is generic:
                (found,) = typing.get_args(base)
                if isinstance(found, typing.ForwardRef):
                    found = found.__forward_arg__
                if isinstance(found, str):
                    found = eval(found, vars(sys.modules[cls.__module__]))  # an annotation of our own source
                return type(None) if found is None else found
    raise MessageTypeError(f"{kind.__name__} names no {what}: declare it as `class {kind.__name__}({example})`")


def encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _ARRAY_KINDS:
            raise MessageTypeError(
                f"an array of dtype {value.dtype} cannot go over the wire: numbers and booleans only"
            )
        header = msgspec.msgpack.encode(_ArrayHeader(value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(_ARRAY_EXT, bytes((len(header),)) + header + np.ascontiguousarray(value).tobytes())
    raise MessageTypeError(f"{type(value).__name__} cannot go over the wire: {_instead(type(value))}")


def _instead(kind: type) -> str:
    if kind.__module__.split(".")[0] == "torch":
        return "use tensor.numpy(), or the data plane for bulk"
    if kind.__name__ == "Ref" and kind.__module__ == "dockyard_actors.runtime.ref":
        return "send its name, the receiver makes a reference with ctx.ref(name)"
    return "use a struct, plain values or a numpy array"


Undecodable = (msgspec.MsgspecError, RecursionError)
"""What decoding a peer's bytes may raise: they are not what they should be, or nested too deep."""


class _ArrayHeader(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]


def _decode_ext(code: int, data: memoryview) -> Any:
    if code != _ARRAY_EXT:
        return msgspec.msgpack.Ext(code, bytes(data))
    try:
        start = data[0] + 1
        header = msgspec.msgpack.decode(data[1:start], type=_ArrayHeader)
        dtype = np.dtype(header.dtype)
        if dtype.kind not in _ARRAY_KINDS:
            raise ValueError(f"dtype {dtype} is refused")
        array = np.frombuffer(data[start:], dtype).reshape(header.shape)
        return array.copy()  # aligned, and does not keep the frame alive
    except Exception as error:  # whatever a peer may have put there: it is no array, and nobody's process ends for it
        raise msgspec.ValidationError(f"malformed array: {error}") from error


def _decode_custom(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    raise msgspec.ValidationError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)


@cache
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """The (cached) decoder of a message or reply type. MessageTypeError when the type cannot go over the wire."""
    try:
        made = msgspec.msgpack.Decoder(kind, ext_hook=_decode_ext, dec_hook=_decode_custom)
        _refuse_number_lists(msgspec.inspect.type_info(kind), str(kind), set())
    except TypeError as error:
        raise MessageTypeError(f"{kind} cannot go over the wire: {error}") from error
    return made


@cache
def reply_decoder(kind: type[Message[Any]]) -> Callable[[Any], Any]:
    """Decodes the body of a reply to this message type. MessageTypeError when it, or its reply, cannot travel, and for a stream."""
    if issubclass(kind, Stream):
        raise not_asked(kind)
    decoder(kind)
    return _reply(kind).decode


@cache
def item_decoder(kind: type[Stream[Any]]) -> Callable[[Any], Any]:
    """Decodes an item of this stream. MessageTypeError when it, or its items, cannot travel."""
    decoder(kind)
    return _reply(kind).decode


def check(kind: type[Message[Any]]) -> None:
    """MessageTypeError when a message of this type, or what answers it, cannot go over the wire."""
    decoder(kind)
    _reply(kind)


def _reply(kind: type[Message[Any]]) -> msgspec.msgpack.Decoder[Any]:
    try:
        return decoder(reply_type(kind))
    except MessageTypeError as error:
        raise MessageTypeError(
            f"{'item' if issubclass(kind, Stream) else 'reply'} of {kind.__name__}: {error}"
        ) from error


def not_asked(kind: type[Message[Any]]) -> MessageTypeError:
    return MessageTypeError(
        f"{kind.__name__} is a stream: it is read with `async with ref.stream(msg) as items`, and cannot be asked or told"
    )


def _refuse_number_lists(info: msgspec.inspect.Type, where: str, seen: set[type]) -> None:
    """A `list[int]` field costs 28 times what the same numbers cost as an array, so declaring one is an error."""
    inspect = msgspec.inspect
    if isinstance(info, inspect.ListType):
        if isinstance(info.item_type, inspect.IntType | inspect.FloatType):
            raise TypeError(f"{where} is a list of numbers: declare np.ndarray (or tuple[int, ...] for a handful)")
        _refuse_number_lists(info.item_type, where, seen)
    elif isinstance(info, inspect.StructType | inspect.DataclassType):
        if info.cls not in seen:
            seen.add(info.cls)
            for field in info.fields:
                _refuse_number_lists(field.type, f"{info.cls.__name__}.{field.name}", seen)
    elif isinstance(info, inspect.CustomType):
        cls = typing.get_origin(info.cls) or info.cls
        if cls is not np.ndarray:
            raise TypeError(f"{where} is a {getattr(cls, '__name__', cls)}: {_instead(cls)}")
    elif isinstance(info, inspect.UnionType):
        for member in info.types:
            _refuse_number_lists(member, where, seen)
    elif isinstance(info, inspect.DictType):
        _refuse_number_lists(info.value_type, where, seen)
    elif isinstance(info, inspect.VarTupleType):
        _refuse_number_lists(info.item_type, where, seen)


def fingerprint(kinds: list[type[Message[Any]]]) -> str:
    """Short hash of the names and types of all fields of these messages and their replies, and of what is in them; logged so that skew can
    be seen. The same in every process; defaults, which a peer may change without harm, are no part of it."""
    text = ";".join(
        f"{_shape(msgspec.inspect.type_info(kind), ())}>{_shape(msgspec.inspect.type_info(reply_type(kind)), ())}"
        for kind in sorted(kinds, key=lambda k: k.__name__)
    )
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _shape(value: Any, within: tuple[type, ...]) -> str:
    """A type as it goes over the wire. within: the classes that it is a part of; they are named only."""
    inspect = msgspec.inspect
    if isinstance(value, inspect.Metadata):
        return _shape(value.type, within)
    if isinstance(value, inspect.StructType | inspect.DataclassType | inspect.NamedTupleType):
        if value.cls in within:
            return value.cls.__name__
        within = (*within, value.cls)
        fields = [f"{field.encode_name}:{_shape(field.type, within)}" for field in value.fields]
        in_order = isinstance(value, inspect.NamedTupleType) or getattr(value, "array_like", False)
        shape = "".join(f"({field})" for field in (fields if in_order else sorted(fields)))
        return f"{value.cls.__name__}{getattr(value, 'tag', None)!r}{in_order}{shape}"
    if isinstance(value, inspect.UnionType):
        return "|".join(sorted(_shape(member, within) for member in value.types))
    if isinstance(value, inspect.EnumType):
        return f"{value.cls.__name__}{sorted(repr(member.value) for member in value.cls)}"
    if isinstance(value, inspect.Type):
        parts = (f"{name}={_shape(getattr(value, name), within)}" for name in value.__struct_fields__)
        return f"{type(value).__name__}({','.join(parts)})"
    if isinstance(value, tuple):
        return f"[{','.join(_shape(member, within) for member in value)}]"
    return value.__qualname__ if isinstance(value, type) else repr(value)
