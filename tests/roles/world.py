"""A run in one process: the real controller and buffer, plain memory as data plane, and scripted stand-ins that exist in tests only.

`ScriptedEngine`, `ScriptedBroker` and the like do what a test tells them: no model, no sandbox. Everything that is under test is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dockyard_actors.config import Config, load_config
from dockyard_actors.engines.base import (
    EngineError,
    FinishReason,
    GroupOutput,
    GroupRequest,
    GroupResult,
    SamplingConfig,
)
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.buffer import Buffer
from dockyard_actors.roles.controller import Controller
from dockyard_actors.roles.journal import read_journal
from dockyard_actors.roles.ledger import Event, GroupMeta, Lease, Ledger, recount
from dockyard_actors.runtime.actor import Actor, Death, concurrent
from dockyard_actors.runtime.message import Message
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.sandbox.types import Verdict
from dockyard_actors.tasks.types import Task, TaskSet
from dockyard_actors.transport.plane import LocalPlane, TensorRef

BASE = (
    "generation.engine=hf",
    "model.source=tiny",
    "correction.kind=tis",
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "grpo.max_num_steps=10",
    "generation.max_new_tokens=6",
    "data_plane.blocks=16",
    "data_plane.block_bytes=16384",
)
PATIENCE_S = 20.0  # a hang guard: what is awaited takes milliseconds


def config_of(*overrides: str) -> Config:
    return load_config(None, [*BASE, *overrides], {})


def tasks_of(train: int = 40, heldout: int = 2) -> TaskSet:
    def task(split: Any, index: int) -> Task:
        name = f"{split}-{index}"
        return Task(id=name, split=split, prompt=f"{name}:", prefix="x = ", tests=("assert x == 1",), stop=("\n",))

    return TaskSet(
        source="made",
        train=tuple(task("train", i) for i in range(train)),
        heldout=tuple(task("heldout", i) for i in range(heldout)),
        sha="",
    )


def meta_of(
    grant: m.Granted, version: int = 0, rewards: tuple[float, ...] = (1.0, 0.0), valid: tuple[bool, ...] | None = None
) -> GroupMeta:
    return GroupMeta(
        lease=grant.lease,
        prompt=grant.prompt,
        epoch=grant.epoch,
        attempt=grant.attempt,
        rewards=rewards,
        valid=valid or (True,) * len(rewards),
        lengths=(3,) * len(rewards),
        prompt_tokens=5,
        oldest_version=version,
        newest_version=version,
        resolved=tuple(r == 1.0 for r in rewards),
    )


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # state of another actor: it announces nothing
            await asyncio.sleep(0.005)


class World:
    """One run. `controller` and `buffer` are the living instances."""

    def __init__(self, system: ActorSystem, config: Config, tasks: TaskSet, path: Path):
        self.system, self.config, self.tasks = system, config, tasks
        self.run_dir = RunDir(path)
        for directory in (self.run_dir.ledger, self.run_dir.checkpoints, self.run_dir.rollouts):
            directory.mkdir(parents=True, exist_ok=True)
        self.plane = LocalPlane("test", config.data_plane.blocks, config.data_plane.block_bytes)
        self.trainer = 1  # incarnation of whoever takes batches
        self.controller: Controller
        self.buffer: Buffer

    @property
    def ledger(self) -> Ledger:
        return self.controller.ledger

    @property
    def journal(self) -> list[Event]:
        events, torn = read_journal(self.run_dir.ledger / "journal.bin", Event)
        assert torn == 0
        return events

    async def start_controller(self, session: str = "session-1") -> None:
        self.controller = Controller(self.config, self.tasks, self.run_dir, session)
        await self.system.start(self.controller, "controller")

    async def restart_controller(self, session: str = "session-1") -> None:
        await self.system.stop("controller")
        await self.start_controller(session)

    async def start_buffer(self) -> None:
        self.buffer = Buffer(self.config, self.plane)
        await self.system.start(self.buffer, "buffer")

    async def restart_buffer(self) -> None:
        await self.system.stop("buffer")
        await self.start_buffer()

    def ask(self, name: str, message: Message[Any]) -> Awaitable[Any]:
        return self.system.ref(name).ask(message, deadline_s=PATIENCE_S)

    # ---- what roles do

    async def publish(self) -> int:
        version = (await self.ask("controller", m.NextVersion(above=self.ledger.version))).version
        await self.ask("controller", m.EnginesFresh(version=version, step=self.ledger.step))
        return version

    async def lease(
        self,
        capacity: int,
        rollout: str = "rollout-0",
        incarnation: int = 1,
        wait_s: float = 0.0,
        working: tuple[int, ...] | None = None,
    ) -> tuple[m.Granted, ...]:
        """Asks for work as a rollout that still works on all it holds, unless `working` says otherwise."""
        if working is None:
            working = tuple(lease.id for lease in self.ledger.held_by(f"{rollout}#{incarnation}"))
        message = m.LeasePrompts(
            rollout=rollout, incarnation=incarnation, capacity=capacity, wait_s=wait_s, working=working
        )
        return (await self.ask("controller", message)).leases

    def sealed(self) -> TensorRef:
        block = self.plane.try_alloc({"tokens": ("int32", (2, 3))})
        assert block is not None
        block.array("tokens")[:] = 1
        return block.seal()

    async def push(self, grant: m.Granted, version: int = 0, rewards: tuple[float, ...] = (1.0, 0.0)) -> m.Pushed:
        return await self.ask("buffer", m.PushGroup(meta=meta_of(grant, version, rewards), ref=self.sealed()))

    async def take(
        self, count: int, version: int = 0, max_age: int = 1, wait_s: float = 0.0, holding: tuple[int, ...] = ()
    ) -> list[int]:
        message = m.TakeGroups(
            count=count,
            version=version,
            max_age=max_age,
            wait_s=wait_s,
            incarnation=self.trainer,
            holding=holding,
        )
        batch = await self.ask("buffer", message)
        return [group.meta.lease for group in batch.groups]

    async def step(self, trained: Sequence[int], filtered: Sequence[int] = (), version: int = 0) -> m.StepAck:
        return await self.ask(
            "controller",
            m.StepDone(
                step=self.ledger.step + 1,
                version=version,
                trained=tuple(trained),
                filtered=tuple((lease, "no_signal") for lease in filtered),
            ),
        )

    async def fail(self, grant: m.Granted, cause: str = "deadline") -> None:
        await self.ask("controller", m.CloseLease(lease=grant.lease, outcome="failed", cause=cause, retry_prompt=True))

    async def rollout_dies(self, incarnation: int = 1, name: str = "rollout-0") -> None:
        await self.controller.on_death(Death(name, incarnation, "killed by SIGKILL"))

    async def trainer_dies(self) -> None:
        self.trainer += 1
        await self.buffer.on_death(Death("trainer", self.trainer - 1, "killed by SIGKILL"))


@asynccontextmanager
async def world_of(
    path: Path, *overrides: str, tasks: TaskSet | None = None, buffer: bool = True, open: bool = True
) -> AsyncIterator[World]:
    """A run whose engines are fresh at version 0, unless `open` is False."""
    planes: list[LocalPlane] = []
    try:
        async with ActorSystem() as system:
            world = World(system, config_of(*overrides), tasks or tasks_of(), path)
            planes.append(world.plane)
            await world.start_controller()
            if buffer:
                await world.start_buffer()
            if open:
                await world.publish()
            yield world
    finally:
        for plane in planes:  # after the actors, which may be in the middle of something
            plane.close()


def assert_journal_is_the_ledger(world_or_controller: World | Controller) -> None:
    """Replaying the journal gives the very state that the controller has in memory, and the audit agrees."""
    controller = world_or_controller.controller if isinstance(world_or_controller, World) else world_or_controller
    events, torn = read_journal(controller.run_dir.ledger / "journal.bin", Event)
    assert torn == 0
    assert state_of(Ledger.replay(events)) == state_of(controller.ledger)
    audit = recount(events)
    assert audit.exact
    assert {"issued": audit.issued, **{k: len(v) for k, v in audit.classes.items()}} == controller.ledger.summary()


def state_of(ledger: Ledger) -> dict[str, Any]:
    return {**vars(ledger), "counts": +ledger.counts, "open": list(ledger.open)}


def held(ledger: Ledger) -> list[Lease]:
    return [lease for lease in ledger.open.values() if lease.holder and not lease.buffered]


# ---- scripted stand-ins


def verdict_of(state: Any = "ok", passed: int = 1, total: int = 1) -> Verdict:
    return Verdict(
        state=state, passed=int(passed), total=total, resolved=state == "ok" and passed == total, tests=(), stdout="",
        stderr="", error="", isolation="none (scripted)", seconds=0.0, evidence_hash="",
    )  # fmt: skip


class ScriptedBroker(Actor):
    """Test only: answers each program with what `judge` returns; runs nothing."""

    def __init__(self, judge: Callable[[m.Program], Awaitable[Verdict]]):
        self.judge = judge
        self.asked: list[m.Program] = []

    @concurrent
    async def score(self, msg: m.ScorePrograms) -> m.Scored:
        self.asked += msg.programs
        return m.Scored(tuple([await self.judge(program) for program in msg.programs]))


class Letters:
    """Test only: one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return ["".join(map(chr, row)) for row in rows]


