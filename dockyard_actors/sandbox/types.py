"""Verdicts as the rest of the system sees them. Frozen values without torch; knows no HTTP and no executor."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["ok", "timeout", "untrusted", "integrity_failure", "infra"]
Outcome = Literal["passed", "failed", "error", "not_run"]


class TestOutcome(msgspec.Struct, frozen=True):
    """What became of one test."""

    __test__ = False  # not a test case of pytest

    name: str  # position in the request: "tests[0]", "hidden_tests[2]"
    hidden: bool
    outcome: Outcome
    message: str = ""  # why it did not pass; may quote the test


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The executor's judgement of one program.

    `resolved` only when every test, visible and hidden, passed under trust. `infra` says nothing about the program: it is
    retried or masked, never a reward of 0. `isolation` is the level that held: "landlock+seccomp+uid",
    "landlock+seccomp" or "weak".
    """

    state: State
    passed: int
    total: int
    resolved: bool
    tests: tuple[TestOutcome, ...]
    stdout: str  # last bytes of each stream, decoded with replacement; never part of the judgement
    stderr: str
    error: str  # in plain words; "" when there is nothing to say
    isolation: str
    seconds: float  # wall time of all runs of this program
    evidence_hash: str  # SHA-256 over program, tests and event logs


class Health(msgspec.Struct, frozen=True):
    """What an executor says of itself."""

    status: Literal["ok", "degraded"]
    isolation: str
    workers: int
    queued: int
    running: int
    counts: dict[str, int] = {}
