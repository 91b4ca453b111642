"""The runtime under simulated time and faults: what it promises holds in every history, and the check would see if it did not."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dockyard_actors.runtime.caller import Caller
from dockyard_actors.runtime.deadlines import Deadlines
from dockyard_actors.runtime.deliveries import StreamCredit
from dockyard_actors.runtime.directory import Gone
from dockyard_actors.runtime.errors import PeerDied
from dockyard_actors.runtime.mailbox import Remembered
from dockyard_actors.runtime.membership import Membership
from dockyard_actors.runtime.service import Service
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.runtime.testing import Event, Faults, SimTransport, Violation
from dockyard_actors.runtime.windows import Window
from tests.runtime.simulation import CONFIG, MUCH, NARROW, SOME, SOUND, simulated

SEEDS_IN_SUITE, SEEDS_SOAK = 102, 1_000
ENOUGH = 60  # seeds within which a broken promise shows


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def some_history(seed: int, faults: Faults, log: list[Event] | None = None):
    """The registry dies in every third, and windows are narrow in every second."""
    return simulated(seed, faults, config=NARROW if seed % 2 else CONFIG, registry=seed % 3 == 0, log=log)


@pytest.mark.parametrize("faults", [SOUND, SOME, MUCH], ids=["sound", "some", "much"])
def test_what_is_promised_holds_in_every_history(faults: Faults) -> None:
    histories = [some_history(seed, faults) for seed in range(SEEDS_IN_SUITE // 3)]
    operations = [operation for history in histories for operation in history.operations]
    answered = sum(operation.instance is not None for operation in operations)
    assert answered > len(operations) / 3, "much of what was asked came to an answer, or nothing was shown"
    failed = {type(operation.error).__name__ for operation in operations}
    assert failed >= {"AskTimeout", "PeerDied", "OutcomeUnknown", "MailboxFull"}, "faults had consequences"


@pytest.mark.slow
def test_a_thousand_seeds_hold() -> None:
    for seed in range(SEEDS_SOAK):
        some_history(seed, (SOUND, SOME, MUCH)[seed % 3])


# ------------------------------------------------------------------ the test of the test

IN_DISORDER = Faults(delay=(0.0001, 0.05), disorder=True)


def late(push: Callable[..., None]) -> Callable[..., None]:
    return lambda self, when, entry: push(self, when + 1.0, entry)


def lingering(close: Callable[..., Any]) -> Callable[..., Any]:
    async def close_later(self: ActorSystem) -> None:
        await asyncio.sleep(1.0)
        await close(self)

    return close_later


def ever_more(numbers: Iterator[int]) -> property:
    """Its reader seems to say something all the time."""
    return property(lambda self: next(numbers), lambda self, value: None)


def endless(take: Callable[..., bool]) -> Callable[..., bool]:
    def unbounded(self: Window, size: int) -> bool:
        self.messages, self.size = 10**6, 10**9
        return take(self, size)

    return unbounded


BROKEN: dict[str, tuple[Faults, str, list[tuple[Any, str, Any]]]] = {
    "retries are not known again": (
        SOME,
        "handled more than once in one incarnation",
        [(Remembered, "seen", lambda self, key: None)],
    ),
    "messages are not counted": (
        SOME,
        "handled more than once",
        [(Service, "account", lambda self, peer: [[0] * 5, [0] * 5])],
    ),
    "order is not kept": (
        IN_DISORDER,
        "out of order",
        [(Service, "account", lambda self, peer: [[0] * 5, [0] * 5])],
    ),
    "deadlines are late": (SOME, "ended after its deadline", [(Deadlines, "push", late(Deadlines.push))]),
    "errors promise too much": (
        SOME,
        "handled, and its error says that it was not",
        [(sys.modules[Caller.__module__], "OutcomeUnknown", PeerDied)],
    ),
    "windows have no end": (SOUND, "holds more than a window", [(Window, "take", endless(Window.take))]),
    "the dead may speak": (
        SOUND,
        "which knew since",
        [
            (
                SimTransport,
                "forget",
                lambda self, uid: self.forgotten.setdefault(uid, self.receiver.system.loop.time()),
            ),
            (Gone, "__contains__", lambda self, uid: False),
        ],
    ),
    "the dead may go on": (SOUND, "which was told at", [(ActorSystem, "close", lingering(ActorSystem.close))]),
    "lost updates stay lost": (SOME, "believes that", [(Membership, "_catch_up", lambda self: None)]),
    "streams outlive their readers": (
        SOME,
        "is still at work",
        [(Caller, "on_item", lambda self, *item: None), (StreamCredit, "heard", ever_more(itertools.count()))],
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_check_sees_a_runtime_that_breaks_its_promises(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, text, patches = BROKEN[what]
    for owner, name, broken in patches:
        monkeypatch.setattr(owner, name, broken, raising=False)

    def until_it_shows() -> None:
        for seed in range(ENOUGH):
            config = NARROW if "windows" in what or seed % 2 else CONFIG
            simulated(seed, faults, config=config, in_order="order" in what or None)

    with pytest.raises(Violation, match=text):
        until_it_shows()


# ------------------------------------------------------------------ one seed, one history


def fingerprint(seeds: range) -> str:
    """Of everything that went over the network, of every outcome, and of what watchers were told."""
    digest = hashlib.sha256()
    for seed, faults in itertools.product(seeds, (SOME, MUCH)):
        log: list[Event] = []
        history = some_history(seed, faults, log)
        for item in (*log, *history.operations, *history.watched, *history.notes):
            digest.update(f"{item}\n".encode())
    return digest.hexdigest()


def test_one_seed_is_one_history_to_the_byte_in_any_process() -> None:
    """Whatever the order of sets is there."""
    code = (
        "import os, logging; os.getpid = lambda: 1; logging.disable(logging.CRITICAL)\n"  # it is in what processes say of themselves
        "from tests.runtime.test_simulation import fingerprint\n"
        "print(fingerprint(range(3, 7)), fingerprint(range(7, 8)))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    first, second = (process.communicate()[0].split() for process in started)
    assert len(first) == 2
    assert first == second
    assert first[0] != first[1]