class ScriptedEngine:
    """Test only: completion i of every group is `texts[i]`, one token a step; counts what it was asked.

    Token logprobs are -(version + 1), so that whoever reads one knows which weights it came from. `before_step` runs in the engine's
    thread, where it may block or raise.
    """

    def __init__(self, texts: Sequence[str] = ("1\n", "2\n"), version: int = 0):
        self.texts, self.version = texts, version
        self.tokenizer = Letters()
        self.max_tokens: int | None = None
        self.token_capacity = 1 << 20
        self.requests: list[GroupRequest] = []
        self.resumed: list[GroupResult] = []
        self.running: dict[int, tuple[GroupRequest, GroupOutput]] = {}
        self.before_step: Callable[[], None] = lambda: None
        self.recomputed: list[bool] = []
        self.canary_offset = 0.0
        self.closed = False
        self.awake = True
        self.calls: list[str] = []  # that take or give memory, and weights

    @property
    def unfinished(self) -> int:
        return len(self.running)

    def start(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def sleep(self) -> None:
        if self.running:
            raise EngineError(f"{len(self.running)} groups run")
        self.awake = False
        self.calls.append("sleep")

    def prepare_for_generation(self) -> None:
        if not self.awake:
            self.calls.append("wake up")
        self.awake = True

    def score(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        return np.full(len(ids) - 1, -(self.version + 1.0) + self.canary_offset, np.float32)

    def next_token(self, ids: np.ndarray, temperature: float = 1.0) -> tuple[int, float]:
        return 1, -(self.version + 1.0) + self.canary_offset

    def update_weights(
        self, views: Mapping[str, np.ndarray], manifest: Any, version: int, recompute_kv_cache: bool = True
    ) -> None:
        assert self.awake
        self.version = version
        self.calls.append(f"weights {version}")
        self.recomputed.append(recompute_kv_cache)

    def submit(
        self, request: GroupRequest, output: GroupOutput, sampling: SamplingConfig, resume: GroupResult | None = None
    ) -> None:
        if self.max_tokens is not None and request.prompt_ids.size > self.max_tokens:
            raise ValueError(f"group {request.key}: prompt too long")
        if request.prompt_ids.size + sampling.max_new_tokens > self.token_capacity:
            raise ValueError(f"group {request.key}: more than the engine's {self.token_capacity} positions")
        if resume is None:
            output.clear()
        else:
            self.resumed.append(resume)
        self.requests.append(request)
        self.running[request.key] = (request, output)

    def step(self) -> list[GroupResult]:
        assert self.awake
        self.before_step()
        done = []
        for key, (request, output) in list(self.running.items()):
            ids = [self._ids(request, row) for row in range(request.n)]
            for row in range(request.n):
                at = int(output.lengths[row])
                if at < len(ids[row]):
                    output.tokens[row, at] = ids[row][at]
                    output.logprobs[row, at] = -(self.version + 1.0)
                    output.versions[row, at] = self.version
                    output.lengths[row] = at + 1
            if all(output.lengths[row] == len(ids[row]) for row in range(request.n)):
                done.append(self._end(key))
        return done

    def _ids(self, request: GroupRequest, row: int) -> list[int]:
        return self.tokenizer.encode(self.texts[row % len(self.texts)])

    def abort(self, keys: Collection[int] | None = None) -> list[GroupResult]:
        return [self._end(key) for key in list(self.running) if keys is None or key in keys]

    def _end(self, key: int) -> GroupResult:
        request, output = self.running.pop(key)
        whole = [int(output.lengths[row]) == len(self._ids(request, row)) for row in range(request.n)]
        reasons = tuple(FinishReason.STOP if ended else FinishReason.CUT for ended in whole)
        return GroupResult(key, reasons, int(request.prompt_ids.size), int(output.lengths.sum()))
