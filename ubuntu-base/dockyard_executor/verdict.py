"""From what one run left behind to a typed verdict: pure functions over bytes, an exit status and the tests.

Promises that nothing printed decides anything, that a broken or incomplete event chain is never a pass, and that `infra`
cannot be brought about by a program. Starts no process and reads no clock.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dockyard_executor import judge
from dockyard_executor.config import MIB, Limits

State = Literal["ok", "timeout", "untrusted", "integrity_failure", "infra"]
Ended = Literal["", "timeout", "output", "events", "channel", "setup", "cancelled"]
OPAQUE = "opaque"  # not an outcome of the API: the value was not plain, the test has to run inside


@dataclass(frozen=True)
class Test:
    """One test of a request; `name` as in the result, `source` a Python statement."""

    __test__ = False  # not a test case of pytest

    name: str
    source: str
    hidden: bool


@dataclass(frozen=True)
class Run:
    """What a fork server observed of one process."""

    key: bytes  # of the event chain
    events: bytes
    status: int  # as waitpid gives it
    ended: Ended  # why the fork server ended the process; "" when it ended by itself
    stdout: bytes
    stderr: bytes
    seconds: float  # wall
    cpu_s: float
    timeout_s: float
    cpu_limit_s: float


@dataclass(frozen=True)
class Outcome:
    """Of one test: passed, failed, error, not_run (or opaque, within this package)."""

    outcome: str
    message: str = ""
    memory: bool = False


@dataclass(frozen=True)
class Reading:
    """One run, read: `outcomes` has one entry for each test whatever happened."""

    state: State
    error: str
    outcomes: tuple[Outcome, ...]

    @property
    def opaque(self) -> tuple[int, ...]:
        return tuple(i for i, outcome in enumerate(self.outcomes) if outcome.outcome == OPAQUE)


def parse_events(raw: bytes, key: bytes) -> tuple[list[dict[str, Any]], str]:
    """Events of the chain up to its first fault, and the fault ("" for none). An unended last line is no event."""
    events: list[dict[str, Any]] = []
    previous = b""
    *lines, rest = raw.split(b"\n")
    for line in lines:
        mac, _, body = line.partition(b" ")
        previous_and_body = previous + body
        if mac != hashlib.blake2b(previous_and_body, key=key, digest_size=16).hexdigest().encode():
            return events, f"event {len(events)} is not the runner's"
        previous = mac
        try:
            event = json.loads(body)
        except (ValueError, RecursionError):
            return events, f"event {len(events)} is not JSON"
        if not isinstance(event, dict) or event.get("n") != len(events):
            return events, f"event {len(events)} is out of sequence"
        events.append(event)
    return events, f"event {len(events)} has no end" if rest else ""


def read(run: Run, tests: Sequence[Test], plans: Sequence[judge.Plan], limits: Limits) -> Reading:
    """The run as claims checked against its exit; `plans` says how each test was delivered."""
    if run.ended in ("setup", "cancelled"):
        reason = (
            "the task was cancelled"
            if run.ended == "cancelled"
            else f"the sandbox could not be set up: {_text(run.stderr)}"
        )
        return Reading("infra", reason, (Outcome("not_run"),) * len(tests))
    events, fault = parse_events(run.events, run.key)
    load_error = ""
    outcomes: list[Outcome] = []
    complete = False
    changed: list[str] = []
    for position, event in enumerate(events):
        kind = event.get("k")
        if position == 0 and kind == "load":
            load_error = "" if event.get("ok") else str(event.get("m"))
            memory_at_load = event.get("t") == "MemoryError"
            if load_error and memory_at_load:
                load_error = f"{_memory(limits)} while it was loaded"
        elif (
            position
            and kind == "test"
            and not complete
            and event.get("i") == len(outcomes) < len(tests)
            and not load_error
        ):
            try:
                outcomes.append(_outcome(event, plans[len(outcomes)]))
            except (ValueError, TypeError, KeyError):
                fault = fault or f"event {position} is not the runner's"
                break
        elif position and kind == "end" and not complete and position == len(events) - 1:
            complete = bool(load_error) or len(outcomes) == len(tests)
            changed = [str(name) for name in event.get("changed", ())]
            fault = fault or ("" if complete else "the end came before all tests")
        else:
            fault = fault or f"event {position} is out of place"
            break
    where = _where(tests, len(outcomes), bool(events))
    state, error = _state(run, fault, complete, changed, where, limits)
    if state == "ok" and not error:
        if load_error:
            error = (
                load_error
                if load_error.startswith("memory limit")
                else f"the program could not be loaded: {load_error}"
            )
        elif any(outcome.memory for outcome in outcomes):
            error = _memory(limits)
    outcomes += [Outcome("not_run")] * (len(tests) - len(outcomes))
    return Reading(state, error, tuple(outcomes))


def _outcome(event: dict[str, Any], plan: judge.Plan) -> Outcome:
    """Of one test event. Raises ValueError, TypeError or KeyError when the runner cannot have sent it."""
    kind = event["o"]
    message = str(event.get("m", ""))
    if kind == "error":
        return Outcome("error", message, memory=event.get("t") == "MemoryError")
    if isinstance(plan, judge.Outside):
        if kind == "value":
            encoded = event["v"]
            if not isinstance(encoded, list) or not all(isinstance(text, str) for text in encoded):
                raise TypeError("values are strings")
            return Outcome(*judge.judge(plan, encoded))
        if kind == "opaque":
            if event["foreign"] and plan.against_literal:
                # inside, the program's own type would decide whether it equals what the test expects
                return Outcome("failed", f"the program gave {message} of its own; expected {plan.text}")
            return Outcome(OPAQUE, message)
    elif kind in ("passed", "failed"):
        return Outcome(kind, message)
    raise ValueError(f"no such outcome: {kind!r}")


def _state(run: Run, fault: str, complete: bool, changed: list[str], where: str, limits: Limits) -> tuple[State, str]:
    number = os.WTERMSIG(run.status) if os.WIFSIGNALED(run.status) else 0
    if run.ended == "timeout":
        return "timeout", f"time limit of {run.timeout_s:g} s reached {where}"
    if number == signal.SIGXCPU or (number == signal.SIGKILL and run.cpu_s >= run.cpu_limit_s and not run.ended):
        return "timeout", f"CPU time limit of {run.cpu_limit_s:g} s reached {where}"
    if run.ended == "output":
        return "ok", f"output limit of {_size(limits.output_bytes)} reached {where}"
    if run.ended == "events":
        return "untrusted", f"more than {_size(limits.event_bytes)} on the event channel {where}"
    if run.ended == "channel":
        return "untrusted", f"the event channel was written to by the program {where}"
    if number == signal.SIGKILL:  # a program can neither send it to itself nor to others
        return "infra", f"ended by SIGKILL from outside {where} (the host may be out of memory)"
    if number:
        return "ok", f"ended by {signal.Signals(number).name} {where}"
    code = os.waitstatus_to_exitcode(run.status)
    if not complete or code != 0:
        ended = f"the program ended its own process {where} (exit status {code})"
        return "untrusted", f"{ended}; {fault}" if fault else ended
    if fault:
        return "untrusted", fault
    if changed:
        return "untrusted", f"the program changed built-ins: {', '.join(changed[:5])}"
    return "ok", ""


def _where(tests: Sequence[Test], done: int, loaded: bool) -> str:
    if not loaded:
        return "while the program was loaded"
    return f"in {tests[done].name}" if done < len(tests) else "after the tests"


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB and count % MIB == 0 else f"{count} bytes"


def _memory(limits: Limits) -> str:
    return f"memory limit of {_size(limits.memory_bytes)} reached"


def apply_twin(reading: Reading, twin: Reading, tests: Sequence[Test], twinned: Sequence[int]) -> Reading:
    """The reading after its must-fail twin ran: what passed there as well is an integrity failure."""
    if twin.state != "ok":
        return replace(reading, state=twin.state, error=f"in the must-fail twin: {twin.error}")
    passed = [tests[i].name for i in twinned if twin.outcomes[i].outcome == "passed"]
    if passed:
        names = ", ".join(passed[:5])
        return replace(
            reading,
            state="integrity_failure",
            error=f"passes although it must fail: {names} (forged, equal to everything, or not repeatable)",
        )
    missing = [tests[i].name for i in twinned if twin.outcomes[i].outcome == "not_run"]
    if missing:
        return replace(
            reading,
            state="untrusted",
            error=f"the must-fail twin did not reach {missing[0]}: {twin.error or 'unknown cause'}",
        )
    return reading


def result(
    reading: Reading,
    tests: Sequence[Test],
    runs: Sequence[Run],
    isolation: str,
    program: str,
    twin_checked: int,
    twin_skipped: int,
    seconds: float,
) -> dict[str, Any]:
    """The verdict as the API gives it."""
    outcomes = [
        replace(o, outcome="error", message=f"not judged: {o.message}") if o.outcome == OPAQUE else o
        for o in reading.outcomes
    ]
    passed = sum(outcome.outcome == "passed" for outcome in outcomes)
    last = runs[0] if runs else None
    return {
        "status": "failed" if reading.state == "infra" else "completed",
        "state": reading.state,
        "tests": [
            {"name": test.name, "hidden": test.hidden, "outcome": outcome.outcome, "message": outcome.message}
            for test, outcome in zip(tests, outcomes, strict=True)
        ],
        "passed": passed,
        "total": len(tests),
        "resolved": reading.state == "ok" and not reading.error and passed == len(tests) > 0,
        "stdout": _text(last.stdout) if last else "",
        "stderr": _text(last.stderr) if last else "",
        "error": reading.error,
        "isolation": isolation,
        "execution_time": round(seconds, 6),
        "twin": {"checked": twin_checked, "skipped": twin_skipped},
        "evidence_hash": evidence_hash(program, tests, runs),
    }


def evidence_hash(program: str, tests: Sequence[Test], runs: Sequence[Run]) -> str:
    """SHA-256 over the program, the tests and every run's event log and exit."""
    digest = hashlib.sha256()
    for part in (
        program.encode("utf-8", "surrogatepass"),
        *(f"{t.hidden}{t.source}".encode("utf-8", "surrogatepass") for t in tests),
    ):
        digest.update(hashlib.sha256(part).digest())
    for run in runs:
        digest.update(hashlib.sha256(run.events).digest())
        digest.update(f"{run.status}:{run.ended}".encode())
    return digest.hexdigest()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
