"""A role process for the tests: `python -m tests.runtime.role NAME [HOW]` runs one Counter under its node agent."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

from dockyard_actors.runtime.errors import PermanentError
from dockyard_actors.runtime.guard import guard
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.process import main_process
from dockyard_actors.runtime.system import ActorSystem
from tests.runtime.actors import Waiter


class Hopeless(PermanentError):
    pass


class Heard(Message[tuple[str, ...]], frozen=True):
    """The causes of deaths that it was told of."""


class Watcher(Waiter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    async def on_start(self) -> None:
        self.ctx.watch(self.name)

    async def heard(self, msg: Heard) -> tuple[str, ...]:
        return tuple(death.cause for death in self.deaths)


async def build(system: ActorSystem) -> None:
    how = sys.argv[2] if len(sys.argv) > 2 else ""
    if how == "broken":
        raise RuntimeError("this role cannot start")
    if how == "hopeless":
        raise Hopeless("the checkpoint is damaged")
    if how == "family":
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1001"], start_new_session=True)
        subprocess.run(["sh", "-c", "setsid sleep 1002 &"], check=True)  # a daemon: its parent is gone
    await system.start(Watcher(sys.argv[3]) if how == "watch" else Waiter(), sys.argv[1])
    if how == "deaf":
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "slow":
        with guard(30.0, "loading nothing slowly"):
            time.sleep(1.5)  # noqa: ASYNC251


if __name__ == "__main__":
    main_process(build)
