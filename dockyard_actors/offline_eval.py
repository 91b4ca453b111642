"""`dockyard-launch eval CHECKPOINT`: pass@1 of a checkpoint on a task file, through the HF engine and the same executor as in a run.

Everything happens in this process and one child executor; no actors, no ledger.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dockyard_actors.config import Config, ConfigError, from_resolved, load_config
from dockyard_actors.roles import messages as m
from dockyard_actors.sandbox.types import Verdict
from dockyard_actors.tasks.types import Task

if TYPE_CHECKING:
    from dockyard_actors.engines.base import Engine
    from dockyard_actors.roles.engine_driver import EngineDriver

VERSION = 0  # a checkpoint has one set of weights; its version only has to agree with itself


def resolve(path: Path) -> Path:
    """The model directory that `path` means: itself, what a `latest` pointer names, or a run's newest checkpoint. Raises ConfigError."""
    pointer = path / "checkpoints" / "latest" if (path / "checkpoints").is_dir() else path
    if pointer.is_file() and pointer.name == "latest":
        path = pointer.parent / pointer.read_text().strip()
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: no model directory (config.json is missing); a run keeps them in RUN/checkpoints/")
    return path


def config_of(checkpoint: Path, overrides: list[str]) -> Config:
    """The configuration of the run that wrote the checkpoint, or the defaults for a model directory that no run wrote."""
    written = checkpoint.resolve().parent.parent / "config.resolved.yaml"
    if written.is_file():
        base = from_resolved(written.read_text())
        if not overrides:
            return base
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(written.read_text())
            file.flush()
            return load_config(Path(file.name), overrides)
    return load_config(None, ["correction.kind=tis", *overrides])


@asynccontextmanager
async def driving(engine: Engine, stop_s: float) -> AsyncIterator[EngineDriver]:
    """A started engine and its driver, closed whatever happens. When the engine fails, its own error is raised."""
    from dockyard_actors.roles.engine_driver import EngineDriver, EngineStopped

    failed: list[BaseException] = []
    driver = EngineDriver(engine, failed.append)
    try:
        await driver.call(engine.start)
        yield driver
    except EngineStopped:
        if failed:
            raise failed[0] from None
        raise
    finally:
        driver.close()
        await driver.closed(stop_s)


async def evaluate_checkpoint(
    checkpoint: Path,
    tasks_source: str,
    samples: int,
    config: Config,
    say: Callable[[str], None],
    only: str | None = None,
) -> dict[str, Any]:
    """Returns {split: {t1, greedy, by_task}} with overall figures, isolation and counts. Raises ConfigError, TaskFileError and what made the
    engine fail."""
    from dockyard_actors.roles.build import make_executor, make_hf_engine
    from dockyard_actors.roles.evaluation import evaluate
    from dockyard_actors.tasks.dataset import load_tasks

    tasks = load_tasks(tasks_source)
    with tempfile.TemporaryDirectory(prefix="dy-") as scratch:
        executor, client = make_executor(config, Path(scratch), Path(scratch))
        await executor.start()
        try:
            health = await client.health()
            say(f"loading {checkpoint}")
            engine = make_hf_engine(config, str(checkpoint), own_weights=VERSION)

            async def judge(programs: Sequence[m.Program], deadline_s: float) -> Sequence[Verdict]:
                return await asyncio.gather(
                    *(
                        client.run_program(
                            p.request_id,
                            p.source,
                            list(p.tests),
                            list(p.hidden_tests),
                            timeout_s=config.sandbox.timeout_s,
                            deadline_s=deadline_s,
                        )
                        for p in programs
                    )
                )

            by_id: dict[str, Task] = {task.id: task for task in (*tasks.train, *tasks.heldout)}
            report: dict[str, Any] = {
                "checkpoint": str(checkpoint),
                "tasks": tasks_source,
                "isolation": health.isolation,
            }
            async with driving(engine, config.supervision.stop_grace_s) as driver:
                for split, chosen in (("train", tasks.train), ("heldout", tasks.heldout)):
                    if not chosen or only not in (None, split):
                        continue
                    part: dict[str, Any] = {"tasks": len(chosen), "samples": samples, "by_task": {}}
                    for mode in ("t1", "greedy"):
                        say(f"{split}, {mode}: {len(chosen)} tasks")
                        reply = await evaluate(
                            judge,
                            config,
                            by_id,
                            driver,
                            say,
                            m.Evaluate(
                                prompts=tuple(task.id for task in chosen),
                                samples=samples,
                                greedy=mode == "greedy",
                                seed=config.run.seed,
                                version=VERSION,
                                step=0,
                            ),
                        )
                        rates = {r.prompt_id: r.passed / r.samples for r in reply.results if r.samples}
                        part[mode] = sum(rates.values()) / len(rates) if rates else None
                        part[f"{mode}_masked"] = reply.masked
                        for name, rate in rates.items():
                            part["by_task"].setdefault(name, {})[mode] = rate
                    report[split] = part
            for mode in ("t1", "greedy"):
                parts = [
                    (report[s][mode], report[s]["tasks"])
                    for s in ("train", "heldout")
                    if s in report and report[s][mode] is not None
                ]
                report[mode] = sum(rate * n for rate, n in parts) / sum(n for _, n in parts) if parts else None
            return report
        finally:
            await client.close()
            await executor.stop()
