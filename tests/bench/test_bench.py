from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from bench import harness
from bench.__main__ import main, names, table
from bench.harness import Options, Span


def test_benchmarks_are_found_by_the_name_of_their_module():
    assert {"control", "trainstep"} <= set(names())
    assert not {"harness", "__main__"} & set(names())


SLOW = {"overlap", "weights"}  # whole runs, a model of some size
HANG_S = 900.0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in names()]
)
def test_every_benchmark_runs_at_a_tiny_size_and_gives_whole_figures(name: str):
    figures = tiny(name, "--peers", "none")
    assert figures
    for figure in figures.values():
        assert set(figure) == {"value", "unit", "detail"}
        assert figure["value"] is not None or figure["detail"]["reason"]
    assert all(key in table(figures) for key in figures)


def tiny(name: str, *more: str) -> dict[str, harness.Figure]:
    command = [sys.executable, "-m", "bench", name, "--json", "--size", "tiny", "--rounds", "1", *more]
    root = Path(bench.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_unknown_name_lists_the_names(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["trainsteps"])
    said = capsys.readouterr().err
    assert all(name in said for name in names())


def test_with_json_one_object_alone_goes_to_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    module = importlib.import_module("bench.trainstep")
    monkeypatch.setattr(module, "run", lambda options: {"key": harness.figure(options.rounds, "rounds", a=1)})
    assert main(["trainstep", "--json", "--rounds", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == {"key": {"value": 3.0, "unit": "rounds", "detail": {"a": 1}}}


def test_a_peer_that_is_not_installed_gives_null_and_the_reason():
    reason = harness.missing_peer("no_such_module_anywhere")
    assert reason is not None
    assert "no_such_module_anywhere" in reason
    assert harness.missing_peer("json") is None
    figures = {"key": harness.absent("x", reason)}
    assert figures["key"]["value"] is None
    assert reason in table(figures)


def test_sides_run_in_turn_and_a_ratio_is_the_median_of_the_rounds_own():
    ran: list[str] = []
    spans = harness.alternate({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, rounds=3)
    assert ran == ["a", "b"] * 4  # the first of each is not timed
    assert {name: len(found) for name, found in spans.items()} == {"a": 3, "b": 3}
    slow, fast = [Span(2, 8), Span(9, 9), Span(40, 8)], [Span(1, 4), Span(3, 3), Span(10, 1)]
    assert harness.ratio(slow, fast) == 3
    assert harness.ratio(slow, fast, "cpu") == 3


def test_options_that_cannot_be_are_refused_by_name():
    with pytest.raises(ValueError, match="rounds"):
        Options(rounds=0)
