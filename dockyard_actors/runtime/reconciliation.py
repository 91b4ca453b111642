"""How a registry that was started anew comes to know what the one before it knew: from the claims of the living.

A claimed incarnation is taken when nobody living has a higher one, numbers never go back, and of two living claimants of one name
the higher wins and the other is fenced. Who is only known from hearsay and does not come back in time counts as dead.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dockyard_actors.runtime.directory import REGISTRY, Entry, died

if TYPE_CHECKING:
    from dockyard_actors.runtime.registry import Registry

log = logging.getLogger("dockyard.runtime.registry")

_LATE = (
    0.5  # seconds by which the loop may be late before it does not judge: then it was held, and claims wait to be read
)
_RESPITES = (
    2  # times that the settle time is given again to a process of this host whose pid is there: its loop may be held
)


@dataclass
class _Missing:
    """A process that others believe to live and that has not come back yet."""

    who: str
    until: float  # loop time
    pid: int = 0  # on this host, else 0
    respites: int = _RESPITES


class Reconciliation:
    def __init__(self, registry: Registry, settle_s: float) -> None:
        self.registry, self.settle_s = registry, settle_s
        self._missing: dict[str, _Missing] = {}
        self._vouched: dict[str, str] = {}  # uid → uid of the node agent that says it lives
        self._believed: dict[str, Entry] = {}  # incarnations of missing processes whose name somebody living has
        self._unclaimed: dict[str, set[str]] = {}  # uid that is coming back → its names that it has claimed so far
        self._heard_out: set[str] = set()  # processes that have claimed all that they have
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def expect(self, uid: str, who: str, pid: int = 0) -> None:
        """Counts as dead unless it joins, or its agent vouches for it, within settle_s."""
        if uid in self._missing or uid in self.registry.processes or uid in self._vouched:
            return
        loop = asyncio.get_running_loop()
        self._missing[uid] = _Missing(who, loop.time() + self.settle_s, pid)
        self._arm()

    def highest(self, name: str) -> int:
        """The highest incarnation that a missing process may have."""
        believed = self._believed.get(name)
        return believed.incarnation if believed else 0

    def children_of(self, agent: str) -> list[str]:
        """Processes known only through what this agent said."""
        return [uid for uid, by in self._vouched.items() if by == agent and uid not in self.registry.processes]

    def died(self, doomed: Iterable[str]) -> None:
        """These processes are dead for good: whoever has a name of theirs must be above their incarnation."""
        for uid in doomed:
            self._missing.pop(uid, None)
            self._vouched.pop(uid, None)
            self._unclaimed.pop(uid, None)
            self._heard_out.discard(uid)
        for entry in [e for e in self._believed.values() if e.uid in self.registry.gone]:
            del self._believed[entry.name]
            self._take(died(entry, self.registry.gone[entry.uid]), "")

    # ------------------------------------------------------------------ claims

    def claim(
        self, uid: str, entries: Iterable[Entry], gone: dict[str, str], children: tuple[str, ...], last: bool
    ) -> None:
        """One part of what process ``uid`` knows. It may turn out to be fenced."""
        registry = self.registry
        for child in children:
            self._vouched[child] = uid
            self._missing.pop(child, None)
        for dead, cause in gone.items():
            if dead not in (uid, registry.own.uid):
                registry.declare_dead(dead, cause)
        held = self._unclaimed.setdefault(uid, set())
        for entry in entries:
            if entry.uid == registry.own.uid or entry.name == REGISTRY:
                continue  # nobody knows better than this process itself
            if entry.alive and entry.uid == uid:
                held.add(entry.name)
            self._take(entry, uid)  # also when an entry before fenced it: what it knows of numbers still counts
        if last and self._unclaimed.pop(uid, None) is not None and uid not in registry.gone:
            self._heard_out.add(uid)
            left = [e for e in registry.entries.values() if e.alive and e.uid == uid and e.name not in held]
            left = [e for e in left if e.name not in registry.given]
            if left:
                registry.publish([died(e, "it had stopped when its process came back", clean=True) for e in left])

    def _take(self, entry: Entry, claimant: str) -> None:
        """One incarnation that somebody knows of. claimant: uid of who says so; it is sure of its own names."""
        registry = self.registry
        own = entry.alive and entry.uid == claimant
        gone: dict[str, str] = {}
        if entry.alive and entry.uid in registry.gone:
            gone = {entry.uid: registry.gone[entry.uid]}
            entry = died(entry, registry.gone[entry.uid])
        if entry.alive and not own:
            self.expect(entry.uid, f"process {entry.meta.get('process', entry.uid)}", self._pid_here(entry))
        known = registry.entries.get(entry.name)
        if known is None and not own and entry.incarnation <= registry.entries.forgotten:
            if not entry.alive:
                return  # it died long ago
            if entry.uid in registry.processes:
                if entry.uid not in self._heard_out:
                    return  # it will claim it, unless it stopped long ago
                entry = died(entry, "its process does not have it any more", clean=True)
        if known is None or (known.uid == entry.uid and (not own or known.alive)):
            if known is None or (entry.incarnation, not entry.alive) > (known.incarnation, not known.alive):
                registry.publish([entry], gone)
        elif not entry.alive:
            self._take_dead(entry, known, gone)
        elif not known.alive:
            self._take_over_dead(entry, known, own)
        elif own:
            self._contest(entry, known)
        elif known.uid in registry.processes:
            if entry.incarnation >= max(known.incarnation, self.highest(entry.name)):
                self._believed[entry.name] = entry  # who has the name stays until the other one is back or dead
        elif entry.incarnation > known.incarnation:
            registry.publish([entry])

    def _take_dead(self, entry: Entry, known: Entry, gone: dict[str, str]) -> None:
        registry = self.registry
        if entry.incarnation < known.incarnation:
            return
        if not known.alive:
            if entry.incarnation > known.incarnation:
                registry.publish([entry], gone)
        elif known.name in registry.given:
            self._raise(known, entry.incarnation + 1)
        elif entry.incarnation > known.incarnation:  # it was replaced once already, while it was thought to be dead
            self._fence(known, entry)
            registry.publish([entry], gone)

    def _take_over_dead(self, entry: Entry, known: Entry, own: bool) -> None:
        registry = self.registry
        if entry.incarnation > known.incarnation:
            registry.publish([entry])
        elif own and (entry.name in registry.given or known.uid == entry.uid):
            self._raise(entry, known.incarnation + 1)
        elif own:
            self._fence(entry, known)

    def _contest(self, entry: Entry, known: Entry) -> None:
        """Both live, or so it is believed, and both say they are the one."""
        registry = self.registry
        given = known.name in registry.given  # by this registry, which did not know of the other
        if known.uid == registry.own.uid:
            self._fence(entry, known)
            self._raise(known, max(known.incarnation, entry.incarnation + 1))
        elif entry.incarnation > known.incarnation or (given and entry.incarnation == known.incarnation):
            tie = entry.incarnation == known.incarnation
            if known.uid in registry.processes:
                self._fence(known, entry)
            self._raise(entry, entry.incarnation + tie)
        else:
            self._fence(entry, known)

    def _raise(self, entry: Entry, incarnation: int) -> None:
        """The same actor goes on under a higher number: the one it had was taken before."""
        log.info("%s#%d goes on as #%d", entry.name, entry.incarnation, incarnation)
        self.registry.publish([msgspec.structs.replace(entry, incarnation=incarnation)])

    def _fence(self, loser: Entry, winner: Entry) -> None:
        cause = f"its {loser.name}#{loser.incarnation} is fenced: the name is at #{winner.incarnation}"
        where = winner.meta.get("process")
        self.registry.declare_dead(loser.uid, f"{cause} in process {where}" if where else cause)

    def _pid_here(self, entry: Entry) -> int:
        pid = int(entry.meta.get("pid", 0))
        return pid if entry.address.host == self.registry.own.host and pid != os.getpid() else 0

    # ------------------------------------------------------------------ settling

    def _arm(self) -> None:
        if self._timer is None and self._missing:
            loop = asyncio.get_running_loop()
            self._due = min(missing.until for missing in self._missing.values())
            self._timer = loop.call_at(self._due, self._settle)

    def _settle(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        held = now - self._due > _LATE
        for uid, missing in list(self._missing.items()):
            if uid in self.registry.processes:
                self._missing.pop(uid, None)
            elif held:
                missing.until = max(missing.until, now + min(_LATE, self.settle_s))
            elif now >= missing.until and uid in self._missing:
                if missing.pid and missing.respites and Path(f"/proc/{missing.pid}").exists():
                    missing.respites -= 1
                    missing.until = now + self.settle_s
                    continue
                late = self.settle_s * (1 + _RESPITES - missing.respites)
                self.registry.declare_dead(uid, f"{missing.who} did not come back to the registry within {late:g} s")
                self._missing.pop(uid, None)
        self._arm()
