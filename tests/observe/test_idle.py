"""Idle figures are those of the spans, however these overlap, also when the trace has no end."""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from dockyard_actors.cli import OK, USAGE, main
from dockyard_actors.observe.idle import IdleError, idle_report, quantile, read_trace, render_idle, union
from dockyard_actors.observe.rundir import RunDir
from dockyard_actors.observe.trace import Span, TraceWriter

SHARED_TMP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
SECOND = 1_000_000
TIMES = st.integers(0, 40)
OWN = st.builds(
    lambda role, name, start, length, busy, whom: (
        role,
        Span(name, start, length, busy=busy, args={"for": whom} if whom and not busy else {}),
    ),
    st.sampled_from(["trainer", "rollout-0", "broker"]),
    st.sampled_from(["generate", "score", "train", "other"]),
    TIMES,
    TIMES,
    st.booleans(),
    st.sampled_from(["", "buffer", "engines"]),
)


def seconds(start: float, end: float, name: str, **changes: Any) -> Span:
    return Span(name, round(start * SECOND), round((end - start) * SECOND), **changes)


def trace_of(path: Path, spans: list[tuple[str, Span]], close: bool = True) -> Path:
    path.unlink(missing_ok=True)
    writer = TraceWriter(path)
    for role, span in spans:
        writer.append(role, 1, [span])
    if close:
        writer.close()
    return path


def waits(start: float, end: float, whom: str) -> Span:
    return seconds(start, end, "wait", busy=False, args={"for": whom})


STEPS = [
    # two whole steps of 10 s after the first one ended at 10: train 4 s, wait 5 s, 1 s of nothing
    *[("trainer", span) for t in (0, 10, 20) for span in (waits(t + 1, t + 6, "buffer"), seconds(t + 6, t + 10, "train"))],
    # generates in 8 of 10 s; scoring goes on in 2 of 10, half of it while generating, none while training
    *[("rollout-0", seconds(t, t + 8, "generate")) for t in (0, 10, 20)],
    *[("broker", seconds(t + 3, t + 4, "score")) for t in (0, 10, 20)],
    ("broker", seconds(18, 19, "score")),
]  # fmt: skip


def test_shares_of_whole_training_steps(tmp_path: Path):
    report = idle_report(trace_of(tmp_path / "trace.json", STEPS))
    window = report.training
    assert window is not None
    assert (window.wall_s, report.steps, report.complete) == (20.0, 3, True)
    trainer, rollout, broker = (window.roles[name] for name in ("trainer", "rollout-0", "broker"))
    assert (trainer.busy_s, trainer.waiting_s, trainer.idle_s) == (8.0, 10.0, 2.0)
    assert trainer.by_name == {"train": 8.0}
    assert trainer.waits == {"buffer": 10.0}
    assert (rollout.busy_share, rollout.waiting_s) == (0.8, 0.0)
    assert (broker.busy_s, broker.busy_share) == (3.0, 0.15)
    overlap = window.overlap
    assert overlap.each == {"generate": 0.8, "score": 0.15, "train": 0.4}
    # per step: generate and train share 6 to 8; generate and score share 3 to 4; 18 to 19 is score and train
    assert overlap.together == pytest.approx({"generate+score": 0.1, "generate+train": 0.2, "score+train": 0.05})
    assert overlap.two_or_more == pytest.approx(0.35)
    assert report.whole.wall_s == 30.0


