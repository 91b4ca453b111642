"""A history that nobody, or not everybody, writes into does not pass for one in which nothing went wrong."""

from __future__ import annotations

import pytest

from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.runtime.testing import History, Violation, World, run


class Work(Message[int], frozen=True):
    number: int
    told: bool = True  # the handler tells the history


class Worker(Actor):
    def __init__(self, history: History) -> None:
        self.history = history

    async def work(self, msg: Work) -> int:
        return self.history.handle(msg.number, self) if msg.told else 0


def history_of(*told: bool) -> None:
    async def main() -> None:
        history = History()

        async def build(system: ActorSystem) -> None:
            await system.start(Worker(history), "worker")

        async with World(0) as world:
            await world.start("server", build)
            client = await world.start("client")
            for tells in told:
                operation = history.begin(client.uid, "worker", "ask", 5.0)
                reply = await client.system.ref("worker").ask(Work(number=operation.number, told=tells))
                history.end(operation, reply if tells else None)
            history.check(world)

    run(main())


def test_an_answer_that_no_handler_stands_behind_is_a_violation() -> None:
    history_of(True, True)
    with pytest.raises(Violation, match="answered, and no handler said that it handled it: ask 1"):
        history_of(True, False)


def test_a_history_in_which_no_handler_writes_says_so() -> None:
    with pytest.raises(ValueError, match="2 asks were answered and no handler called `handle`"):
        history_of(False, False)


def test_an_operation_of_an_unknown_kind_is_refused() -> None:
    async def main() -> None:
        async with World(0):
            History().begin("client.1", "worker", "aks", 5.0)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="one of ask, retry, tell, not 'aks'"):
        run(main())
