"""Confinement of one freshly forked process: uid, capabilities, Landlock, seccomp, resource limits.

Promises that `confine` either applies every part that `probe` found to work or raises; nothing is skipped in silence.
Knows the kernel's interfaces and nothing of programs, tests or verdicts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from dataclasses import dataclass

from dockyard_executor import syscalls

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_CAPSET = {"x86_64": 126, "aarch64": 91}
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15

_libc = ctypes.CDLL(None, use_errno=True)

# What a program may open for reading besides the standard library: shared libraries of extension modules, time zones.
READABLE = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
    "/dev/urandom",
    "/dev/zero",
)
WRITABLE = ("/dev/null",)

REMEDY = {
    "landlock": "Landlock: needs Linux 5.13 or newer with CONFIG_SECURITY_LANDLOCK and `landlock` among the kernel's `lsm=` "
    "modules; in a container, a seccomp profile that permits the landlock_* calls",
    "seccomp": "seccomp: needs a kernel with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64",
}


class IsolationError(RuntimeError):
    """This host cannot confine a program, or a part of the confinement failed to apply."""


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def landlock_abi() -> int:
    """Version of the kernel's Landlock interface; 0 where there is none."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def landlock_ruleset(readable: list[str | int], writable: list[str]) -> int:
    """A ruleset descriptor that lets a process open only what lies under `readable` and `writable`.

    Entries are paths (a missing one is left out: nothing to allow there) or open descriptors. Where the kernel can, TCP is
    refused and signals and abstract sockets are kept inside the domain.
    """
    abi = landlock_abi()
    handled = (1 << 13) - 1
    for since, bit in ((2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= bit if abi >= since else 0
    attributes = struct.pack("=Q", handled)
    if abi >= 4:
        attributes += struct.pack("=Q", 3)  # bind and connect
    if abi >= 6:
        attributes += struct.pack("=Q", 3)  # abstract unix sockets and signals
    ruleset = _check(
        _libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)),
        "landlock_create_ruleset",
    )
    for entries, access in (
        (readable, _EXECUTE | _READ_FILE | _READ_DIR),
        (writable, _READ_FILE | _WRITE_FILE | _TRUNCATE),
    ):
        for entry in entries:
            _allow(ruleset, entry, access & handled)
    return ruleset


def _allow(ruleset: int, entry: str | int, access: int) -> None:
    if isinstance(entry, str):
        try:
            descriptor = os.open(entry, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return
    else:
        descriptor = entry
    try:
        if not os.path.isdir(entry):
            access &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
        rule = struct.pack("=Qi", access, descriptor)
        _check(_libc.syscall(_LANDLOCK_ADD_RULE, ruleset, 1, rule, ctypes.c_uint32(0)), f"landlock_add_rule {entry}")
    finally:
        if isinstance(entry, str):
            os.close(descriptor)


def set_parent_death_signal(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends. Raises ProcessLookupError when that happened already.

    To be called after any change of uid, which clears the setting.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise ProcessLookupError(f"parent {parent_pid} has ended")


def become_subreaper() -> None:
    """Orphaned descendants become children of this process, so that `waitpid(-1)` knows of every survivor."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def _no_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.syscall(_CAPSET[platform.machine()], header, bytes(24)), "capset")


def _switch_uid(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


class _SockFprog(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _install_seccomp(pid: int) -> None:
    program = syscalls.program_filter(pid)
    buffer = ctypes.create_string_buffer(program, len(program))

    prog = _SockFprog(len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(prog), 0, 0), "prctl(PR_SET_SECCOMP)")


@dataclass(frozen=True)
class Parts:
    """Which parts of the confinement work on this host, each tried for real in a child process."""

    uid: bool
    landlock: bool
    seccomp: bool

    @property
    def isolated(self) -> bool:
        """Landlock and seccomp together count as isolated; the uid switch, where root allows it, is a second wall."""
        return self.landlock and self.seccomp

    @property
    def level(self) -> str:
        if not self.isolated:
            return "weak"
        return "landlock+seccomp+uid" if self.uid else "landlock+seccomp"

    @property
    def remedy(self) -> str:
        missing = [REMEDY[name] for name in ("landlock", "seccomp") if not getattr(self, name)]
        return "; ".join(missing)


def probe(uid: int) -> Parts:
    """Tries each part in a child of its own. Needs no privilege."""
    return Parts(
        uid=os.geteuid() == 0 and _works(lambda: _switch_uid(uid)),
        landlock=landlock_abi() >= 1 and _works(_try_landlock),
        seccomp=syscalls.supported() and _works(_try_seccomp),
    )


def _try_landlock() -> None:
    _no_new_privileges()
    ruleset = landlock_ruleset([], [])
    _check(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")
    try:
        os.listdir("/")
    except PermissionError:
        return
    raise IsolationError("landlock_restrict_self succeeded but restricts nothing")


def _try_seccomp() -> None:
    _no_new_privileges()
    _install_seccomp(os.getpid())
    try:
        os.setsid()
    except PermissionError:
        return
    raise IsolationError("the seccomp filter was accepted but filters nothing")


def _works(attempt) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            attempt()
            code = 0
        except (OSError, IsolationError):
            pass  # the answer is the exit code
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


@dataclass(frozen=True)
class Confinement:
    """What `confine` applies; prepared once by the fork server so that a fork pays only for the applying."""

    parts: Parts
    uid: int
    ruleset: int | None  # Landlock ruleset descriptor
    address_space: int  # bytes
    threads: int
    open_files: int
    parent_pid: int

    def confine(self, cpu_s: int, keep: tuple[int, ...]) -> None:
        """Confines the calling, single-threaded process for good and closes every descriptor not in `keep` (sorted).

        Raises OSError when any part fails; the caller must then end the process.
        """
        os.setsid()
        if self.parts.uid:
            _switch_uid(self.uid)
        set_parent_death_signal(self.parent_pid)
        _no_new_privileges()
        if self.ruleset is not None:
            _check(_libc.syscall(_LANDLOCK_RESTRICT_SELF, self.ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")
        low = 0
        for descriptor in keep:
            if low < descriptor:  # an empty range from 0 closes everything (CPython passes -1 on as "no end")
                os.closerange(low, descriptor)
            low = descriptor + 1
        os.closerange(low, 1 << 30)
        _drop_capabilities()
        for name, soft, hard in (
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_FSIZE, 0, 0),
            (resource.RLIMIT_MEMLOCK, 0, 0),
            (resource.RLIMIT_MSGQUEUE, 0, 0),
            (resource.RLIMIT_NOFILE, self.open_files, self.open_files),
            # SIGXCPU at the soft limit can be ignored, SIGKILL a second later cannot
            (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
            # the reserve lets the runner report a MemoryError
            (resource.RLIMIT_AS, self.address_space, self.address_space + MEMORY_RESERVE),
        ):
            resource.setrlimit(name, (soft, hard))
        if self.parts.uid:  # counted over all processes of the uid: meaningless where the uid is shared
            resource.setrlimit(resource.RLIMIT_NPROC, (self.threads, self.threads))
        if self.parts.seccomp:
            _install_seccomp(os.getpid())


MEMORY_RESERVE = 8 << 20
