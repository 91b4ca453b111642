"""The live view: a table on terminals, plain lines elsewhere, weak isolation always in sight."""

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from dockyard_actors.observe.gain import Gain, Gains
from dockyard_actors.observe.live import LiveView, RoleState, Snapshot, duration, final_report, render
from dockyard_actors.observe.rollouts import TestLine
from dockyard_actors.observe.summary import LedgerCounts, PassRates
from tests.observe.samples import rollout_sample, summary

ESCAPE = "\x1b"
RED = re.compile(r"\x1b\[[0-9;]*31m[^\x1b]*WEAK ISOLATION")
SNAPSHOT = Snapshot(
    run_id="r1",
    phase="training",
    engine="hf",
    mode="async",
    isolation="strong",
    step=3,
    steps=10,
    reward_mean=0.5,
    ledger=LedgerCounts(issued=4, trained=4),
    evals=PassRates(train_t1=(0.25, None)),
    roles=(RoleState(name="trainer", pid=7, state="running", doing="step 4", waits_for="buffer Take", wait_s=3.0),),
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 120) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, color_system="standard", width=width, height=40, _environ={}), out


def plain_view() -> tuple[LiveView, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return LiveView(Console(file=out), clock=clock), out, clock


def changed(**changes: object) -> Snapshot:
    return msgspec.structs.replace(SNAPSHOT, **changes)


def test_plain_output_has_one_line_per_step_and_per_phase_change_and_no_control_codes():
    view, out, _ = plain_view()
    with view:
        for snapshot in (
            changed(phase="starting", step=0),
            changed(phase="starting", step=0),
            changed(step=0),
            changed(step=1, phase="training"),
            changed(step=1, reward_mean=0.9),
            changed(step=2),
            changed(step=2, phase="evaluating after"),
        ):
            view.update(snapshot)
    lines = out.getvalue().splitlines()
    assert [re.sub(r"^\[[\d:]+\] ", "", line).split(" |")[0] for line in lines] == [
        "phase: starting",
        "phase: training",
        "step 1/10",
        "step 2/10",
        "phase: evaluating after",
    ]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out.getvalue())


def test_plain_output_says_what_an_evaluation_beside_training_found():
    view, out, _ = plain_view()
    view.update(changed(step=4))
    view.update(changed(step=4, evals=PassRates(train_t1=(0.25, None), heldout_t1=(0.125, 0.5))))
    view.update(changed(step=4, evals=PassRates(train_t1=(0.25, None), heldout_t1=(0.125, 0.5))))
    said = [line for line in out.getvalue().splitlines() if "evaluated" in line]
    assert len(said) == 1
    assert "held-out T=1 0.12 → 0.50" in said[0]


def test_plain_output_shows_progress_for_what_takes_over_two_seconds_and_names_the_longest_wait():
    view, out, clock = plain_view()
    loading = changed(phase="loading the model", step=0, phase_done=3, phase_total=9)
    view.update(loading)
    clock.now += 1.5
    view.update(loading)
    assert out.getvalue().count("\n") == 1
    for _ in range(40):
        clock.now += 0.5
        view.update(loading)
    lines = out.getvalue().splitlines()[1:]
    assert len(lines) == 2  # after two seconds, then every fifteen
    assert "3 of 9" in lines[0]
    assert "trainer waits 3 s for buffer Take" in lines[0]


def test_colour_forced_into_a_file_still_gives_plain_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    with LiveView(Console(file=out)) as view:
        view.update(SNAPSHOT)
    assert ESCAPE not in out.getvalue()


def test_a_stream_that_cannot_encode_gets_escapes_instead_of_a_crash():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    LiveView(Console(file=out), plain=True).update(changed(phase="wörm-up", step=0))
    assert b"w\\xf6rm-up" in raw.getvalue()


