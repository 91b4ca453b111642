"""The command line in this process: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard_actors import cli
from dockyard_actors.cli import FAILED, OK, USAGE, main, ranges
from dockyard_actors.roles.journal import Journal
from dockyard_actors.roles.ledger import Closed, Event, Issued, Opened, Stepped


def read_back(text: str) -> list[int]:
    """What a person understands from `ranges`."""
    ids: list[int] = []
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return ids


@given(st.sets(st.integers(0, 200)))
def test_ranges_say_exactly_the_ids(ids: set[int]) -> None:
    assert read_back(ranges(sorted(ids), limit=1000)) == sorted(ids)


@pytest.mark.parametrize(
    ("ids", "text"), [([], ""), ([4], "4"), ([1, 2], "1-2"), ([0, 1, 2, 3, 4, 7, 9, 10, 11, 12], "0-4, 7, 9-12")]
)
def test_ranges_are_short(ids: list[int], text: str) -> None:
    assert ranges(ids) == text


@given(st.integers(0, 40), st.integers(2, 12))
def test_ranges_that_leave_something_out_say_how_much_and_keep_both_ends(count: int, limit: int) -> None:
    ids = [3 * i for i in range(count)]
    parts = ranges(ids, limit).split(", ")
    left_out = [part for part in parts if part.startswith("…")]
    if count <= limit:
        assert not left_out
        return
    assert left_out == [f"… {count - limit} more …"] or limit % 2
    assert (parts[0], parts[-1]) == ("0", str(ids[-1]))


def run_of(path: Path, *events: Event) -> Path:
    (path / "ledger").mkdir(parents=True)
    (path / "config.resolved.yaml").write_text("")
    journal: Journal[Event] = Journal(path / "ledger" / "journal.bin", Event)
    for event in (Opened("run", 0, "sha", "session"), *events):
        journal.append(event)
    journal.close()
    return path


SOUND = (
    *(Issued(i, f"p{i}", 0, 1, "rollout-0#1", i) for i in range(5)),
    Stepped(1, 0, (0, 1)),
    Closed(2, "expired", "too_old"),
)


def test_an_exact_ledger_is_printed_class_by_class_and_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run_of(tmp_path / "run", *SOUND)), "--ledger"]) == OK
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "trained 2 + expired 1 + filtered 0 + failed 0 + in_flight 2 = issued 5"
    assert "trained 2 0-1" in lines
    assert "in_flight 2 3-4" in lines
    assert lines[-1] == "exact: every issued lease is in exactly one class"


def test_a_ledger_that_is_not_exact_names_the_leases_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", *SOUND, Closed(0, "failed", "x"), Closed(9, "failed", "x"))
    assert main(["inspect", str(run), "--ledger"]) == FAILED
    out = capsys.readouterr().out
    assert "IN TWO CLASSES: lease 0: trained and failed" in out
    assert "IN NO CLASS: 9" in out
    assert out.rstrip().endswith("NOT EXACT")
    assert main(["inspect", str(run), "--ledger", "--json"]) == FAILED
    assert json.loads(capsys.readouterr().out)["exact"] is False


def test_a_torn_end_of_the_journal_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", *SOUND)
    journal = run / "ledger" / "journal.bin"
    journal.write_bytes(journal.read_bytes()[:-3])
    assert main(["inspect", str(run), "--ledger"]) == OK
    assert "torn bytes" in capsys.readouterr().out


def test_a_damaged_journal_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", *SOUND)
    journal = run / "ledger" / "journal.bin"
    raw = bytearray(journal.read_bytes())
    raw[10] ^= 0xFF
    journal.write_bytes(raw)
    assert main(["inspect", str(run), "--ledger"]) == USAGE
    assert "no torn tail" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--role", "trainer", "up", "x.yaml"], "does not go with the command 'up'"),
        (["--role", "buffer"], "needs --rendezvous"),
        (["--role", "controller"], "needs --config"),
        (["--role", "controller", "--config", "x.yaml", "--rendezvous", "ipc:///x"], "without --rendezvous"),
        (["resume", "nowhere"], "no run to resume"),
        (["check", "nowhere.yaml"], "no such file"),
        (["eval", "nowhere", "--samples", "2"], "at least 8"),
    ],
)
def test_wrong_usage_is_told_on_stderr_with_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == USAGE
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


def test_no_command_prints_the_help_with_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == USAGE
    assert "exit codes: 0 done" in capsys.readouterr().out


def test_every_problem_of_a_configuration_is_listed_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("correction: {kind: tis}\n")
    assert main(["check", str(path), "grpo.num_prompt_per_step=3", "optimzer.lr=1"]) == USAGE
    error = capsys.readouterr().err
    assert "grpo.num_prompts_per_step" in error
    assert "optimizer" in error


def test_check_reads_the_tasks_and_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("correction: {kind: tis}\nmodel: {source: tiny}\n")
    assert main(["check", str(path)]) == OK
    assert capsys.readouterr().out.rstrip().endswith("ok")
    assert main(["check", str(path), "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert main(["check", str(path), f"tasks.path={tmp_path / 'none.jsonl'}"]) == USAGE
    assert "tasks.path" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), cli.INTERRUPTED), (BrokenPipeError(), OK)])
def test_an_interrupt_and_a_closed_pipe_end_quietly(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(args: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", raises)
    assert main(["inspect", "x"]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_the_module_knows_no_torch_until_it_is_needed() -> None:
    names = set(vars(cli)) & {"torch", "transformers", "numpy"}
    assert not names
    assert cli.__name__ in sys.modules
