"""What a child does first, before threads and sockets: die with its parent, take its cores, enter its namespace.

Only the standard library is imported here, so that a child is guarded before its slow imports begin.
"""

import ctypes
import os
import signal
import socket
import struct
from collections.abc import Iterable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_CLONE_NEWNET: Final = 0x40000000
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid


class ParentGone(Exception):
    """The parent had already died when the child began; the child has to exit."""


def die_with_parent(parent_link_fd: int | None = None, *, parent_pid: int | None = None) -> None:
    """Have the kernel send SIGKILL when the thread that spawned this process ends.

    A parent that died before this call would never cause that signal: ``parent_link_fd`` (a socket pair made by the
    parent) or ``parent_pid`` names the parent, and a different ``getppid()`` raises ParentGone. Without either only a
    parent that is pid 1 counts as gone. Raises OSError when the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.getppid()
    if parent_pid is not None:
        if parent != parent_pid:
            raise ParentGone(f"the parent process (pid {parent_pid}) has died")
    elif parent_link_fd is None:
        if parent == 1:
            raise ParentGone("the parent process has died")
    elif (maker := link_maker_pid(parent_link_fd)) != parent:
        raise ParentGone(f"the parent process (pid {maker}) has died")


def link_maker_pid(fd: int) -> int:
    """The pid of the process that made this socket pair. Raises OSError for a descriptor that is not a socket."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        pid: int = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    return pid


def set_process_name(name: str) -> None:
    """What ``ps -o comm`` and ``top`` show; the kernel keeps 15 bytes."""
    _check(_libc().prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl")


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's, where it can see and reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def enter_netns(fd: int) -> None:
    """Move the calling thread into the network namespace behind ``fd``.

    Only threads started later follow, and sockets stay where they were made: call it before threads start, after
    the control socket listens. Raises OSError (EPERM without CAP_SYS_ADMIN).
    """
    _check(_libc().setns(fd, _CLONE_NEWNET), "setns")


def unshare_netns() -> None:
    """Move the calling thread into a new, empty network namespace. Raises OSError (EPERM without CAP_SYS_ADMIN)."""
    _check(_libc().unshare(_CLONE_NEWNET), "unshare")


def pin_to(cpus: Iterable[int]) -> None:
    """Run every thread of this process, and all they start, on ``cpus`` only; none = leave as it is. Raises OSError."""
    if chosen := set(cpus):
        for thread in os.listdir("/proc/self/task"):  # a library may have started some at its import
            os.sched_setaffinity(int(thread), chosen)


def keep_from_children(*fds: int) -> None:
    """Mark inherited descriptors close-on-exec: a grandchild that held them would keep links and ports open."""
    for fd in fds:
        os.set_inheritable(fd, False)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _check(_libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def _check(result: int, name: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
