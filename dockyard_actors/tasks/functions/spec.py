"""How a family of functions is written down.

A family is a table of rows; a row is one right expression, the plausible wrong ones, and parameters to vary. Promises only
to expand a row into its variants; which arguments the tests call with is decided in cases.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dockyard_actors.tasks.types import Split

_SIGNATURE = re.compile(r"(?P<name>[a-z_0-9]+)\((?P<params>[^)]*)\)")

Value = int | str


@dataclass(frozen=True)
class Row:
    """`signature` names the pool of each argument: `over_{k}(x: int)`; `intent` goes on after "return". `fills` maps each placeholder to its values."""

    signature: str
    intent: str
    right: str
    wrong: tuple[str, ...]
    fills: dict[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Family:
    """Rows of one subject. A whole family is for training or held out, never both."""

    name: str
    split: Split
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Variant:
    """One function with one bug: a task without its tests."""

    family: str
    split: Split
    name: str
    params: tuple[str, ...]
    pools: tuple[str, ...]
    intent: str
    right: str
    wrong: str
    other_wrong: tuple[str, ...]
    """The row's other wrong expressions: the tests must catch these too."""

    @property
    def header(self) -> str:
        return f"def {self.name}({', '.join(self.params)}):"

    @property
    def key(self) -> str:
        """Names the variant whatever else is in the tables, so that adding a row changes no other task."""
        return f"{self.header} {self.right} <- {self.wrong}"


def row(signature: str, intent: str, right: str, *wrong: str, **fills: tuple[Value, ...]) -> Row:
    return Row(signature, intent, right, wrong, fills)


def train(name: str, *rows: Row) -> Family:
    return Family(name, "train", rows)


def heldout(name: str, *rows: Row) -> Family:
    return Family(name, "heldout", rows)


def variants(family: Family) -> list[Variant]:
    """The functions of a family.

    Training: as many of each row as its longest list has items, shorter lists starting again from their beginning. Held
    out: one of each row, with the wrong expressions taking turns, since time for measuring buys most with different functions.
    """
    found = []
    for number, entry in enumerate(family.rows):
        count = max(len(entry.wrong), *(len(values) for values in entry.fills.values()), 1)
        for index in range(count) if family.split == "train" else [number % count]:
            fill = {key: str(values[index % len(values)]) for key, values in entry.fills.items()}
            found.append(_variant(family, entry, index % len(entry.wrong), fill))
    return found


def _variant(family: Family, entry: Row, wrong: int, fill: dict[str, str]) -> Variant:
    match = _SIGNATURE.fullmatch(_filled(entry.signature, fill))
    if match is None:
        raise ValueError(f"{family.name}: {entry.signature!r} is not of the form name(argument: pool, ...)")
    params = [part.split(": ") for part in match["params"].split(", ")]
    return Variant(
        family=family.name,
        split=family.split,
        name=match["name"],
        params=tuple(param for param, _ in params),
        pools=tuple(pool for _, pool in params),
        intent=_filled(entry.intent, fill),
        right=_filled(entry.right, fill),
        wrong=_filled(entry.wrong[wrong], fill),
        other_wrong=tuple(_filled(text, fill) for index, text in enumerate(entry.wrong) if index != wrong),
    )


def _filled(template: str, fill: dict[str, str]) -> str:
    """Only the row's own placeholders are replaced: braces of f-strings and dicts stay as they are."""
    for key, value in fill.items():
        template = template.replace("{" + key + "}", value)
    return template
