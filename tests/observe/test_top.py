"""`top` shows the longest wait first, whoever is silent, and says plainly when there is nothing to look at."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dockyard_actors.cli import main
from dockyard_actors.observe.top import (
    RUNTIME,
    Ended,
    NotRunning,
    Runtime,
    View,
    as_json,
    joined,
    look,
    render,
    runtime_of,
)
from dockyard_actors.runtime.actor import Actor
from dockyard_actors.runtime.agent import AgentConfig, NodeAgent
from dockyard_actors.runtime.supervision import ProcessInfo
from dockyard_actors.transport import control
from tests.runtime.actors import Add, Block, Counter, Note, Open


def shown(view: View) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(render(view))
    return out.getvalue()


async def test_a_look_shows_waits_queues_handlers_and_dead_letters(tmp_path: Path) -> None:
    async with NodeAgent(AgentConfig(runtime_parent=tmp_path)) as agent:
        counter = Counter()
        await agent.system.start(counter, "counter")
        ref = agent.system.ref("counter", owner="tester")
        await ref.ask(Add())
        blocked = asyncio.ensure_future(ref.ask(Block(), deadline_s=50.0))
        await counter.entered.wait()
        await ref.tell(Note(n=1))
        await agent.system.ref("nobody").tell(Note(n=2))
        async with joined(Runtime(agent.rendezvous, str(agent.key_file))) as system:
            view = await look(system)
            again = await look(system)
        assert set(view.processes) == {"agent"}, "the observer does not show itself"
        actor = view.processes["agent"].actors["counter"]
        assert (actor.mailbox, actor.busy) == (1, "Block")
        assert actor.handlers["Add"].count == 1
        assert again.processes["agent"].actors["counter"].handlers["Add"].count == 1, "looking changes nothing"
        text = shown(view)
        assert text.index("tester") < text.index("counter ")
        for word in ("longest waits", "Block", "reply", "dead letters", "nobody"):
            assert word in text
        assert json.loads(as_json(view))["processes"]["agent"]["actors"]["counter"]["mailbox"] == 1
        await ref.ask(Open())
        await blocked


def test_a_process_that_does_not_answer_is_shown_with_the_reason() -> None:
    process = ProcessInfo("trainer", 42, 3, "unresponsive", 2, 0.0)
    text = shown(View(time=0.0, supervised=(process,), processes={}, silent={"trainer": "no reply"}, entries=()))
    assert "nobody waits" in text
    for word in ("trainer", "42", "unresponsive", "#3", "no reply"):
        assert word in text


@pytest.mark.parametrize("how", [[], ["--once"], ["--json"]])
def test_the_command_fails_where_there_is_nothing_to_look_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    assert main(["top", str(tmp_path), *how]) == 1
    assert "is not a run directory" in capsys.readouterr().err


def test_what_is_no_run_or_does_not_run_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="is not a run directory"):
        runtime_of(tmp_path)
    (tmp_path / "run.lock").touch()
    with pytest.raises(NotRunning, match="does not run now"):
        runtime_of(tmp_path)
    (tmp_path / RUNTIME).write_text("{")
    with pytest.raises(NotRunning, match="cannot be read"):
        runtime_of(tmp_path)


async def test_a_run_that_was_killed_is_said_to_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dockyard_actors.observe.top.JOIN_S", 0.2)
    with pytest.raises(NotRunning, match="the run has ended or was killed"):
        async with joined(Runtime(f"ipc://{tmp_path}/gone.", "")):
            pass


async def test_a_run_that_ends_between_two_looks_is_no_error(tmp_path: Path) -> None:
    async with NodeAgent(AgentConfig(runtime_parent=tmp_path)) as agent:
        await agent.system.start(Actor(), "someone")
        runtime = Runtime(agent.rendezvous, str(agent.key_file))
        async with joined(runtime) as system:
            await look(system)
            await agent.close()
            with pytest.raises(Ended, match="the run has ended"):
                await look(system)


async def test_a_run_on_another_host_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AgentConfig(runtime_parent=tmp_path, listen="tcp://127.0.0.1:0")
    async with NodeAgent(config) as agent:
        with monkeypatch.context() as patch:
            patch.setattr(control, "host_id", lambda: "elsewhere")
            viewer = joined(Runtime(agent.rendezvous, str(agent.key_file)))
            system = await viewer.__aenter__()
        await agent.system.start(Counter(), "born later")
        view = await look(system)
        assert "born later" in view.processes["agent"].actors
        assert system.directory.alive("born later") is not None, "it was told"
        await viewer.__aexit__(None, None, None)
