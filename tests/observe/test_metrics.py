"""metrics.jsonl: every number comes back or says why not; a crash costs at most the line being written."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dockyard_actors.observe.metrics import EvalRecord, EventRecord, MetricsWriter, read_metrics
from tests.observe.samples import step_record

# The file is made anew by each example, so sharing tmp_path between examples is safe.
SHARED_TMP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
REASONS = {"nan": math.isnan, "inf": lambda v: v == math.inf, "-inf": lambda v: v == -math.inf}


def evaluation(step: int, split: str, mode: str, rate: float | None) -> EvalRecord:
    return EvalRecord(step=step, split=split, mode=mode, pass_rate=rate, samples=8, tasks=3, seconds=1.0)  # type: ignore[arg-type]


@SHARED_TMP
@given(loss=ANY_FLOAT, diagnostics=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), ANY_FLOAT))
def test_numbers_come_back_exactly_or_as_null_with_their_reason(tmp_path: Path, loss, diagnostics):
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    with MetricsWriter(path) as writer:
        writer.write(step_record(loss=loss, diagnostics=diagnostics))
    json.loads(path.read_text(), parse_constant=pytest.fail)  # no NaN or Infinity literals
    (record,) = read_metrics(path).steps
    wanted = {"loss": loss} | {f"diagnostics.{key}": value for key, value in diagnostics.items()}
    got = {"loss": record.loss} | {f"diagnostics.{key}": value for key, value in record.diagnostics.items()}
    for key, value in wanted.items():
        if math.isfinite(value):
            assert got[key] == value
            assert key not in record.not_finite
        else:
            assert got[key] is None
            assert REASONS[record.not_finite[key]](value)
    assert set(record.not_finite) <= set(wanted)


@SHARED_TMP
@given(text=st.text(st.characters()), name=st.text(st.characters()))
def test_an_event_is_one_line_whatever_its_text_holds(tmp_path: Path, text: str, name: str):
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    with MetricsWriter(path) as writer:
        writer.event("e", text, value={name: text})
    assert path.read_bytes().count(b"\n") == 1
    (event,) = read_metrics(path).events
    assert event.text == text.encode("utf-8", "backslashreplace").decode()


@SHARED_TMP
@given(cut=st.integers(min_value=1, max_value=300))
def test_a_torn_last_line_is_said_by_the_reader_and_cut_by_the_next_writer(tmp_path: Path, cut: int):
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    with MetricsWriter(path) as writer:
        writer.write(step_record(1))
        writer.write(step_record(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    log = read_metrics(path)
    assert log.torn
    assert [r.step for r in log.steps] == [1]
    assert "torn" in log.problems[-1]
    with MetricsWriter(path) as writer:
        writer.write(step_record(2))
    log = read_metrics(path)
    assert not log.torn
    assert not log.problems
    assert [r.step for r in log.steps] == [1, 2]
    assert [e.name for e in log.events] == ["torn_line_cut"]


def test_numpy_and_torch_like_scalars_are_numbers(tmp_path: Path):
    path = tmp_path / "m"
    values = {"f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True), "a": np.array(2.0), "n": np.float16("nan")}
    with MetricsWriter(path) as writer:
        writer.write(step_record(loss=np.float64(1.25), diagnostics=values))
    (record,) = read_metrics(path).steps
    assert record.loss == 1.25
    assert record.diagnostics == {"f": 0.5, "i": 3, "b": True, "a": 2.0, "n": None}
    assert record.not_finite == {"diagnostics.n": "nan"}


@pytest.mark.parametrize("value", [object(), np.zeros(2), {1, 2}, 1j])
def test_a_value_that_is_no_number_is_refused_by_name_and_writes_nothing(tmp_path: Path, value):
    path = tmp_path / "m"
    with MetricsWriter(path) as writer, pytest.raises(TypeError, match=r"diagnostics\.odd"):
        writer.write(step_record(diagnostics={"odd": value}))
    assert path.read_bytes() == b""


@pytest.mark.parametrize("wrong", [{"age_max": 1.5}, {"tokens_trained": math.nan}, {"loss": "low"}, {"seconds": None}])
def test_a_record_that_no_reader_could_decode_is_refused_and_writes_nothing(tmp_path: Path, wrong):
    path = tmp_path / "m"
    with MetricsWriter(path) as writer, pytest.raises(TypeError, match=next(iter(wrong))):
        writer.write(step_record(**wrong))
    assert path.read_bytes() == b""


def test_damaged_and_unknown_lines_are_named_and_the_rest_is_read(tmp_path: Path):
    path = tmp_path / "m"
    with MetricsWriter(path) as writer:
        writer.write(step_record(1))
    with path.open("ab") as file:
        file.write(b'{"kind":"step","step":"two"}\n\xff\xfe\n{"kind":"from_the_future"}\n\n[1]\n')
    with MetricsWriter(path) as writer:
        writer.write(step_record(2))
    log = read_metrics(path)
    assert [r.step for r in log.steps] == [1, 2]
    assert [p.split(" cannot")[0] for p in log.problems] == ["line 2", "line 3", "line 4", "line 6"]


def test_fields_of_a_newer_version_are_tolerated(tmp_path: Path):
    path = tmp_path / "m"
    path.write_text('{"kind":"event","name":"e","text":"","novel":{"x":1}}\n')
    assert read_metrics(path).events == (EventRecord(name="e"),)


def test_a_rollback_makes_later_steps_void_and_a_repeated_step_replaces_the_first(tmp_path: Path):
    path = tmp_path / "m"
    with MetricsWriter(path) as writer:
        for step in (1, 2, 3, 4):
            writer.write(step_record(step, loss=0.1))
        writer.write(evaluation(0, "heldout", "t1", 0.1))
        writer.write(evaluation(4, "heldout", "t1", 0.9))
        writer.resumed(2)
        writer.write(step_record(3, loss=0.2))
        writer.write(step_record(3, loss=0.3))
    log = read_metrics(path)
    assert [(r.step, r.loss) for r in log.steps] == [(1, 0.1), (2, 0.1), (3, 0.3)]
    assert log.rolled_back == 4
    assert log.eval_pair("heldout", "t1") == (0.1, None)


def test_before_is_the_evaluation_at_step_0_and_after_the_last_one(tmp_path: Path):
    path = tmp_path / "m"
    with MetricsWriter(path) as writer:
        for step, rate in ((0, 0.2), (5, 0.3), (10, 0.6)):
            writer.write(evaluation(step, "train", "t1", rate))
        writer.write(evaluation(10, "train", "greedy", 0.7))
        writer.write(evaluation(0, "heldout", "greedy", 0.4))
    log = read_metrics(path)
    assert log.eval_pair("train", "t1") == (0.2, 0.6)
    assert log.eval_pair("train", "greedy") == (None, 0.7)
    assert log.eval_pair("heldout", "greedy") == (0.4, None)
    assert log.eval_pair("heldout", "t1") == (None, None)


def test_a_missing_file_reads_as_empty_and_is_named(tmp_path: Path):
    log = read_metrics(tmp_path / "none")
    assert not log.steps
    assert "does not exist" in log.problems[0]


def test_a_line_is_on_disk_as_soon_as_write_returns(tmp_path: Path):
    path = tmp_path / "m"
    writer = MetricsWriter(path, clock=lambda: 12.0)
    writer.write(step_record(1))
    assert read_metrics(path).steps[0].time == 12.0
    writer.close()
    writer.close()
