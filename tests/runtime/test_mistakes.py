"""Common mistakes end at once, in an error that says what to do instead; and `ready` waits for a name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import AskTimeout, NameTaken, SystemClosed
from dockyard_actors.runtime.system import ActorSystem
from tests.runtime.actors import Add, Counter
from tests.runtime.test_streams import Lines


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem() as system:
        yield system


async def test_a_system_that_is_not_open_says_so() -> None:
    system = ActorSystem(SystemConfig())
    for use in (lambda: system.ref("c"), lambda: system.request_stop("no")):
        with pytest.raises(SystemClosed, match="not open: `async with ActorSystem"):
            use()
    with pytest.raises(SystemClosed, match="not open"):
        await system.start(Counter(), "c")
    assert not hasattr(system, "no_such_thing")


async def test_what_is_no_actor_cannot_be_started(system: ActorSystem) -> None:
    with pytest.raises(TypeError, match="an instance of an Actor's subclass, not the class Counter"):
        await system.start(Counter, "c")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a dict"):
        await system.start({}, "c")  # type: ignore[arg-type]


async def test_one_instance_has_one_name_while_it_runs(system: ActorSystem) -> None:
    actor = Counter()
    ref = await system.start(actor, "one")
    with pytest.raises(ValueError, match="this Counter runs as 'one' already and cannot be 'two' as well"):
        await system.start(actor, "two")
    with pytest.raises(NameTaken, match="stop it first, or choose another name"):
        await system.start(Counter(), "one")
    assert await ref.ask(Add()) == 1
    await system.stop("one")
    assert await (await system.start(actor, "two")).ask(Add()) == 2
    other = Counter()
    outcomes = await asyncio.gather(*(system.start(other, name) for name in ("a", "b")), return_exceptions=True)
    assert [type(outcome).__name__ for outcome in outcomes] == ["Ref", "ValueError"]


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e12])
async def test_a_wait_without_an_end_is_refused(system: ActorSystem, seconds: float) -> None:
    ref = await system.start(Counter(), "c")
    for use in (
        lambda: ref.ask(Add(), deadline_s=seconds),
        lambda: ref.tell(Add(), deadline_s=seconds),
        lambda: ref.ready(seconds),
        lambda: ref.stream(Lines(count=1), deadline_s=seconds).__aenter__(),
    ):
        with pytest.raises(ValueError, match="every wait has a deadline"):
            await use()
    assert await ref.ask(Add()) == 1, "nothing was sent before"


async def test_ready_waits_until_the_name_is_registered(system: ActorSystem) -> None:
    ref = system.ref("c")
    with pytest.raises(AskTimeout, match="main waited for c to be registered in vain"):
        await ref.ready(0.02)
    waiting = asyncio.ensure_future(ref.ready(30.0))
    await asyncio.sleep(0)
    assert [(wait.peer, wait.what) for wait in system.waits()] == [("c", "start")]
    await system.start(Counter(), "c")
    assert await waiting is ref
    assert await (await ref.ready()).ask(Add()) == 1
    await system.stop("c")
    with pytest.raises(AskTimeout, match="c to be registered in vain; #1 died: stopped"):
        await ref.ready(0.02)
