"""The program of a role process: `python -m dockyard_actors.roles.main ROLE INDEX`, started by a node agent.

It asks the primary agent what the run is, builds its role and serves until it is told to stop.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import msgspec

from dockyard_actors.config import from_resolved
from dockyard_actors.observe.logs import setup_logging
from dockyard_actors.roles.build import build_role, name_of
from dockyard_actors.roles.hosts import Hosts
from dockyard_actors.roles.messages import AskRun
from dockyard_actors.runtime.guard import guard
from dockyard_actors.runtime.process import main_process, read_bootstrap
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.transport.base import load_keys

NICENESS = 10  # of the evaluator: it yields shared cores to trainer and rollouts
RUN_DESK = "run"  # the actor of the primary agent that knows the run
ASK_RUN_S = 60.0  # the primary answers at once; a busy host may be slow to schedule it
IMPORT_S = 120.0  # torch and transformers from a cold disk, with several processes importing at once


def main() -> None:
    role, index = sys.argv[1], int(sys.argv[2])
    setup_logging(name_of(role, index), None, stderr=True)
    bootstrap = read_bootstrap()
    if role == "evaluator":
        os.nice(NICENESS)

    opened: list[Hosts] = []

    async def build(system: ActorSystem) -> None:
        run = await system.ref(RUN_DESK).ask(AskRun(), deadline_s=ASK_RUN_S, retry=True)
        config = from_resolved(run.config)
        logging.getLogger().setLevel(config.observe.log_level)
        hosts = await Hosts.find(system, load_keys(Path(bootstrap.key_file)).cookie)
        opened.append(hosts)
        run = msgspec.structs.replace(run, fd_path=hosts.fd_path)  # of this host
        with guard(IMPORT_S, "importing"):
            actor = build_role(role, index, config, run, bootstrap.socket_dir, hosts)
        await system.start(actor, name_of(role, index))

    def closed() -> None:
        for hosts in opened:
            hosts.close()

    main_process(build, closed)


if __name__ == "__main__":
    main()
