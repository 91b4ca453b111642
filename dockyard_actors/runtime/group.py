"""Rest-for-one: each process of a group depends on those that were started before it, goes down with them and comes up after them.

When one dies, those behind it are stopped in reverse order, and all start again in order, each when those before it answer. It knows
the order and who is up; every process counts its own crashes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dockyard_actors.runtime.child import Child

_UP = ("running", "unresponsive")
_OVER = ("stopped", "exited")  # nobody depends any longer on what ended on purpose


class Group:
    def __init__(self) -> None:
        self.members: list[Child] = []  # in the order of their start
        self._changed = asyncio.Event()

    def add(self, child: Child) -> None:
        """Behind all others, or in the place of the one that had its name."""
        for at, member in enumerate(self.members):
            if member.spec.name == child.spec.name:
                self.members[at] = child
                return
        self.members.append(child)

    def broken_before(self, child: Child) -> Child | None:
        """One that this child depends on and that is down by no wish: a death of the child is then most likely its echo."""
        return next((m for m in self._before(child) if m.state not in _OVER and not m.lives()), None)

    async def halt_rest(self, child: Child) -> None:
        """Stops those behind the child, the last one first; takes at most the sum of their graces."""
        for member in reversed(self.members[self.members.index(child) + 1 :]):
            await member.halt()

    async def turn(self, child: Child) -> None:
        """Returns when the child may start, because those before it answer, or when it need not start any more."""
        while not child.retired and any(
            m.state not in _OVER and not (m.state in _UP and m.lives()) for m in self._before(child)
        ):
            await self._changed.wait()

    def pulse(self) -> None:
        """A member has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _before(self, child: Child) -> list[Child]:
        return self.members[: self.members.index(child)]
