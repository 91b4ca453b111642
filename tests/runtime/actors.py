"""Messages and actors that the runtime's tests share, also across processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time

import msgspec
import numpy as np

from dockyard_actors.runtime.actor import Actor, Death, concurrent, control
from dockyard_actors.runtime.guard import guard
from dockyard_actors.runtime.message import Message


class Granted(msgspec.Struct, frozen=True, tag=True):
    value: int


class Exhausted(msgspec.Struct, frozen=True, tag=True):
    why: str


class Lease(Message[Granted | Exhausted], frozen=True):
    n: int


class Add(Message[int], frozen=True):
    amount: int = 1


class Total(Message[int], frozen=True):
    pass


class Seen(Message[tuple[int, ...]], frozen=True):
    pass


class Note(Message[None], frozen=True):
    n: int


class Fail(Message[None], frozen=True):
    text: str


class Scale(Message[np.ndarray], frozen=True):
    values: np.ndarray
    factor: float


class Block(Message[None], frozen=True):
    """Waits (without holding the loop) until `Open`."""


class Open(Message[None], frozen=True):
    pass


class Urgent(Message[int], frozen=True):
    pass


class Hold(Message[None], frozen=True):
    """Holds the loop of the process."""

    seconds: float
    declared: float = 0.0


class HoldAll(Message[None], frozen=True):
    """Another thread holds the interpreter, and says so: the loop cannot run."""

    seconds: float
    declared: float


class Lump(Message[None], frozen=True):
    """Takes its handler so many seconds, without holding the loop."""

    body: str
    seconds: float


class Die(Message[None], frozen=True):
    how: str  # "kill" | "stop" (SIGSTOP) | "task" | "exit"


class Pid(Message[int], frozen=True):
    pass


class Counter(Actor):
    def __init__(self) -> None:
        self.total = 0
        self.seen: list[int] = []
        self.gate = asyncio.Event()
        self.deaths: list[Death] = []
        self.cancelled = 0
        self.entered = asyncio.Event()

    async def lease(self, msg: Lease) -> Granted | Exhausted:
        return Granted(msg.n) if msg.n > 0 else Exhausted("none left")

    async def add(self, msg: Add) -> int:
        self.total += msg.amount
        return self.total

    async def get(self, msg: Total) -> int:
        return self.total

    async def note(self, msg: Note) -> None:
        self.seen.append(msg.n)

    async def history(self, msg: Seen) -> tuple[int, ...]:
        return tuple(self.seen)

    async def fail(self, msg: Fail) -> None:
        raise ValueError(msg.text)

    async def scale(self, msg: Scale) -> np.ndarray:
        return msg.values * msg.factor

    async def block(self, msg: Block) -> None:
        self.entered.set()
        await self.gate.wait()

    @control
    async def open(self, msg: Open) -> None:
        self.gate.set()

    @control
    async def urgent(self, msg: Urgent) -> int:
        return len(self.seen)

    async def lump(self, msg: Lump) -> None:
        await asyncio.sleep(msg.seconds)

    async def pid(self, msg: Pid) -> int:
        return os.getpid()

    async def hold(self, msg: Hold) -> None:
        if msg.declared:
            with guard(msg.declared, "holding the loop on purpose"):
                time.sleep(msg.seconds)  # noqa: ASYNC251
        else:
            time.sleep(msg.seconds)  # noqa: ASYNC251

    async def hold_all(self, msg: HoldAll) -> None:
        def hold() -> None:
            with guard(msg.declared, "a thread holds the interpreter"):
                ctypes.PyDLL(None).usleep(int(msg.seconds * 1e6))  # PyDLL does not let go of the interpreter

        await asyncio.to_thread(hold)

    async def die(self, msg: Die) -> None:
        if msg.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif msg.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif msg.how == "exit":
            os._exit(3)
        elif msg.how == "task":
            self.ctx.spawn(self._fail_later(), "doomed")

    async def _fail_later(self) -> None:
        raise RuntimeError("the owned task broke")

    async def on_death(self, death: Death) -> None:
        self.deaths.append(death)


class Waiter(Counter):
    """As Counter, with a handler that waits without holding up the others."""

    @concurrent
    async def block(self, msg: Block) -> None:
        self.entered.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
