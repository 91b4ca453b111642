"""Plain values on their way from a program to the judge: exact built-in types as tagged JSON, nothing else.

Promises that decoding runs no code of the sender and that a value which is not plain is named, never approximated.
Subclasses are not plain (a list that is equal to everything must not pass for a list), save dictionaries of `collections`.
"""

from __future__ import annotations

import collections
import json
from typing import Any

MAX_DEPTH = 60
MAX_RANGE = 1 << 16  # a longer one would cost its reader more than its sender
_SMALL_INT = 1 << 53
_DICTIONARIES = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)


def _refuse(value: object) -> object:
    raise TypeError("not JSON")


# The C encoder made ahead: json.dumps looks up isinstance and itself at each call, where a program may have put others.
_c_encode = vars(json.encoder)["c_make_encoder"](
    None, _refuse, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, False
)


class NotPlain(Exception):
    """The value has a part of another type, nests too deeply, or is too large; says which."""


def to_json(value: object) -> str:
    """Compact ASCII JSON of dicts, lists, strings, numbers; independent of built-ins and of `json`'s globals."""
    return "".join(_c_encode(value, 0))


def encode(value: object, max_bytes: int) -> str:
    """Text for `decode`. Raises NotPlain. Calls no method of a foreign type."""
    budget = [max_bytes]
    text = to_json(_pack(value, 0, budget))
    if len(text) > max_bytes:
        raise NotPlain(f"a value of more than {max_bytes} bytes")
    return text


def _pack(value: Any, depth: int, budget: list[int]) -> Any:
    kind = type(value)
    budget[0] -= 1
    if budget[0] < 0:
        raise NotPlain("a value that is too large")
    if depth > MAX_DEPTH:
        raise NotPlain(f"a value nested more than {MAX_DEPTH} levels deep")
    if value is None or kind is bool:
        return value
    if kind is str:
        budget[0] -= len(value)
        if budget[0] < 0:
            raise NotPlain("a value that is too large")
        return value
    if kind is int:
        if -_SMALL_INT < value < _SMALL_INT:
            return value
        if value.bit_length() // 4 > budget[0]:
            raise NotPlain("a value that is too large")
        return {"i": hex(value)}
    if kind is float:
        return {"f": value.hex()}
    if kind is complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        if len(value) > budget[0]:
            raise NotPlain("a value that is too large")
        return {"b": value.hex()}
    if kind is list:
        return [_pack(item, depth + 1, budget) for item in value]
    if kind is tuple:
        return {"t": [_pack(item, depth + 1, budget) for item in value]}
    if kind is set:
        return {"s": [_pack(item, depth + 1, budget) for item in value]}
    if kind is frozenset:
        return {"z": [_pack(item, depth + 1, budget) for item in value]}
    if kind in _DICTIONARIES:
        return {"d": [[_pack(k, depth + 1, budget), _pack(v, depth + 1, budget)] for k, v in dict.items(value)]}
    if kind is range:
        if abs(value.stop - value.start) // abs(value.step) >= MAX_RANGE:  # len() cannot count beyond 2**63
            raise NotPlain("a range that is too long")
        return {"r": [_pack(n, depth + 1, budget) for n in (value.start, value.stop, value.step)]}
    raise NotPlain(f"a value of type {type.__dict__['__name__'].__get__(kind)}")


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
            return {_unpack(item) for item in body}
        case "z":
            return frozenset(_unpack(item) for item in body)
        case "d":
            return {_unpack(key): _unpack(item) for key, item in body}
        case "r":
            span = range(*(_unpack(n) for n in body))
            if len(span) > MAX_RANGE:
                raise ValueError("a range that is too long")
            return span
    raise ValueError(f"unknown tag {tag!r}")


def preview(value: object, limit: int = 160) -> str:
    """A short `repr` of a plain value for messages; never raises on huge integers."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"<an integer of {value.bit_length()} bits>"
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts, somewhere inside
        return f"<a {type(value).__name__} with a huge integer>"
    return text if len(text) <= limit else text[: limit - 3] + "..."
