"""Whole runs in simulated time: the real controller and buffer, a scripted trainer and rollouts that speak the real messages, on a
network that loses and repeats, with deaths of any of them. The ledger adds up whatever happens, and the run reaches its end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dockyard_actors.config import Config
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.buffer import Buffer
from dockyard_actors.roles.controller import Controller
from dockyard_actors.roles.journal import read_journal
from dockyard_actors.roles.ledger import Event, recount
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.message import Message, R
from dockyard_actors.runtime.testing import Faults, Process, World, run
from dockyard_actors.tasks.types import TaskSet
from dockyard_actors.transport.plane import LocalPlane
from tests.roles.world import assert_journal_is_the_ledger, config_of, meta_of, tasks_of

STEPS, EVERY = 8, 3
SOUND, ROUGH = Faults(), Faults(loss=0.05, duplicate=0.1, delay=(0.001, 0.05))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("dockyard_actors.roles.controller.reward_png", lambda run_dir: None)  # takes real time
    monkeypatch.setattr("os.fsync", lambda fd: None)  # as well; a killed process's writes need none
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Disk:
    """What outlives the processes: the run directory, shared memory, and the trainer's newest checkpoint."""

    def __init__(self, path: Path) -> None:
        self.config: Config = config_of(f"grpo.max_num_steps={STEPS}", f"checkpoint.every={EVERY}")
        self.tasks: TaskSet = tasks_of()
        self.run_dir = RunDir(path)
        for directory in (self.run_dir.ledger, self.run_dir.checkpoints, self.run_dir.rollouts):
            directory.mkdir(parents=True, exist_ok=True)
        self.plane = LocalPlane("simulated", self.config.data_plane.blocks, self.config.data_plane.block_bytes)
        self.checkpoint = 0
        self.trained: list[int] = []  # leases of steps that a checkpoint covers
        self.finished = False


class Scripted(Actor):
    def __init__(self, disk: Disk, rng: random.Random) -> None:
        self.disk, self.rng = disk, rng

    async def on_start(self) -> None:
        self.ctx.spawn(self.work(), "work")

    async def work(self) -> None:
        raise NotImplementedError

    async def say(self, name: str, message: Message[R]) -> R:
        return await self.ctx.ref(name).ask(message, deadline_s=300.0, retry=True)


class ScriptedRollout(Scripted):
    """Test only: makes up groups of made-up age, and fails some."""

    async def work(self) -> None:
        self.working: set[int] = set()
        while True:
            grants = await self.say(
                "controller",
                m.LeasePrompts(
                    rollout=self.ctx.name,
                    incarnation=self.ctx.incarnation,
                    capacity=2,
                    wait_s=1.0,
                    working=tuple(self.working),
                ),
            )
            self.working |= {grant.lease for grant in grants.leases}
            for grant in grants.leases:
                self.ctx.spawn(self.group(grant), f"lease {grant.lease}")
            await asyncio.sleep(self.rng.uniform(0.0, 0.1))

    async def group(self, grant: m.Granted) -> None:
        await asyncio.sleep(self.rng.uniform(0.05, 0.6))
        if self.rng.random() < 0.1:
            await self.say(
                "controller", m.CloseLease(lease=grant.lease, outcome="failed", cause="infra", retry_prompt=True)
            )
        else:
            while (block := self.disk.plane.try_alloc({"tokens": ("int32", (2, 3))})) is None:  # noqa: ASYNC110  # simulated time
                await asyncio.sleep(0.1)
            block.array("tokens")[:] = grant.lease
            version = max(0, self.disk.checkpoint - self.rng.randrange(2))
            await self.say("buffer", m.PushGroup(meta=meta_of(grant, version), ref=block.seal()))
        self.working.discard(grant.lease)


