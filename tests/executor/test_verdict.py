"""The verdict as a pure function of event bytes, exit status and tests: no process is started here."""

from __future__ import annotations

import enum
import hashlib
import json
import signal
from collections import Counter, defaultdict
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from dockyard_executor import judge, values
from dockyard_executor.config import Limits
from dockyard_executor.verdict import Run, Test, apply_twin, evidence_hash, parse_events, read, result
from hypothesis import given
from hypothesis import strategies as st

KEY = bytes(range(32))
TESTS = (Test("tests[0]", "assert f(1) == 2", False), Test("hidden_tests[0]", "assert f(1) == 2 or f(1) == 3", True))
PLANS = [judge.plan(test.source, frozenset()) for test in TESTS]
LIMITS = Limits()
LOAD = {"k": "load", "ok": True}
VALUE = {"k": "test", "i": 0, "o": "value", "v": ["2"]}
PASSED = {"k": "test", "i": 1, "o": "passed"}
END = {"k": "end", "changed": []}


def chain(*events: dict[str, Any], key: bytes = KEY) -> bytes:
    out, previous = b"", b""
    for number, event in enumerate(events):
        body = json.dumps({"n": number, **event}).encode()
        previous = hashlib.blake2b(previous + body, key=key, digest_size=16).hexdigest().encode()
        out += previous + b" " + body + b"\n"
    return out


def run(events: bytes, status: int = 0, ended: Any = "", cpu_s: float = 0.01) -> Run:
    return Run(KEY, events, status, ended, b"", b"", 0.02, cpu_s, timeout_s=5.0, cpu_limit_s=6.0)


def test_a_complete_chain_with_the_right_value_passes() -> None:
    reading = read(run(chain(LOAD, VALUE, PASSED, END)), TESTS, PLANS, LIMITS)
    assert (reading.state, reading.error) == ("ok", "")
    assert [outcome.outcome for outcome in reading.outcomes] == ["passed", "passed"]


def test_a_wrong_value_fails_and_names_what_was_expected() -> None:
    reading = read(run(chain(LOAD, {**VALUE, "v": ["3"]}, PASSED, END)), TESTS, PLANS, LIMITS)
    assert reading.outcomes[0].outcome == "failed"
    assert reading.outcomes[0].message == "f(1) was 3; expected f(1) == 2"


GOOD = [LOAD, VALUE, PASSED, END]


@pytest.mark.parametrize(
    "events",
    [
        [],
        [LOAD],
        [LOAD, VALUE, END],
        [LOAD, VALUE, PASSED],
        [VALUE, PASSED, END],
        [LOAD, PASSED, VALUE, END],
        [LOAD, VALUE, VALUE, PASSED, END],
        [LOAD, VALUE, PASSED, PASSED, END],
        [LOAD, VALUE, PASSED, END, END],
        [LOAD, LOAD, VALUE, PASSED, END],
        [LOAD, {**VALUE, "o": "passed"}, PASSED, END],  # a value test that only claims
        [LOAD, VALUE, {**PASSED, "o": "value", "v": ["1"]}, END],
        [LOAD, VALUE, {**PASSED, "o": "excellent"}, END],
        [LOAD, {**VALUE, "v": []}, PASSED, END],
        [LOAD, {**VALUE, "v": ["2", "2"]}, PASSED, END],
        [LOAD, {**VALUE, "v": "2"}, PASSED, END],
        [LOAD, {**VALUE, "v": [2]}, PASSED, END],
        [LOAD, {**VALUE, "v": ['{"x":1}']}, PASSED, END],
        [LOAD, {**VALUE, "n": 7}, PASSED, END],
        [LOAD, VALUE, PASSED, {**END, "changed": ["len"]}],
        [LOAD, {"k": "test"}, PASSED, END],
        [{"k": "hello"}],
    ],
)
def test_any_other_sequence_is_untrusted(events: list[dict[str, Any]]) -> None:
    assert read(run(chain(*events)), TESTS, PLANS, LIMITS).state == "untrusted"


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_changed_byte_breaks_the_chain(position: int, change: int) -> None:
    good = bytearray(chain(*GOOD))
    good[position % len(good)] ^= change
    assert parse_events(bytes(good), KEY)[1] != ""


@given(st.binary(max_size=300))
def test_bytes_of_a_stranger_never_pass(noise: bytes) -> None:
    for raw in (noise, noise + chain(*GOOD), chain(*GOOD) + noise):
        reading = read(run(raw), TESTS, PLANS, LIMITS)
        assert reading.state == "untrusted" or not noise


