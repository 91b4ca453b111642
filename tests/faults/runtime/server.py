"""A process of its own that hosts a registry and an actor, reachable over tcp alone. Says where on its first line; ends with its stdin."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.system import ActorSystem
from tests.runtime.actors import Waiter


async def main(key_file: str) -> None:
    config = SystemConfig(name="server", tcp_bind="tcp://127.0.0.1:0", key_file=Path(key_file))
    async with ActorSystem(config) as system:
        await system.start(Waiter(), "c")
        print(json.dumps(system.transport.address.tcp), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
