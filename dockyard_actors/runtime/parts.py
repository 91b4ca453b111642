"""Cuts what may outgrow a frame into parts: lists of names and of the dead, which grow with the run.

It promises parts in order and below a size, unless one item alone is larger. It knows nothing of what the items are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from dockyard_actors.runtime.directory import Entry
from dockyard_actors.runtime.message import encoder

T = TypeVar("T")

PART_BYTES = 256 << 10  # takes a registry a few milliseconds to make or to read


def part_bytes(max_frame_bytes: int) -> int:
    """Bytes of encoded items in one part: what goes around them fits into the frame as well."""
    return min(PART_BYTES, max_frame_bytes // 2)


def parts(items: Iterable[T], most: int) -> Iterator[tuple[T, ...]]:
    """The items in order, cut where more than ``most`` bytes (encoded) would come together; nothing when there are none."""
    part: list[T] = []
    size = 0
    for item in items:
        more = len(encoder.encode(item))
        if part and size + more > most:
            yield tuple(part)
            part, size = [], 0
        part.append(item)
        size += more
    if part:
        yield tuple(part)


def news_parts(
    gone: dict[str, str], entries: Iterable[Entry], most: int
) -> Iterator[tuple[tuple[Entry, ...], dict[str, str]]]:
    """Names, and dead processes (uid → cause), as messages carry them: the dead first. One part at least."""
    news = (*gone.items(), *entries)
    for part in parts(news, most) if len(news) > 1 else (news,):
        yield news_of(part)


def news_of(part: tuple[Entry | tuple[str, str], ...]) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """One part, sorted out."""
    entries = tuple(item for item in part if isinstance(item, Entry))
    return entries, dict(item for item in part if not isinstance(item, Entry))