@SHARED_TMP
@given(items=st.lists(OWN, min_size=1, max_size=14))
def test_every_figure_is_what_counting_microseconds_gives(tmp_path: Path, items):
    start, end = min(s.start_us for _, s in items), max(s.end_us for _, s in items)
    path = trace_of(tmp_path / "trace.json", items)
    if start == end:
        with pytest.raises(IdleError, match="length"):
            idle_report(path)
        return

    def covered(*chosen: Span) -> np.ndarray:
        grid = np.zeros(end - start, bool)
        for span in chosen:
            grid[span.start_us - start : span.end_us - start] = True
        return grid

    window = idle_report(path).whole
    assert window.wall_s == pytest.approx((end - start) / SECOND)
    for role in {role for role, _ in items}:
        mine = [s for r, s in items if r == role]
        busy = covered(*(s for s in mine if s.busy))
        waiting = covered(*(s for s in mine if not s.busy)) & ~busy
        got = window.roles[role]
        assert got.busy_s == pytest.approx(busy.sum() / SECOND)
        assert got.waiting_s == pytest.approx(waiting.sum() / SECOND)
        assert got.busy_s + got.waiting_s + got.idle_s == pytest.approx(window.wall_s)
        assert got.busy_share == pytest.approx(busy.mean())
        for name in {s.name for s in mine}:
            alone = covered(*(s for s in mine if s.busy and s.name == name)).sum() / SECOND
            assert got.by_name.get(name, 0.0) == pytest.approx(alone)
        for whom in {str(s.args.get("for", s.name)) for s in mine if not s.busy}:
            its = covered(*(s for s in mine if not s.busy and str(s.args.get("for", s.name)) == whom)) & ~busy
            assert got.waits.get(whom, 0.0) == pytest.approx(its.sum() / SECOND)
    work = {n: covered(*(s for _, s in items if s.busy and s.name == n)) for n in ("generate", "score", "train")}
    assert window.overlap.each == pytest.approx({name: grid.mean() for name, grid in work.items()})
    assert window.overlap.two_or_more == pytest.approx((sum(g.astype(int) for g in work.values()) >= 2).mean())
    for pair, share in window.overlap.together.items():
        a, b = pair.split("+")
        assert share == pytest.approx((work[a] & work[b]).mean(), abs=1e-12)


@given(st.lists(st.tuples(TIMES, TIMES).map(lambda pair: (min(pair), max(pair)))))
def test_a_union_is_ordered_disjoint_and_covers_the_same(intervals):
    merged = union(intervals, (5, 30))
    assert {t for a, b in merged for t in range(a, b)} == {t for a, b in intervals for t in range(a, b) if 5 <= t < 30}
    assert all(a < b for a, b in merged)
    assert all(left[1] < right[0] for left, right in pairwise(merged))


@given(st.lists(st.integers(0, 1000), min_size=1), st.floats(0, 1))
def test_a_quantile_is_numpys(values, q):
    assert quantile(sorted(values), q) == pytest.approx(np.quantile(values, q))


def test_the_way_of_groups_is_told_stage_by_stage(tmp_path: Path):
    spans: list[tuple[str, Span]] = []
    for lease in range(11):
        spans += [
            ("rollout-0", seconds(0, lease, "generate", lease=lease)),
            ("rollout-0", seconds(20, 21, "generate", lease=lease)),  # it was aborted and taken up again
            ("buffer", seconds(25, 30, "buffered", lease=lease)),
            ("rollout-0", seconds(21, 25, "novel", lease=lease)),
        ]
    report = idle_report(trace_of(tmp_path / "trace.json", spans))
    assert list(report.stages) == ["generate", "buffered", "novel", "way"]
    generate, way = report.stages["generate"], report.stages["way"]
    assert (generate.groups, generate.median_s, generate.p90_s) == (11, 6.0, 10.0)
    assert (way.median_s, way.p90_s) == (30.0, 30.0)
    assert report.training is None
    assert not report.whole.roles


def test_a_span_that_was_told_twice_counts_once(tmp_path: Path):
    group = seconds(0, 2, "generate", lease=4)
    twice = [("rollout-0", seconds(0, 2, "generate")), ("rollout-0", group)] * 2
    report = idle_report(trace_of(tmp_path / "trace.json", twice))
    assert report.spans == 2
    assert report.stages["generate"].median_s == 2.0


def test_what_an_evaluator_generates_is_its_own_time_and_no_overlap(tmp_path: Path):
    spans = [("trainer", seconds(0, 1, "train")), ("evaluator", seconds(0, 2, "generate"))]
    window = idle_report(trace_of(tmp_path / "trace.json", spans)).whole
    assert window.roles["evaluator"].busy_share == 1.0
    assert (window.overlap.each["generate"], window.overlap.two_or_more) == (0.0, 0.0)


def test_waits_of_the_same_time_for_different_peers_are_two(tmp_path: Path):
    spans = [("trainer", waits(0, 1, "buffer")), ("trainer", waits(0, 1, "engines"))]
    report = idle_report(trace_of(tmp_path / "trace.json", spans))
    assert report.whole.roles["trainer"].waits == {"buffer": 1.0, "engines": 1.0}


