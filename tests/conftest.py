"""What every test run promises: nothing is left behind, and what was skipped is said in one line with its reasons."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

MARK = "PYTEST_DOCKYARD_SESSION"  # inherited by every process that a test starts
SETTLE_S = 10.0  # a killed grandchild is reaped by init a moment later


def _carries_mark(pid: int) -> bool:
    try:
        return f"{MARK}={os.environ[MARK]}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return False


def _processes() -> set[int]:
    """Ours: descendants, and orphans that carry this session's mark. Whatever else runs on the machine is not looked at."""
    found = {child.pid for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}
    return found | {pid for pid in psutil.pids() if pid != os.getpid() and _carries_mark(pid)}


def _runtime_dirs() -> set[str]:
    """Those whose node agent is dead: a living one's is locked."""
    found = set()
    for path in Path(tempfile.gettempdir()).glob(f"dockyard-{os.getuid()}-*"):
        try:
            with (path / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                found.add(path.name)
        except (BlockingIOError, FileNotFoundError):
            continue
    return found


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _mounts() -> set[str]:
    return set(Path("/proc/self/mounts").read_text().splitlines())


def _left(before: dict[str, set], after: dict[str, set]) -> dict[str, set]:
    return {kind: after[kind] - before[kind] for kind in before if after[kind] - before[kind]}


def _look() -> dict[str, set]:
    return {
        "processes": _processes(),
        "runtime directories": _runtime_dirs(),
        "shared memory": _shared_memory(),
        "mounts": _mounts(),
    }


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    os.environ[MARK] = secrets.token_hex(8)
    before = _look()
    sockets = len(psutil.Process().net_connections("all"))
    yield
    until = time.monotonic() + SETTLE_S
    left = _left(before, _look())
    while left and time.monotonic() < until:
        time.sleep(0.1)  # polls the process table: there is no event for somebody else's grandchild
        left = _left(before, _look())
    assert not left, f"left behind by the test session: {left}"
    assert len(psutil.Process().net_connections("all")) <= sockets + 2, "sockets were left open by the test session"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    deselected = len(terminalreporter.stats.get("deselected", []))
    parts = [f"{count} because {reason}" for reason, count in reasons.most_common()]
    parts += [f"{deselected} deselected by marker"] if deselected else []
    terminalreporter.write_line(f"skipped: {'; '.join(parts) if parts else 'nothing'}")
