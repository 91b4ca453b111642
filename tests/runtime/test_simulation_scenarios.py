"""One scenario each in simulated time: partitions, zombies, slow consumers, clocks that jump, and what simulated time itself promises."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.errors import AskTimeout, MailboxFull, OutcomeUnknown, StaleIncarnation
from dockyard_actors.runtime.status import Inspect
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.runtime.testing import Deadlock, History, Process, World, run
from tests.runtime.simulation import CONFIG, Count, Do, Server, one


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def now() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------ simulated time


def test_waiting_for_what_cannot_happen_is_a_deadlock_that_names_the_task_and_its_place() -> None:
    async def main() -> None:
        await asyncio.create_task(asyncio.Event().wait(), name="forgotten")

    with pytest.raises(Deadlock, match=r"forgotten \(Event.wait:\d+\)"):
        run(main())


def test_a_simulation_that_only_goes_round_in_circles_ends_too() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110  # that is the point
            await asyncio.sleep(1.0)

    with pytest.raises(Deadlock, match="has not ended"):
        run(main(), limit_s=600.0)


def test_what_would_run_in_a_thread_runs_at_once_and_takes_no_time() -> None:
    async def main() -> float:
        assert await asyncio.to_thread(sum, (1, 2)) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return now()

    assert run(main()) == 0.0


def test_threads_and_sockets_are_refused_with_a_reason() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        said: list[str] = []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                said.append(str(error))

        thread = threading.Thread(target=call, name="stray")
        thread.start()
        thread.join()
        assert "'stray'" in said[0]
        with pytest.raises(RuntimeError, match="no sockets"):
            await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)

    run(main())


def test_a_held_process_does_nothing_and_then_what_was_due() -> None:
    async def main() -> None:
        async with World(0) as world:
            process = await world.start("one")
            ticks: list[float] = []

            async def tick() -> None:
                while True:
                    await asyncio.sleep(1.0)
                    ticks.append(round(now() - began, 3))

            began = now()
            process.spawn(tick())
            await asyncio.sleep(2.5)
            world.hold(process)
            await asyncio.sleep(5.0)
            assert ticks == [1.0, 2.0]
            world.release(process)
            await asyncio.sleep(1.6)
            assert ticks == [1.0, 2.0, 7.5, 8.5]
            world.hold(process)
            await world.kill(process)
            await asyncio.sleep(5.0)
            assert len(ticks) == 4

    run(main())


def test_a_killed_process_runs_nothing_more_not_even_its_cleanup() -> None:
    ended: list[str] = []

    class Careful(Actor):
        async def on_start(self) -> None:
            self.ctx.spawn(self.work(), "work")

        async def work(self) -> None:
            try:
                await asyncio.sleep(60.0)
            finally:
                ended.append(self.ctx.name)

        async def on_stop(self) -> None:
            ended.append("on_stop")

    async def main() -> None:
        async with World(0) as world:
            for name in ("killed", "stopped"):
                process = await world.start(name)
                await process.system.start(Careful(), name)
                if name == "killed":
                    await world.kill(process)
                else:
                    process.system.request_stop("enough")
            await asyncio.sleep(5.0)
            assert ended == ["on_stop", "stopped"]

    run(main())


# ------------------------------------------------------------------ the runtime in it

Scenario = Callable[[World, Process, Process, History], Awaitable[None]]


def on_a_sound_network(scenario: Scenario) -> None:
    """Runs it with a server process, which has the actor "a", and a client process."""
    history = History()

    async def build(system: ActorSystem) -> None:
        await system.start(Server(history), "a")

    async def main() -> None:
        async with World(0, config=CONFIG) as world:
            server = await world.start("server", build)
            other = await world.start("client")
            await scenario(world, server, other, history)
            history.check(world)

    run(main())


def test_a_partition_ends_asks_by_their_deadline_and_heals_without_a_trace() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        await one(other, history, "a", "ask", Do, 0.0, 1.0)
        world.network.cut(server.uid, other.uid)
        tries = CONFIG.window + 50
        for _ in range(tries):
            await one(other, history, "a", "ask", Do, 0.0, 0.02)
        errors = {type(operation.error) for operation in history.operations[1:]}
        assert errors == {AskTimeout, MailboxFull}
        world.network.heal()
        for _ in range(tries):  # what was lost costs no room
            await one(other, history, "a", "ask", Do, 0.0, 5.0)
        assert all(operation.instance == 0 for operation in history.operations[1 + tries :])

    on_a_sound_network(scenario)


def test_what_a_network_kept_back_for_too_long_is_not_handled_any_more() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        world.network.cut(server.uid, other.uid, keeps=True)
        asking = other.spawn(one(other, history, "a", "retry", Do, 0.0, 4.0))
        late = other.spawn(one(other, history, "a", "ask", Do, 0.0, 1.0))
        await asyncio.sleep(3.0)
        world.network.heal()
        await asyncio.wait((asking, late))
        assert len(history.operations[0].handled) == 1, "seven times sent, once handled"
        assert history.operations[0].instance == 0
        assert isinstance(history.operations[1].error, AskTimeout)

    on_a_sound_network(scenario)


def test_a_reply_lost_on_a_one_way_cut_is_had_again_without_doing_it_again() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        world.network.cut(server.uid, other.uid, both=False)
        asking = other.spawn(one(other, history, "a", "retry", Do, 0.0, 10.0))
        await asyncio.sleep(2.0)
        assert len(history.operations[0].handled) == 1, "it was handled, and nobody heard"
        world.network.heal()
        await asking
        assert history.operations[0].instance == 0
        assert server.system.counts.deduplicated >= 1

    on_a_sound_network(scenario)


def test_a_process_declared_dead_while_it_was_stopped_cannot_act_when_it_wakes_up() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        asking = other.spawn(one(other, history, "a", "ask", Do, 0.0, 60.0))  # its first step is not done yet
        world.hold(other)
        world.declare_dead(other, "hung (simulated)")
        await asyncio.sleep(1.0)
        assert not history.operations
        world.network.cut(world.home.uid, other.uid)  # nor does it hear of it soon
        world.release(other)
        await asyncio.sleep(0.5)
        assert len(history.operations) == 1, "it goes on where it was"
        assert not history.operations[0].handled
        assert server.system.counts.fenced == 1, "it dials anew, and is known"
        world.network.heal()
        await asking
        assert other.stop is not None
        assert "declared" in str(other.stop.cause)
        assert not history.operations[0].handled

    on_a_sound_network(scenario)


def test_an_ask_for_an_incarnation_that_is_gone_is_refused() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        old = other.system.ref("a", incarnation=1)
        await world.restart(server)
        await asyncio.sleep(1.0)
        for retry in (False, True):
            with pytest.raises(StaleIncarnation):
                await old.ask(Do(number=0), deadline_s=5.0, retry=retry)

    on_a_sound_network(scenario)


def test_an_ask_that_the_meant_incarnation_may_have_handled_is_not_called_refused() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        world.network.cut(server.uid, other.uid, both=False)
        asking = other.spawn(one(other, history, "a", "retry", Do, 0.0, 5.0, pinned=True))
        await asyncio.sleep(0.2)
        assert history.operations[0].handled
        await world.restart(server)
        world.network.heal()
        await asking
        assert isinstance(history.operations[0].error, OutcomeUnknown)

    on_a_sound_network(scenario)


def test_an_ask_of_a_process_that_dies_under_it_has_an_unknown_outcome() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        asking = other.spawn(one(other, history, "a", "ask", Do, 5.0, 10.0))
        await asyncio.sleep(0.1)
        await world.kill(server)
        await asking
        operation = history.operations[0]
        assert isinstance(operation.error, OutcomeUnknown)
        assert operation.ended is not None
        assert operation.ended < operation.started + 0.5, "long before its deadline"

    on_a_sound_network(scenario)


def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        wall = time.time()
        for jump in (-1e6, 1e6):
            monkeypatch.setattr("time.time", lambda jump=jump: wall + jump)
            monkeypatch.setattr("time.time_ns", lambda jump=jump: int((wall + jump) * 1e9))
            for kind in ("ask", "retry", "tell"):
                await one(other, history, "a", kind, Do, 0.1, 1.0)
            await world.kill_registry()
            await asyncio.sleep(1.0)
            await world.start_registry()
            await asyncio.sleep(3 * CONFIG.lease_s)
        assert [operation.instance for operation in history.operations] == [0, 0, None] * 2
        assert all(operation.error is None for operation in history.operations)
        assert server.alive
        assert other.alive

    on_a_sound_network(scenario)


def test_a_slow_consumer_costs_no_memory_and_delays_no_control_message() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        flood = [other.spawn(one(other, history, "a", "tell", Do, 0.02, 60.0)) for _ in range(600)]
        await asyncio.sleep(0.5)
        assert server.system.status().actors["a"].mailbox <= server.system.config.window
        started = now()
        await other.system.ref("a").ask(Inspect())
        assert now() - started < 0.05
        await asyncio.wait(flood)
        await asyncio.sleep(5.0)
        assert sum(len(operation.handled) for operation in history.operations) == 600

    on_a_sound_network(scenario)


def test_a_stream_whose_readers_goodbye_was_lost_ends_all_the_same() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        number = history.begin(other.uid, "a", "ask", 9.0).number
        async with other.system.ref("a").stream(Count(number=number), credit=4) as items:
            assert await anext(items) == 0
            world.network.cut(other.uid, server.uid, both=False)
        history.end(history.operations[0])
        await asyncio.sleep(1.0)
        service = server.system.cells["a"].service
        assert service is not None
        assert len(service.running) == 1, "it waits for a reader"
        world.network.heal()
        await asyncio.sleep(2 * CONFIG.probe_s)
        assert not service.running

    on_a_sound_network(scenario)


class Listener(Actor):
    """Is told of deaths as long as it lives."""

    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    async def on_start(self) -> None:
        self.ctx.watch("a")

    async def on_death(self, death: object) -> None:
        self.heard.append(self.ctx.name)


def test_who_has_stopped_is_not_told_of_deaths_any_more() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        heard: list[str] = []
        for name in ("first", "second"):
            await other.system.start(Listener(heard), name)
        await other.system.stop("first")
        await world.kill(server)
        await asyncio.sleep(1.0)
        assert heard == ["second"]

    on_a_sound_network(scenario)
