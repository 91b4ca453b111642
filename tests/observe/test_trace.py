"""trace.json: opens at any moment, loses at most what was being written, and never stops a run."""

import json
import resource
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dockyard_actors.observe.idle import read_trace
from dockyard_actors.observe.trace import GROUPS_PID, Span, Tracer, TraceWriter
from dockyard_actors.roles.messages import ReportSpans
from dockyard_actors.runtime.message import decoder, encoder

# The file is made anew by each example, so sharing tmp_path between examples is safe.
SHARED_TMP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
NAMES = st.sampled_from(["generate", "score", "train", "wait_batch", "ünïcode", 'a "quoted" name\n'])
SPANS = st.builds(
    Span,
    name=NAMES,
    start_us=st.integers(0, 60),
    duration_us=st.integers(0, 25),
    lease=st.integers(-1, 3),
    busy=st.booleans(),
    args=st.dictionaries(st.sampled_from(["for", "tokens"]), st.integers(0, 9) | st.text(st.characters(codec="utf-8"))),
)
BATCHES = st.lists(
    st.tuples(st.sampled_from(["trainer", "rollout-0", "rollout-1"]), st.integers(1, 3), st.lists(SPANS, max_size=6)),
    max_size=8,
)


def own(start: int, end: int, name: str = "train", **changes: Any) -> Span:
    return Span(name, start, end - start, **changes)


