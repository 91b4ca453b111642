"""The controller against a model of what it promises: random lives of a run, restarts of the controller included.

The model is a few dictionaries written from the promises, not from the ledger's code.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.admission import NoPrompts
from dockyard_actors.roles.controller import Controller
from dockyard_actors.runtime.actor import Death
from dockyard_actors.transport.tensors import TensorRef
from tests.roles.world import assert_journal_is_the_ledger, config_of, meta_of, tasks_of

BATCH, AGE, STEPS = 2, 1, 10
ROLLOUTS = ("rollout-0", "rollout-1")


def quiet_context() -> Any:
    """Test only: a context without a system. Nobody is asked and nothing is spawned."""
    return SimpleNamespace(spawn=lambda work, name: work.close(), watch=lambda name: None)


@dataclass
class Model:
    open: dict[int, str | None] = field(default_factory=dict)  # lease → holder, None: waits, "buffer": pushed
    trained_at: dict[int, int] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    prompt: dict[int, str] = field(default_factory=dict)
    second: set[int] = field(default_factory=set)  # leases that are a second try
    quarantined: set[str] = field(default_factory=set)
    owed: list[str] = field(default_factory=list)  # prompts with a second try to come
    incarnation: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROLLOUTS, 1))
    step: int = 0
    fresh_step: int = -1  # the engines hold the weights after it; -1: nobody knows
    version: int = -1
    rolled_back: bool = False

    @property
    def lag(self) -> int:
        return self.step - self.fresh_step

    @property
    def admits(self) -> bool:
        return self.fresh_step >= 0 and self.lag <= AGE


class Life:
    """Drives a controller and the model side by side."""

    def __init__(self, path: Path):
        self.config, self.tasks, self.run_dir = config_of(), tasks_of(train=6), RunDir(path)
        for directory in (self.run_dir.ledger, self.run_dir.rollouts):
            directory.mkdir(parents=True)
        self.model = Model()
        self.refs = 0

    async def start(self) -> None:
        self.controller = Controller(self.config, self.tasks, self.run_dir, "session")
        self.controller.ctx = quiet_context()
        await self.controller.on_start()

    async def act(self, kind: str, pick: int) -> None:
        await getattr(self, kind)(pick)
        self.check()

    def check(self) -> None:
        model, ledger = self.model, self.controller.ledger
        assert_journal_is_the_ledger(self.controller)
        assert set(ledger.open) == set(model.open)
        for lease, holder in model.open.items():
            known = ledger.open[lease]
            assert known.buffered == (holder == "buffer")
            assert known.buffered or (known.holder or None) == holder
        assert {i: lease.step for i, lease in ledger.leases.items() if lease.state == "trained"} == model.trained_at
        assert {i: x.state for i, x in ledger.leases.items() if x.state not in ("trained", "in_flight")} == model.ended
        assert (ledger.step, ledger.version, ledger.fresh_step) == (model.step, model.version, model.fresh_step)
        assert ledger.quarantined == model.quarantined
        assert [ledger.leases[lease].prompt for lease in ledger.retries] == model.owed

    # ---- what can happen

    async def lease(self, pick: int) -> None:
        model, name = self.model, ROLLOUTS[pick % 2]
        holder, capacity = f"{name}#{model.incarnation[name]}", 1 + pick % 4
        mine = tuple(lease for lease, who in model.open.items() if who == holder)
        lost = mine if pick % 7 == 0 else ()  # granted in a reply that never arrived
        for lease in lost:
            model.open[lease] = None
        waiting = [lease for lease, who in model.open.items() if who is None]
        before = len(model.open)
        message = m.LeasePrompts(
            rollout=name,
            incarnation=model.incarnation[name],
            capacity=capacity,
            wait_s=0.0,
            working=() if lost else mine,
        )
        try:
            grants = (await self.controller.lease(message)).leases
        except NoPrompts:
            grants, exhausted = (), True
        else:
            exhausted = False
        assert len(grants) <= capacity
        if not model.admits:
            assert grants == ()
            return
        again = [grant for grant in grants if grant.lease in model.open]
        new = [grant for grant in grants if grant.lease not in model.open]
        # Attempts may run out here: such a lease is not granted, and its prompt is never drawn again.
        given = {grant.lease for grant in again}
        ended = {lease for lease in waiting if self.controller.ledger.leases[lease].state == "failed"}
        assert len(given | ended) == min(capacity, len(waiting))
        model.open |= dict.fromkeys(given, holder)
        for lease in ended:
            assert self.controller.ledger.leases[lease].cause.startswith("quarantined: 3 rollouts died")
            del model.open[lease]
            model.ended[lease] = "failed"
            model.quarantined.add(model.prompt[lease])
        assert {grant.lease for grant in again} <= set(waiting)
        if not model.rolled_back:
            assert len(model.open) + len(new) <= (AGE + 1) * BATCH
        if new:
            assert len(model.open) + len(new) <= min((AGE + 1 - model.lag) * BATCH, (STEPS - model.step) * BATCH)
            assert len(waiting) < capacity, "what waits comes before anything new"
        for grant in new:
            assert grant.lease == len(model.prompt), "ids are given in order and never again"
            if model.owed:
                assert grant.prompt == model.owed.pop(0)
                model.second.add(grant.lease)
            else:
                assert grant.prompt not in model.quarantined
            model.open[grant.lease] = holder
            model.prompt[grant.lease] = grant.prompt
        assert len(model.open) <= max(before, (AGE + 1) * BATCH)
        assert not exhausted or len(model.quarantined) == 6

    def some(self, pick: int, buffered: bool) -> int | None:
        found = [x for x, who in self.model.open.items() if who is not None and (who == "buffer") == buffered]
        return found[pick % len(found)] if found else None

    async def push(self, pick: int) -> None:
        lease = self.some(pick, buffered=False)
        if lease is None:
            return
        self.refs += 1
        grant = m.Granted(lease, self.model.prompt[lease], 0, 1)
        message = m.AcceptGroup(meta=meta_of(grant), ref=TensorRef("a", 0, self.refs, 64, (), 0, "host", "/nowhere"))
        for _ in range(2):
            assert (await self.controller.accept(message)).owned
        self.model.open[lease] = "buffer"

    async def fail(self, pick: int) -> None:
        lease = self.some(pick, buffered=pick % 5 == 0)
        if lease is None:
            return
        message = m.CloseLease(lease=lease, outcome="failed", cause="deadline", retry_prompt=True)
        owned = self.model.open[lease] == "buffer"
        for _ in range(2):
            assert await self.controller.close_lease(message) == m.LeaseIs(owned)
        if owned:
            return
        del self.model.open[lease]
        self.model.ended[lease] = "failed"
        if lease in self.model.second:
            self.model.quarantined.add(self.model.prompt[lease])
        else:
            self.model.owed.append(self.model.prompt[lease])

    async def expire(self, pick: int) -> None:
        lease = self.some(pick, buffered=True)
        if lease is not None:
            await self.controller.close_lease(m.CloseLease(lease=lease, outcome="expired", cause="too_old"))
            del self.model.open[lease]
            self.model.ended[lease] = "expired"

    async def die(self, pick: int) -> None:
        model, name = self.model, ROLLOUTS[pick % 2]
        holder = f"{name}#{model.incarnation[name]}"
        for lease, who in model.open.items():
            model.open[lease] = None if who == holder else who
        await self.controller.on_death(Death(name, model.incarnation[name], "killed"))
        late = m.LeasePrompts(rollout=name, incarnation=model.incarnation[name], capacity=4, wait_s=0.0)
        assert (await self.controller.lease(late)).leases == ()
        model.incarnation[name] += 1

    async def train(self, pick: int) -> None:
        model = self.model
        ready = [lease for lease, who in model.open.items() if who == "buffer"][:BATCH]
        if len(ready) < BATCH or model.fresh_step < 0 or model.lag > AGE or model.step == STEPS:
            return
        trained, filtered = (ready, []) if pick % 3 else (ready[:1], ready[1:])
        model.step += 1
        message = m.StepDone(
            step=model.step, version=model.version, trained=tuple(trained),
            filtered=tuple((lease, "no_signal") for lease in filtered),
        )  # fmt: skip
        for _ in range(2):
            await self.controller.step_done(message)
        for lease in ready:
            del model.open[lease]
        model.trained_at |= dict.fromkeys(trained, model.step)
        model.ended |= dict.fromkeys(filtered, "filtered")

    async def publish(self, pick: int) -> None:
        model = self.model
        model.version += 1
        assert (await self.controller.next_version(m.NextVersion(above=model.version - 1))).version == model.version
        if pick % 2:
            await self.restart(pick)
        await self.controller.engines_fresh(m.EnginesFresh(version=model.version, step=model.step))
        model.fresh_step = model.step

    async def trainer_restarts(self, pick: int) -> None:
        model = self.model
        to = max(0, model.step - pick % 3)
        welcome = await self.controller.trainer_starts(m.TrainerStarts(step=to))
        back = [lease for lease, at in model.trained_at.items() if at > to]
        assert welcome == m.Welcome(to, model.version, len(back))
        for lease in back:
            del model.trained_at[lease]
            model.open[lease] = None
        model.rolled_back |= bool(back)
        model.step, model.fresh_step = to, -1
        await self.publish(0)

    async def restart(self, pick: int) -> None:
        await self.controller.on_stop()
        await self.start()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "lease",
                "lease",
                "lease",
                "push",
                "push",
                "push",
                "fail",
                "expire",
                "die",
                "train",
                "train",
                "publish",
                "publish",
                "trainer_restarts",
                "restart",
            ]
        ),
        st.integers(0, 59),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(ACTIONS)
def test_in_every_life_of_a_run_controller_journal_and_model_agree(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    async def live() -> None:
        life = Life(tmp_path_factory.mktemp("life"))
        await life.start()
        try:
            for kind, pick in [("publish", 0), *actions]:
                await life.act(kind, pick)
        finally:
            await life.controller.on_stop()

    asyncio.run(live())
