"""``python -m cluster.nursery_main --fd N``: a process that has imported everything a worker needs, and forks workers.

Importing torch takes seconds; a fork takes milliseconds, so a cluster starts with one import instead of one per worker
and a killed worker is back at once. N is one end of a SOCK_SEQPACKET pair; see ``nursery`` for the other end and the
messages. The nursery computes nothing and starts no thread: what it forks is as good as a fresh interpreter.

Its end, however it comes, is its workers' end too: they ask the kernel for SIGKILL at their parent's death.
"""

import argparse
import asyncio
import fcntl
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from cluster.nursery_messages import (
    MAX_FDS,
    MAX_MESSAGE_BYTES,
    Fork,
    Forked,
    NurseryReady,
    Reap,
    Reaped,
    decode_request,
    encode_answer,
)
from cluster.process_guard import ParentGone, die_with_parent, set_process_name

EXIT_CRASHED = 1
ASIDE_FROM = 500
"""Above every number that a supervisor uses for what it hands on."""


def serve(sock: socket.socket, run_child: Callable[[int], int]) -> None:
    """Answer requests until the other end closes. ``run_child(link_fd)`` is a worker's whole life."""
    sock.send(encode_answer(NurseryReady(pid=os.getpid())))
    while True:
        data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, MAX_FDS)
        if not data:
            return
        match decode_request(data):
            case Fork() as request:
                pid = _fork(sock, request, fds, run_child)
                sock.send(encode_answer(Forked(pid=pid)))
                for fd in fds:  # the worker's alone: what is forked later must not inherit them
                    os.close(fd)
            case Reap(pid=pid):
                sock.send(encode_answer(Reaped(pid=pid, code=_reap(pid))))


def _reap(pid: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def _fork(sock: socket.socket, request: Fork, fds: list[int], run_child: Callable[[int], int]) -> int:
    """The child's pid; in the child this never returns."""
    nursery_pid = os.getpid()
    assert threading.active_count() == 1, "a fork copies one thread only"
    pid = os.fork()
    if pid:
        return pid
    code = EXIT_CRASHED
    try:
        sock.close()
        os.setsid()
        log = os.open(request.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        set_process_name(f"pd-{request.child_id}")
        die_with_parent(parent_pid=nursery_pid)
        _renumber(fds, request.numbers)
        code = run_child(request.numbers[0])
    except ParentGone:
        code = 0
    except BaseException:  # noqa: BLE001 - outermost frame: into the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # none of the nursery's own clean-up


def _renumber(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Move descriptors to the numbers asked for; out of each other's way first."""
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ASIDE_FROM) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(aside, numbers, strict=True):
        os.dup2(fd, number, inheritable=False)
        os.close(fd)


def import_worker() -> Callable[[int], int]:
    """A worker's whole life, with everything imported that it needs. Imported objects stay: the collector, which would
    walk over all of them again and again, waits until the end."""
    gc.disable()
    run = importlib.import_module("cluster.worker_main").run
    gc.enable()
    gc.collect()
    gc.freeze()  # shared pages stay shared: no collection in a worker touches what was imported here

    def run_worker(link_fd: int) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
        code: int = asyncio.run(run(link_fd))
        return code

    return run_worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.nursery_main")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the nursery's socket pair")
    fd = parser.parse_args().fd
    try:
        die_with_parent(fd)
    except ParentGone:
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=fd), import_worker())
    return 0


if __name__ == "__main__":
    sys.exit(main())
