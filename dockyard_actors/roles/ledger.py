"""The run ledger: what became of every prompt lease.

Promises that each issued lease is in exactly one of trained, expired, filtered, failed or in flight, at every moment, and that the same
answer comes out of replaying the journal. Pure state: no clock, no files, no messages. Only the controller changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from dockyard_actors.transport.tensors import TensorRef

CLASSES = ("trained", "expired", "filtered", "failed", "in_flight")
TERMINAL = ("trained", "expired", "filtered", "failed")
QUARANTINED = "quarantined"  # first word of the cause of a closed lease whose prompt is not drawn again


class GroupMeta(msgspec.Struct, frozen=True, kw_only=True):
    """All that filtering, balancing and ageing a group needs, without touching a tensor."""

    lease: int
    prompt: str  # task id
    epoch: int
    attempt: int
    rewards: tuple[float, ...]  # one per sample; 0 where not valid
    valid: tuple[bool, ...]  # False where the sandbox gave no verdict (infra): masked, never trained as 0
    lengths: tuple[int, ...]  # response tokens per sample
    prompt_tokens: int
    oldest_version: int
    newest_version: int
    resolved: tuple[bool, ...]  # all tests passed


class Issued(msgspec.Struct, frozen=True, tag="issued"):
    lease: int
    prompt: str
    epoch: int
    attempt: int
    holder: str  # rollout name and incarnation
    draw: int  # position in the endless shuffled order of prompts
    retry_of: int = -1  # the failed lease whose prompt this one tries again


class Handed(msgspec.Struct, frozen=True, tag="handed"):
    """A lease that lost its holder or was rolled back goes to a rollout again."""

    lease: int
    holder: str
    attempt: int


class Buffered(msgspec.Struct, frozen=True, tag="buffered"):
    meta: GroupMeta
    ref: TensorRef


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """One optimizer step: provisional until a checkpoint covers it."""

    step: int
    version: int
    trained: tuple[int, ...]


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    lease: int
    outcome: str  # expired | filtered | failed
    cause: str
    retry: bool = False  # the prompt is to be issued once more, as a new lease


class Freed(msgspec.Struct, frozen=True, tag="freed"):
    """A lease in flight that lost its holder, or whose data is gone: it waits to be handed out again."""

    lease: int
    cause: str


class Published(msgspec.Struct, frozen=True, tag="published"):
    """A weight version was given away: its weights go out to the engines."""

    version: int


class Fresh(msgspec.Struct, frozen=True, tag="fresh"):
    """Every engine holds this version, the weights after `step`: what is admitted is counted from there."""

    version: int
    step: int = -1


class Checkpointed(msgspec.Struct, frozen=True, tag="checkpointed"):
    step: int


class RolledBack(msgspec.Struct, frozen=True, tag="rolled_back"):
    step: int
    leases: tuple[int, ...]


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The run was started or resumed."""

    run_id: str
    seed: int
    tasks: str  # sha of the task set: a resumed run must find the same prompts
    session: str  # changes when the whole run was stopped: every buffered tensor of an earlier session is gone


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """Somebody asked the run to stop: nothing is admitted any more."""

    reason: str


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The trainer has ended: completed or interrupted."""

    status: str


Event = (
    Stopping
    | Finished
    | Opened
    | Issued
    | Handed
    | Buffered
    | Stepped
    | Closed
    | Freed
    | Published
    | Fresh
    | Checkpointed
    | RolledBack
)


class LedgerError(RuntimeError):
    """An event that would put a lease into two classes, or that names a lease nobody issued."""


class Lease(msgspec.Struct):
    """The state of one lease."""

    id: int
    prompt: str
    epoch: int
    attempt: int
    holder: str  # "" while it waits to be handed out again
    retry_of: int = -1
    state: str = "in_flight"
    cause: str = ""
    step: int = -1
    meta: GroupMeta | None = None
    ref: TensorRef | None = None

    @property
    def buffered(self) -> bool:
        return self.state == "in_flight" and self.meta is not None


class Ledger:
    """Applies events. Everything it knows can be rebuilt with `Ledger.replay(events)`."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.open: dict[int, Lease] = {}  # in flight, buffered ones included
        self.version = -1  # newest weight version ever published; never repeats
        self.fresh_step = -1  # every engine holds the weights after this step, or newer ones; -1: nobody knows
        self.step = 0
        self.counts: Counter[str] = Counter()
        self.causes: dict[str, Counter[str]] = {name: Counter() for name in ("expired", "filtered", "failed")}
        self.rolled_back = 0
        self.draws = 0  # next position in the shuffled order of prompts
        self.retries: list[int] = []  # failed leases whose prompt is to be issued once more
        self.quarantined: set[str] = set()  # prompts that are never drawn again
        self.session = ""
        self.stopping = ""  # why no prompt is admitted any more
        self.finished = ""  # how the trainer ended

    @classmethod
    def replay(cls, events: Iterable[Event]) -> Ledger:
        ledger = cls()
        for event in events:
            ledger.apply(event)
        return ledger

    def next_lease(self) -> int:
        return len(self.leases)

    def waiting(self) -> list[Lease]:
        """Leases in flight that nobody holds, oldest first."""
        return [lease for lease in self.open.values() if not lease.holder and not lease.buffered]

    def held_by(self, holder: str) -> list[Lease]:
        return [lease for lease in self.open.values() if lease.holder == holder and not lease.buffered]

    def held_by_older(self, name: str, incarnation: int) -> list[Lease]:
        """Leases of earlier incarnations of a rollout, which are dead when this one lives."""
        held = (lease for lease in self.open.values() if lease.holder and not lease.buffered)
        parts = ((lease, lease.holder.rpartition("#")) for lease in held)
        return [lease for lease, (holder, _, number) in parts if holder == name and int(number) < incarnation]

    def summary(self) -> dict[str, int]:
        return {
            "issued": len(self.leases),
            **{name: self.counts[name] for name in TERMINAL},
            "in_flight": len(self.open),
        }

    def _open_lease(self, lease_id: int, event: object) -> Lease:
        lease = self.open.get(lease_id)
        if lease is None:
            known = self.leases.get(lease_id)
            what = f"is already {known.state} ({known.cause or known.step})" if known else "was never issued"
            raise LedgerError(f"lease {lease_id} {what}; refused event {event!r}")
        return lease

    def _close(self, lease: Lease, state: str, cause: str = "", step: int = -1) -> None:
        del self.open[lease.id]
        lease.state, lease.cause, lease.step, lease.holder = state, cause, step, ""
        self.counts[state] += 1
        if state in self.causes:
            self.causes[state][cause] += 1

    def apply(self, event: Event) -> None:
        """Raises LedgerError before changing anything when the event contradicts what is known."""
        match event:
            case Issued():
                if event.lease != self.next_lease():
                    raise LedgerError(f"lease {event.lease} issued out of order; expected {self.next_lease()}")
                lease = Lease(event.lease, event.prompt, event.epoch, event.attempt, event.holder, event.retry_of)
                self.leases[lease.id] = self.open[lease.id] = lease
                self.draws = max(self.draws, event.draw + 1)
                if event.retry_of >= 0:
                    self.retries.remove(event.retry_of)
            case Handed():
                lease = self._open_lease(event.lease, event)
                if lease.buffered:
                    raise LedgerError(f"lease {lease.id} is buffered and cannot be handed to {event.holder}")
                lease.holder, lease.attempt = event.holder, event.attempt
            case Buffered():
                lease = self._open_lease(event.meta.lease, event)
                lease.meta, lease.ref = event.meta, event.ref
            case Stepped():
                leases = [self._open_lease(lease_id, event) for lease_id in event.trained]
                if len(set(event.trained)) != len(event.trained):
                    raise LedgerError(f"step {event.step} trains a lease twice: {event.trained}")
                for lease in leases:
                    self._close(lease, "trained", step=event.step)
                self.step = event.step
            case Closed():
                if event.outcome not in self.causes:
                    raise LedgerError(f"unknown outcome {event.outcome!r}; known: {', '.join(self.causes)}")
                lease = self._open_lease(event.lease, event)
                self._close(lease, event.outcome, event.cause)
                if event.retry:
                    self.retries.append(lease.id)
                elif event.cause.startswith(QUARANTINED):
                    self.quarantined.add(lease.prompt)
            case Freed():
                lease = self._open_lease(event.lease, event)
                lease.holder, lease.meta, lease.ref, lease.cause = "", None, None, event.cause
            case Published():
                if event.version <= self.version:
                    raise LedgerError(f"weight version {event.version} was published before (newest is {self.version})")
                self.version = event.version
            case Fresh():
                self.fresh_step = event.step
            case Checkpointed():
                pass  # in the journal for whoever reads it; the checkpoint directory itself says where a trainer starts
            case RolledBack():
                for lease_id in event.leases:
                    lease = self.leases[lease_id]
                    if lease.state != "trained" or lease.step <= event.step:
                        raise LedgerError(
                            f"lease {lease_id} is {lease.state} at step {lease.step}: no rollback to {event.step}"
                        )
                for lease_id in event.leases:
                    lease = self.leases[lease_id]
                    self.counts["trained"] -= 1
                    lease.state, lease.step, lease.holder, lease.meta, lease.ref = "in_flight", -1, "", None, None
                    lease.cause = "rolled_back"
                    self.open[lease_id] = lease
                self.rolled_back += len(event.leases)
                self.step, self.fresh_step = event.step, -1
            case Opened():
                if event.session != self.session:  # a run that is resumed goes on
                    self.stopping = self.finished = ""
                    self.fresh_step = -1
                self.session = event.session
            case Stopping():
                self.stopping = event.reason
            case Finished():
                self.finished = event.status

    def after(self, step: int) -> tuple[int, ...]:
        """Leases trained by steps later than `step`: what a rollback to that checkpoint puts back in flight."""
        return tuple(lease.id for lease in self.leases.values() if lease.state == "trained" and lease.step > step)


