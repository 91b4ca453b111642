"""A process with an actor system and no node agent, for tests of membership: `python -m tests.runtime.member_main CONFIG.json`.

Prints one JSON line (pid, tcp) when it is up. Without a rendezvous it hosts a registry. Exit code 3 with the cause on stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import uvloop

from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.errors import ActorError
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport import control
from tests.runtime.actors import Add, Counter


class Chase(Message[None], frozen=True):
    """Ask this one again and again from now on."""

    name: str


class Tally(Message[tuple[int, tuple[str, ...]]], frozen=True):
    """(asks answered, errors of all others)."""


class Asker(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.answered = 0
        self.failed: list[str] = []

    async def chase(self, msg: Chase) -> None:
        self.ctx.spawn(self._ask(msg.name), "ask")

    async def tally(self, msg: Tally) -> tuple[int, tuple[str, ...]]:
        return self.answered, tuple(self.failed)

    async def _ask(self, name: str) -> None:
        ref = self.ctx.ref(name)
        while True:
            try:
                await ref.ask(Add())
                self.answered += 1
            except ActorError as error:
                self.failed.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.002)  # leaves the machine to others


async def main(settings: dict) -> None:
    if "host" in settings:
        control.host_id = lambda: settings["host"]
    async with ActorSystem(SystemConfig(**settings["system"])) as system:
        for name, starts in settings.get("actors", {}).items():
            for start in range(starts):
                if start:
                    await system.stop(name)
                await system.start(Asker(), name)
        print(json.dumps({"pid": os.getpid(), "tcp": system.transport.address.tcp[1]}), flush=True)
        await system.wait_stop()


if __name__ == "__main__":
    try:
        uvloop.run(main(json.loads(Path(sys.argv[1]).read_text())))
    except ActorError as error:
        print(f"{error}: {error.__cause__}", file=sys.stderr, flush=True)
        sys.exit(3)
