"""Logging of every process of a run: one line a record, `time level role[pid] logger: message`, in `logs/<role>.log`.
Promises that a record never spans two lines (so no message can forge another record) and that values which look like
credentials are replaced. Does not know what the roles do.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from dockyard_actors.observe.text import visible

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOG_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>[A-Z]+) (?P<role>\S+)\[(?P<pid>\d+)\] "
    r"(?P<logger>\S+): (?P<message>.*)"
)
"""One record as written by `LineFormatter`."""

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|(?:^|_)KEY(?:$|_)|(?:^|_)AUTH(?:$|_)|(?:^|_)PAT$", re.I
)
_NOT_SECRET_NAME = re.compile(
    r"_(?:FILE|PATH|DIR|SOCK|URL|NAME|PARALLELISM|TOKENS|LIMIT|ID)$|MAX_|TOKENIZERS?_|NUM_", re.I
)
_SECRET_SHAPES = re.compile(
    r"""
    \b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abprs]-)[A-Za-z0-9_-]{16,}      # keys with a vendor's prefix
  | \bAKIA[0-9A-Z]{16}\b
  | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*                      # JSON web tokens
  | (?<=://)[^/\s:@]+:[^/\s@]+(?=@)                                                # user:password in a URL
  | (?<=\bbearer\ )[A-Za-z0-9._~+/=-]{8,}
  | (?<=\bbasic\ )[A-Za-z0-9+/=]{12,}
    """,
    re.X | re.I,
)
# `token: 5` and `tokens=312` are ordinary here, so an assigned value must be long and mixed to count as a secret.
_ASSIGNED = re.compile(
    r"""(?P<name>(?:api[_-]?key|access[_-]?key|token|secret|password|passwd)["']?\s*[=:]\s*["']?)"""
    r"""(?P<value>(?=[^\s"',;]*[0-9])(?=[^\s"',;]*[A-Za-z])[^\s"',;]{12,})""",
    re.I,
)
MIN_SECRET_CHARS = 8
"""Shorter values are too common in ordinary text to be replaced (`1`, `true`, `root`)."""


class Redactor:
    """Replaces credentials in text: the values of environment variables with a telling name, known secrets, known shapes."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        env = os.environ if environ is None else environ
        self._names = {
            value: name
            for name, value in env.items()
            if _SECRET_NAME.search(name) and not _NOT_SECRET_NAME.search(name) and len(value) >= MIN_SECRET_CHARS
        }
        self._compile()

    def add(self, secret: str, name: str = "secret") -> None:
        """Replaces `secret` (a token read from a file, say) from now on. Raises ValueError for one too short to find."""
        if len(secret) < MIN_SECRET_CHARS:
            raise ValueError(
                f"{name} has {len(secret)} characters; at least {MIN_SECRET_CHARS} are needed to redact it"
            )
        self._names[secret] = name
        self._compile()

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(lambda m: f"[redacted {self._names[m.group()]}]", text)
        text = _SECRET_SHAPES.sub("[redacted]", text)
        return _ASSIGNED.sub(lambda m: f"{m['name']}[redacted]", text)

    def _compile(self) -> None:
        longest_first = sorted(self._names, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


class LineFormatter(logging.Formatter):
    """One line a record, times in UTC; newlines of messages and tracebacks are written as `\\n`, secrets replaced.

    Redaction sits here and not in a logging.Filter because a filter does not see the rendered traceback.
    """

    def __init__(self, role: str, redactor: Redactor) -> None:
        super().__init__()
        self.role = re.sub(r"\s+", "_", role)
        self.redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        if record.stack_info:
            message = f"{message}\n{self.formatStack(record.stack_info)}"
        # Known secrets first, in the raw text: escaping would change a value with a newline in it.
        message = visible(self.redactor(message), keep="\t")
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        name = re.sub(r"\s+", "_", visible(record.name, keep=""))
        return f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {self.role}[{os.getpid()}] {name}: {message}"


class LogSetup:
    """The handlers that `setup_logging` installed. `close()` removes them and closes the file."""

    def __init__(self, handlers: list[logging.Handler], redactor: Redactor, previous_level: int) -> None:
        self.redactor = redactor
        self._handlers = handlers
        self._previous_level = previous_level

    def close(self) -> None:
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
            handler.close()
        self._handlers = []
        root.setLevel(self._previous_level)
        logging.captureWarnings(False)


def setup_logging(
    role: str,
    directory: Path | str | None,
    *,
    level: str = "INFO",
    stderr: bool = False,
    environ: Mapping[str, str] | None = None,
) -> LogSetup:
    """Sends this process's log records to `directory/<role>.log` (appending) and, with `stderr`, to standard error.

    `level` is one of LEVELS. `environ` (default: this process's) is where secrets to redact are looked up. A process whose
    output already goes to its log file passes directory=None and stderr=True. Raises ValueError for an unknown level or
    when the records would go nowhere.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"log level {level!r} is unknown; one of {', '.join(LEVELS)}")
    if directory is None and not stderr:
        raise ValueError("logging needs a directory or stderr=True, else records would vanish")
    redactor = Redactor(environ)
    handlers: list[logging.Handler] = []
    if directory is not None:
        path = Path(directory) / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', role)}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
    if stderr:
        handlers.append(logging.StreamHandler(sys.stderr))
    root = logging.getLogger()
    previous_level = root.level
    root.setLevel(level.upper())
    for handler in handlers:
        handler.setFormatter(LineFormatter(role, redactor))
        root.addHandler(handler)
    for noisy in ("matplotlib", "asyncio", "urllib3", "filelock"):  # their DEBUG and INFO drown a role's own lines
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    return LogSetup(handlers, redactor, previous_level)