class Recount(msgspec.Struct, frozen=True, kw_only=True):
    """An audit of the journal that shares no code with `Ledger.apply`: sets of lease ids, class by class."""

    issued: int
    classes: dict[str, list[int]]
    in_two: list[str]  # leases that were closed twice, in words
    in_none: list[int]  # ids below the highest one that were never issued, or that events name without an issue
    exact: bool


def recount(events: Iterable[Event]) -> Recount:
    """Puts every lease id into classes from the raw events. `exact` is False when one is in two classes or in none."""
    issued: set[int] = set()
    where: dict[int, str] = {}
    in_two: list[str] = []
    named: set[int] = set()

    def close(lease: int, outcome: str) -> None:
        named.add(lease)
        if lease in where:
            in_two.append(f"lease {lease}: {where[lease]} and {outcome}")
        where[lease] = outcome

    for event in events:
        if isinstance(event, Issued):
            if event.lease in issued:
                in_two.append(f"lease {event.lease}: issued twice")
            issued.add(event.lease)
        elif isinstance(event, Stepped):
            for lease in event.trained:
                close(lease, "trained")
        elif isinstance(event, Closed):
            close(event.lease, event.outcome)
        elif isinstance(event, RolledBack):
            for lease in event.leases:
                if where.pop(lease, None) != "trained":
                    in_two.append(f"lease {lease}: rolled back but was not trained")
        elif isinstance(event, Handed | Freed):
            named.add(event.lease)
            if event.lease in where:
                in_two.append(f"lease {event.lease}: {where[event.lease]} and handed out again")
        elif isinstance(event, Buffered):
            named.add(event.meta.lease)
    classes: dict[str, list[int]] = {name: [] for name in CLASSES}
    for lease in sorted(issued):
        classes[where.get(lease, "in_flight")].append(lease)
    expected = set(range(max(issued) + 1)) if issued else set()
    in_none = sorted((expected | named) - issued)
    return Recount(
        issued=len(issued), classes=classes, in_two=in_two, in_none=in_none, exact=not in_two and not in_none
    )
