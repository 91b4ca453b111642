"""Plain values on their way from a program to the judge: built-in data as tagged JSON, nothing else.

Promises that encoding calls no method a program defined, that decoding runs no code of the sender, and that a value which is
not plain is named, never approximated. A subclass counts as its built-in base when it left equality alone (named tuples,
integer enumerations); a list that is equal to everything does not pass for a list.
"""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import json
import uuid
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 60
MAX_RANGE = 1 << 16  # a longer one would cost its reader more than its sender
MAX_HASHED = 1000  # elements of a set or dictionary: colliding hashes cost the reader the square of it
_SMALL_INT = 1 << 53

# Their equality is the standard library's: not sent, but fit to be compared with a literal inside.
_TRUSTED = {
    id(kind)
    for kind in (
        fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.datetime, datetime.timedelta, uuid.UUID,
        bytearray, array.array,
    )
}  # fmt: skip
_mro_of = type.__dict__["__mro__"].__get__
_dict_of = type.__dict__["__dict__"].__get__
_name_of = type.__dict__["__name__"].__get__


def _refuse(value: object) -> object:
    raise TypeError("not JSON")


# The C encoder made ahead: json.dumps looks up isinstance and itself at each call, where a program may have put others.
_c_encode = vars(json.encoder)["c_make_encoder"](
    None, _refuse, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, False
)


class NotPlain(Exception):
    """The value has a part of another type, nests too deeply, or is too large; says which.

    `foreign`: the type is the program's own, and so is what it calls equal.
    """

    def __init__(self, message: str, foreign: bool = False) -> None:
        super().__init__(message)
        self.foreign = foreign


def to_json(value: object) -> str:
    """Compact ASCII JSON of dicts, lists, strings, numbers; independent of built-ins and of `json`'s globals."""
    return "".join(_c_encode(value, 0))


def encode(value: object, max_bytes: int) -> str:
    """Text for `decode`. Raises NotPlain."""
    text = to_json(_Packer(max_bytes).pack(value, 0))
    if len(text) > max_bytes:
        raise NotPlain(f"a value of more than {max_bytes} bytes")
    return text


