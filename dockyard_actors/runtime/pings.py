"""Hang detection: an agent asks the loop of each of its processes, and of the other agents, to answer, and judges their silence.

A process that declared a guard is not judged while it holds. It knows fixed thresholds and no cleverness.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from dockyard_actors.runtime.child import Child
from dockyard_actors.runtime.directory import ProcessRecord
from dockyard_actors.runtime.registry import DirectoryUpdate
from dockyard_actors.transport.base import Address

if TYPE_CHECKING:
    from dockyard_actors.runtime.agent import NodeAgent

_REPEAT = 4  # a ping to another agent is sent again after so many periods: its connection may have been lost with it


class _Other:
    """Another agent, and when it answered last."""

    def __init__(self, process: ProcessRecord) -> None:
        self.process = process
        self.sent = 0.0
        self.answered = time.monotonic()
        self.waiting = False

    def on_answer(self, pong: asyncio.Future[None]) -> None:
        if not pong.cancelled():
            self.answered = time.monotonic()
            self.waiting = False


class Pings:
    def __init__(self, agent: NodeAgent) -> None:
        self.agent = agent
        self._pending: dict[str, asyncio.Future[None]] = {}  # by uid of a child's start
        self._others: dict[str, _Other] = {}  # of the primary the secondaries, of a secondary the primary
        self._seeing = time.monotonic()  # since when: before, our own loop was held and nobody could be heard

    async def run(self) -> None:
        ping_s = self.agent.config.ping_s
        due = time.monotonic() + ping_s
        while True:
            wake = min([due, *(self._limit_of(child) for child in self._asked())])
            await asyncio.sleep(max(0.0, wake - time.monotonic()))
            now = time.monotonic()
            if now - wake > ping_s:
                self._seeing = now  # whoever answered meanwhile has not been read yet, or was held as well
            for child in self._asked():
                self._judge(child, now)
            if now < due:
                continue
            due = now + ping_s
            for child in self._asked():
                self._ping_child(child)
            for other in list(self._others.values()):
                self._ping_other(other, now)
                silent = now - max(other.answered, self._seeing)
                if silent > self.agent.config.agent_lost_s:
                    del self._others[other.process.uid]
                    who = f"node agent {other.process.name} (pid {other.process.pid})"
                    self.agent.agent_lost(other.process, f"{who} did not answer for {silent:.1f} s")

    def _asked(self) -> list[Child]:
        awake = ("starting", "running", "unresponsive")
        return [c for c in self.agent.children.values() if c.pid and c.state in awake and not c.doomed]

    # ------------------------------------------------------------------ children

    def directory_changed(self, update: DirectoryUpdate) -> None:
        """A child that registered a name is up, even when no ping has come back yet."""
        born = {entry.uid for entry in update.entries if entry.alive}
        for child in self.agent.children.values():
            if child.uid in born:
                self._heard(child)

    def forget(self, uid: str, address: Address) -> None:
        """A child is dead: closes the connection to it."""
        ping = self._pending.pop(uid, None)
        if ping is not None:
            ping.cancel()
        self.agent.system.hang_up(address)

    def _ping_child(self, child: Child) -> None:
        pending = self._pending.get(child.uid)
        if pending is not None and not pending.done():
            return
        pong = self._pending[child.uid] = self.agent.system.ping(self.agent.address_of(child))
        uid = child.uid

        def answered(_: asyncio.Future[None]) -> None:
            if child.uid == uid and not pong.cancelled():
                self._heard(child)

        pong.add_done_callback(answered)

    def _heard(self, child: Child) -> None:
        if child.state == "unresponsive":
            self.agent.child_silent(child.uid, 0.0)
        child.saw_answer()

    def _silent_since(self, child: Child) -> float:
        return max(child.silent_since(), self._seeing)

    def _patience(self, child: Child) -> tuple[float, str]:
        """Seconds of silence after which a child is killed, and the reason."""
        config, spec = self.agent.config, child.spec
        if child.answered:
            limit = config.hang_s if spec.hang_s is None else spec.hang_s
            return limit, f"hung: its loop did not answer for {limit:g} s (hang_s)"
        limit = config.start_grace_s if spec.start_grace_s is None else spec.start_grace_s
        return limit, f"did not come up: no answer within {limit:g} s of its start (start_grace_s)"

    def _limit_of(self, child: Child) -> float:
        """When a child's silence will mean something: it is judged then, not at the next ping."""
        patience, _ = self._patience(child)
        if child.state == "running":
            patience = min(patience, self.agent.config.suspect_s)
        return self._silent_since(child) + patience

    def _judge(self, child: Child, now: float) -> None:
        silent = now - self._silent_since(child)
        patience, reason = self._patience(child)
        if silent >= patience:
            self.agent.own(child.kill(reason), f"kill {child.spec.name}")
        elif child.state == "running" and silent >= self.agent.config.suspect_s:
            self.agent.child_silent(child.uid, silent)
            child.suspect(silent)

    # ------------------------------------------------------------------ other agents

    def joined(self, process: ProcessRecord) -> None:
        if process.is_agent:
            self._others[process.uid] = _Other(process)

    def gone(self, process: ProcessRecord, cause: str) -> None:
        self._others.pop(process.uid, None)

    def _ping_other(self, other: _Other, now: float) -> None:
        if not other.waiting or now - other.sent > _REPEAT * self.agent.config.ping_s:
            other.waiting, other.sent = True, now
            self.agent.system.ping(other.process.address).add_done_callback(other.on_answer)
