"""Who is called what: entries of the registry, and every process's replica of them.

The registry pushes changes, so a replica learns of births and deaths without asking. It knows nothing of sockets.
"""

from __future__ import annotations

import asyncio

import msgspec

from dockyard_actors.transport.base import Address


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process with an actor system, as it presents itself to the registry."""

    uid: str
    name: str
    pid: int
    host: str
    address: Address
    agent: str = ""  # uid of the node agent that is its parent
    is_agent: bool = False


class Entry(msgspec.Struct, frozen=True, tag=True):
    """One name: the newest incarnation, and whether it lives."""

    name: str
    incarnation: int  # strictly increasing for each name, over restarts of the registry too
    uid: str  # of its process
    address: Address
    window: int = 1  # messages one sender may have waiting in the actor's mailbox
    control: tuple[str, ...] = ()  # message names that go over the control lane
    meta: dict[str, str] = {}
    alive: bool = True
    cause: str = ""
    clean: bool = False  # it stopped or left by itself
    window_bytes: int = 4 << 20  # as window, in bytes of envelopes


REGISTRY = "registry"  # name of the registry's own actor
GONE = 4096  # dead processes remembered; uids are random, so that one forgotten can only be met again by waking up later than all these died


DEAD_NAMES = (
    4096  # names of the dead remembered, for who asks what became of them; of all others only the highest incarnation
)
CAUSE_MAX = 4000  # characters of a cause of death that are passed on, once for every name of the process


def lineage(agent: str, process: str) -> str:
    """Names a process over all its starts: by the uid of its node agent and its own name."""
    return f"{agent}/{process}"


def died(entry: Entry, cause: str, clean: bool = False) -> Entry:
    """The same incarnation, dead."""
    return msgspec.structs.replace(entry, alive=False, cause=cause, clean=clean)


class Gone(dict[str, str]):
    """uid → cause of the processes that died last. A process among them must not come back under its uid."""

    def add(self, uid: str, cause: str) -> None:
        self.pop(uid, None)
        self[uid] = cause
        while len(self) > GONE:
            del self[next(iter(self))]


class Names(dict[str, Entry]):
    """The newest known entry of every name that lives, and of those that died last. forgotten: no other name was ever at a higher
    incarnation."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten = 0
        self._dead: dict[str, None] = {}  # in the order of their deaths

    def put(self, entry: Entry) -> None:
        self[entry.name] = entry
        self._dead.pop(entry.name, None)
        if not entry.alive:
            self._dead[entry.name] = None
            while len(self._dead) > DEAD_NAMES:
                name = next(iter(self._dead))
                del self._dead[name]
                self.forgotten = max(self.forgotten, self.pop(name).incarnation)


class Directory:
    """A replica: the newest known entry of every name."""

    def __init__(self) -> None:
        self.entries = Names()
        self.ended: dict[str, str] = {}  # `lineage` of processes that are not started again → why
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    def apply(self, entry: Entry) -> bool:
        """Takes an entry unless a newer one is known; true when it changed something."""
        known = self.entries.get(entry.name)
        if known is None and not entry.alive and entry.incarnation <= self.entries.forgotten:
            return False
        if known is not None and (known.incarnation, not known.alive) >= (entry.incarnation, not entry.alive):
            return False
        self.put(entry)
        return True

    def put(self, entry: Entry) -> None:
        """Takes an entry whatever is known: another registry is the registry from now on."""
        self.entries.put(entry)
        self._wake(entry.name)

    def end(self, process: str, cause: str) -> None:
        """A process (its `lineage`) is not started again; without a cause: it is, after all."""
        self.ended[process] = cause
        for name in list(self._waiters) if cause else ():
            if self.over(name):
                self._wake(name)

    def over(self, name: str) -> str:
        """Why the dead process of this name is not started again; empty when it lives, may come back, or is not known."""
        entry = self.entries.get(name)
        if entry is None or entry.alive:
            return ""
        return self.ended.get(lineage(entry.meta.get("agent", ""), entry.meta.get("process", "")), "")

    def ended_process(self, name: str) -> str:
        """Why a process of this name, under whichever agent, is not started again; empty when none is known."""
        return next(
            (cause for key, cause in self.ended.items() if cause and key == lineage(key.split("/")[0], name)), ""
        )

    def _wake(self, name: str) -> None:
        for waiter in self._waiters.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    def alive(self, name: str) -> Entry | None:
        entry = self.entries.get(name)
        return entry if entry is not None and entry.alive else None

    async def wait_alive(self, name: str, after: int, deadline: float) -> Entry | None:
        """The first living incarnation greater than ``after``; None when it is known that there will be none; TimeoutError at
        ``deadline`` (of `loop.time()`)."""
        loop = asyncio.get_running_loop()
        while True:
            entry = self.alive(name)
            if entry is not None and entry.incarnation > after:
                return entry
            if self.over(name):
                return None
            waiter = loop.create_future()
            self._waiters.setdefault(name, []).append(waiter)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter
            finally:
                waiters = self._waiters.get(name)
                if waiters is not None and waiter in waiters:
                    waiters.remove(waiter)
                    if not waiters:
                        del self._waiters[name]
