"""A world under simulated time for tests: servers that write down what they handle, clients that do everything a client can, and chaos
that does everything that can happen to processes and their network."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from dockyard_actors.runtime.actor import Actor, Birth, Death, concurrent, control
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.deliveries import Delivery
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.runtime.message import Message, Stream
from dockyard_actors.runtime.scope import current
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.runtime.testing import Event, Faults, History, Operation, Process, Violation, World, run

SOUND = Faults()
SOME = Faults(loss=0.03, duplicate=0.05)
MUCH = Faults(loss=0.2, duplicate=0.2, delay=(0.0001, 0.2), disorder=True)
CONFIG = SystemConfig(
    retry_every_s=0.5, registry_s=1.0, join_s=1.0, probe_s=0.5, lease_s=3.0, rejoin_s=0.5, settle_s=1.0, stop_s=0.5
)
NARROW = dataclasses.replace(CONFIG, window=4, mailbox_capacity=8, concurrency=2, dedup_capacity=64)
NAMES = ("a", "b", "c")


class Do(Message[int], frozen=True):
    """Handled one after the other. The reply is the number of the instance."""

    number: int
    takes_s: float = 0.0


class Wait(Message[int], frozen=True):
    """Handled side by side."""

    number: int
    takes_s: float = 0.0


class Now(Message[int], frozen=True):
    """Handled on the control lane."""

    number: int
    takes_s: float = 0.0


class Relay(Message[int], frozen=True):
    """Handled side by side, by asking somebody else."""

    number: int
    takes_s: float = 0.0


class Count(Stream[int], frozen=True):
    """Counts to 20."""

    number: int
    takes_s: float = 0.0


LANES = {Do: "serial", Wait: "side by side", Now: "control", Relay: "relay", Count: "stream"}


class Server(Actor):
    def __init__(self, history: History) -> None:
        self.history = history

    async def do(self, msg: Do) -> int:
        return await self._handle(msg.number, msg.takes_s)

    @concurrent
    async def wait(self, msg: Wait) -> int:
        return await self._handle(msg.number, msg.takes_s)

    @control
    async def now(self, msg: Now) -> int:
        return await self._handle(msg.number, msg.takes_s)

    @concurrent
    async def relay(self, msg: Relay) -> int:
        instance = self.history.handle(msg.number, self)
        scope = current()
        assert scope is not None
        left = min(1.0, scope.deadline - asyncio.get_running_loop().time())
        receiver = NAMES[(NAMES.index(self.ctx.name) + 1) % len(NAMES)]
        if left > 0.0:
            uid = self.ctx.system.config.uid
            operation = self.history.begin(uid, receiver, "ask", left, "relayed", msg.number)
            await finish(
                self.history, operation, self.ctx.ref(receiver).ask(Wait(number=operation.number), deadline_s=1.0)
            )
        return instance

    async def count(self, msg: Count) -> AsyncIterator[int]:
        self.history.handle(msg.number, self)
        for number in range(20):
            yield number
            if msg.takes_s:
                await asyncio.sleep(msg.takes_s)

    async def _handle(self, number: int, takes_s: float) -> int:
        instance = self.history.handle(number, self)
        if takes_s:
            await asyncio.sleep(takes_s)
        return instance


class Watcher(Actor):
    """Is told who lives and who died."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.told: dict[str, tuple[int, bool]] = {}  # name → incarnation, whether it lives

    async def on_start(self) -> None:
        for name in NAMES:
            self.ctx.watch(name)

    async def on_birth(self, birth: Birth) -> None:
        self._told(birth.name, birth.incarnation, True)

    async def on_death(self, death: Death) -> None:
        self._told(death.name, death.incarnation, False)

    def _told(self, name: str, incarnation: int, lives: bool) -> None:
        self.history.watched.append(f"{self.ctx.name}: {name}#{incarnation} {lives}")
        before = self.told.get(name, (0, False))
        if (incarnation, not lives) <= (before[0], not before[1]):
            self.history.violations.append(f"{self.ctx.name} hears of {name}: {incarnation}, {lives} after {before}")
        self.told[name] = (incarnation, lives)


async def finish(history: History, operation: Operation, work: Awaitable[Any]) -> None:
    """Awaits an ask or a tell and writes down how it ended."""
    try:
        history.end(operation, await work)
    except ActorError as error:
        history.end(operation, error=error)
    except asyncio.CancelledError:
        history.end(operation, given_up=True)
        raise


