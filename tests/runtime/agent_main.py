"""A node agent in a process of its own, for tests that kill it: `python -m tests.runtime.agent_main CONFIG.json`.

Prints one JSON line (rendezvous, runtime_dir, pids) when its roles are up, then runs until it is told to end.
Exit code: 0 after Shutdown, 3 with the failure printed on stderr.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import uvloop

from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.supervision import ProcessSpec, RestartPolicy
from tests.runtime.actors import Pid


def role(
    name: str, log_dir: Path, *how: str, policy: RestartPolicy | None = None, grace_s: float = 2.0, **more
) -> ProcessSpec:
    argv = [sys.executable, "-m", "tests.runtime.role", name, *how]
    return ProcessSpec(name, argv, {}, policy or RestartPolicy(), log_dir / f"{name}.log", grace_s, **more)


async def main(settings: dict) -> int:
    key_file = settings.get("key_file")
    config = AgentConfig(
        name=settings.get("name", "agent"),
        rendezvous=settings.get("rendezvous", ""),
        listen=settings.get("listen", ""),
        key_file=Path(key_file) if key_file else None,
        runtime_parent=Path(settings["runtime_parent"]) if "runtime_parent" in settings else None,
        ping_s=0.1,
        hang_s=settings.get("hang_s", 5.0),
        agent_lost_s=settings.get("agent_lost_s", 10.0),
        registry_lost_s=settings.get("registry_lost_s", 1.0),
        settle_s=settings.get("settle_s", 1.0),
        raise_failures=False,
    )
    policy = RestartPolicy(**settings.get("policy", {}))
    async with NodeAgent(config) as agent:
        for name in settings["roles"]:
            await agent.spawn(role(name, Path(settings["log_dir"]), *settings.get("how", ()), policy=policy))
        pids = [await agent.system.ref(name).ask(Pid(), retry=True, deadline_s=30.0) for name in settings["roles"]]
        ready = {
            "rendezvous": agent.rendezvous,
            "runtime_dir": str(agent.runtime_dir),
            "pids": pids,
            "keys": str(agent.key_file),
        }
        print(json.dumps(ready), flush=True)
        failed = asyncio.ensure_future(agent.wait_failed())
        ended = asyncio.ensure_future(agent.wait_shutdown())
        await asyncio.wait((failed, ended), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            print(failed.result(), file=sys.stderr, flush=True)
            return 3
        return ended.result().exit_code


if __name__ == "__main__":
    sys.exit(uvloop.run(main(json.loads(Path(sys.argv[1]).read_text()))))
