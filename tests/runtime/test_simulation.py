"""The runtime under simulated time and faults: what it promises holds in every history, and the check would see if it did not."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator

import pytest

from dockyard_actors.runtime.actor import Actor, concurrent
from dockyard_actors.runtime.errors import ActorError, AskTimeout, OutcomeUnknown, StaleIncarnation
from dockyard_actors.runtime.mailbox import Remembered
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.status import Inspect
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.runtime.testing import Deadlock, Faults, History, Process, Violation, World, run

SEEDS_IN_SUITE, SEEDS_SOAK = 150, 1_000


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Do(Message[int], frozen=True):
    number: int
    takes_s: float = 0.0


class Wait(Message[int], frozen=True):
    number: int
    takes_s: float = 0.0


class Server(Actor):
    """Answers with its incarnation."""

    def __init__(self, history: History) -> None:
        self.history = history

    async def do(self, msg: Do) -> int:
        self.history.handle(msg.number, self.ctx.name, self.ctx.incarnation)
        if msg.takes_s:
            await asyncio.sleep(msg.takes_s)
        return self.ctx.incarnation

    @concurrent
    async def wait(self, msg: Wait) -> int:
        self.history.handle(msg.number, self.ctx.name, self.ctx.incarnation)
        await asyncio.sleep(msg.takes_s)
        return self.ctx.incarnation


async def one(
    process: Process, history: History, receiver: str, kind: str, msg: type, takes_s: float, limit: float
) -> None:
    sender = f"{process.name}.{process.start}"
    operation = history.begin(sender, receiver, kind, limit)
    message = msg(number=operation.number, takes_s=takes_s)
    ref = process.system.ref(receiver)
    try:
        if kind == "tell":
            await ref.tell(message, deadline_s=limit)
            history.end(operation)
        else:
            history.end(operation, await ref.ask(message, deadline_s=limit, retry=kind == "retry"))
    except ActorError as error:
        history.end(operation, error=error)
    except asyncio.CancelledError:  # its process died
        history.end(operation)
        raise


async def client(process: Process, history: History, rng: random.Random, count: int) -> None:
    for _ in range(count):
        kind = rng.choice(("ask", "retry", "tell"))
        # What runs side by side has no order: such asks go to an actor of their own.
        msg, receiver = (Wait, "loose") if kind == "retry" or rng.random() < 0.2 else (Do, rng.choice("ab"))
        work = one(process, history, receiver, kind, msg, rng.choice((0.0, 0.0, 0.005)), rng.choice((0.3, 2.0, 5.0)))
        if rng.random() < 0.5:
            await work
        else:
            process.spawn(work)
            await asyncio.sleep(0)  # it sends before the next one does
        await asyncio.sleep(rng.random() * 0.05)


async def chaos(world: World, rng: random.Random, rounds: int) -> None:
    for _ in range(rounds):
        await asyncio.sleep(rng.random() * 0.4)
        process = world.processes[rng.choice(list(world.processes))]
        match rng.choice(("kill", "cut", "one way", "hold")):
            case "kill":
                await world.restart(process)
            case "cut":
                world.network.cut(process.uid, world.processes[rng.choice(list(world.processes))].uid)
            case "one way":
                world.network.cut(process.uid, world.processes[rng.choice(list(world.processes))].uid, both=False)
            case "hold":
                process.transport.hold(True)
        await asyncio.sleep(rng.random() * 0.3)
        world.network.heal()
        for other in world.processes.values():
            other.transport.hold(False)


def simulated(seed: int, faults: Faults, *, rounds: int = 6) -> History:
    history = History(in_order=not faults.disorder)
    rng = random.Random(f"test {seed}")

    async def serve(system: ActorSystem, *names: str) -> None:
        for name in names:
            await system.start(Server(history), name)

    async def main() -> None:
        async with World(seed, faults) as world:
            await world.start("server-0", lambda system: serve(system, "a", "loose"))
            await world.start("server-1", lambda system: serve(system, "b"))
            clients = [await world.start(f"client-{n}") for n in range(3)]
            work = [p.spawn(client(p, history, random.Random(rng.random()), 40)) for p in clients]
            await chaos(world, random.Random(rng.random()), rounds)
            await asyncio.wait(work)
            await asyncio.sleep(6.0)  # beyond every deadline
            for process in world.processes.values():
                left = [wait for wait in process.system.waits() if wait.peer != "registry"]
                assert not left, f"seed {seed}: {left}"

    run(main())
    return history


SOME = Faults(loss=0.03, duplicate=0.05)
MUCH = Faults(loss=0.2, duplicate=0.2, delay=(0.0001, 0.2), disorder=True)


def check(seed: int, faults: Faults) -> History:
    history = simulated(seed, faults)
    try:
        history.check()
    except Violation as error:
        raise Violation(f"seed {seed}: {error}") from None
    return history


def check_all(seeds: int, faults: Faults) -> list[History]:
    return [check(seed, faults) for seed in range(seeds)]


@pytest.mark.parametrize("faults", [Faults(), SOME, MUCH], ids=["sound", "some", "much"])
def test_what_is_promised_holds_in_every_history(faults: Faults) -> None:
    histories = check_all(SEEDS_IN_SUITE // 3, faults)
    operations = [operation for history in histories for operation in history.operations]
    answered = sum(operation.reply is not None for operation in operations)
    assert answered > len(operations) / 5, "most of what was asked came to an answer, or nothing was shown"


def test_a_thousand_seeds_hold() -> None:
    for seed in range(SEEDS_SOAK):
        check(seed, MUCH if seed % 3 == 0 else SOME)


def test_the_check_sees_a_runtime_that_repeats_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remembered, "seen", lambda self, key: None)
    with pytest.raises(Violation, match="handled more than once in one incarnation"):
        check_all(SEEDS_IN_SUITE, SOME)


def test_the_check_sees_messages_that_the_network_brings_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dockyard_actors.runtime.service.Service.account", lambda self, peer: [[0, 0, 0], [0, 0, 0]])
    with pytest.raises(Violation, match="handled more than once"):
        check_all(SEEDS_IN_SUITE, SOME)


def test_one_seed_is_one_history() -> None:
    first, second = (list(map(str, simulated(7, MUCH).operations)) for _ in range(2))
    assert first == second
    assert list(map(str, simulated(8, MUCH).operations)) != first


def test_waiting_for_what_cannot_happen_is_a_deadlock_that_names_the_task() -> None:
    async def main() -> None:
        task = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
        await task

    with pytest.raises(Deadlock, match="forgotten"):
        run(main())


def test_what_would_run_in_a_thread_runs_at_once_and_takes_no_time() -> None:
    async def main() -> float:
        assert await asyncio.to_thread(sum, (1, 2)) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.0


def both(scenario) -> None:
    """Runs ``scenario(world, server process, client process, history)`` on a sound network."""
    history = History()

    async def main() -> None:
        async with World(0) as world:
            server = await world.start("server", lambda system: system.start(Server(history), "a"))
            other = await world.start("client")
            await scenario(world, server, other, history)

    run(main())
    history.check()


def test_a_partition_ends_asks_by_their_deadline_and_heals_without_a_trace() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        ref = other.system.ref("a")
        await one(other, history, "a", "ask", Do, 0.0, 1.0)
        world.network.cut(server.uid, other.uid)
        with pytest.raises(AskTimeout, match="client asked a#1 for Do"):
            await ref.ask(Do(number=history.begin("client.1", "a", "ask", 1.0).number), deadline_s=0.2)
        history.end(history.operations[-1])
        world.network.heal()
        for _ in range(200):  # more than a window: what was lost costs no room
            await one(other, history, "a", "ask", Do, 0.0, 5.0)
        assert history.operations[-1].reply == 1

    both(scenario)


def test_a_reply_lost_on_a_one_way_cut_is_had_again_without_doing_it_again() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        world.network.cut(server.uid, other.uid, both=False)
        asking = asyncio.ensure_future(one(other, history, "a", "retry", Do, 0.0, 10.0))
        await asyncio.sleep(2.0)
        assert len(history.operations[0].handled) == 1, "it was handled, and nobody heard"
        world.network.heal()
        await asking
        assert history.operations[0].reply == 1
        assert server.system.counts.deduplicated >= 1

    both(scenario)


def test_a_fenced_process_that_wakes_up_cannot_act() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        other.transport.hold(True)  # SIGSTOP: its messages wait in it, and it hears nothing
        stop = asyncio.ensure_future(other.system.wait_stop())
        world.registry.declare_dead(other.uid, "hung (simulated)")
        await asyncio.sleep(0.1)
        asking = other.spawn(one(other, history, "a", "ask", Do, 0.0, 1.0))  # it goes on where it was, before it hears
        await asyncio.sleep(0.2)
        assert not history.operations[0].handled
        other.transport.hold(False)
        assert "declared this process dead" in str((await stop).cause)
        await asking

    both(scenario)


def test_an_ask_for_an_incarnation_that_is_gone_is_refused() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        old = other.system.ref("a", incarnation=1)
        await world.restart(server)
        await asyncio.sleep(1.0)
        with pytest.raises(StaleIncarnation):
            await old.ask(Do(number=history.begin("client.1", "a", "ask", 5.0).number))
        history.end(history.operations[-1], error=StaleIncarnation())

    both(scenario)


def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        for jump in (-1e6, 1e6):
            monkeypatch.setattr("time.time", lambda jump=jump: 1.7e9 + jump)
            await one(other, history, "a", "ask", Do, 0.1, 1.0)
            await one(other, history, "a", "retry", Do, 0.1, 1.0)
        assert [operation.reply for operation in history.operations] == [1, 1, 1, 1]

    both(scenario)


def test_a_slow_consumer_costs_no_memory_and_delays_no_control_message() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        flood = [asyncio.ensure_future(one(other, history, "a", "tell", Do, 0.02, 60.0)) for _ in range(600)]
        await asyncio.sleep(0.5)
        assert server.system.status().actors["a"].mailbox <= server.system.config.window
        started = asyncio.get_running_loop().time()
        await other.system.ref("a").ask(Inspect())
        assert asyncio.get_running_loop().time() - started < 0.05
        await asyncio.gather(*flood)
        await asyncio.sleep(5.0)
        assert sum(len(operation.handled) for operation in history.operations) == 600

    both(scenario)


def test_an_ask_of_a_process_that_dies_under_it_has_an_unknown_outcome() -> None:
    async def scenario(world: World, server: Process, other: Process, history: History) -> None:
        asking = asyncio.ensure_future(one(other, history, "a", "ask", Do, 5.0, 10.0))
        await asyncio.sleep(0.1)
        await world.kill(server)
        await asking
        operation = history.operations[0]
        assert isinstance(operation.error, OutcomeUnknown)
        assert operation.ended is not None
        assert operation.ended < 0.5, "long before its deadline"

    both(scenario)
