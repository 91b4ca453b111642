"""The system calls a program may make, and the seccomp filter made of them.

An allow-list: what is not named fails with EPERM, so that calls newer than this file are refused too. A program is one
process: it may start threads, never processes, and has no sockets but the unnamed pairs that an event loop needs.
"""

from __future__ import annotations

import errno
import platform
import struct
from functools import cache

# name, number on x86_64, number on aarch64 (None where the call does not exist)
ALLOWED: tuple[tuple[str, int | None, int | None], ...] = (
    ("read", 0, 63),
    ("write", 1, 64),
    ("futex", 202, 98),
    ("mmap", 9, 222),
    ("munmap", 11, 215),
    ("brk", 12, 214),
    ("close", 3, 57),
    ("fstat", 5, 80),
    ("newfstatat", 262, 79),
    ("openat", 257, 56),
    ("lseek", 8, 62),
    ("getdents64", 217, 61),
    ("rt_sigaction", 13, 134),
    ("rt_sigprocmask", 14, 135),
    ("rt_sigreturn", 15, 139),
    ("clock_gettime", 228, 113),
    ("readv", 19, 65),
    ("writev", 20, 66),
    ("pread64", 17, 67),
    ("pwrite64", 18, 68),
    ("close_range", 436, 436),
    ("dup", 32, 23),
    ("dup2", 33, None),
    ("dup3", 292, 24),
    ("pipe", 22, None),
    ("pipe2", 293, 59),
    ("open", 2, None),
    ("openat2", 437, 437),
    ("stat", 4, None),
    ("lstat", 6, None),
    ("statx", 332, 291),
    ("access", 21, None),
    ("faccessat", 269, 48),
    ("faccessat2", 439, 439),
    ("readlink", 89, None),
    ("readlinkat", 267, 78),
    ("getcwd", 79, 17),
    ("mprotect", 10, 226),
    ("mremap", 25, 216),
    ("madvise", 28, 233),
    ("rt_sigpending", 127, 136),
    ("rt_sigtimedwait", 128, 137),
    ("rt_sigsuspend", 130, 133),
    ("sigaltstack", 131, 132),
    ("pause", 34, None),
    ("alarm", 37, None),
    ("setitimer", 38, 103),
    ("getitimer", 36, 102),
    ("select", 23, None),
    ("pselect6", 270, 72),
    ("poll", 7, None),
    ("ppoll", 271, 73),
    ("epoll_create", 213, None),
    ("epoll_create1", 291, 20),
    ("epoll_ctl", 233, 21),
    ("epoll_wait", 232, None),
    ("epoll_pwait", 281, 22),
    ("epoll_pwait2", 441, 441),
    ("eventfd2", 290, 19),
    ("timerfd_create", 283, 85),
    ("timerfd_settime", 286, 86),
    ("timerfd_gettime", 287, 87),
    ("socketpair", 53, 199),
    ("recvfrom", 45, 207),
    ("shutdown", 48, 210),
    ("getsockopt", 55, 209),
    ("setsockopt", 54, 208),
    ("getsockname", 51, 204),
    ("getpeername", 52, 205),
    ("getpid", 39, 172),
    ("gettid", 186, 178),
    ("getppid", 110, 173),
    ("getuid", 102, 174),
    ("geteuid", 107, 175),
    ("getgid", 104, 176),
    ("getegid", 108, 177),
    ("getresuid", 118, 148),
    ("getresgid", 120, 150),
    ("getgroups", 115, 158),
    ("getpgrp", 111, None),
    ("getpgid", 121, 155),
    ("getsid", 124, 156),
    ("gettimeofday", 96, 169),
    ("time", 201, None),
    ("clock_getres", 229, 114),
    ("nanosleep", 35, 101),
    ("clock_nanosleep", 230, 115),
    ("times", 100, 153),
    ("getrusage", 98, 165),
    ("sysinfo", 99, 179),
    ("uname", 63, 160),
    ("getrlimit", 97, 163),
    ("sched_getaffinity", 204, 123),
    ("sched_yield", 24, 124),
    ("getcpu", 309, 168),
    ("set_robust_list", 273, 99),
    ("get_robust_list", 274, 100),
    ("rseq", 334, 293),
    ("membarrier", 324, 283),
    ("restart_syscall", 219, 128),
    ("getrandom", 318, 278),
    ("exit", 60, 93),
    ("exit_group", 231, 94),
)

_ARCHITECTURES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}  # AUDIT_ARCH, column of the table
_CHECKED = {  # calls allowed only with certain arguments
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "sendto": (44, 206),
}
_THREAD_FLAGS = 0x003D0F00  # exactly what pthread_create passes
_CLONE_THREAD = 0x00010000
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032)  # dup, descriptor and status flags; not owners, leases, signals, pipe sizes
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # isatty, window size, FIONREAD, FIONBIO, close-on-exec
_SIGKILL = 9
_RLIMIT_AS = 9
_PID = 0x7EDCBA98  # above any process id, equal to nothing else in the program

_LD, _RET = 0x20, 0x06
_JA, _JEQ, _JGT, _JGE, _JSET = 0x05, 0x15, 0x25, 0x35, 0x45
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH = 0, 4


