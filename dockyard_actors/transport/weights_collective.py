"""Weights by broadcast: the trainer sends a version to all engines at once, bucket by bucket, over a torch process group of their own.

Each side needs two buckets of memory (an engine one more buffer for the largest entry that exceeds a bucket), never a second model. Every
call ends within its timeout, in a `CollectiveError` when somebody died, stopped, never came or meant something else; the group is gone
then and the next meeting makes another one. It knows names, dtypes and shapes, and neither models nor who should be a member.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Generator, Iterable, Sequence

import numpy as np
import torch

from dockyard_actors.transport.tensors import DataPlaneError
from dockyard_actors.transport.torch_views import as_array
from dockyard_actors.transport.weights_buckets import Packer, Unpacker, largest, manifest_digest, plan
from dockyard_actors.transport.weights_group import Group, GroupError
from dockyard_actors.transport.weights_lines import (
    Accepted,
    Backend,
    Door,
    Header,
    Hello,
    Line,
    LineError,
    Meeting,
    Taken,
    Welcome,
    gather,
)
from dockyard_actors.transport.weights_shm import WeightManifest

BUCKET_BYTES = 16 << 20  # larger ones are no faster over loopback
TIMEOUT_S = 120.0  # for one version, meeting included
TRAINER = "the trainer"


class CollectiveError(DataPlaneError):
    """A version was not delivered to everybody, and the group is gone on this side. who: names of those whose fault it is, as far as is
    known here; else of everybody else. phase: what was going on. waited_s: since the call began."""

    def __init__(self, who: Iterable[str], phase: str, version: int, waited_s: float, reason: str) -> None:
        self.who, self.phase, self.version, self.waited_s = tuple(who), phase, version, waited_s
        super().__init__(
            f"weights version {version} failed during {phase} after {waited_s:.3g} s, because of {', '.join(self.who)}: {reason}"
        )


class CollectiveSender:
    """The trainer's side, rank 0. One thread at a time calls it.

    host: the address that engines reach it at. device: of the buckets, the CPU for gloo. With "nccl" and a CUDA device the same code
    broadcasts device buffers; **that has never run**. Raises ValueError for a manifest or bucket size that cannot be sent.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        host: str,
        *,
        backend: Backend = "gloo",
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        device: str | torch.device = "cpu",
    ) -> None:
        self.manifest = manifest
        self._host = host
        self._backend: Backend = backend
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._device = torch.device(device)
        self._plan = plan(manifest, bucket_bytes)
        self._nbytes = sum(bucket.nbytes for bucket in self._plan)
        self._digest = manifest_digest(manifest)
        self._meetings: dict[str, Meeting] = {}
        self._door: Door | None = None  # while nobody was sent to by this group
        self._group: Group | None = None  # afterwards

    def meet(self, members: Sequence[str]) -> dict[str, Meeting]:
        """What each member has to be told before `send`, by name. The same as before while these very members share a group that lives;
        else of a new group, and the one before is left: members of it that are not among the new ones see that it ended.

        A name stands for one process: a restarted engine that left no trace yet should come under another name, or it delays `send`.
        Raises ValueError without members or with one twice, OSError when nobody can listen at the host.
        """
        if not members or len(set(members)) < len(members):
            raise ValueError(f"a meeting needs members, each of them once, not {list(members)}")
        if set(members) == set(self._meetings) and self._is_open():
            return dict(self._meetings)
        self._leave("the members changed")
        self._door = Door(self._host)
        for rank, name in enumerate(members, 1):
            self._meetings[name] = Meeting(
                self._door.host,
                self._door.port,
                self._door.epoch,
                rank,
                len(members) + 1,
                self._backend,
                self._bucket_bytes,
                self._timeout_s,
            )
        return dict(self._meetings)

    def send(self, version: int, entries: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, ...]:
        """Deliver `entries` (in the manifest's order, any float dtype and device) to everybody who was told to meet; blocks until each
        has taken every byte. Returns the xxh3_64 of each entry as it was sent, in the manifest's order.

        Raises CollectiveError within the timeout, whatever the engines do: an engine that has taken everything by then keeps it and ends
        well, the others end in an error too. Raises WrongEntries, and what iterating `entries` raises, with the group gone as well.
        """
        if not self._meetings:
            raise ValueError("nobody was told to meet: call meet() first, and again after an error")
        work = _Attempt(version, self._timeout_s)
        packer = Packer(entries)
        try:
            group = self._gather(work)
            work.phase = "the header"
            header = Header(version, self._nbytes, self._digest)
            for line in group.lines:
                line.send(header, work.until)
            gather(group.lines, Accepted, work.until, "the answer")
            buffers = group.buffers(largest(self._plan), self._device)
            for number, bucket in enumerate(self._plan):
                work.phase = f"bucket {number + 1} of {len(self._plan)}"
                buffer = buffers[number % 2]  # the one before the last was awaited
                packer.pack(bucket, buffer)
                if bucket is self._plan[-1]:
                    packer.finish()
                group.await_broadcast(work.until)
                group.broadcast(buffer[: bucket.nbytes], work.until)
            group.await_broadcast(work.until)
            work.phase = "the last acknowledgements"
            gather(group.lines, Taken, work.until, "word that everything was taken")
        except (LineError, GroupError) as error:
            failed = work.failed(error, list(self._meetings), self._group)
            self._leave(str(failed), own=work.refused)
            raise failed from error
        except BaseException as error:
            self._leave(f"the trainer gave up: {error!r}")
            raise
        return tuple(packer.checksums)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._leave("the trainer ends")

    def _is_open(self) -> bool:
        return self._door is not None or (self._group is not None and self._group.wrong() is None)

    def _gather(self, work: _Attempt) -> Group:
        if self._group is None:
            assert self._door is not None
            work.phase = "the meeting"
            members = {meeting.rank: name for name, meeting in self._meetings.items()}
            self._group = Group(self._backend, 0, self._door.roll_call(members, work.until))
            work.phase = "making the group"
            self._group.join(self._door.host, self._door.epoch, 0, work.until, len(members) + 1)
            self._door.close()
            self._door = None
        return self._group

    def _leave(self, reason: str, *, own: bool = True) -> None:
        self._meetings = {}
        door, self._door = self._door, None
        group, self._group = self._group, None
        if door is not None:
            door.close()
        if group is not None:
            group.leave(reason, own=own)


