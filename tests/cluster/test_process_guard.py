import os
import socket
import subprocess
import sys

import pytest

from cluster.process_guard import (
    enter_netns,
    keep_from_children,
    link_maker_pid,
    pin_to,
)


def run_python(program: str, *, pass_fds: tuple[int, ...] = ()) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, pass_fds=pass_fds)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_link_names_the_process_that_made_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert link_maker_pid(theirs.fileno()) == os.getpid()
        program = (
            f"from cluster.process_guard import link_maker_pid; print(link_maker_pid({theirs.fileno()}))"
        )
        assert run_python(program, pass_fds=(theirs.fileno(),)) == str(os.getpid())


def test_child_of_the_link_maker_asks_to_die_with_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = (
            "import ctypes; from cluster.process_guard import die_with_parent\n"
            f"die_with_parent({theirs.fileno()}); number = ctypes.c_int()\n"
            "ctypes.CDLL(None).prctl(2, ctypes.byref(number)); print(number.value)"
        )
        assert run_python(program, pass_fds=(theirs.fileno(),)) == "9"


def test_parent_that_has_died_is_noticed() -> None:
    """The link was made by another process than the one that is the parent now: as after the parent's death."""
    program = (
        "import os, socket; from cluster.process_guard import ParentGone, die_with_parent\n"
        "ours, theirs = socket.socketpair()\n"
        "try: die_with_parent(theirs.fileno())\n"
        "except ParentGone as gone: print(str(gone) == f'the parent process (pid {os.getpid()}) has died')"
    )
    assert run_python(program) == "True"


def test_pinning_holds_for_threads_started_later() -> None:
    cpu = min(os.sched_getaffinity(0))
    program = (
        "import os, threading; from cluster.process_guard import pin_to\n"
        f"pin_to([{cpu}])\n"
        "thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0))); thread.start(); thread.join()"
    )
    assert run_python(program) == f"{{{cpu}}}"


def test_no_cores_means_no_pinning() -> None:
    before = os.sched_getaffinity(0)
    pin_to(())
    assert os.sched_getaffinity(0) == before


def test_descriptor_that_is_no_namespace_is_refused() -> None:
    with open(os.devnull) as file, pytest.raises(OSError, match="setns"):
        enter_netns(file.fileno())


def test_guarded_descriptor_is_not_inherited() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.set_inheritable(theirs.fileno(), True)
        keep_from_children(theirs.fileno())
        assert not os.get_inheritable(theirs.fileno())


def test_guard_loads_nothing_slow() -> None:
    program = (
        "import sys; import cluster.process_guard; print('msgspec' in sys.modules, 'asyncio' in sys.modules)"
    )
    assert run_python(program) == "False False"


def test_supervisor_does_not_import_torch() -> None:
    assert run_python("import sys; import cluster.supervisor_main; print('torch' in sys.modules)") == "False"


def test_nursery_imports_a_worker_once_and_collects_again_afterwards() -> None:
    program = (
        "import gc, sys; from cluster.nursery_main import import_worker; before = 'torch' in sys.modules;"
        "import_worker(); print(before, 'torch' in sys.modules, gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    assert run_python(program) == "False True True True"
