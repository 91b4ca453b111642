"""One host of a run over two: its node agent, the memory it holds, and real roles in one process, so that killing it loses the host.

`consumer` has controller, buffer, broker and trainer; `producer` a rollout. Engine, learner, weights and verdicts are made up. Run as
`python -m tests.roles.host_peer consumer|producer OPTIONS` (JSON); says what happens on stdout, a JSON object a line.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dockyard_actors.config import Config
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.buffer import Buffer
from dockyard_actors.roles.controller import Controller
from dockyard_actors.roles.hosts import HostMemory, Hosts
from dockyard_actors.roles.journal import read_journal
from dockyard_actors.roles.learner import StepOutcome, teaching
from dockyard_actors.roles.ledger import Event, recount
from dockyard_actors.roles.rollout import Rollout
from dockyard_actors.roles.trainer import LOST, Trainer
from dockyard_actors.roles.weight_routes import Collective, Kind, Route
from dockyard_actors.roles.weight_source import WeightSource
from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.sandbox.types import Verdict
from dockyard_actors.transport.base import Address, load_keys
from dockyard_actors.transport.plane import DataPlane, TensorRef
from dockyard_actors.transport.remote import RemotePlane
from dockyard_actors.transport.weights_collective import CollectiveSender
from dockyard_actors.transport.weights_shm import WeightManifest
from tests.roles.test_rollout import ScriptedWeights
from tests.roles.test_trainer import BASE, ScriptedLearner
from tests.roles.world import ScriptedBroker, ScriptedEngine, config_of, tasks_of, verdict_of

STEPS = 6
BLOCKS = 6  # fewer than groups: without releases that reach their host the run could not end
NO_SIGNAL = 4  # every so many groups all samples pass
AGENT_LOST_S = 2.0
SEND_S = 5.0  # a host that is lost says nothing


def config_for(backend: str, overrides: Sequence[str]) -> Config:
    return config_of(
        *BASE,
        f"data_plane.backend={backend}",
        f"data_plane.blocks={BLOCKS}",
        f"grpo.max_num_steps={STEPS}",
        *overrides,
    )


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Watched:
    """The plane of the roles, which tells when it fetches."""

    def __init__(self, plane: RemotePlane) -> None:
        self.plane = plane

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plane, name)

    async def fetch(self, refs: Sequence[TensorRef], deadline_s: float) -> None:
        say(fetching=len(refs))
        try:
            await self.plane.fetch(refs, deadline_s)
        except LOST as error:
            say(lost=f"{type(error).__name__}: {error}")
            raise


class Learner(ScriptedLearner):
    """Looks at what it is given."""

    def __init__(self, plane: DataPlane) -> None:
        super().__init__(plane)
        self.looked_at = 0  # bytes

    def route(self, kind: Kind, client: Any, here: Address) -> Route:
        """The version itself, sent to whoever is on the other host."""
        assert kind == "collective"
        manifest = WeightManifest.of({"w": ("float32", (1,))})
        sender = CollectiveSender(manifest, here.interface, timeout_s=SEND_S)
        return Collective(sender, lambda: iter([("w", torch.ones(1))]))

    def train(self, groups: Sequence[m.OpenGroup], version: int) -> StepOutcome:
        outcome = super().train(groups, version)
        signal = teaching([group.meta for group in groups])
        for group in (group for group, teaches in zip(groups, signal, strict=True) if teaches):
            with self.plane.get(group.ref, verify=True) as fields:
                lengths, versions, tokens = fields["lengths"], fields["versions"], fields["tokens"]
                assert tuple(lengths) == group.meta.lengths
                assert versions[0, 0] == group.meta.oldest_version
                assert [chr(token) for token in tokens[:, 0]] == ["1", "2"]
            self.looked_at += group.ref.nbytes
        return dataclasses.replace(
            outcome,
            trained=tuple(g.meta.lease for g, teaches in zip(groups, signal, strict=True) if teaches),
            filtered=tuple(
                (g.meta.lease, "no_signal") for g, teaches in zip(groups, signal, strict=True) if not teaches
            ),
        )


class Taking(ScriptedEngine):
    """Takes weights to their end, as they come."""

    def update_weights(self, views: Any, manifest: Any, version: int, recompute_kv_cache: bool = True) -> None:
        for _ in views:
            pass
        super().update_weights({}, manifest, version, recompute_kv_cache)


class Counting(Controller):
    """Says when the run is over."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.over = asyncio.Event()

    async def run_finished(self, msg: m.RunFinished) -> m.Done:
        done = await super().run_finished(msg)
        self.over.set()
        return done