def test_the_terminal_table_shows_everything_and_gives_the_cursor_back():
    console, out = terminal()
    with LiveView(console, plain=False) as view:
        view.update(changed(warnings=("rollout-0 restarted",), eta_s=75, groups_in_flight=5, groups_buffered=2))
    text = out.getvalue()
    for wanted in (
        "r1", "async", "hf", "3/10", "0.50", "trainer", "step 4", "3.0 s: buffer Take", "issued 4 = trained 4",
        "train T=1 0.25", "5 in flight, 2 buffered", "ETA 1:15", "rollout-0 restarted",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_narrow_terminal_keeps_names_pids_and_states_whole():
    console, out = terminal(80)
    roles = (
        RoleState(name="controller", pid=4194304, state="restarting", doing="d" * 60, waits_for="w" * 60, wait_s=12.5),
    )
    console.print(render(changed(roles=roles), elapsed_s=1, phase_s=1))
    for wanted in ("controller", "4194304", "restarting", "12.5 s: w"):
        assert wanted in out.getvalue()


def test_weak_isolation_is_red_in_the_table_in_the_report_and_said_in_every_plain_step():
    console, out = terminal()
    console.print(render(changed(isolation="weak"), elapsed_s=1, phase_s=1))
    assert RED.search(out.getvalue())
    console, out = terminal()
    final_report(console, summary(isolation="weak"), [], run_dir=Path("runs/x"))
    assert RED.search(out.getvalue())
    view, plain, _ = plain_view()
    for step in (1, 2):
        view.update(changed(isolation="weak", step=step))
    assert all("WEAK" in line for line in plain.getvalue().splitlines() if "phase" not in line)


def test_hostile_texts_reach_the_terminal_as_visible_escapes():
    evil = "\x1b[2J\x07\r[red]x[/red]\u202e"
    console, out = terminal()
    snapshot = changed(
        run_id=evil, phase=evil, warnings=(evil,), roles=(RoleState(name=evil, doing=evil, waits_for=evil),)
    )
    console.print(render(snapshot, elapsed_s=1, phase_s=1))
    sample = rollout_sample(task=evil, completion=evil, verdict=evil)
    failed = summary(status="failed", cause=evil, warnings=(evil,), failed_by_cause={evil: 1})
    final_report(console, failed, [sample], run_dir=Path(evil))
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # rich's own colours
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "[red]x[/red]" in text


def test_the_report_shows_rates_examples_ledger_and_places_and_ends_with_the_cause():
    console, out = terminal(200)
    good = rollout_sample(tests=(TestLine(name="t", outcome="passed"),))
    final_report(
        console,
        summary(status="failed", cause="trainer: gave up"),
        [good] * 4,
        run_dir=Path("runs/x"),
        plot=Path("runs/x/reward.png"),
    )
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    for wanted in (
        "+0.300", "Example 3", "return a + b", "1 of 1 tests passed", "Run directory: runs/x\n",
        "Plot: runs/x/reward.png", "issued 10 = trained 7", "2 no_signal",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert "Example 4" not in text
    assert text.rstrip().endswith("Cause: trainer: gave up")


def test_the_report_bounds_the_gains_and_fits_a_terminal_of_80_columns():
    console, out = terminal(80)
    rates = PassRates(heldout_t1=(0.125, 0.25), heldout_greedy=(0.5, 0.25))
    gain = Gain(tasks=32, unpaired=0, before=0.125, after=0.25, gain=0.125, low=0.0315, high=0.2185)
    alone = Gain(tasks=1, unpaired=0, before=0.5, after=0.25, gain=-0.25, low=None, high=None)
    gains = Gains(heldout_t1=gain, heldout_greedy=alone)
    final_report(console, summary(pass_rate=rates, gain=gains), [], run_dir=Path("r"))
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).replace("│", " ") for line in out.getvalue().splitlines()]
    held_out = [" ".join(row.split()) for row in rows if "held-out" in row]
    assert held_out == ["held-out T=1 0.125 0.250 +0.125 +0.032 to +0.218 32", "held-out greedy 0.500 0.250 -0.250 – 1"]


def test_long_completions_are_cut_in_the_report():
    console, out = terminal()
    final_report(console, summary(), [rollout_sample(completion="x\n" * 5000)], run_dir=Path("r"))
    assert "more characters" in out.getvalue()
    assert out.getvalue().count("x") < 500


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75, "1:15"), (3700, "1:01:40"), (-1, "0:00")])
def test_durations_read_as_clocks(seconds: float, text: str):
    assert duration(seconds) == text
