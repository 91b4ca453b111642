"""What roles tell of their time reaches the trace, and nothing depends on it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dockyard_actors.observe.idle import read_trace
from dockyard_actors.roles import messages as m
from dockyard_actors.roles.broker import Broker
from dockyard_actors.roles.reporting import Reporter
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.system import ActorSystem
from dockyard_actors.sandbox.types import Verdict
from tests.roles.world import config_of, eventually, verdict_of, world_of


class Worker(Actor):
    """Test only: a role that does nothing but report."""

    async def on_start(self) -> None:
        self.report = Reporter(self, doing="nothing")


class ListeningController(Actor):
    """Test only: keeps what it is told; `refuses` makes it fail on spans."""

    def __init__(self) -> None:
        self.spans: list[str] = []
        self.batches = 0
        self.refuses = False
        self.roles: list[m.ReportRole] = []

    async def report_role(self, msg: m.ReportRole) -> m.Done:
        self.roles.append(msg)
        return m.Done()

    async def report_spans(self, msg: m.ReportSpans) -> m.Done:
        if self.refuses:
            raise OSError("no")
        self.batches += 1
        self.spans += [span.name for span in msg.spans]
        return m.Done()


async def test_spans_are_told_with_the_reports_each_once_and_only_when_there_are_some() -> None:
    async with ActorSystem() as system:
        controller, worker = ListeningController(), Worker()
        await system.start(controller, "controller")
        await system.start(worker, "worker")
        await eventually(lambda: len(controller.roles) >= 2)
        assert controller.batches == 0
        for i in range(3):
            worker.report.trace.add(f"s{i}", i, i + 1)
        await eventually(lambda: controller.spans)
        rounds = len(controller.roles)
        await eventually(lambda: len(controller.roles) > rounds)
        assert controller.spans == ["s0", "s1", "s2"]
        assert controller.batches == 1


async def test_a_flush_tells_all_spans_of_however_many_batches() -> None:
    async with ActorSystem() as system:
        controller, worker = ListeningController(), Worker()
        await system.start(controller, "controller")
        await system.start(worker, "worker")
        for i in range(12_000):
            worker.report.trace.add(f"s{i}", i, i + 1)
        await worker.report.flush()
        assert controller.spans == [f"s{i}" for i in range(12_000)]
        assert controller.batches > 1


async def test_spans_that_nobody_takes_are_counted_and_stop_nothing() -> None:
    async with ActorSystem() as system:
        controller, worker = ListeningController(), Worker()
        controller.refuses = True
        await system.start(controller, "controller")
        await system.start(worker, "worker")
        worker.report.trace.add("lost", 0, 1)
        await worker.report.flush()
        controller.refuses = False
        worker.report.trace.add("told", 1, 2)
        await worker.report.flush()
        assert controller.spans == ["told"]
        assert worker.report.message().counters == {"spans_lost": 1.0}
        worker.report.counters = {}  # the trainer begins to count anew with every phase
        assert worker.report.message().counters == {"spans_lost": 1.0}


async def test_a_flush_without_a_controller_ends_in_its_time_and_says_what_is_lost() -> None:
    async with ActorSystem() as system:
        worker = Worker()
        await system.start(worker, "worker")
        worker.report.trace.add("lost", 0, 1)
        async with asyncio.timeout(20):
            await worker.report.flush(deadline_s=0.1)
        assert len(worker.report.trace) == 0
        assert worker.report.message().counters == {"spans_lost": 1.0}


async def test_the_trace_outlives_a_controller_and_is_strict_json_when_it_stops(tmp_path: Path) -> None:
    async with world_of(tmp_path, buffer=False, open=False) as world:
        worker = Worker()
        await world.system.start(worker, "worker")
        worker.report.trace.add("first", 0, 1)
        await worker.report.flush()
        assert not read_trace(world.run_dir.trace).complete
        await world.restart_controller()
        worker.report.trace.add("second", 1, 2, lease=4)
        await worker.report.flush()
        await world.system.stop("controller")
        trace = read_trace(world.run_dir.trace)
        assert [(s.role, s.span.name) for s in trace.own] == [("worker", "first")]
        assert [(s.role, s.span.name, s.span.lease) for s in trace.groups] == [("worker", "second", 4)]
        assert trace.complete


async def test_a_trace_that_cannot_be_written_is_a_warning_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    async with world_of(tmp_path, buffer=False, open=False) as world:
        worker = Worker()
        await world.system.start(worker, "worker")
        for i in range(2):
            worker.report.trace.add("work", i, i + 1)
            await worker.report.flush()
        status = await world.ask("controller", m.AskStatus())
        assert [str(tmp_path) in warning for warning in status.warnings] == [True]


async def test_the_stay_of_a_group_in_the_buffer_is_on_its_track(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        grants = await world.lease(2)
        for grant in grants:
            await world.push(grant)
        assert not len(world.buffer.report.trace)
        taken = await world.take(2)
        await world.trainer_dies()
        assert await world.take(2) == taken
        spans = world.buffer.report.trace.drain()
        assert sorted(span.lease for span in spans) == sorted(taken * 2)
        assert {(span.name, span.args["outcome"]) for span in spans} == {("buffered", "taken")}
        for lease in taken:
            first, again = (span for span in spans if span.lease == lease)
            assert first.end_us <= again.start_us, "what was taken lay in no buffer meanwhile"


async def test_a_group_that_grew_too_old_says_so_on_its_track(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        (grant,) = await world.lease(1)
        await world.push(grant, version=0)
        assert await world.take(1, version=5) == []
        (span,) = world.buffer.report.trace.drain()
        assert (span.lease, span.args["outcome"]) == (grant.lease, "expired")


class ScriptedClient:
    """Test only: a verdict when `open` is set for its program."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Event] = {}

    async def health(self) -> Any:
        return SimpleNamespace(isolation="none (scripted)", workers=1)

    async def close(self) -> None: ...

    async def run_program(self, request_id: str, *args: object, **kwargs: object) -> Verdict:
        self.running[request_id] = asyncio.Event()
        await self.running[request_id].wait()
        return verdict_of()


class ScriptedExecutor:
    """Test only: lives for ever."""

    pid, is_alive = 1, True

    async def start(self) -> None: ...

    async def stop(self, grace_s: float = 0.0) -> None: ...

    async def wait_dead(self) -> str:
        return await asyncio.Future()


@pytest.mark.parametrize("first", ["a", "b"])
async def test_the_broker_is_busy_while_a_program_runs_and_says_how_many(first: str) -> None:
    async with ActorSystem() as system:
        client = ScriptedClient()
        broker = Broker(config_of(), ScriptedExecutor(), client)  # type: ignore[arg-type]
        await system.start(ListeningController(), "controller")
        await system.start(broker, "broker")
        asks = []
        for names in ("ab", "c"):
            programs = tuple(m.Program(name, "", (), ()) for name in names)
            asks.append(
                asyncio.ensure_future(
                    system.ref("broker").ask(m.ScorePrograms(programs=programs, deadline_s=20), deadline_s=20)
                )
            )
            await eventually(lambda last=names[-1]: last in client.running)
        client.running["c"].set()
        await asks[1]
        for name in (first, *{"a", "b"} - {first}):
            client.running[name].set()
        await asks[0]
        spans = broker.report.trace.drain()
        assert [span.args["programs"] for span in spans] == [2, 3, 2]
        assert {(span.name, span.busy, span.lease) for span in spans} == {("score", True, -1)}
        assert [a.end_us == b.start_us for a, b in pairwise(spans)] == [True, True]