class _Packer:
    def __init__(self, budget: int) -> None:
        self._budget = budget

    def pack(self, value: Any, depth: int) -> Any:
        kind = type(value)
        self._spend(1)
        if depth > MAX_DEPTH:
            raise NotPlain(f"a value nested more than {MAX_DEPTH} levels deep")
        packer = _PACKERS.get(id(kind))
        if packer is None:
            packer = _PACKERS.get(id(_equality_of(kind)))
            if packer is None or id(kind) in _TRUSTED:
                raise NotPlain(f"a value of type {_name_of(kind)}", foreign=id(kind) not in _TRUSTED)
        return packer(self, value, depth)

    def _spend(self, size: int) -> None:
        self._budget -= size
        if self._budget < 0:
            raise NotPlain("a value that is too large")

    def _all(self, items: Any, depth: int) -> list[Any]:
        return [self.pack(item, depth + 1) for item in items]

    def itself(self, value: Any, depth: int) -> Any:
        return value

    def string(self, value: Any, depth: int) -> Any:
        self._spend(str.__len__(value))
        return str.__str__(value)

    def integer(self, value: Any, depth: int) -> Any:
        value = int.__index__(value)
        if -_SMALL_INT < value < _SMALL_INT:
            return value
        self._spend(value.bit_length() // 4)
        return {"i": hex(value)}

    def floating(self, value: Any, depth: int) -> Any:
        return {"f": float.hex(value)}

    def complex_number(self, value: Any, depth: int) -> Any:
        return {"c": [value.real.hex(), value.imag.hex()]}

    def binary(self, value: Any, depth: int) -> Any:
        self._spend(bytes.__len__(value))
        return {"b": bytes.hex(value)}

    def list_(self, value: Any, depth: int) -> Any:
        return self._all(list.__iter__(value), depth)

    def tuple_(self, value: Any, depth: int) -> Any:
        return {"t": self._all(tuple.__iter__(value), depth)}

    def set_(self, value: Any, depth: int) -> Any:
        _hashed(set.__len__(value))
        return {"s": self._all(set.__iter__(value), depth)}

    def frozenset_(self, value: Any, depth: int) -> Any:
        _hashed(frozenset.__len__(value))
        return {"z": self._all(frozenset.__iter__(value), depth)}

    def dictionary(self, value: Any, depth: int) -> Any:
        _hashed(dict.__len__(value))
        return {"d": [[self.pack(k, depth + 1), self.pack(v, depth + 1)] for k, v in dict.items(value)]}

    def span(self, value: Any, depth: int) -> Any:
        if abs(value.stop - value.start) // abs(value.step) >= MAX_RANGE:  # len() cannot count beyond 2**63
            raise NotPlain("a range that is too long")
        return {"r": self._all((value.start, value.stop, value.step), depth)}


_PACKERS: dict[int, Callable[[_Packer, Any, int], Any]] = {
    id(kind): packer
    for kind, packer in (
        (type(None), _Packer.itself),
        (bool, _Packer.itself),
        (str, _Packer.string),
        (int, _Packer.integer),
        (float, _Packer.floating),
        (complex, _Packer.complex_number),
        (bytes, _Packer.binary),
        (list, _Packer.list_),
        (tuple, _Packer.tuple_),
        (set, _Packer.set_),
        (frozenset, _Packer.frozenset_),
        (dict, _Packer.dictionary),
        (collections.Counter, _Packer.dictionary),
        (collections.OrderedDict, _Packer.dictionary),
        (range, _Packer.span),
    )
}


def _equality_of(kind: type) -> type:
    """The class whose `__eq__` instances of `kind` use, found without asking the class."""
    for base in _mro_of(kind):
        if "__eq__" in _dict_of(base):
            # complex reads `real` by name, which a subclass may have replaced
            return object if base is complex else base
    return object


def _hashed(count: int) -> None:
    if count > MAX_HASHED:
        raise NotPlain(f"a set or dictionary of more than {MAX_HASHED} elements")


def decode(text: str) -> object:
    """The value. Raises ValueError on anything that `encode` does not write."""
    try:
        return _unpack(json.loads(text))
    except (RecursionError, TypeError, KeyError, OverflowError, AttributeError) as error:
        raise ValueError(f"not an encoded value: {type(error).__name__}") from error


def _unpack(packed: Any) -> Any:
    if packed is None or isinstance(packed, (bool, int, str)):
        return packed
    if isinstance(packed, list):
        return [_unpack(item) for item in packed]
    if not isinstance(packed, dict) or len(packed) != 1:
        raise ValueError("not an encoded value")
    ((tag, body),) = packed.items()
    match tag:
        case "i":
            return int(body, 16)
        case "f":
            return float.fromhex(body)
        case "c":
            return complex(float.fromhex(body[0]), float.fromhex(body[1]))
        case "b":
            return bytes.fromhex(body)
        case "t":
            return tuple(_unpack(item) for item in body)
        case "s":
            return {_unpack(item) for item in _counted(body)}
        case "z":
            return frozenset(_unpack(item) for item in _counted(body))
        case "d":
            return {_unpack(key): _unpack(item) for key, item in _counted(body)}
        case "r":
            span = range(*(_unpack(n) for n in body))
            if len(span) > MAX_RANGE:
                raise ValueError("a range that is too long")
            return span
    raise ValueError(f"unknown tag {tag!r}")


def _counted(body: list[Any]) -> list[Any]:
    if len(body) > MAX_HASHED:
        raise ValueError("a set or dictionary with too many elements")
    return body


def preview(value: object, limit: int = 160) -> str:
    """A short `repr` of a plain value for messages; never raises on huge integers."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"<an integer of {value.bit_length()} bits>"
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts, somewhere inside
        return f"<a {type(value).__name__} with a huge integer>"
    return text if len(text) <= limit else text[: limit - 3] + "..."
