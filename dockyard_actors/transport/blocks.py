"""What both ends hold while they use a block: `Block` to write one, `Fields` to read one, and the wait for a free one.

A `Block` is sealed or aborted exactly once, `Fields` refuses after its release, and a wait for a block is first come, first served
with a deadline. Where the memory comes from is the plane's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from dockyard_actors.transport.tensors import (
    DTYPES,
    ArenaFull,
    FieldShapes,
    FieldSpec,
    ReleasedFields,
    TensorRef,
    carve,
)


class Block:
    """A block being written: fill `array(name)` in place, then `seal()` it into a ref, or `abort()`.

    Used as a context manager it aborts when it was not sealed, so that an exception never leaks a block.
    """

    def __init__(
        self,
        specs: tuple[FieldSpec, ...],
        nbytes: int,
        memory: np.ndarray,
        on_seal: Callable[[Block], TensorRef],
        on_abort: Callable[[], None],
    ) -> None:
        self.specs = specs
        self.nbytes = nbytes
        self.memory = memory  # uint8 (nbytes,), writable
        self._arrays = carve(memory, specs)
        self._on_seal = on_seal
        self._on_abort = on_abort
        self._open = True

    def array(self, name: str) -> np.ndarray:
        """The field's memory, writable, holding whatever was there before. A view kept past `seal()` must not be
        written: readers may be looking (a later `get(verify=True)` would say `ChecksumError`)."""
        if not self._open:
            raise ReleasedFields(f"block already sealed or aborted: field {name!r} can no longer be written")
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; the block has {', '.join(self._arrays)}") from None

    def seal(self) -> TensorRef:
        """Make the bytes readable by others and return their ref. Once."""
        if not self._open:
            raise ReleasedFields("block already sealed or aborted")
        ref = self._on_seal(self)
        self._close()
        return ref

    def abort(self) -> None:
        """Give the block back unread. Does nothing after `seal()` or an earlier `abort()`."""
        if self._open:
            self._close()
            self._on_abort()

    def _close(self) -> None:
        self._open = False
        for array in self._arrays.values():
            array.flags.writeable = False  # catches the late writer whom we can catch; torch views escape this
        self._arrays = {}
        self.memory = self.memory[:0]

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


class Fields(Mapping[str, np.ndarray]):
    """Read-only views of one sealed block, by name. Views alias the block: who wants to keep or change them copies.

    `release()` ends this reader's use: the mapping refuses from then on. The block itself returns to its producer by
    `plane.release(ref)`, which waits for views that escaped (slices, torch tensors) to die in this process.
    """

    def __init__(self, arrays: dict[str, np.ndarray], still_valid: Callable[[], None], what: str) -> None:
        self._arrays: dict[str, np.ndarray] | None = arrays
        self._still_valid = still_valid
        self._what = what

    def _live(self) -> dict[str, np.ndarray]:
        if self._arrays is None:
            raise ReleasedFields(f"{self._what} was released by this reader: get it again, or copy before releasing")
        return self._arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self._live()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._live())

    def __len__(self) -> int:
        return len(self._live())

    def check(self) -> None:
        """Raise `StaleRef` if the block was released meanwhile, so that what was read so far cannot be trusted."""
        self._live()
        self._still_valid()

    def release(self) -> None:
        """Forget the views. Idempotent."""
        self._arrays = None

    def __enter__(self) -> Fields:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Backpressure:
    """`alloc` and `put` on top of `try_alloc`, for planes that ring an eventfd whenever a block becomes free."""

    owner: str
    _recheck_s: float
    _waiting: int
    _turn: asyncio.Lock

    def try_alloc(self, fields: FieldShapes) -> Block | None:
        raise NotImplementedError

    def _bell(self) -> int:
        """Descriptor of the eventfd (non-blocking)."""
        raise NotImplementedError

    def _why_full(self) -> str:
        """What the blocks are busy with and what to do about it."""
        raise NotImplementedError

    def notify(self) -> None:
        os.eventfd_write(self._bell(), 1)

    async def alloc(self, fields: FieldShapes, deadline_s: float) -> Block:
        if self._waiting == 0 and (block := self.try_alloc(fields)) is not None:
            return block
        started = time.monotonic()
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline_s), self._turn:  # one after the other: first come, first served
                while True:
                    self._silence()  # before looking, so that a release in between rings again
                    if (block := self.try_alloc(fields)) is not None:
                        return block
                    await self._rung()
        except TimeoutError:
            raise ArenaFull(
                f"{self.owner} waited {time.monotonic() - started:.3g} s for 1 block, {self._waiting} waiting: "
                f"{self._why_full()}"
            ) from None
        finally:
            self._waiting -= 1

    async def put(self, arrays: Mapping[str, np.ndarray], deadline_s: float) -> TensorRef:
        names = {dtype: name for name, dtype in DTYPES.items()}
        if unknown := [name for name, array in arrays.items() if array.dtype not in names]:
            raise ValueError(
                f"field {unknown[0]!r} has dtype {arrays[unknown[0]].dtype}; known are {', '.join(DTYPES)}"
            )
        with await self.alloc({n: (names[a.dtype], a.shape) for n, a in arrays.items()}, deadline_s) as block:
            for name, array in arrays.items():
                block.array(name)[...] = array
            return block.seal()

    def _silence(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody rang since the last look
            os.eventfd_read(self._bell())

    async def _rung(self) -> None:
        loop = asyncio.get_running_loop()
        rung = loop.create_future()
        bell = self._bell()
        loop.add_reader(bell, lambda: rung.done() or rung.set_result(None))
        # A releaser killed between freeing a block and ringing leaves us only the recheck.
        timer = loop.call_later(self._recheck_s, lambda: rung.done() or rung.set_result(None))
        try:
            await rung
        finally:
            timer.cancel()
            loop.remove_reader(bell)
