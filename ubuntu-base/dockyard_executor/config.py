"""Everything the executor can be told, as one frozen value read from the environment and the command line.

Promises that a bad value is refused with its name before anything starts. Knows no HTTP and no isolation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

MIB = 1 << 20


class ConfigError(ValueError):
    """A setting is missing or out of range; the message names it and says what would be right."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. Bytes, seconds and counts."""

    memory_bytes: int = 256 * MIB  # address space on top of the warm interpreter's own
    cpu_headroom_s: int = 1  # RLIMIT_CPU = ceil(timeout) + this; the wall clock is the primary limit
    max_timeout_s: float = 300.0  # a request may ask for no more
    threads: int = 64  # RLIMIT_NPROC of the slot's uid; processes are refused altogether
    open_files: int = 64
    output_bytes: int = 1 * MIB  # stdout and stderr together; beyond it the program is ended
    output_tail_bytes: int = 4096  # what of each stream the result keeps
    event_bytes: int = 4 * MIB  # the runner's event channel; an honest run needs a few KiB
    value_bytes: int = 64 * 1024  # one value that a program hands to the judge


@dataclass(frozen=True)
class ExecutorConfig:
    """Settings of one executor process. Times are in seconds."""

    socket: Path | None = None
    host: str = "127.0.0.1"
    port: int = 9090
    token: str | None = field(default=None, repr=False)
    workers: int = 2
    queue_limit: int = 512  # waiting tasks; beyond it 429, so that a flood costs the client and not this process
    max_body_bytes: int = 1 * MIB
    max_tests: int = 1000  # of one request, visible and hidden together
    max_wait_s: float = 60.0  # longest long-poll; below usual proxy timeouts
    task_max_age_s: float = 3600.0  # how long a finished result stays readable
    keep_results: int = 10_000  # at most this many finished results are held
    drain_s: float = 10.0  # on SIGTERM: time for accepted tasks to finish
    worker_grace_s: float = 10.0  # beyond a task's timeout before its worker itself is held for hung
    worker_start_s: float = 30.0  # a fork server answers within this or is replaced
    worker_backoff_s: float = 0.5  # pause before replacing a fork server that could not start
    uid_base: int = 0  # 0: derived from the executor's pid, so that two executors on a host share no uid
    allow_weak: bool = False
    parent_pid: int = 0  # not 0: end when this parent ends
    log_level: str = "info"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("workers", "queue_limit", "max_body_bytes", "max_tests", "keep_results"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be at least 1")
        for name in ("max_wait_s", "task_max_age_s", "worker_grace_s", "worker_start_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: must be above 0 seconds")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}: must be between 0 and 65535")
        if self.limits.memory_bytes < 16 * MIB:
            raise ConfigError(f"memory_bytes is {self.limits.memory_bytes}: a Python program needs at least {16 * MIB}")
        if self.socket is None and self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host!r} without a token: set API_TOKEN or API_TOKEN_FILE, or bind to 127.0.0.1"
            )

    @property
    def address(self) -> str:
        return f"unix:{self.socket}" if self.socket is not None else f"http://{self.host}:{self.port}"

    @property
    def first_uid(self) -> int:
        """First of the `workers` consecutive uids that programs run under (only used as root)."""
        # 20000..58399: outside the system's and people's ranges, inside the 65536 ids that a container maps
        return self.uid_base or 20_000 + (os.getpid() % 600) * 64


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


_ENV: dict[str, tuple[str, type]] = {
    "API_HOST": ("host", str),
    "API_PORT": ("port", int),
    "WORKERS": ("workers", int),
    "QUEUE_LIMIT": ("queue_limit", int),
    "TASK_MAX_AGE": ("task_max_age_s", float),
    "MAX_BODY_BYTES": ("max_body_bytes", int),
    "DRAIN_SECONDS": ("drain_s", float),
    "UID_BASE": ("uid_base", int),
    "LOG_LEVEL": ("log_level", str),
    "MEMORY_BYTES": ("limits.memory_bytes", int),
    "OUTPUT_BYTES": ("limits.output_bytes", int),
    "MAX_TIMEOUT": ("limits.max_timeout_s", float),
}


def from_env(environ: Mapping[str, str], **overrides: object) -> ExecutorConfig:
    """Reads the settings above from `environ`; `overrides` (field names; None means "not given") win.

    The token comes from API_TOKEN or from the file that API_TOKEN_FILE names, never from a command line.
    Raises ConfigError naming the variable.
    """
    values: dict[str, object] = {}
    limits: dict[str, object] = {}
    for variable, (name, kind) in _ENV.items():
        text = environ.get(variable)
        if text is None:
            continue
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"{variable} is {text!r}: must be of type {kind.__name__}") from None
        if name.startswith("limits."):
            limits[name.removeprefix("limits.")] = value
        else:
            values[name] = value
    values["token"] = _token(environ)
    values.update({name: value for name, value in overrides.items() if value is not None})
    unknown = set(values) - {f.name for f in fields(ExecutorConfig)}
    if unknown:
        raise ConfigError(f"unknown setting {sorted(unknown)[0]!r}")
    return ExecutorConfig(limits=replace(Limits(), **limits), **values)  # type: ignore[arg-type]


def _token(environ: Mapping[str, str]) -> str | None:
    path = environ.get("API_TOKEN_FILE")
    token = environ.get("API_TOKEN")
    if path and token:
        raise ConfigError("API_TOKEN and API_TOKEN_FILE are both set: give one")
    if path:
        try:
            token = Path(path).read_text().strip()
        except OSError as error:
            raise ConfigError(f"API_TOKEN_FILE {path!r} cannot be read: {error.strerror}") from error
    if token is not None and not token.strip():
        raise ConfigError("the API token is empty")
    return token
