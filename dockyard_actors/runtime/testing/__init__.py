"""Simulated time, network and processes for tests of actors: the runtime itself is the real one.

def test_it() -> None:
    async def main() -> None:
        async with World(seed=1, faults=Faults(loss=0.1)) as world:
            server = await world.start("server", build)  # async def build(system): await system.start(MyActor(), "it")
            ...
            await world.restart(server)
    run(main())
"""

from dockyard_actors.runtime.testing.clock import Deadlock, VirtualLoop, run
from dockyard_actors.runtime.testing.history import History, Operation, Violation
from dockyard_actors.runtime.testing.network import Event, Faults, SimNetwork, SimTransport
from dockyard_actors.runtime.testing.world import Process, World

__all__ = [
    "Deadlock",
    "Event",
    "Faults",
    "History",
    "Operation",
    "Process",
    "SimNetwork",
    "SimTransport",
    "Violation",
    "VirtualLoop",
    "World",
    "run",
]
