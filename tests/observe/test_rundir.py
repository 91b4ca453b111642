"""The run directory: exclusive, atomic, and readable without the lock."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dockyard_actors.observe.rundir import RunDir, RunDirBusy, RunDirError, replacing, write_atomic

HOLD = """
import sys
from dockyard_actors.observe.rundir import RunDir
run = RunDir.create(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_default_directory_is_dated_named_and_linked_as_latest(tmp_path: Path):
    with RunDir.create(name="my run/..", base=tmp_path / "runs") as run:
        assert run.path.parent == tmp_path / "runs"
        assert run.id.endswith("-my-run")
        assert (tmp_path / "runs" / "latest").resolve() == run.path
        assert all(p.is_dir() for p in (run.ledger, run.checkpoints, run.rollouts, run.logs))


def test_two_runs_of_one_second_get_two_directories_and_latest_is_the_newer(tmp_path: Path):
    with RunDir.create(base=tmp_path) as first, RunDir.create(base=tmp_path) as second:
        assert first.path != second.path
        assert (tmp_path / "latest").resolve() == second.path


def test_a_latest_that_is_a_real_directory_is_left_alone(tmp_path: Path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").touch()
    with RunDir.create(base=tmp_path):
        assert (tmp_path / "latest" / "mine").exists()


def test_a_given_path_elsewhere_puts_no_link_beside_it(tmp_path: Path):
    with RunDir.create(tmp_path / "deep" / "here", base=tmp_path / "runs"):
        assert os.listdir(tmp_path / "deep") == ["here"]


def test_a_directory_with_other_files_is_refused_and_untouched(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("x")
    for resume in (False, True):
        with pytest.raises(RunDirError):
            RunDir.create(tmp_path, resume=resume)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_file_as_run_directory_is_refused(tmp_path: Path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(RunDirError, match="is a file"):
        RunDir.create(tmp_path / "f")


def test_an_existing_run_is_refused_unless_resuming(tmp_path: Path):
    RunDir.create(tmp_path / "r").close()
    with pytest.raises(RunDirError, match="resume it"):
        RunDir.create(tmp_path / "r")
    RunDir.create(tmp_path / "r", resume=True).close()


def test_resuming_sets_the_old_summary_aside_so_that_a_crash_is_not_taken_for_success(tmp_path: Path):
    with RunDir.create(tmp_path / "r") as run:
        run.write_json("summary.json", {"status": "completed"})
    with RunDir.create(tmp_path / "r", resume=True) as run:
        assert not run.summary.exists()
        assert json.loads((run.path / "summary.previous.json").read_text()) == {"status": "completed"}


def test_a_run_held_by_a_live_process_is_refused_naming_it_and_free_after_its_death(tmp_path: Path):
    path = tmp_path / "r"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert RunDir(path).is_held()
        holder = RunDir(path).holder()
        assert holder is not None
        assert holder.pid == child.pid
        for resume in (False, True):
            with pytest.raises(RunDirBusy, match=f"process {child.pid}"):
                RunDir.create(path, resume=resume, lock_wait_s=0.0)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert not RunDir(path).is_held()
    RunDir.create(path, resume=True).close()


def test_the_lock_is_not_inherited_by_children(tmp_path: Path):
    run = RunDir.create(tmp_path / "r")
    child = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()  # the kernel closes descriptors a moment after the new program took over
        run.close()
        assert not run.is_held()
    finally:
        child.communicate(b"\n")


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path):
    target = tmp_path / "x.json"
    write_atomic(target, b"old")

    def crash_half_way() -> None:
        with replacing(target) as temporary:
            temporary.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        crash_half_way()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_json_written_has_null_for_what_is_not_finite(tmp_path: Path):
    with RunDir.create(tmp_path / "r") as run:
        path = run.write_json("x.json", {"a": float("nan"), "b": float("inf"), "c": np.float32(1.5)})
    assert json.loads(path.read_text()) == {"a": None, "b": None, "c": 1.5}