class ScriptedTrainer(Scripted):
    """Test only: a step is the lapse of some time."""

    async def work(self) -> None:
        disk, step, steps = self.disk, self.disk.checkpoint, self.disk.config.grpo.max_num_steps
        welcome = await self.say("controller", m.TrainerStarts(step=step))
        version = welcome.newest_version
        covered: list[int] = []
        holding: set[int] = set()  # as the real one, which keeps the last steps' leases only
        while True:
            version = (await self.say("controller", m.NextVersion(above=version))).version
            await self.say("controller", m.EnginesFresh(version=version, step=step))
            if step == steps or (step and step % EVERY == 0 and step > disk.checkpoint):
                disk.checkpoint, disk.trained = step, disk.trained + covered
                covered = []
                await self.say("controller", m.CheckpointDone(step=step))
            if step == steps:
                break
            groups: tuple[m.OpenGroup, ...] = ()
            while not groups:
                taking = m.TakeGroups(
                    count=2, version=0, max_age=99, wait_s=1.0, incarnation=self.ctx.incarnation, holding=tuple(holding)
                )
                groups = (await self.say("buffer", taking)).groups
            leases = tuple(group.meta.lease for group in groups)
            holding |= set(leases)
            await asyncio.sleep(self.rng.uniform(0.1, 0.5))
            step += 1
            filtered = ((leases[0], "no_signal"),) if self.rng.random() < 0.2 else ()
            trained = leases[len(filtered) :]
            await self.say("controller", m.StepDone(step=step, version=version, trained=trained, filtered=filtered))
            covered += trained
        await self.say("controller", m.RunFinished(status="completed"))
        disk.finished = True


async def whole_run(world: World, disk: Disk, deaths: int, seed: int) -> Controller:
    rng = random.Random(f"run {seed}")
    alive: dict[str, Actor] = {}

    def starting(name: str):
        async def build(process: Process) -> None:
            match name:
                case "controller":
                    actor: Actor = Controller(disk.config, disk.tasks, disk.run_dir, "session-1")
                case "buffer":
                    actor = Buffer(disk.config, disk.plane)
                case "trainer":
                    actor = ScriptedTrainer(disk, random.Random(rng.random()))
                case _:
                    actor = ScriptedRollout(disk, random.Random(rng.random()))
            await process.system.start(actor, name)
            alive[name] = actor

        return build

    names = ("controller", "buffer", "trainer", "rollout-0", "rollout-1")
    for name in names:
        await world.start(name, starting(name))
    for _ in range(deaths):
        await asyncio.sleep(rng.uniform(0.1, 1.5))
        if disk.finished:
            break
        await world.restart(world.processes[rng.choice(names)])
        audit = recount(read_journal(disk.run_dir.ledger / "journal.bin", Event)[0])
        assert audit.exact, f"seed {seed}: {audit}"
    async with asyncio.timeout(3_000.0):
        while not disk.finished:  # noqa: ASYNC110  # simulated time
            await asyncio.sleep(1.0)
    controller = alive["controller"]
    assert isinstance(controller, Controller)
    return controller


def check(path: Path, seed: int, faults: Faults, deaths: int) -> None:
    disk = Disk(path)

    async def main() -> None:
        async with World(seed, faults) as world:
            controller = await whole_run(world, disk, deaths, seed)
            assert_journal_is_the_ledger(controller)
            events, _ = read_journal(disk.run_dir.ledger / "journal.bin", Event)
            audit = recount(events)
            assert audit.exact
            assert sorted(audit.classes["trained"]) == sorted(disk.trained), (
                f"seed {seed}: what checkpoints cover is what is trained"
            )
            assert controller.ledger.step == STEPS

    run(main())


@pytest.mark.parametrize("seed", range(3))
def test_a_run_of_sound_processes_adds_up(tmp_path: Path, seed: int) -> None:
    check(tmp_path / "run", seed, SOUND, deaths=0)


@pytest.mark.parametrize("faults", [SOUND, ROUGH], ids=["sound network", "rough network"])
def test_a_run_adds_up_whoever_dies_in_it(tmp_path: Path, faults: Faults) -> None:
    for seed in range(40):
        check(tmp_path / f"run-{seed}", seed, faults, deaths=6)
