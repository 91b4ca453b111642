"""A whole run in simulated time: the real controller, buffer, rollouts and trainer in simulated processes, with engines, learner, weights
and verdicts that tests make up. What outlives processes (files, shared memory) is one `Disk`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dockyard_actors.config import Config
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.buffer import Buffer
from dockyard_actors.roles.controller import Controller
from dockyard_actors.roles.engine_driver import EngineDriver
from dockyard_actors.roles.journal import read_journal
from dockyard_actors.roles.learner import StepOutcome
from dockyard_actors.roles.ledger import Event, recount
from dockyard_actors.roles.rollout import Rollout
from dockyard_actors.roles.trainer import Trainer
from dockyard_actors.roles.weight_routes import Kind, Route, SharedMemory
from dockyard_actors.roles.weight_source import WeightSource
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.config import SystemConfig
from dockyard_actors.runtime.supervision import RestartProcess
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.runtime.testing import Faults, Process, World
from dockyard_actors.runtime.testing.clock import here
from dockyard_actors.sandbox.types import Verdict
from dockyard_actors.tasks.types import TaskSet
from dockyard_actors.transport.plane import Block, FieldShapes, LocalPlane
from dockyard_actors.transport.weights_shm import WeightRef
from tests.roles.test_rollout import ScriptedWeights, ref_of
from tests.roles.world import ScriptedBroker, ScriptedEngine, config_of, tasks_of, verdict_of

STEPS, EVERY = 8, 3
ROLES = ("controller", "buffer", "trainer", "rollout-0", "rollout-1", "broker")
CONFIG = SystemConfig(registry_s=1.0, join_s=1.0, probe_s=0.5, lease_s=3.0, rejoin_s=0.5, settle_s=1.0, stop_s=0.5)
OVERRIDES = (
    "weight_sync.canary=false",
    "eval.before=false",
    "eval.after=false",
    "rollout.count=2",
    "data_plane.blocks=64",
    f"grpo.max_num_steps={STEPS}",
    f"checkpoint.every={EVERY}",
)


class Plane(LocalPlane):
    """Shared memory that is taken back from a process that died while it wrote."""

    def __init__(self, owner: str, blocks: int, block_bytes: int) -> None:
        super().__init__(owner, blocks, block_bytes)
        self.writing: list[tuple[object, Block]] = []

    async def alloc(self, fields: FieldShapes, deadline_s: float) -> Block:
        until = asyncio.get_running_loop().time() + deadline_s
        while asyncio.get_running_loop().time() < until:
            block = self.try_alloc(fields)
            if block is not None:
                self.writing.append((here.get(), block))
                return block
            for process, torn in self.writing:
                if isinstance(process, Process) and not process.alive:
                    torn.abort()
            await asyncio.sleep(0.1)
        raise TimeoutError


class Disk:
    """What outlives the processes, and what must hold for whatever they do to it."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.config: Config = config_of(*OVERRIDES, *overrides)
        self.tasks: TaskSet = tasks_of()
        self.run_dir = RunDir(path)
        for directory in (self.run_dir.ledger, self.run_dir.checkpoints, self.run_dir.rollouts):
            directory.mkdir(parents=True, exist_ok=True)
        self.plane = Plane("simulated", self.config.data_plane.blocks, self.config.data_plane.block_bytes)
        self.checkpoint = 0
        self.trained: tuple[int, ...] = ()  # leases of steps that the checkpoint covers
        self.controllers: list[Controller] = []

    @property
    def controller(self) -> Controller:
        return self.controllers[-1]

    async def close(self) -> None:
        """What the system does for processes that are killed: their files are closed."""
        for controller in self.controllers:
            await controller.on_stop()
        self.plane.close()

    def audit(self) -> Any:
        return recount(read_journal(self.run_dir.ledger / "journal.bin", Event)[0])


