"""Append-only journal of the run: framed msgpack records in one file.

Promises that what `append` has returned from `commit` for is on disk, that a torn tail left by a crash is cut and said, and that a
record damaged anywhere else is an error and never skipped. Knows nothing about leases: it stores whatever Struct union it is given.

Frame: u32 length, u32 xxh32 of the payload, payload (msgpack), little endian.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import xxhash

from dockyard_actors.runtime.errors import PermanentError

log = logging.getLogger(__name__)

E = TypeVar("E")
_HEAD = struct.Struct("<II")
MAX_RECORD_BYTES = 16 << 20
FIRST_RECORD_BYTES = 1024  # more than the first event of a run takes: only so much can be a torn first record


class JournalDamaged(PermanentError, RuntimeError):
    """A record in the middle of the journal does not read back: the file was edited or the disk is failing."""


def _scan(raw: bytes, path: Path, decoder: msgspec.msgpack.Decoder[E]) -> tuple[list[E], int]:
    """Returns the records and the length in bytes of the intact prefix. Raises JournalDamaged unless only the tail is torn."""
    records: list[E] = []
    at = 0
    while at < len(raw):
        payload, end = _record_at(raw, at)
        if payload is None:
            if not records and len(raw) > FIRST_RECORD_BYTES:
                raise JournalDamaged(
                    f"{path}: none of its {len(raw)} bytes is a record: the file was overwritten. Restore it from a copy"
                )
            if end < len(raw) or _whole_record_follows(raw, at):
                raise JournalDamaged(
                    f"{path}: record {len(records)} at byte {at} does not read back, and it is no torn tail: more follows it. "
                    "Restore the file from a copy, or start a new run from the newest checkpoint."
                )
            break
        try:
            records.append(decoder.decode(payload))
        except msgspec.ValidationError as error:
            raise JournalDamaged(
                f"{path}: record {len(records)} at byte {at} is not a known event ({error}). It was written by another version."
            ) from error
        at = end
    return records, at


def _record_at(raw: bytes, at: int) -> tuple[bytes | None, int]:
    """The payload of the record at byte `at`, None when it is not whole; and where it ends by its own account, at most the file's end."""
    if at + _HEAD.size > len(raw):
        return None, len(raw)
    length, digest = _HEAD.unpack_from(raw, at)
    end = at + _HEAD.size + length
    if not 0 < length <= MAX_RECORD_BYTES or end > len(raw):
        return None, len(raw)
    payload = raw[at + _HEAD.size : end]
    return (payload if xxhash.xxh32_intdigest(payload) == digest else None), end


def _whole_record_follows(raw: bytes, at: int) -> bool:
    """Whether a record begins anywhere behind `at`: a damaged length is then no torn tail, whatever it claims."""
    return any(_record_at(raw, start)[0] is not None for start in range(at + 1, len(raw) - _HEAD.size))


def read_journal(path: Path, kind: Any) -> tuple[list[Any], int]:
    """Reads a journal that another process may be writing. Returns the records and how many bytes of torn tail were ignored."""
    raw = path.read_bytes() if path.exists() else b""
    records, intact = _scan(raw, path, msgspec.msgpack.Decoder(kind))
    return records, len(raw) - intact


class Journal(Generic[E]):
    """The single writer. `append` buffers; `commit` writes and fsyncs everything appended so far (group commit)."""

    def __init__(self, path: Path, kind: Any):
        self.path = path
        self._encoder = msgspec.msgpack.Encoder()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.recovered: list[E]
        self.recovered, torn = read_journal(path, kind)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if torn:
            intact = os.fstat(self._fd).st_size - torn
            log.warning("%s: cut a torn tail of %d bytes after %d intact records", path, torn, len(self.recovered))
            path.with_suffix(".torn").write_bytes(os.pread(self._fd, torn, intact))  # nothing is thrown away unseen
            os.ftruncate(self._fd, intact)
        os.lseek(self._fd, 0, os.SEEK_END)
        self._pending: list[bytes] = []

    def append(self, event: E) -> None:
        payload = self._encoder.encode(event)
        self._pending.append(_HEAD.pack(len(payload), xxhash.xxh32_intdigest(payload)) + payload)

    def commit(self) -> None:
        """Makes every appended record durable. Raises OSError when the disk refuses; nothing is acknowledged then."""
        if not self._pending:
            return
        blob = b"".join(self._pending)
        start = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            done = 0
            while done < len(blob):
                done += os.write(self._fd, blob[done:])
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, start)
            os.lseek(self._fd, start, os.SEEK_SET)
            raise
        self._pending.clear()

    def close(self) -> None:
        if self._fd >= 0:
            try:
                self.commit()
            finally:
                os.close(self._fd)
                self._fd = -1
