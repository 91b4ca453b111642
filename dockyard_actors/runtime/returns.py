"""Compares what a handler says it returns with what its message says is replied.

It objects only where both are types of which it is sure that one cannot travel as the other, and knows nothing of who calls whom.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from dockyard_actors.runtime.message import Message, MessageTypeError, reply_type

_PLAIN = (type(None), bool, int, float, str, bytes, np.ndarray)


def refuse_contradiction(handler: str, function: Callable[..., Any], kinds: list[type[Message[Any]]]) -> None:
    """MessageTypeError when ``function`` is annotated to return something that is no reply of any of ``kinds``."""
    returned = getattr(function, "__annotations__", {}).get("return", Any)
    if isinstance(returned, str):
        try:
            returned = eval(returned, getattr(function, "__globals__", {}))  # an annotation of our own source
        except NameError:  # known to type checkers only
            return
    replies = [member for kind in kinds for member in _members(reply_type(kind))]
    for member in _members(returned):
        if not any(_fits(member, reply) for reply in replies):
            promised = " | ".join(getattr(reply, "__name__", str(reply)) for reply in replies)
            raise MessageTypeError(
                f"{handler} returns {getattr(member, '__name__', member)}, but the reply of "
                f"{' or '.join(kind.__name__ for kind in kinds)} is {promised}"
            )


def _members(kind: Any) -> list[Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(kind) for member in _members(part)]
    return [type(None) if kind is None else kind]


def _fits(returned: Any, reply: Any) -> bool:
    if not (_known(returned) and _known(reply)):
        return True
    if returned is bool or (returned, reply) == (int, float):
        return returned is reply or returned is int
    return issubclass(returned, reply) or (issubclass(returned, msgspec.Struct) and issubclass(reply, returned))


def _known(kind: Any) -> bool:
    return isinstance(kind, type) and (kind in _PLAIN or issubclass(kind, msgspec.Struct))