async def one(
    process: Process,
    history: History,
    receiver: str,
    kind: Any,
    msg: type,
    takes_s: float,
    limit: float,
    *,
    wait: bool = True,
    pinned: bool = False,
) -> Operation:
    """One operation, from its beginning to its end."""
    operation = history.begin(process.uid, receiver, kind, limit, LANES[msg])
    message = msg(number=operation.number, takes_s=takes_s)
    known = process.system.directory.alive(receiver) if pinned else None
    ref = process.system.ref(receiver, incarnation=known.incarnation if known else None)
    if kind == "tell":
        await finish(history, operation, ref.tell(message, deadline_s=limit, wait=wait))
    else:
        asking = ref.ask(message, deadline_s=limit, retry=kind == "retry", wait=wait)
        await finish(history, operation, asking)
    return operation


async def read(process: Process, history: History, receiver: str, takes_s: float, leave_at: int) -> None:
    """Reads a stream, to its end or until it has got to ``leave_at``."""
    operation = history.begin(process.uid, receiver, "ask", 60.0, LANES[Count])
    got: list[int] = []

    async def reading() -> None:
        message = Count(number=operation.number, takes_s=takes_s)
        async with process.system.ref(receiver).stream(message, deadline_s=1.0, credit=4) as items:
            async for item in items:
                got.append(item)
                if item == leave_at:
                    return
        if got != list(range(20)):
            history.violations.append(f"a stream ended in order with {got}: {operation}")

    await finish(history, operation, reading())
    if got != list(range(len(got))):
        history.violations.append(f"items of a stream are missing or out of order, {got}: {operation}")


async def client(process: Process, history: History, rng: random.Random, count: int) -> None:
    for _ in range(count):
        receiver, takes_s = rng.choice(NAMES), rng.choice((0.0, 0.0, 0.0, 0.005, 0.1))
        limit = rng.choice((0.05, 0.3, 2.0, 5.0))
        kind = rng.choice(("ask", "retry", "tell"))
        msg = rng.choice((Do, Do, Wait, Now, Relay))
        if msg is Relay and kind == "tell":
            msg = Do  # whatever a tell leads to has no deadline
        work = one(
            process,
            history,
            receiver,
            kind,
            msg,
            takes_s,
            limit,
            wait=rng.random() < 0.9,
            pinned=rng.random() < 0.1,
        )
        if rng.random() < 0.05:
            work.close()
            work = read(process, history, receiver, min(takes_s, 0.02), rng.choice((3, 99)))
        if rng.random() < 0.4:
            await work
        else:
            task = process.spawn(work, "operation")
            if rng.random() < 0.1:
                asyncio.get_running_loop().call_later(rng.random() * 0.1, task.cancel)
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.1)
        else:
            await asyncio.sleep(0)  # it sends before the next one does


async def change_actor(process: Process, history: History, name: str) -> None:
    """An actor stops in order and another takes its name."""
    if name in process.system.cells:
        await process.system.stop(name)
        await process.system.start(Server(history), name)


async def chaos(world: World, history: History, rng: random.Random, rounds: int, registry: bool) -> None:
    kinds = ["kill", "cut", "one way", "stall", "reset", "hold", "zombie", "leave", "actor"] + ["registry"] * registry
    for _ in range(rounds):
        await asyncio.sleep(rng.random() * 0.4)
        process = world.processes[rng.choice(list(world.processes))]
        other = rng.choice([*world.processes.values(), world.home])
        kind = rng.choice(kinds)
        history.note(f"{kind}: {process} {other}")
        match kind:
            case "kill":
                await world.kill(process)
            case "cut":
                world.network.cut(process.uid, other.uid)
            case "one way":
                world.network.cut(process.uid, other.uid, both=False)
            case "stall":
                world.network.cut(process.uid, other.uid, keeps=True)
            case "reset":
                world.network.reset(process.uid, other.uid)
            case "hold":
                world.hold(process)
            case "zombie":
                world.hold(process)
                world.declare_dead(process, "hung (simulated)")
            case "leave":
                process.system.request_stop("asked to (simulated)")
            case "actor":
                names = [name for name in process.system.cells if name in NAMES]
                if names:
                    changing = process.spawn(change_actor(process, history, names[0]), "change an actor")
                    await asyncio.wait(
                        [changing], timeout=60.0
                    )  # its process may end meanwhile, and the change with it
                    if not changing.done() or changing.exception() is not None:
                        await world.kill(process)
            case _:
                await world.kill_registry()
                await asyncio.sleep(rng.random() * 2.0)
                await world.start_registry()
        await asyncio.sleep(rng.random() * rng.choice((0.3, 3.0)))
        history.note("healed")
        world.network.heal()
        for process in list(world.processes.values()):
            world.release(process)
        await world.revive()