def supported() -> bool:
    """Whether the tables above know this machine's processor."""
    return platform.machine() in _ARCHITECTURES


def _instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, k & 0xFFFFFFFF)


def _low(argument: int) -> bytes:
    return _instruction(_LD, 16 + 8 * argument)


def _high(argument: int) -> bytes:
    return _instruction(_LD, 20 + 8 * argument)


_ret_allow = _instruction(_RET, _ALLOW)
_ret_eperm = _instruction(_RET, _ERRNO | errno.EPERM)
_ret_enosys = _instruction(_RET, _ERRNO | errno.ENOSYS)


def _one_of(argument: int, values: tuple[int, ...]) -> list[bytes]:
    """Allow when the low word of the argument is one of `values`, else EPERM."""
    steps = [_low(argument)]
    for index, value in enumerate(values):
        steps.append(_instruction(_JEQ, value, len(values) - index, 0))
    return [*steps, _ret_eperm, _ret_allow]


def _signal(pid: int, signal_argument: int) -> list[bytes]:
    """Allow a signal to the program itself, but not SIGKILL: a death by SIGKILL then always came from outside."""
    return [
        _low(0),
        _instruction(_JEQ, pid, 0, 2),
        _low(signal_argument),
        _instruction(_JEQ, _SIGKILL, 0, 1),
        _ret_eperm,
        _ret_allow,
    ]


def _own_limits(pid: int) -> list[bytes]:
    """Allow reading the program's own limits, and setting only that of memory (the runner needs it): a program that
    lowers its CPU limit could otherwise die by a SIGKILL that looks like the host's."""
    return [
        _low(0),
        _instruction(_JEQ, 0, 1, 0),
        _instruction(_JEQ, pid, 0, 6),
        _low(1),
        _instruction(_JEQ, _RLIMIT_AS, 5, 0),
        _low(2),
        _instruction(_JEQ, 0, 0, 2),
        _high(2),
        _instruction(_JEQ, 0, 1, 0),  # no new value: reading
        _ret_eperm,
        _ret_allow,
    ]


def program_filter(pid: int) -> bytes:
    """The BPF program for a task whose process id is `pid`. Raises OSError on an unknown processor."""
    return _template().replace(struct.pack("=I", _PID), struct.pack("=I", pid))


@cache
def _template() -> bytes:
    """The program with _PID for the process id: built once, patched in each fork."""
    pid = _PID
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call table for {machine}")
    arch, column = _ARCHITECTURES[machine]
    number = {name: row[column - 1] for name, row in _CHECKED.items()}
    checks: list[tuple[int, list[bytes]]] = [
        (
            number["clone"],
            [
                _low(0),
                _instruction(_JSET, ~_THREAD_FLAGS, 2, 0),
                _instruction(_JSET, _CLONE_THREAD, 0, 1),
                _ret_allow,
                _ret_eperm,
            ],
        ),
        (number["clone3"], [_ret_enosys]),  # its flags lie in memory; the C library falls back to clone
        (number["kill"], _signal(pid, 1)),
        (number["tgkill"], _signal(pid, 2)),
        (number["prlimit64"], _own_limits(pid)),
        (number["fcntl"], _one_of(1, _FCNTL)),
        (number["ioctl"], _one_of(1, _IOCTL)),
        # no destination address: only connected pairs can be written to
        (
            number["sendto"],
            [_low(4), _instruction(_JEQ, 0, 0, 3), _high(4), _instruction(_JEQ, 0, 0, 1), _ret_allow, _ret_eperm],
        ),
    ]
    allowed = sorted(n for _, x86_64, aarch64 in ALLOWED if (n := (x86_64, aarch64)[column - 1]) is not None)
    ranges: list[tuple[int, int, list[bytes]]] = [(n, n, body) for n, body in checks]
    for n in allowed:
        if ranges and ranges[-1][1] == n - 1 and ranges[-1][2] == [_ret_allow]:
            ranges[-1] = (ranges[-1][0], n, [_ret_allow])
        else:
            ranges.append((n, n, [_ret_allow]))
    steps = [
        _instruction(_LD, _ARCH),
        _instruction(_JEQ, arch, 1, 0),
        _instruction(_RET, _KILL),
        _instruction(_LD, _NR),
        *_search(sorted(ranges, key=lambda entry: entry[0])),
    ]
    return b"".join(steps)


def _search(entries: list[tuple[int, int, list[bytes]]]) -> list[bytes]:
    """Binary search for the call's number. The kernel runs a new filter once for each call there is: a list would cost
    every fork several times as much."""
    if len(entries) > 2:
        middle = len(entries) // 2
        left, right = _search(entries[:middle]), _search(entries[middle:])
        if len(left) <= 255:
            return [_instruction(_JGE, entries[middle][0], len(left), 0), *left, *right]
        return [_instruction(_JGE, entries[middle][0], 0, 1), _instruction(_JA, len(left)), *left, *right]
    steps = []
    for first, last, body in entries:
        if first == last:
            steps += [_instruction(_JEQ, first, 0, len(body)), *body]
        else:
            steps += [_instruction(_JGE, first, 0, len(body) + 1), _instruction(_JGT, last, len(body), 0), *body]
    return [*steps, _ret_eperm]
