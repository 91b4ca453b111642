"""Ends what outlives its node agent: `python -I -S warden.py AGENT_PID MARK` waits for the agent's death and kills every process whose
environment has the mark.

Role processes die with their agent through PR_SET_PDEATHSIG; this is for what they started: plain subprocesses, and daemons that left
for a session of their own. A process that cleared its environment is not found. Standard library only: it runs before anything is set up.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

_ROUNDS = 100  # each meets what forked while the one before it was killing
_PAUSE_S = 0.02


def kill_marked(mark: str) -> int:
    """SIGKILL for every process but this one whose environment contains the mark, until none is found. Returns how many were found."""
    wanted, total = mark.encode(), 0
    for number in range(_ROUNDS):
        if number:
            time.sleep(_PAUSE_S)  # for those of the round before to be gone; nothing tells when a stranger is
        found = sum(_kill_if_marked(int(name), wanted) for name in os.listdir("/proc") if name.isdigit())
        total += found
        if not found:
            break
    return total


def _kill_if_marked(pid: int, wanted: bytes) -> bool:
    if pid == os.getpid():
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if wanted not in file.read():  # empty for a zombie
                return False
        os.kill(pid, signal.SIGKILL)
    except OSError:  # gone, or another user's
        return False
    return True


def start(mark: str) -> subprocess.Popen[bytes]:
    """Starts a warden of the calling process, which kills it when it ends in order."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # not ours: whoever reads our output must see it end with us
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(agent_pid: int, mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what ends a whole job must not end this before the agent
    with contextlib.suppress(ProcessLookupError):
        agent = os.pidfd_open(agent_pid)
        if os.getppid() == agent_pid:  # else it died before, and the number may be anyone's
            select.select([agent], [], [])
    kill_marked(mark)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