def test_another_key_or_a_cut_line_is_a_fault() -> None:
    assert read(run(chain(*GOOD, key=b"x" * 32)), TESTS, PLANS, LIMITS).state == "untrusted"
    assert read(run(chain(*GOOD)[:-1]), TESTS, PLANS, LIMITS).state == "untrusted"


@pytest.mark.parametrize(
    ("status", "ended", "cpu_s", "state", "error"),
    [
        (signal.SIGKILL, "timeout", 0.0, "timeout", "time limit of 5 s reached in hidden_tests[0]"),
        (signal.SIGXCPU, "", 6.0, "timeout", "CPU time limit of 6 s reached in hidden_tests[0]"),
        (signal.SIGKILL, "", 7.0, "timeout", "CPU time limit of 6 s reached in hidden_tests[0]"),
        (signal.SIGKILL, "output", 0.1, "ok", "output limit of 1 MiB reached in hidden_tests[0]"),
        (signal.SIGKILL, "events", 0.1, "untrusted", "more than 4 MiB on the event channel in hidden_tests[0]"),
        (signal.SIGSEGV, "", 0.1, "ok", "ended by SIGSEGV in hidden_tests[0]"),
        (signal.SIGKILL, "cancelled", 0.1, "infra", "the task was cancelled"),
        (0, "", 0.1, "untrusted", "the program ended its own process in hidden_tests[0] (exit status 0)"),
        (3 << 8, "", 0.1, "untrusted", "the program ended its own process in hidden_tests[0] (exit status 3)"),
    ],
)
def test_every_end_has_its_state_and_plain_words(status: int, ended: str, cpu_s: float, state: str, error: str) -> None:
    reading = read(run(chain(LOAD, VALUE), status, ended, cpu_s), TESTS, PLANS, LIMITS)
    assert (reading.state, reading.error) == (state, error)
    if state != "infra":
        assert [outcome.outcome for outcome in reading.outcomes] == ["passed", "not_run"]
    assert not result(reading, TESTS, [], "weak", "", 0, 0, 0.0)["resolved"]


def test_sigkill_from_outside_is_infra() -> None:
    assert read(run(chain(LOAD, VALUE), signal.SIGKILL), TESTS, PLANS, LIMITS).state == "infra"


def test_a_full_chain_with_a_bad_exit_is_untrusted() -> None:
    assert read(run(chain(*GOOD), 1 << 8), TESTS, PLANS, LIMITS).state == "untrusted"


def test_an_opaque_value_is_asked_for_again_and_never_a_pass() -> None:
    reading = read(
        run(chain(LOAD, {"k": "test", "i": 0, "o": "opaque", "m": "x", "foreign": False}, PASSED, END)),
        TESTS,
        PLANS,
        LIMITS,
    )
    assert reading.opaque == (0,)
    verdict = result(reading, TESTS, [], "weak", "", 0, 0, 0.0)
    assert verdict["tests"][0]["outcome"] == "error"
    assert not verdict["resolved"]


def twin_of(*outcomes: str) -> Any:
    plans = [judge.Inside("pass")] * 2
    events = [{"k": "test", "i": i, "o": outcome, "m": ""} for i, outcome in enumerate(outcomes)]
    return read(run(chain(LOAD, *events, END)), TESTS, plans, LIMITS)


def test_a_twin_that_passes_is_an_integrity_failure() -> None:
    reading = read(run(chain(*GOOD)), TESTS, PLANS, LIMITS)
    assert apply_twin(reading, twin_of("passed", "failed"), TESTS, [1]) == reading
    assert apply_twin(reading, twin_of("passed", "error"), TESTS, [1]) == reading
    caught = apply_twin(reading, twin_of("passed", "passed"), TESTS, [1])
    assert caught.state == "integrity_failure"
    assert "hidden_tests[0]" in caught.error


def test_a_twin_that_does_not_end_takes_the_pass_with_it() -> None:
    reading = read(run(chain(*GOOD)), TESTS, PLANS, LIMITS)
    assert apply_twin(reading, read(run(b"", 0), TESTS, PLANS, LIMITS), TESTS, [1]).state == "untrusted"
    assert apply_twin(reading, read(run(b"", 9, "timeout"), TESTS, PLANS, LIMITS), TESTS, [1]).state == "timeout"
    failed_load = read(run(chain({"k": "load", "ok": False, "m": "x", "t": "E"}, END)), TESTS, PLANS, LIMITS)
    assert apply_twin(reading, failed_load, TESTS, [1]).state == "untrusted"