class Broker(ScriptedBroker):
    def __init__(self) -> None:
        super().__init__(self._passes)

    async def _passes(self, program: m.Program) -> Verdict:
        group = (len(self.asked) - 1) // 2
        return verdict_of(passed=program.source == "x = 1\n" or group % NO_SIGNAL == 0)


async def consumer(directory: str, runtime: str, listen: str, backend: str, overrides: Sequence[str]) -> None:
    config, tasks, run_dir = config_for(backend, overrides), tasks_of(), RunDir(Path(directory))
    for path in (run_dir.ledger, run_dir.checkpoints, run_dir.rollouts):
        path.mkdir(parents=True)
    settings = AgentConfig(listen=f"tcp://{listen}:0", agent_lost_s=AGENT_LOST_S, runtime_parent=Path(runtime))
    async with NodeAgent(settings) as agent, HostMemory(agent, config) as memory:
        hosts = await Hosts.find(agent.system, load_keys(agent.key_file).cookie)
        plane, copies = hosts.plane(config, "buffer"), hosts.plane(config, "trainer", copies=True)
        assert isinstance(copies, RemotePlane)
        controller = Counting(config, tasks, run_dir, "session-1")
        learner = Learner(Watched(copies))  # type: ignore[arg-type]
        await agent.system.start(controller, "controller")
        await agent.system.start(Buffer(config, plane), "buffer")
        await agent.system.start(Broker(), "broker")
        await agent.system.start(Trainer(config, tasks, learner, None, run_dir), "trainer")  # type: ignore[arg-type]
        say(rendezvous=agent.rendezvous, key_file=str(agent.key_file))
        await controller.over.wait()
        audit = recount(read_journal(run_dir.ledger / "journal.bin", Event)[0])
        assert memory.pull_server is not None
        say(
            status=controller.ledger.finished,
            exact=audit.exact,
            counts=controller.ledger.summary(),
            failed=dict(controller.ledger.causes["failed"]),
            warnings=controller.warnings,
            looked_at=learner.looked_at,
            received=dict(copies.pull_stats().received_bytes),
            sent=dict(memory.pull_server.sent_bytes),
            copies=copies.stats().blocks - copies.stats().free,
        )
        await asyncio.to_thread(plane.close)
        await asyncio.to_thread(copies.close)


async def producer(runtime: str, rendezvous: str, key_file: str, backend: str, overrides: Sequence[str]) -> None:
    config = config_for(backend, overrides)
    settings = AgentConfig(name="far", rendezvous=rendezvous, key_file=Path(key_file), runtime_parent=Path(runtime))
    async with NodeAgent(settings) as agent, HostMemory(agent, config) as memory:
        hosts = await Hosts.find(agent.system, load_keys(agent.key_file).cookie)
        plane = hosts.plane(config, "rollout-0")
        rollout = Rollout(config, tasks_of(), Taking(), plane, WeightSource(ScriptedWeights()))  # type: ignore[arg-type]
        await agent.system.start(rollout, "rollout-0")
        say(ready=True)
        await agent.wait_shutdown()
        assert memory.pull_server is not None
        say(sent=dict(memory.pull_server.sent_bytes))
        await agent.system.stop("rollout-0")
        await asyncio.to_thread(plane.close)


if __name__ == "__main__":
    asyncio.run({"consumer": consumer, "producer": producer}[sys.argv[1]](**json.loads(sys.argv[2])))
