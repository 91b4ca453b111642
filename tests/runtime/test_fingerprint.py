"""The fingerprint that shows skew between processes: equal schemas have equal ones, in every process, and others have others."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import typing
from typing import Any

import msgspec
import numpy as np

from dockyard_actors.runtime.actor import schema_of
from dockyard_actors.runtime.message import Message, fingerprint
from dockyard_actors.runtime.registry import Registry


class Tree(msgspec.Struct, frozen=True):
    label: str
    branches: tuple[Tree, ...] = ()


class Colour(enum.Enum):
    RED = "red"


def shape(
    reply: Any = int,
    field: Any = int,
    default: Any = msgspec.NODEFAULT,
    factory: Any = msgspec.NODEFAULT,
    inner: Any = str,
    tag: str = "Inner",
) -> str:
    """Fingerprint of a message M(field, inner) -> Reply(value)."""
    content = msgspec.defstruct("Inner", [("x", inner)], tag=tag)
    answer = msgspec.defstruct("Reply", [("value", reply)], frozen=True)
    fields = [("inner", content), ("field", field, msgspec.field(default=default, default_factory=factory))]
    kind = msgspec.defstruct(
        "M",
        fields,
        bases=(Message,),
        namespace={"__orig_bases__": (Message[answer],)},
        frozen=True,
        kw_only=True,
        tag=True,
    )
    return fingerprint([kind])


def test_the_fingerprint_is_of_names_and_types_all_the_way_down_and_of_nothing_else() -> None:
    known = shape()
    assert shape() == known
    assert shape(default=3) == shape(factory=lambda: 3) == shape(factory=lambda: 4) == known
    others = [
        shape(reply=str),
        shape(field=float),
        shape(inner=int),
        shape(tag="Other"),
        shape(reply=Tree),
        shape(reply=tuple[Tree, ...]),
        shape(field=np.ndarray),
        shape(field=Colour),
        shape(field=typing.Literal["red"]),
        shape(field=typing.Literal["blue"]),
        shape(field=dict[str, int]),
        shape(field=dict[str, str]),
    ]
    assert len({known, *others}) == 1 + len(others)
    assert shape(field=int | str) == shape(field=str | int)


def test_the_fingerprint_of_a_class_is_the_same_in_another_process() -> None:
    code = (
        "from dockyard_actors.runtime.actor import schema_of; from dockyard_actors.runtime.registry import Registry; "
    )
    told = subprocess.run(
        [sys.executable, "-c", code + "print(schema_of(Registry))"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == schema_of(Registry)
