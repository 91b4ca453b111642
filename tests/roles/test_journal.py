"""What the disk does to the journal: full, too small, or damaged in any byte."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.roles import messages as m
from dockyard_actors.roles.journal import Journal, JournalDamaged, read_journal
from dockyard_actors.roles.ledger import Closed, Event, Ledger, Published
from dockyard_actors.runtime.errors import ActorCrashed, RemoteError
from tests.roles.world import meta_of, state_of, world_of


def write(path: Path, count: int) -> list[int]:
    """Journals `count` records of different lengths; returns where each one starts."""
    journal: Journal[Event] = Journal(path, Event)
    starts = []
    for index in range(count):
        journal.append(Closed(index, "failed", "x" * index))
        starts.append(path.stat().st_size)
        journal.commit()
    journal.close()
    return starts


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_but_in_the_last_record_is_an_error_and_costs_no_record(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("j") / "journal.bin"
    starts = write(path, 6)
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, starts[-1] - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    with pytest.raises(JournalDamaged, match="at byte"):
        Journal(path, Event)
    assert path.read_bytes() == raw, "nothing is cut from a journal that a person has to look at"


def test_a_torn_last_record_is_cut_wherever_it_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    starts = write(path, 3)
    raw = path.read_bytes()
    for end in range(starts[-1] + 1, len(raw)):
        path.write_bytes(raw[:end])
        journal: Journal[Event] = Journal(path, Event)
        assert len(journal.recovered) == 2
        journal.close()
        assert path.read_bytes() == raw[: starts[-1]]


def test_a_file_that_may_not_grow_keeps_what_was_acknowledged_and_takes_up_again_when_it_may(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in a child: the kernel refuses in the middle of a write, as a full disk does."""
    program = textwrap.dedent(
        """
        import resource, sys
        from pathlib import Path
        from dockyard_actors.roles.journal import Journal, read_journal
        from dockyard_actors.roles.ledger import Event, Published
        path, acknowledged = Path(sys.argv[1]), 0
        journal = Journal(path, Event)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        try:
            for version in range(1000):
                journal.append(Published(version))
                journal.commit()
                acknowledged += 1
        except OSError as error:
            print(type(error).__name__, error.errno, flush=True)
        records, torn = read_journal(path, Event)
        assert torn == 0 and [r.version for r in records] == list(range(acknowledged)), (torn, len(records), acknowledged)
        assert 0 < acknowledged < 1000
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        journal.commit()
        journal.close()
        records, torn = read_journal(path, Event)
        assert torn == 0 and [r.version for r in records] == list(range(acknowledged + 1))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "journal.bin")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "OSError"


def test_closing_a_journal_that_cannot_be_written_says_so_and_leaves_no_descriptor(tmp_path: Path) -> None:
    journal: Journal[Event] = Journal(tmp_path / "journal.bin", Event)
    journal.append(Published(0))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert read_journal(tmp_path / "journal.bin", Event) == ([], 0)


async def test_a_controller_whose_disk_is_full_acknowledges_nothing_and_ends_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ActorCrashed, match="the journal") as ended:
        await _run_into_a_full_disk(tmp_path)
    assert isinstance(ended.value.__cause__, OSError)
    async with world_of(tmp_path, open=False) as world:
        assert [lease.holder for lease in world.ledger.open.values()] == ["rollout-0#1"] * 2
        assert state_of(world.ledger) == state_of(Ledger.replay(world.journal))


async def _run_into_a_full_disk(path: Path) -> None:
    async with world_of(path, buffer=False) as world:
        grants = await world.lease(2)
        before = (world.run_dir.ledger / "journal.bin").read_bytes()

        def full() -> None:
            raise OSError(28, "No space left on device")

        world.controller.journal.commit = full  # type: ignore[method-assign]
        accept = m.AcceptGroup(meta=meta_of(grants[0]), ref=world.sealed())
        step = m.StepDone(step=1, version=0, trained=(1,), filtered=())
        for message in (
            accept,
            accept,
            step,
            step,
        ):  # the second finds it in memory, which is no reason to acknowledge it
            with pytest.raises(RemoteError, match="No space left on device"):
                await world.ask("controller", message)
        assert (world.run_dir.ledger / "journal.bin").read_bytes() == before
        os.close(world.controller.journal._fd)  # as the death of the process does: nothing more is written
        world.controller.metrics.close()
        world.controller.rollouts.close()
