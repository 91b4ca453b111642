"""Whole runs in simulated time, on a network that loses and repeats, with deaths, pauses and partitions of any role. The ledger adds up
whatever happens, the run reaches its end, and nothing is trained twice, torn or too old."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dockyard_actors.runtime.testing import Faults, run
from tests.roles.simulated import STEPS, Disk, Driver, whole_run
from tests.roles.world import assert_journal_is_the_ledger

SOUND, ROUGH = Faults(), Faults(loss=0.05, duplicate=0.1, delay=(0.001, 0.05))
EVERYTHING = ("kill", "kill", "hold", "zombie", "cut", "reset", "registry")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("dockyard_actors.roles.engine_host.EngineDriver", Driver)
    monkeypatch.setattr("dockyard_actors.roles.controller.reward_png", lambda run_dir: None)  # takes real time
    monkeypatch.setattr("os.fsync", lambda fd: None)  # as well; a killed process's writes need none
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(path: Path, seed: int, faults: Faults, troubles: int, kinds: Sequence[str] = EVERYTHING) -> None:
    disk = Disk(path, "grpo.mode=async" if seed % 2 else "grpo.mode=sync")
    seconds = random.Random(f"threads {seed}")
    try:
        run(
            whole_run(disk, seed, faults, troubles, kinds), limit_s=3_000.0, thread_s=lambda: seconds.uniform(0.01, 0.2)
        )
    except BaseException as error:
        error.add_note(f"seed {seed}, {faults}, {kinds}")
        raise
    finally:
        asyncio.run(disk.close())
    assert_journal_is_the_ledger(disk.controller)
    audit = disk.audit()
    assert audit.exact
    assert sorted(audit.classes["trained"]) == sorted(disk.trained), f"seed {seed}: what checkpoints cover is trained"
    assert disk.controller.ledger.step == STEPS


@pytest.mark.parametrize("seed", range(4))
def test_a_run_of_sound_processes_adds_up(tmp_path: Path, seed: int) -> None:
    check(tmp_path / "run", seed, SOUND, troubles=0)


@pytest.mark.parametrize("faults", [SOUND, ROUGH], ids=["sound network", "rough network"])
def test_a_run_adds_up_whoever_dies_in_it(tmp_path: Path, faults: Faults) -> None:
    for seed in range(20):
        check(tmp_path / f"run-{seed}", seed, faults, troubles=6, kinds=("kill",))


@pytest.mark.parametrize("faults", [SOUND, ROUGH], ids=["sound network", "rough network"])
def test_a_run_adds_up_whatever_happens_to_it(tmp_path: Path, faults: Faults) -> None:
    for seed in range(20):
        check(tmp_path / f"run-{seed}", seed, faults, troubles=6)
