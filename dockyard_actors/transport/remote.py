"""The data plane across hosts: `SlabPlane` for what lies here, and a pull into a block of one's own for what lies elsewhere.

`fetch` brings blocks of other hosts here; from then on their refs are read and released like any other. A pulled block is checked
against the ref's checksum before anybody sees it. How the bytes travel is chosen by configuration and said in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from dockyard_actors.transport.blocks import Block, Fields
from dockyard_actors.transport.plane import PlaneStats
from dockyard_actors.transport.pull import PullConfig
from dockyard_actors.transport.puller import Puller, PullStats
from dockyard_actors.transport.slab import SlabPlane
from dockyard_actors.transport.tensors import (
    DataPlaneError,
    FieldShapes,
    MalformedRef,
    TensorRef,
    WrongHost,
    lay_out,
    mismatch,
)

log = logging.getLogger(__name__)


class RemotePlane:
    """A `DataPlane` (see there). `server_of` gives the address of a host's pull server, or raises `WrongHost`.

    `fetch`, `alloc` and `put` belong to one event loop; all else may be used from any thread. Blocks that are fetched take room in
    this process's own arena, so that a full one makes `fetch` wait.
    """

    def __init__(
        self, local: SlabPlane, cookie: str, server_of: Callable[[str], str], config: PullConfig | None = None
    ) -> None:
        self._local = local
        self._config = config or PullConfig()
        self._puller = Puller(cookie, server_of, self._config)
        self._pool = ThreadPoolExecutor(self._config.pulls, thread_name_prefix="pull")
        self._releases = ThreadPoolExecutor(1, thread_name_prefix="release")  # a dead host's hold up no pull
        self._copies: dict[TensorRef, TensorRef] = {}  # of other hosts' blocks, here
        self._coming: dict[TensorRef, asyncio.Task[None]] = {}

    async def fetch(self, refs: Iterable[TensorRef], deadline_s: float) -> None:
        """Have all refs readable here. When each has arrived or failed, the first error is raised; what arrived stays until its
        release."""
        missing = [ref for ref in dict.fromkeys(refs) if ref.host_id != self._local.host_id and ref not in self._copies]
        for ref in missing:
            if ref not in self._coming:
                self._coming[ref] = task = asyncio.create_task(self._bring(ref, deadline_s))
                task.add_done_callback(lambda task, ref=ref: self._arrived(ref, task))
        results = await asyncio.gather(*(asyncio.shield(self._coming[ref]) for ref in missing), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _arrived(self, ref: TensorRef, task: asyncio.Task[None]) -> None:
        del self._coming[ref]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("%s", error)  # whoever asked raises it, unless it gave up meanwhile

    async def _bring(self, ref: TensorRef, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        shapes = {spec.name: (spec.dtype, spec.shape) for spec in ref.fields}
        specs, nbytes = lay_out(shapes)
        if (specs, nbytes) != (ref.fields, ref.nbytes):
            raise MalformedRef(
                f"block {ref.block} of arena {ref.arena}: its fields do not lie where they would be laid"
            )
        block = await self._local.alloc(shapes, deadline_s)
        loop = asyncio.get_running_loop()
        self._copies[ref] = await loop.run_in_executor(self._pool, self._pull, ref, block, until)

    def _pull(self, ref: TensorRef, block: Block, until: float) -> TensorRef:
        self._puller.pull(ref, block, min(until - time.monotonic(), self._config.transfer_s))
        copy = block.seal()
        if ref.checksum and copy.checksum and ref.checksum != copy.checksum:
            self._local.release(copy)
            raise mismatch(ref, copy.checksum)
        return copy

    def get(self, ref: TensorRef, select_fields: Iterable[str] | None = None, verify: bool = False) -> Fields:
        return self._local.get(self._here(ref), select_fields, verify)

    def release(self, ref: TensorRef) -> bool:
        """Of another host's block: frees the copy here at once and has its host free the original, in the background (a host
        that does not hear of it keeps the block; the log says so). True when there was a copy."""
        if ref.host_id == self._local.host_id:
            return self._local.release(ref)
        done = self._drop(ref)
        try:
            self._releases.submit(self._puller.release, ref, self._config.release_s).add_done_callback(_say)
        except RuntimeError:
            raise DataPlaneError(f"the data plane of {self._local.owner} is closed") from None
        return done

    def forget(self, ref: TensorRef) -> None:
        self._drop(ref)

    def _drop(self, ref: TensorRef) -> bool:
        copy = self._copies.pop(ref, None)
        return copy is not None and self._local.release(copy)

    def _here(self, ref: TensorRef) -> TensorRef:
        if ref.host_id == self._local.host_id:
            return ref
        if (copy := self._copies.get(ref)) is None:
            raise WrongHost(f"block {ref.block} of arena {ref.arena} lies on host {ref.host_id}: fetch() it first")
        return copy

    def try_alloc(self, fields: FieldShapes) -> Block | None:
        return self._local.try_alloc(fields)

    async def alloc(self, fields: FieldShapes, deadline_s: float) -> Block:
        return await self._local.alloc(fields, deadline_s)

    async def put(self, arrays: Mapping[str, np.ndarray], deadline_s: float) -> TensorRef:
        return await self._local.put(arrays, deadline_s)

    def notify(self) -> None:
        self._local.notify()

    def stats(self) -> PlaneStats:
        return self._local.stats()

    def pull_stats(self) -> PullStats:
        return self._puller.stats()

    def close(self) -> None:
        """Cut what is on its way, then close the local plane. Releases that were asked for have `release_s` to be sent.
        Idempotent."""
        with contextlib.suppress(
            RuntimeError, TimeoutError
        ):  # closed before; or a host does not answer, as the log says
            self._releases.submit(int).result(self._config.release_s)
        self._releases.shutdown(wait=False)
        self._pool.shutdown(wait=False)
        self._puller.close()
        self._releases.shutdown(wait=True)
        self._pool.shutdown(wait=True)
        self._local.close()


def _say(release: Future[bool]) -> None:
    if (error := release.exception()) is not None:
        log.warning("a block of another host was not released: %s", error)
