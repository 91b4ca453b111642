"""Every issued lease is in exactly one class, at every moment, and the journal says the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.roles.journal import Journal, JournalDamaged, read_journal
from dockyard_actors.roles.ledger import (
    Buffered,
    Closed,
    Event,
    Freed,
    GroupMeta,
    Handed,
    Issued,
    Ledger,
    LedgerError,
    Opened,
    Published,
    RolledBack,
    Stepped,
    recount,
)
from dockyard_actors.transport.tensors import TensorRef

REF = TensorRef("arena", 0, 1, 64, (), 0, "host", "/nowhere")


def meta(lease: int) -> GroupMeta:
    return GroupMeta(
        lease=lease,
        prompt=f"p{lease}",
        epoch=0,
        attempt=1,
        rewards=(1.0, 0.0),
        valid=(True, True),
        lengths=(3, 4),
        prompt_tokens=5,
        oldest_version=0,
        newest_version=0,
        resolved=(True, False),
    )


class Machine:
    """Draws legal events for a ledger, as the controller would."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.events: list[Event] = []
        self.step = 0

    def record(self, event: Event) -> None:
        self.ledger.apply(event)
        self.events.append(event)

    def act(self, kind: str, pick: int) -> None:
        ledger = self.ledger
        open_leases = list(ledger.open.values())
        lease = open_leases[pick % len(open_leases)] if open_leases else None
        if kind == "issue":
            self.record(Issued(ledger.next_lease(), f"p{pick}", 0, 1, "rollout-0#1", ledger.draws))
        elif kind == "rollback":
            to = pick % (self.step + 1)
            self.record(RolledBack(to, ledger.after(to)))
            self.step = to
        elif lease is None:
            return
        elif kind == "free":
            self.record(Freed(lease.id, "holder_died"))
        elif kind == "hand" and not lease.buffered:
            self.record(Handed(lease.id, "rollout-1#2", lease.attempt + 1))
        elif kind == "buffer":
            self.record(Buffered(meta(lease.id), REF))
        elif kind == "close":
            self.record(Closed(lease.id, ("expired", "filtered", "failed")[pick % 3], "cause"))
        elif kind == "step":
            self.step += 1
            self.record(Stepped(self.step, self.step, tuple(x.id for x in open_leases[: pick % 4])))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["issue", "issue", "free", "hand", "buffer", "close", "step", "rollback"]), st.integers(0, 50)
    ),
    max_size=80,
)


@given(ACTIONS)
def test_issued_equals_the_sum_of_the_classes_at_every_moment(actions: list[tuple[str, int]]) -> None:
    machine = Machine()
    for kind, pick in actions:
        machine.act(kind, pick)
        counts = machine.ledger.summary()
        assert counts["issued"] == sum(n for name, n in counts.items() if name != "issued")
        audit = recount(machine.events)
        assert audit.exact
        assert {name: len(ids) for name, ids in audit.classes.items()} == {
            k: v for k, v in counts.items() if k != "issued"
        }


@settings(max_examples=30)
@given(ACTIONS, st.integers(0, 400))
def test_a_journal_cut_anywhere_replays_to_an_exact_ledger(
    tmp_path_factory, actions: list[tuple[str, int]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.bin"
    machine = Machine()
    for kind, pick in actions:
        machine.act(kind, pick)
    journal = Journal(path, Event)
    for event in machine.events:
        journal.append(event)
    journal.close()
    os.truncate(path, max(0, path.stat().st_size - cut))
    again = Journal(path, Event)
    assert again.recovered == machine.events[: len(again.recovered)]
    ledger = Ledger.replay(again.recovered)
    assert recount(again.recovered).exact
    again.append(Opened("run", 0, "sha", "session"))
    again.close()
    events, torn = read_journal(path, Event)
    assert torn == 0
    assert len(events) == len(ledger.leases) * 0 + len(again.recovered) + 1


def test_damage_in_the_middle_is_an_error_and_never_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", Event)
    for version in range(5):
        journal.append(Published(version))
    journal.close()
    raw = bytearray((tmp_path / "j").read_bytes())
    raw[12] ^= 0xFF
    (tmp_path / "j").write_bytes(raw)
    with pytest.raises(JournalDamaged, match="record 0 at byte 0"):
        read_journal(tmp_path / "j", Event)


def test_a_lease_cannot_end_twice() -> None:
    machine = Machine()
    machine.act("issue", 1)
    machine.record(Closed(0, "failed", "x"))
    with pytest.raises(LedgerError, match="already failed"):
        machine.ledger.apply(Stepped(1, 1, (0,)))
    assert machine.ledger.summary()["trained"] == 0


def test_recount_finds_a_lease_in_two_classes_and_one_in_none() -> None:
    events: list[Event] = [
        Issued(0, "a", 0, 1, "r#1", 0),
        Issued(1, "b", 0, 1, "r#1", 1),
        Stepped(1, 1, (0,)),
        Closed(0, "expired", "too_old"),
        Closed(5, "failed", "x"),
    ]
    audit = recount(events)
    assert not audit.exact
    assert audit.in_two == ["lease 0: trained and expired"]
    assert audit.in_none == [5]


def test_a_version_never_repeats() -> None:
    ledger = Ledger.replay([Published(3)])
    with pytest.raises(LedgerError, match="version 3"):
        ledger.apply(Published(3))


def test_a_failed_prompt_is_issued_once_more_and_then_quarantined() -> None:
    ledger = Ledger.replay([Issued(0, "a", 0, 1, "r#1", 0), Closed(0, "failed", "deadline", retry=True)])
    assert ledger.retries == [0]
    ledger.apply(Issued(1, "a", 0, 2, "r#1", 0, retry_of=0))
    assert ledger.retries == []
    assert ledger.draws == 1
    ledger.apply(Closed(1, "failed", "quarantined: deadline"))
    assert ledger.quarantined == {"a"}


def test_an_overwritten_journal_is_damage_and_no_torn_tail(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(os.urandom(5000))
    with pytest.raises(JournalDamaged, match="overwritten"):
        Journal(tmp_path / "j", Event)
    assert (tmp_path / "j").stat().st_size == 5000


def test_the_bytes_of_a_torn_tail_are_kept_beside_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", Event)
    for version in range(2):
        journal.append(Published(version))
    journal.close()
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-3])
    again = Journal(tmp_path / "j", Event)
    again.close()
    assert again.recovered == [Published(0)]
    assert (tmp_path / "j").read_bytes() + (tmp_path / "j.torn").read_bytes() == whole[:-3]
