"""After each test of a package that imports this fixture: no descriptor, socket, child process or shared memory more than before it."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest
import uvloop

SETTLE_S = 10.0  # killed grandchildren are reaped, and sockets linger, for a moment


def _descriptors() -> Counter[str]:
    """How many of each kind: sockets and pipes have numbers in their names."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        kinds[target.partition(":[")[0]] += 1
    return kinds


def _look() -> dict[str, Counter]:
    children = (child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE)
    return {
        "descriptors": _descriptors(),
        "processes": Counter(child.pid for child in children),
        "shared memory": Counter(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else Counter(),
    }


def _more(before: dict[str, Counter], after: dict[str, Counter]) -> dict[str, Counter]:
    return {kind: after[kind] - before[kind] for kind in before if after[kind] - before[kind]}


@functools.cache
def _one_loop_has_run() -> None:
    """libuv keeps a pipe for signals for as long as the process lives."""
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def nothing_is_left_by_a_test() -> Iterator[None]:
    _one_loop_has_run()
    before = _look()
    yield
    until = time.monotonic() + SETTLE_S
    left = _more(before, _look())
    while left and time.monotonic() < until:
        time.sleep(0.02)  # polls: there is no event for somebody else's grandchild
        left = _more(before, _look())
    assert not left, f"left behind by this test: {left}"