class Driver(EngineDriver):
    """The engine's turns are callbacks of the event loop, `step_s` apart."""

    step_s = 0.02

    def _start(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def _post(self, futures: Any, call: Any) -> None:
        super()._post(futures, call)
        self._soon_a_turn()

    def close(self) -> None:
        super().close()
        self._soon_a_turn()

    async def closed(self, timeout_s: float) -> bool:
        await asyncio.sleep(min(2 * self.step_s, timeout_s))
        return self._over

    def _soon_a_turn(self) -> None:
        if self._timer is None and not self._over:
            self._timer = self._loop.call_later(self.step_s, self._take_turn)

    def _take_turn(self) -> None:
        self._timer = None
        if self._idle():
            return
        try:
            if self._next():
                self._turn()
                self._soon_a_turn()
            else:
                self._over = True
                self._end()
        except BaseException as error:
            self._over = True
            self._fail(error)


class Learner:
    """Trains nothing; looks at what it is given, and remembers on disk what it was given."""

    def __init__(self, disk: Disk, rng: random.Random) -> None:
        self.disk, self.rng, self.plane = disk, rng, disk.plane
        self.step, self.fresh, self.needs_warmup = 0, True, False
        self.trained: tuple[int, ...] = ()

    def load(self) -> None:
        self.step, self.trained = self.disk.checkpoint, self.disk.trained
        self.fresh = self.step == 0

    def begin(self) -> None: ...

    def save(self) -> None:
        self.disk.checkpoint, self.disk.trained = self.step, self.trained

    def route(self, kind: Kind, client: Any, here: Any) -> Route:
        assert kind == "shm"
        return SharedMemory(Publisher(), lambda buffers: None)  # type: ignore[arg-type]

    def train(self, groups: Sequence[m.OpenGroup], version: int) -> StepOutcome:
        for group in groups:
            fields = self.disk.plane.get(group.ref, verify=True)
            lengths, versions = fields["lengths"], fields["versions"]
            used = [int(v) for row in range(len(lengths)) for v in versions[row, : lengths[row]]]
            assert (min(used), max(used)) == (group.meta.oldest_version, group.meta.newest_version)
            assert max(used) <= version, "no engine was ahead of the trainer"
            assert version - min(used) <= self.disk.config.max_age, "no group is older than allowed"
        leases = tuple(group.meta.lease for group in groups)
        filtered = ((leases[0], "no_signal"),) if self.rng.random() < 0.2 else ()
        trained = leases[len(filtered) :]
        self.step += 1
        assert not set(trained) & set(self.trained), "nothing is trained twice"
        self.trained += trained
        return StepOutcome(self.step, version, 0.0, 0.0, 0.0, 1, trained, filtered)


class Publisher:
    def __init__(self) -> None:
        self.held: list[int] = []

    def slot(self, version: int) -> dict[str, np.ndarray]:
        assert len(self.held) < 2
        return {}

    def publish(self, version: int) -> WeightRef:
        self.held.append(version)
        return ref_of(version)

    def release(self, version: int) -> bool:
        self.held.remove(version)
        return True

    def drop_predecessors(self) -> int:
        return 0

    def close(self) -> None: ...


class Agent(Actor):
    """Restarts what it is asked to."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def restart(self, msg: RestartProcess) -> None:
        await self.world.kill(self.world.processes[msg.name])


class Run:
    """All of it. `keep` restarts what has ended."""

    def __init__(self, disk: Disk, world: World, seed: int) -> None:
        self.disk, self.world = disk, world
        self.rng = random.Random(f"run {seed}")
        self.restarts = 0

    async def start(self) -> None:
        await self.world.start("agent", self._agent)
        for name in ROLES:
            await self.world.start(name, self._role)

    async def _agent(self, system: ActorSystem) -> None:
        await system.start(Agent(self.world), "agent")

    async def _role(self, system: ActorSystem) -> None:
        await system.start(self._make(system.config.name), system.config.name)

    def _make(self, name: str) -> Actor:
        disk, rng = self.disk, random.Random(self.rng.random())
        match name:
            case "controller":
                disk.controllers.append(Controller(disk.config, disk.tasks, disk.run_dir, "session-1"))
                return disk.controller
            case "buffer":
                return Buffer(disk.config, disk.plane)
            case "trainer":
                return Trainer(disk.config, disk.tasks, Learner(disk, rng), None, disk.run_dir)  # type: ignore[arg-type]
            case "broker":
                return ScriptedBroker(lambda program: self._judge(rng))
            case _:
                texts = tuple("1" * rng.randint(1, 5) + "\n" for _ in range(2))
                engine = ScriptedEngine(texts, version=-1)
                return Rollout(disk.config, disk.tasks, engine, disk.plane, WeightSource(ScriptedWeights()))  # type: ignore[arg-type]

    async def _judge(self, rng: random.Random) -> Verdict:
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        return verdict_of("infra", 0) if rng.random() < 0.05 else verdict_of(passed=rng.random() < 0.5)

    async def keep(self) -> None:
        """Node agents: whoever has ended is started again."""
        starting: dict[str, asyncio.Task[Process]] = {}  # side by side: a role may wait for another one when it starts
        while True:
            await asyncio.sleep(0.1)
            for name in [name for name, task in starting.items() if task.done()]:
                starting.pop(name).result()
            for process in list(self.world.processes.values()):
                if not process.alive and process.name not in starting:
                    self.restarts += 1
                    starting[process.name] = asyncio.ensure_future(self.world.start(process.name, process.build))

    async def disturb(self, kinds: Sequence[str]) -> None:
        """One thing that goes wrong, and is over after a while."""
        world, rng = self.world, self.rng
        process = world.processes[rng.choice(ROLES)]
        other = world.processes[rng.choice(ROLES)]
        match rng.choice(kinds):
            case "kill":
                await world.kill(process)
            case "hold":
                world.hold(process)
            case "zombie":
                world.hold(process)
                world.declare_dead(process, "hung (simulated)")
            case "cut":
                world.network.cut(process.uid, other.uid, both=rng.random() < 0.5, keeps=rng.random() < 0.5)
            case "reset":
                world.network.reset(process.uid, other.uid)
            case _:
                await world.kill_registry()
                await asyncio.sleep(rng.random())
                await world.start_registry()
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        world.network.heal()
        for process in list(world.processes.values()):
            world.release(process)


async def whole_run(disk: Disk, seed: int, faults: Faults, troubles: int, kinds: Sequence[str]) -> Run:
    """A run to its end, with so many troubles on the way. The ledger adds up after each."""
    async with World(seed, faults, CONFIG) as world:
        run = Run(disk, world, seed)
        await run.start()
        keeping = asyncio.ensure_future(run.keep())
        for _ in range(troubles):
            await asyncio.sleep(run.rng.uniform(0.1, 1.5))
            if disk.controller.ledger.finished:
                break
            await run.disturb(kinds)
            audit = disk.audit()
            assert audit.exact, audit
        async with asyncio.timeout(2_000.0):
            while disk.controller.ledger.finished != "completed":
                assert not keeping.done(), keeping.exception()
                await asyncio.sleep(0.5)
        keeping.cancel()
        return run