async def watch_mailboxes(world: World, history: History) -> None:
    """No sender ever has more than its window waiting."""
    while True:
        await asyncio.sleep(0.05)
        for process in world.processes.values():
            for name, cell in process.system.cells.items() if process.alive else ():
                if cell.service is not None:
                    waiting = Counter(item.peer.uid for item in cell.service.user.items if isinstance(item, Delivery))
                    if waiting and max(waiting.values()) > process.system.config.window:
                        history.violations.append(f"{name} in {process} holds more than a window: {waiting}")


async def recovered(world: World, history: History) -> None:
    """With sound processes on a sound network everything works again, and nothing of before is left."""
    world.network.faults = SOUND
    await asyncio.sleep(8.0)  # who was declared dead, or missed something, has heard of it by now
    await world.revive()
    await asyncio.sleep(10.0)  # who came back only now has done its work, and a stream without a reader has ended
    found = history.violations
    known = {name: (entry.uid, entry.incarnation, entry.alive) for name, entry in world.registry.entries.items()}
    for process in world.processes.values():
        found += [f"{process} still waits: {wait}" for wait in process.system.waits() if wait.peer != "registry"]
        found += [f"{process} still reads streams" for _ in process.system.caller.feeds]
        seen = {
            name: (entry.uid, entry.incarnation, entry.alive)
            for name, entry in process.system.directory.entries.items()
        }
        for name in set(known) | set(seen) if seen != known else ():
            if seen.get(name) != known.get(name):
                found.append(f"{process} believes that {name} is {seen.get(name)}, the registry says {known.get(name)}")
        for name, cell in process.system.cells.items():
            if isinstance(cell.actor, Watcher):
                wrong = {n: told for n, told in cell.actor.told.items() if told != known.get(n, ("",))[1:]}
                found += [f"{name} was told that {n} is {told}, it is {known.get(n)}" for n, told in wrong.items()]
            if cell.service is not None and (cell.service.running or len(cell.service.user) or cell.service.busy):
                at_work = [(r.item.message.kind, r.item.peer.uid, r.why) for r in cell.service.running.values()]
                found.append(f"{name} in {process} is still at work: {cell.service.busy} {at_work}")
    for process in world.processes.values():
        for name in NAMES:
            for msg in (Do, Now):
                operation = await one(process, history, name, "ask", msg, 0.0, 5.0)
                if operation.instance is None:
                    found.append(f"asking does not work again: {operation}")


def simulated(
    seed: int,
    faults: Faults,
    *,
    config: SystemConfig = CONFIG,
    rounds: int = 6,
    count: int = 40,
    registry: bool = False,
    in_order: bool | None = None,
    log: list[Event] | None = None,
) -> History:
    """One history, checked. registry: its process may die as well. in_order: check the order, whatever the network does to it."""
    history = History(not faults.disorder if in_order is None else in_order, once=not faults.duplicate)

    def serving(*names: str):
        async def build(system: ActorSystem) -> None:
            for name in names:
                await system.start(Server(history), name)

        return build

    def asking(world: World):
        async def build(system: ActorSystem) -> None:
            process = world.all[system.config.uid]
            for number in range(2):
                await system.start(Watcher(history), f"watcher-{number} of {process.name}")
            process.spawn(client(process, history, random.Random(f"{seed} {process}"), count), "client")

        return build

    async def main() -> None:
        async with World(seed, faults, config) as world:
            if log is not None:
                world.network.on_event = log.append
            await world.start("server-0", serving("a", "c"))
            await world.start("server-1", serving("b"))
            for number in range(2):
                await world.start(f"client-{number}", asking(world))
            watching = asyncio.ensure_future(watch_mailboxes(world, history)) if not faults.disorder else None
            await chaos(world, history, random.Random(f"chaos {seed}"), rounds, registry)
            await recovered(world, history)
            if watching is not None:
                watching.cancel()
            try:
                history.check(world)
            except Violation as error:
                raise Violation(f"seed {seed}, {faults}: {error}") from None

    run(main(), limit_s=3_600.0)
    return history
