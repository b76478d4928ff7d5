"""``python -m cluster.supervisor_main --fd N``: the supervisor process. N is its end of the parent link.

The first line down the link is a SupervisorSpec. The link's end is the lifeline: a supervisor whose parent is gone
stops its cluster and exits.
"""

import argparse
import asyncio
import signal
import sys

from cluster.control import CommandSent, SupervisorSpec
from cluster.json_stream import JsonStream, StreamError
from cluster.process_guard import become_subreaper, keep_from_children
from cluster.summary import write_summary
from cluster.supervisor import Supervisor


def main() -> int:
    """The exit code: 0, or what StartFailed said."""
    parser = argparse.ArgumentParser(prog="python -m cluster.supervisor_main")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the parent link")
    parent_fd: int = parser.parse_args().fd
    keep_from_children(parent_fd)
    become_subreaper()
    return asyncio.run(supervise(parent_fd))


async def supervise(parent_fd: int) -> int:
    """Run one supervisor over an inherited parent link."""
    parent = await JsonStream.from_fd(parent_fd)
    spec = await parent.receive()
    if not isinstance(spec, SupervisorSpec):
        print(f"first message is {type(spec).__name__}; expected SupervisorSpec", file=sys.stderr)
        return 2
    supervisor = Supervisor(spec, parent.send, write_summary, owns_process=True)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, supervisor, number)
    listening = asyncio.create_task(listen(parent, supervisor), name="parent link")
    try:
        return await supervisor.run()
    finally:
        await parent.drain()
        listening.cancel()
        await asyncio.wait({listening})
        await parent.close()


def on_signal(supervisor: Supervisor, number: int) -> None:
    """The first signal stops, the second does not wait."""
    if supervisor.is_stopping:
        supervisor.kill_now()
    else:
        supervisor.request_stop(signal.Signals(number).name)


async def listen(parent: JsonStream, supervisor: Supervisor) -> None:
    """Take commands until the parent is gone."""
    reason = "the console is gone"
    try:
        while (message := await parent.receive()) is not None:
            if isinstance(message, CommandSent):
                supervisor.take(message)
    except StreamError as error:
        reason = f"the parent link broke: {error}"
    supervisor.request_stop(reason)


if __name__ == "__main__":
    sys.exit(main())