class CollectiveReceiver:
    """An engine's side. One thread at a time calls it. device: as `CollectiveSender`'s."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        self._epoch = ""
        self._group: Group | None = None

    def receive(
        self, meeting: Meeting, manifest: WeightManifest, version: int
    ) -> Generator[tuple[str, np.ndarray], None, None]:
        """Entries by name in the manifest's order as they arrive, on the CPU: read-only arrays (bfloat16 as uint16) that are valid until
        the next entry is asked for. Nothing happens before the first is asked for; the delivery is complete when the iteration ends by
        itself, and leaving it early leaves the group.

        Raises CollectiveError within `meeting.timeout_s`, ValueError for a manifest that cannot be received.
        """
        with contextlib.closing(self.receive_tensors(meeting, manifest, version)) as entries:
            for name, tensor in entries:
                array = as_array(tensor)
                array.flags.writeable = False
                yield name, array

    def receive_tensors(
        self, meeting: Meeting, manifest: WeightManifest, version: int
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """As `receive`, as tensors on this receiver's device, which must not be written."""
        work = _Attempt(version, meeting.timeout_s)
        buckets = plan(manifest, meeting.bucket_bytes)
        try:
            group = self._meet(meeting, work)
            work.phase = "the header"
            (line,) = group.lines
            header = line.receive(Header, work.until, "the header")
            expected = Header(version, sum(bucket.nbytes for bucket in buckets), manifest_digest(manifest))
            if header != expected:
                work.refused = True
                raise LineError([TRAINER], _difference(header, expected))
            line.send(Accepted(version), work.until)
            buffers = group.buffers(largest(buckets), self._device)
            unpacker = Unpacker(buckets, self._device)
            for number, bucket in enumerate(buckets):
                work.phase = f"bucket {number + 1} of {len(buckets)}"
                if number == 0:
                    group.broadcast(buffers[0][: bucket.nbytes], work.until)
                group.await_broadcast(work.until)
                if number + 1 < len(buckets):
                    group.broadcast(buffers[(number + 1) % 2][: buckets[number + 1].nbytes], work.until)
                yield from unpacker.unpack(bucket, buffers[number % 2])
            work.phase = "the last acknowledgement"
            line.send(Taken(version), work.until)
        except (LineError, GroupError) as error:
            failed = work.failed(error, [TRAINER], self._group)
            self._leave(str(failed), own=work.refused)
            raise failed from error
        except BaseException as error:
            self._leave("it was left early" if isinstance(error, GeneratorExit) else repr(error))
            raise

    def decline(self, meeting: Meeting, reason: str) -> None:
        """Take no part: the trainer's delivery ends at once, for this reason, instead of waiting for this engine. Raises CollectiveError
        when the trainer cannot be told."""
        work = _Attempt(-1, meeting.timeout_s)
        try:
            self._knock(meeting, work.until)
        except LineError as error:
            failed = work.failed(error, [TRAINER], self._group)
            self._leave(str(failed), own=False)
            raise failed from error
        self._leave(reason)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._leave("the engine ends")

    def _meet(self, meeting: Meeting, work: _Attempt) -> Group:
        work.phase = "the meeting"
        group, is_new = self._knock(meeting, work.until)
        if is_new:
            (line,) = group.lines
            welcome = line.receive(Welcome, work.until, "the welcome")
            work.phase = "making the group"
            group.join(meeting.host, meeting.epoch, welcome.store_port, work.until, meeting.world)
        return group

    def _knock(self, meeting: Meeting, until: float) -> tuple[Group, bool]:
        """The group that is met, and whether it has to be made yet. Raises LineError."""
        if self._group is not None and self._epoch == meeting.epoch:
            return self._group, False
        self._leave("it was told to meet elsewhere")
        try:
            left_s = max(until - time.monotonic(), 1e-3)
            sock = socket.create_connection((meeting.host, meeting.port), timeout=left_s)
        except OSError as error:
            raise LineError([TRAINER], f"{meeting.host}:{meeting.port} cannot be reached: {error}") from error
        self._group = Group(meeting.backend, meeting.rank, [Line(sock, TRAINER)])
        self._epoch = meeting.epoch
        self._group.lines[0].send(Hello(meeting.epoch, meeting.rank), until)
        return self._group, True

    def _leave(self, reason: str, *, own: bool = True) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave(reason, own=own)


def _difference(header: Header, expected: Header) -> str:
    """Why the two sides do not mean the same delivery."""
    if header.version != expected.version:
        return f"it sends version {header.version} where version {expected.version} is expected"
    return (
        f"its manifest is {header.manifest:016x} with {header.nbytes} bytes, the one here is {expected.manifest:016x} with "
        f"{expected.nbytes}: the two sides do not mean the same model or dtype"
    )


class _Attempt:
    """One call's deadline, and how far it got."""

    def __init__(self, version: int, timeout_s: float) -> None:
        self.version = version
        self.phase = "the meeting"
        self.refused = False  # by this side, for a reason of its own
        self._began = time.monotonic()
        self.until = self._began + timeout_s

    def failed(self, error: Exception, others: Sequence[str], group: Group | None) -> CollectiveError:
        """The line, when it knows, says better what happened than the process group does."""
        waited_s = time.monotonic() - self._began
        who, reason = others, str(error)
        if isinstance(error, LineError):
            who = error.who
        elif group is not None and (wrong := group.wrong(self.until)) is not None:
            who, reason = wrong.who, f"{wrong} ({reason})"
        return CollectiveError(who, self.phase, self.version, waited_s, reason)