def test_nothing_printed_changes_the_verdict() -> None:
    quiet = run(chain(LOAD, {**VALUE, "v": ["3"]}, PASSED, END))
    loud = Run(**{**vars(quiet), "stdout": b"2 passed in 0.1s", "stderr": b"OK"})
    assert read(quiet, TESTS, PLANS, LIMITS) == read(loud, TESTS, PLANS, LIMITS)


def test_the_evidence_covers_program_tests_and_events() -> None:
    one = run(chain(*GOOD))
    hashes = {
        evidence_hash("a", TESTS, [one]),
        evidence_hash("b", TESTS, [one]),
        evidence_hash("a", TESTS[:1], [one]),
        evidence_hash("a", TESTS, [run(chain(LOAD))]),
        evidence_hash("a", TESTS, [one, one]),
    }
    assert len(hashes) == 5
    assert evidence_hash("a", TESTS, [one]) == evidence_hash("a", TESTS, [one])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner) | st.sets(st.integers()) | st.frozensets(st.text()),
    max_leaves=20,
)  # fmt: skip


@given(plain)
def test_plain_values_survive_the_way_with_their_types(value: object) -> None:
    decoded = values.decode(values.encode(value, 1 << 20))
    assert decoded == value
    assert repr(decoded) == repr(value) or isinstance(value, (set, frozenset, dict, list, tuple))


@given(st.text(max_size=200))
def test_decoding_never_raises_but_value_error(text: str) -> None:
    for candidate in (text, json.dumps({"d": text}), json.dumps({"r": [0, 1 << 80, 1]}), json.dumps({"s": [[text]]})):
        try:
            values.decode(candidate)
        except ValueError:
            continue


class Equal:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


class Pair(NamedTuple):
    a: int
    b: str


class Colour(enum.IntEnum):
    RED = 3


class Liar(list):
    def __iter__(self) -> Any:
        raise AssertionError("must not be asked")

    __len__ = __getitem__ = __repr__ = __hash__ = __bool__ = __iter__  # type: ignore[assignment]


class Meta(type):
    def __eq__(cls, other: object) -> bool:
        raise AssertionError("must not be asked")

    __hash__ = __instancecheck__ = __eq__  # type: ignore[assignment]


def test_a_subclass_that_left_equality_alone_counts_as_its_base() -> None:
    for value, base in (
        (Pair(1, "x"), (1, "x")),
        (Colour.RED, 3),
        (Liar([1, [2]]), [1, [2]]),
        (defaultdict(int, a=1), {"a": 1}),
        (Counter("aa"), {"a": 2}),
    ):
        decoded = values.decode(values.encode(value, 1000))
        assert decoded == base
        assert type(decoded) is type(base)


def test_a_type_with_its_own_equality_is_foreign_and_is_never_asked() -> None:
    for kind in (Equal, type("L", (Equal, list), {}), type("I", (int,), {"__eq__": Equal.__eq__}), Meta("M", (), {})):
        value = kind()
        for wrapped in (value, [value], {1: (value,)}):
            with pytest.raises(values.NotPlain) as raised:
                values.encode(wrapped, 1000)
            assert raised.value.foreign


def test_what_is_too_large_or_of_the_library_is_refused_but_not_foreign() -> None:
    large = ("x" * 2000, 1 << 20_000, range(1 << 70), set(range(1500)), dict.fromkeys(range(1500)), [[0] * 900] * 2)
    for value in (*large, Fraction(1, 2), bytearray(b"x"), [Fraction(1, 2)]):
        with pytest.raises(values.NotPlain) as raised:
            values.encode(value, 1000)
        assert not raised.value.foreign


def test_a_value_of_the_programs_own_type_is_not_compared_with_a_literal_inside() -> None:
    event = {"k": "test", "i": 0, "o": "opaque", "m": "a value of type Equal", "foreign": True}
    reading = read(run(chain(LOAD, event, PASSED, END)), TESTS, PLANS, LIMITS)
    assert reading.opaque == ()
    assert reading.outcomes[0].outcome == "failed"
    assert "a value of type Equal of its own; expected f(1) == 2" in reading.outcomes[0].message
