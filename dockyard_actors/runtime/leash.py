"""Runs a program that cannot outlive its parent: `python -I -S leash.py PARENT_PID PROGRAM ARGS...`.

Sets PR_SET_PDEATHSIG, makes sure that the parent is still there, and becomes the program. Standard library only, no imports
of this package: it runs before anything is set up, and whoever starts a process may use it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """SIGKILL for this process when the thread that started it ends; exits at once when the parent is gone already.

    Call it in a direct child of ``parent_pid`` only. Raises OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:  # it died before the request was in force
        sys.exit(f"the parent process {parent_pid} is gone")


def command(argv: list[str]) -> list[str]:
    """The command line that runs ``argv`` as a child of the calling process on a leash."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *argv]


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