def new(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def write(path: Path, *batches: tuple[str, int, list[Span]], close: bool = True) -> None:
    writer = TraceWriter(path)
    for role, incarnation, spans in batches:
        writer.append(role, incarnation, spans)
    if close:
        writer.close()


def events_of(path: Path) -> list[dict[str, Any]]:
    """What a viewer that knows strict JSON only reads."""
    return json.loads(path.read_text())


def opened(path: Path) -> list[dict[str, Any]]:
    """What Perfetto reads: it forgives a missing end of the array and the comma before it, nothing else."""
    text = path.read_text().rstrip()
    return json.loads(text if text.endswith("]") else text.rstrip(",") + "]")


def known(path: Path, torn: bool = False) -> set[tuple[Any, ...]]:
    """Every span of the file, without what only one of the two kinds of track keeps."""
    trace = read_trace(path)
    assert torn or not trace.problems
    spans = {(s.role, s.incarnation, s.span.name, s.span.start_us, s.span.duration_us) for s in trace.own}
    return spans | {(g.role, g.span.lease, g.span.name, g.span.start_us, g.span.duration_us) for g in trace.groups}


def told(batches: list[tuple[str, int, list[Span]]]) -> set[tuple[Any, ...]]:
    return {
        (role, incarnation if s.lease < 0 else s.lease, s.name, s.start_us, s.duration_us)
        for role, incarnation, spans in batches
        for s in spans
    }


def assert_drawable(events: list[dict[str, Any]]) -> None:
    """No two spans of a lane overlap unless one lies within the other, ends match beginnings, every row has one name."""
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    depth: dict[tuple[int, str], int] = defaultdict(int)
    names: dict[tuple[str, int, int], str] = {}
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "be":
            assert event["pid"] == GROUPS_PID
            assert event["cat"] == "group"
            depth[event["id"], event["name"]] += 1 if event["ph"] == "b" else -1
            assert depth[event["id"], event["name"]] >= 0
        elif "name" in event.get("args", {}):
            row = (event["name"], event["pid"], event["tid"])
            assert row not in names, "a row has one name, told once"
            names[row] = event["args"]["name"]
    assert not any(depth.values())
    roles = [name for (kind, _, _), name in names.items() if kind == "process_name"]
    assert len(set(roles)) == len(roles)
    assert len({tid for kind, _, tid in names if kind == "thread_name"}) == sum(k == "thread_name" for k, _, _ in names)
    for lane, spans in lanes.items():
        assert ("process_name", lane[0], 0) in names
        assert ("thread_name", *lane) in names
        for i, (start, end) in enumerate(spans):
            for other_start, other_end in spans[i + 1 :]:
                apart = end <= other_start or other_end <= start
                assert (
                    apart or (start <= other_start and other_end <= end) or (other_start <= start and end <= other_end)
                )


@SHARED_TMP
@given(batches=BATCHES)
def test_every_span_comes_back_whatever_the_order_and_each_lane_can_be_drawn(tmp_path: Path, batches):
    path = new(tmp_path / "trace.json")
    write(path, *batches, close=False)
    assert_drawable(opened(path))
    assert known(path) == told(batches)
    assert not read_trace(path).complete
    new(path)
    write(path, *batches)
    assert_drawable(events_of(path))
    assert known(path) == told(batches)
    assert read_trace(path).complete


@SHARED_TMP
@given(batches=BATCHES, more=BATCHES, cut=st.integers(0, 2000), closed=st.booleans())
def test_a_crash_at_any_byte_costs_the_line_under_way_and_the_next_writer_goes_on(
    tmp_path: Path, batches, more, cut, closed
):
    path = new(tmp_path / "trace.json")
    write(path, *batches, close=closed)
    raw = path.read_bytes()
    path.write_bytes(raw[: max(0, len(raw) - cut)])
    standing = known(path, torn=True)
    assert standing <= told(batches)
    assert cut or standing == told(batches)
    write(path, *more)
    assert_drawable_again(events_of(path))
    assert known(path) == standing | told(more)


def assert_drawable_again(events: list[dict[str, Any]]) -> None:
    """As `assert_drawable`, for times that run anew after a restart: real clocks go on, these examples begin at zero again."""
    assert_drawable([e for e in events if e["ph"] != "X"] or events)
    pids = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert {e["pid"] for e in events if e["ph"] == "X"} <= pids


def test_a_restarted_controller_goes_on_in_the_same_rows(tmp_path: Path):
    path = tmp_path / "trace.json"
    write(path, ("trainer", 1, [own(0, 9)]), ("rollout-0", 1, [own(0, 5, "generate")]))
    write(path, ("rollout-0", 1, [own(10, 15, "generate")]), ("broker", 1, [own(10, 11, "score")]), close=False)
    write(path, ("trainer", 1, [own(20, 29)]), ("trainer", 2, [own(30, 39)]))
    events = events_of(path)
    assert_drawable(events)
    rows = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert rows == {"groups": 1, "trainer": 2, "rollout-0": 3, "broker": 4}
    trains = [e for e in events if e["ph"] == "X" and e["pid"] == rows["trainer"]]
    assert [e["ts"] for e in trains] == [0, 20, 30]
    assert trains[0]["tid"] == trains[1]["tid"] != trains[2]["tid"]


def test_the_file_is_one_event_a_line_and_on_disk_when_append_returns(tmp_path: Path):
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    assert path.read_text().startswith("[\n")
    writer.append("trainer", 1, [own(1, 3, args={"for": "line\nbreak"})])
    lines = path.read_text().splitlines()
    assert [json.loads(line.rstrip(","))["ph"] for line in lines[1:]] == ["M", "M", "M", "M", "M", "X"]
    writer.append("trainer", 1, [])
    assert path.read_text().splitlines() == lines
    writer.close()
    writer.close()
    assert path.read_text().endswith("\n]\n")


def test_the_way_of_a_group_is_one_track_in_the_order_of_its_stages(tmp_path: Path):
    path = tmp_path / "trace.json"
    write(
        path,
        ("buffer", 1, [own(30, 50, "buffered", lease=7)]),
        ("rollout-0", 1, [own(0, 10, "generate", lease=7, args={"tokens": 5}), own(10, 30, "score", lease=7)]),
        ("trainer", 1, [own(50, 60, "train", lease=7)]),
    )
    events = events_of(path)
    track = sorted((e for e in events if e.get("id") == 7), key=lambda e: e["ts"])
    assert {(e["pid"], e["cat"], e["id"]) for e in track} == {(GROUPS_PID, "group", 7)}
    assert [e["name"] for e in track if e["ph"] == "b"] == ["generate", "score", "buffered", "train"]
    assert next(e for e in track if e["name"] == "generate")["args"] == {"role": "rollout-0", "tokens": 5}


def test_spans_at_the_same_time_get_lanes_of_their_own_and_a_name_keeps_its_lane(tmp_path: Path):
    path = tmp_path / "trace.json"
    steps = [[own(10 * i, 10 * i + 10), own(10 * i + 2, 10 * i + 8, "wait_batch", busy=False)] for i in range(4)]
    write(path, *(("trainer", 1, spans) for spans in steps))
    lanes: dict[str, set[int]] = defaultdict(set)
    for event in events_of(path):
        if event["ph"] == "X":
            lanes[event["name"]].add(event["tid"])
            assert event["cat"] == ("wait" if event["name"] == "wait_batch" else "busy")
    assert [len(tids) for tids in lanes.values()] == [1, 1]
    assert not set.intersection(*lanes.values())


# ---- disks


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """A file of this process can grow to `size` bytes and no further: writes fail part of the way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_spans_that_are_counted_and_said_once(tmp_path: Path):
    path = tmp_path / "trace.json"
    said: list[str] = []
    writer = TraceWriter(path, warn=said.append)
    writer.append("trainer", 1, [own(0, 1)])
    whole = path.read_bytes()
    with files_at_most(len(whole) + 70):
        for i in (2, 4):
            writer.append("trainer", 1, [own(i, i + 1), own(i + 1, i + 2)])
        assert path.read_bytes() == whole, "no half of a line stays"
    assert writer.lost == 4
    assert len(said) == 1
    assert str(path) in said[0]
    writer.append("trainer", 1, [own(8, 9)])
    writer.close()
    events = events_of(path)
    assert [e["ts"] for e in events if e["ph"] == "X"] == [0, 8]
    assert events[-1]["args"] == {"spans_lost": 4}


def test_rows_that_a_full_disk_left_out_are_named_when_there_is_room_again(tmp_path: Path):
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    with files_at_most(path.stat().st_size + 10):
        writer.append("trainer", 1, [own(0, 1)])
    writer.append("trainer", 1, [own(2, 3)])
    writer.close()
    assert_drawable(events_of(path))
    assert known(path) == {("trainer", 1, "train", 2, 1)}


def test_a_place_that_cannot_be_written_stops_nothing_and_is_tried_again(tmp_path: Path):
    said: list[str] = []
    writer = TraceWriter(tmp_path / "later" / "trace.json", warn=said.append)
    writer.append("trainer", 1, [own(0, 1)])
    assert (writer.lost, len(said)) == (1, 1)
    (tmp_path / "later").mkdir()
    writer.append("trainer", 1, [own(2, 3)])
    writer.close()
    assert known(tmp_path / "later" / "trace.json") == {("trainer", 1, "train", 2, 1)}
    (tmp_path / "directory").mkdir()
    TraceWriter(tmp_path / "directory").close()


def test_a_trace_stops_at_its_limit_and_stays_whole(tmp_path: Path):
    path = tmp_path / "trace.json"
    writer = TraceWriter(path, limit_bytes=2000)
    for i in range(100):
        writer.append("trainer", 1, [own(i, i + 1)])
    writer.close()
    kept = sum(e["ph"] == "X" for e in events_of(path))
    assert 0 < kept < 100
    assert kept + writer.lost == 100


def test_a_file_that_is_no_trace_is_set_aside(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_text("precious\n")
    write(path, ("trainer", 1, [own(0, 1)]))
    assert (tmp_path / "trace.damaged.json").read_text() == "precious\n"
    assert known(path) == {("trainer", 1, "train", 0, 1)}


# ---- tracer


def test_a_tracer_gives_spans_back_oldest_first_and_counts_what_overflowed():
    tracer = Tracer(limit=3)
    for i in range(5):
        tracer.add(f"s{i}", i, i + 0.5)
    assert tracer.lost == 2
    assert [s.name for s in tracer.drain(2)] == ["s2", "s3"]
    (last,) = tracer.drain()
    assert last == Span("s4", 4_000_000, 500_000)
    assert tracer.drain() == ()


def test_spans_that_adjoin_in_seconds_adjoin_in_microseconds():
    tracer = Tracer()
    times = np.cumsum(np.random.default_rng(0).exponential(0.01, 200)) + 1.7e9
    for start, end in pairwise(times):
        tracer.add("step", start, end)
    spans = tracer.drain()
    assert all(a.end_us == b.start_us for a, b in pairwise(spans))


def test_a_block_is_traced_also_when_it_raises_and_may_add_to_its_args():
    tracer = Tracer()

    def work() -> None:
        with tracer.span("train", lease=3, step=1) as args:
            args["tokens"] = 5
            raise KeyError

    with pytest.raises(KeyError):
        work()
    (span,) = tracer.drain()
    assert (span.name, span.lease, span.args) == ("train", 3, {"step": 1, "tokens": 5})
    assert span.duration_us >= 0


def test_an_end_before_its_start_is_no_negative_length():
    tracer = Tracer()
    tracer.add("sync", 5.0, 4.0)
    assert tracer.drain()[0].duration_us == 0


def test_whatever_a_role_puts_into_args_travels_and_is_written(tmp_path: Path):
    tracer = Tracer()
    tracer.add(
        "generate", 1, 2, i=np.int64(3), f=np.float32(0.5), nan=float("nan"), inf=np.float64("inf"), yes=True,
        surrogate="\ud800", long="x" * 10_000, array=np.zeros(3), nothing=None,
    )  # fmt: skip
    message = ReportSpans(role="rollout-0", incarnation=1, spans=tracer.drain())
    arrived = decoder(ReportSpans).decode(encoder.encode(message))
    assert arrived == message
    write(tmp_path / "trace.json", (arrived.role, arrived.incarnation, list(arrived.spans)))
    args = events_of(tmp_path / "trace.json")[-2]["args"]
    assert (args["i"], args["f"], args["nan"], args["inf"], args["yes"]) == (3, 0.5, "nan", "inf", 1)
    assert args["surrogate"] == "\\ud800"
    assert len(args["long"]) < 1000


def test_threads_lose_no_span_between_them():
    tracer, rounds = Tracer(limit=100_000), 2000
    taken: list[Span] = []

    def add(name: str) -> None:
        for i in range(rounds):
            tracer.add(name, i, i + 1)

    threads = [threading.Thread(target=add, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += tracer.drain(100)
    while spans := tracer.drain(100):
        taken += spans
    for thread in threads:
        thread.join()
        mine = [s.start_us for s in taken if s.name == f"t{threads.index(thread)}"]
        assert mine == [i * 1_000_000 for i in range(rounds)]


def test_a_wait_says_for_whom():
    tracer = Tracer()
    with tracer.waiting("wait_batch", "buffer"):
        pass
    (span,) = tracer.drain()
    assert (span.name, span.busy, span.args) == ("wait_batch", False, {"for": "buffer"})


@pytest.mark.parametrize(
    "line",
    [
        b'{"ph":"M","name":"process_name","pid":9,"tid":0},\n',
        b'{"ph":"M","name":"thread_name","pid":9,"tid":0,"args":{"incarnation":[1]}},\n',
        b'{"ph":"M","name":"process_name","pid":"x"},\n',
    ],
)
def test_a_damaged_name_of_a_row_stops_neither_a_resume_nor_a_reader(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"[\n" + line)
    writer = TraceWriter(path)
    writer.append("trainer", 1, [Span("train", 1_000_000, 500)])
    writer.close()
    assert [own.span.name for own in read_trace(path).own] == ["train"]