def test_incarnations_of_a_role_are_one_role(tmp_path: Path):
    writer = TraceWriter(tmp_path / "trace.json")
    writer.append("trainer", 1, [seconds(0, 1, "train")])
    writer.append("trainer", 2, [seconds(3, 4, "train")])
    trace = read_trace(tmp_path / "trace.json")
    assert [s.incarnation for s in trace.own] == [1, 2]
    assert idle_report(tmp_path / "trace.json").whole.roles["trainer"].busy_share == 0.5


def test_damaged_lines_and_half_spans_are_named_and_the_rest_counts(tmp_path: Path):
    path = trace_of(tmp_path / "trace.json", [("trainer", seconds(0, 1, "train"))], close=False)
    with path.open("ab") as file:
        file.write(b'\xff\n{"ph":"b","name":"generate","pid":1,"tid":0,"id":3},\n{"ph":"X","name":"torn')
    report = idle_report(path)
    assert report.whole.roles["trainer"].busy_share == 1.0
    assert [problem.split()[0] for problem in report.problems] == ["1", "1"]
    assert not report.complete
    out = io.StringIO()
    render_idle(report, Console(file=out, width=200))
    assert out.getvalue().count("problem: ") == 2
    assert "no end" in out.getvalue()


# ---- command line


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "r")
    run.close()
    return run


def test_the_command_prints_a_table_and_json_of_an_unfinished_run(run: RunDir, capsys: pytest.CaptureFixture[str]):
    group = ("buffer", seconds(1, 3, "buffered", lease=0))
    trace_of(run.trace, [*STEPS, group], close=False)
    assert main(["inspect", str(run.path), "--idle", "--json"]) == OK
    data = json.loads(capsys.readouterr().out)
    assert data["training"]["roles"]["trainer"]["waits"] == {"buffer": 10.0}
    assert data["stages"]["buffered"]["median_s"] == 2.0
    assert main(["inspect", str(run.path), "--idle"]) == OK
    out = " ".join(capsys.readouterr().out.split())
    assert "trainer 40 % 50 % 10 %" in out
    assert "two or more 35 % of the time" in out
    assert "buffered 1 2.000 2.000" in out


@pytest.mark.parametrize(("content", "why"), [(None, "does not exist"), ("[\n", "no spans yet"), ("", "no spans yet")])
def test_a_run_without_spans_is_told_plainly(run: RunDir, capsys: pytest.CaptureFixture[str], content, why: str):
    if content is not None:
        run.trace.write_text(content)
    assert main(["inspect", str(run.path), "--idle"]) == USAGE
    err = capsys.readouterr().err
    assert why in err
    assert "Traceback" not in err


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(tmp_path), "--idle"]) == USAGE
    assert "not a run directory" in capsys.readouterr().err


def test_names_from_a_trace_reach_the_terminal_without_control_codes(tmp_path: Path):
    path = trace_of(tmp_path / "trace.json", [("ro\x1b[31mle", seconds(0, 1, "na\x1b[2Jme[red]"))])
    out = io.StringIO()
    render_idle(idle_report(path), Console(file=out, width=200, force_terminal=True, color_system=None))
    assert "\x1b" not in out.getvalue()
    assert "na\\x1b[2Jme[red]" in out.getvalue()


def test_the_time_between_an_interruption_and_a_resume_is_nobodys_idle_time(tmp_path: Path) -> None:
    def session(start: float) -> list[tuple[str, Span]]:
        return [
            (role, Span(s.name, s.start_us + round(start * SECOND), s.duration_us, busy=s.busy, args=s.args))
            for role, s in STEPS
        ]

    whole = idle_report(trace_of(tmp_path / "a.json", session(0))).training
    twice = idle_report(trace_of(tmp_path / "b.json", [*session(0), *session(500)]))
    window = twice.training
    assert whole is not None
    assert window is not None
    assert window.away_s == 470.0
    assert window.wall_s == 50.0, "five steps of 10 s, from the end of the first"
    for time in window.roles.values():
        assert time.busy_s + time.waiting_s + time.idle_s == pytest.approx(window.wall_s)
    trainer, alone = window.roles["trainer"], whole.roles["trainer"]
    assert trainer.idle_s / window.wall_s == pytest.approx(alone.idle_s / whole.wall_s, abs=0.03)
    assert "7:50 in which nothing ran left out" in _rendered(twice)
    assert "left out" not in _rendered(idle_report(tmp_path / "a.json"))


def _rendered(report: Any) -> str:
    out = io.StringIO()
    render_idle(report, Console(file=out, width=200))
    return out.getvalue()
