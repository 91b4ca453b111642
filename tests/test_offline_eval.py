"""Whatever ends an evaluation of a checkpoint, its engine is closed, and a failed engine says itself why. Engine and executor are scripted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dockyard_actors import offline_eval
from dockyard_actors.roles import build
from dockyard_actors.sandbox.types import Verdict
from tests.roles.world import ScriptedEngine, config_of, tasks_of, verdict_of


class ScriptedExecutor:
    """Test only: child and client in one; every program gets what `judge` returns."""

    def __init__(self, judge: Callable[[str], Verdict]):
        self.judge = judge
        self.ended = 0

    async def start(self) -> None: ...

    async def health(self) -> Any:
        return SimpleNamespace(isolation="none (scripted)")

    async def run_program(self, request_id: str, source: str, *args: Any, **limits: float) -> Verdict:
        return self.judge(source)

    async def close(self) -> None:
        self.ended += 1

    async def stop(self) -> None:
        self.ended += 1


async def evaluate(
    monkeypatch: pytest.MonkeyPatch, path: Path, engine: ScriptedEngine, executor: ScriptedExecutor
) -> dict[str, Any]:
    made = tasks_of(train=1)
    lines = [msgspec.json.encode(task).decode() for task in (*made.train, *made.heldout)]
    (path / "tasks.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(build, "make_executor", lambda *_: (executor, executor))
    monkeypatch.setattr(build, "make_hf_engine", lambda *_, **__: engine)
    return await offline_eval.evaluate_checkpoint(
        path, str(path / "tasks.jsonl"), 2, config_of(), lambda text: None, "heldout"
    )


async def test_a_checkpoint_gets_its_rates_and_the_engine_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, executor = (
        ScriptedEngine(),
        ScriptedExecutor(lambda source: verdict_of(passed=source == "x = 1\n")),
    )
    report = await evaluate(monkeypatch, tmp_path, engine, executor)
    assert (report["heldout"]["t1"], report["heldout"]["greedy"]) == (0.5, 1.0)
    assert engine.closed


async def test_an_engine_that_fails_ends_it_with_its_own_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> None:
        raise MemoryError("no room for the batch")

    engine, executor = ScriptedEngine(), ScriptedExecutor(lambda source: verdict_of())
    engine.before_step = broken
    with pytest.raises(MemoryError, match="no room for the batch"):
        await evaluate(monkeypatch, tmp_path, engine, executor)
    assert executor.ended == 2


async def test_a_judge_that_fails_leaves_no_engine_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gone(source: str) -> Verdict:
        raise ConnectionError("no executor")

    engine = ScriptedEngine()
    with pytest.raises(ConnectionError, match="no executor"):
        await evaluate(monkeypatch, tmp_path, engine, ScriptedExecutor(gone))
    assert engine.closed
