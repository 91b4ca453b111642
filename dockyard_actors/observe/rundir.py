"""The directory of one run: what lies where, who holds it, and writes that are whole or absent.
Promises that two runs never share a directory (a lock held for the run's life) and that a file written here is never seen
half-written. Does not know what the files mean; readers open a run without the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
LATEST = "latest"
# A reader that asks whether a run is alive holds the lock for microseconds; a starting run waits that out.
DEFAULT_LOCK_WAIT_S = 0.5
_LOCK_POLL_S = 0.01


class RunDirError(Exception):
    """A directory cannot serve as a run directory; the message names it, the reason and the way out."""


class RunDirBusy(RunDirError):
    """Another live process holds the run directory."""


class LockHolder(msgspec.Struct, frozen=True):
    """Who wrote the lock file last. Only true now while the lock is held (`RunDir.is_held`)."""

    pid: int
    host: str
    since: float  # seconds since the epoch


class RunDir:
    """Paths of one run below `path`. `RunDir(path)` only names them; `RunDir.create` makes and locks the directory."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()  # `runs/latest` is a link: its target is the run
        self._lock_fd: int | None = None

    @classmethod
    def create(
        cls,
        path: Path | str | None = None,
        *,
        name: str = "run",
        base: Path | str = "runs",
        resume: bool = False,
        lock_wait_s: float = DEFAULT_LOCK_WAIT_S,
    ) -> RunDir:
        """Makes (or, with `resume`, re-opens) a run directory and takes its lock.

        Without `path` the directory is `base/<YYYYmmdd-HHMMSS>-<name>`. `base/latest` then points to it, as it does for a
        `path` directly below `base`. Raises RunDirError for a directory that holds other files, a run that
        exists already (unless resuming), or, when resuming, no run; RunDirBusy when a live process holds it.
        """
        base = Path(base).absolute()
        if path is None:
            if resume:
                raise RunDirError("resuming needs the path of a run directory")
            run = cls(_fresh_directory(base, name))
        else:
            run = cls(path)
            run._refuse_unfit(resume)
            run.path.mkdir(parents=True, exist_ok=True)
        run._acquire(lock_wait_s)
        for directory in (run.ledger, run.checkpoints, run.rollouts, run.logs):
            directory.mkdir(exist_ok=True)
        if resume and run.summary.exists():
            # Until the resumed run ends it has no summary; an old one would call it finished if it crashed.
            os.replace(run.summary, run.path / "summary.previous.json")
        if run.path.parent == base:
            _point_latest(base, run.path.name)
        return run

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.resolved.yaml"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def lock(self) -> Path:
        return self.path / LOCK_NAME

    def is_run(self) -> bool:
        """Whether the directory is one that `create` made, or a copy of one without its lock file."""
        return self.lock.is_file() or self.config.is_file() or self.metrics.is_file()

    def is_held(self) -> bool:
        """Whether a live process (this one included) holds the run."""
        if self._lock_fd is not None:
            return True
        try:
            fd = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)  # also lets go of the probe's own lock
        return False

    def holder(self) -> LockHolder | None:
        """What the lock file says about the process that took the run last; None when it says nothing readable."""
        try:
            return msgspec.json.decode(self.lock.read_bytes(), type=LockHolder)
        except (FileNotFoundError, msgspec.DecodeError):  # missing, or being written just now
            return None

    def write_text(self, name: str, text: str) -> Path:
        """Replaces the file `name` below the run atomically. Returns its path."""
        return write_atomic(self.path / name, text.encode("utf-8"))

    def write_json(self, name: str, value: Any) -> Path:
        """Replaces the file `name` below the run by `value` as indented JSON, atomically. NaN and infinities become null."""
        return write_atomic(self.path / name, json_bytes(value))

    def close(self) -> None:
        """Lets go of the lock. The files stay."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse_unfit(self, resume: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RunDirError(f"{self.path} is a file; give a directory for the run")
        if resume:
            if not self.is_run():
                raise RunDirError(f"{self.path} holds no run to resume (no {LOCK_NAME}, no config.resolved.yaml)")
            return
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        if self.is_run():
            if self.is_held():
                raise RunDirBusy(self._busy_text())
            raise RunDirError(f"{self.path} already holds a run; resume it, or give another directory")
        raise RunDirError(f"{self.path} holds files that are not a run's; give an empty or a new directory")

    def _acquire(self, wait_s: float) -> None:
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        give_up = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    os.close(fd)
                    raise RunDirBusy(self._busy_text()) from None
                time.sleep(_LOCK_POLL_S)
        self._lock_fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}).encode(), 0)

    def _busy_text(self) -> str:
        holder = self.holder()
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        return f"{self.path} is in use by {who}; wait for it to end, or give another directory"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, of the same suffix: what the block writes there replaces `path` when it succeeds.

    The content is on disk before the name changes, so a crash leaves the old file or the new one. On an error the
    temporary file is removed and `path` is untouched.
    """
    temporary = path.with_name(f".{path.stem}-{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> Path:
    """Replaces `path` by `data`, whole or not at all. Returns `path`."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)
    return path


def json_bytes(value: Any) -> bytes:
    """`value` (structs, dicts, lists, numbers) as indented JSON with a final newline. NaN and infinities become null."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=plain_scalar), indent=2) + b"\n"


def plain_scalar(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number: an `enc_hook` for msgspec. Raises TypeError for anything else."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError) as error:  # no scalar; many elements in NumPy; in torch
        raise TypeError(f"{type(value).__name__} is not JSON data or a single number") from error


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fresh_directory(base: Path, name: str) -> Path:
    """A new directory under `base` that no other run has; a second run within the same second gets `-2`."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "run"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
    base.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        path = base / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return path


def _point_latest(base: Path, name: str) -> None:
    link = base / LATEST
    if link.exists() and not link.is_symlink():
        logger.warning("%s is not a symlink and stays as it is; it does not point to the newest run", link)
        return
    temporary = base / f".{LATEST}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary.symlink_to(name)
    os.replace(temporary, link)
