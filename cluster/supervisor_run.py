"""What a supervisor process does once it is set up: the spec, the signals, the commands, and the run itself."""

import asyncio
import signal
import sys
import time
from typing import Final

from cluster.control import CommandSent, Detach, Detached, Ping, Pong, SupervisorSpec
from cluster.events import NoteAdded
from cluster.json_stream import JsonStream, StreamError
from cluster.nursery import Nursery
from cluster.python_program import PYTHON_MODULE
from cluster.spawner import ProgramSpawner
from cluster.summary import write_summary
from cluster.supervisor import Supervisor

DETACHED: Final = "the console detached; the cluster goes on without one"
ROUTER_COMMAND: Final = (*PYTHON_MODULE, "cluster.router_main")


async def supervise(parent_fd: int, nursery: Nursery) -> int:
    """Run one supervisor over an inherited parent link."""
    nursery.listen()
    parent = await JsonStream.from_fd(parent_fd)
    spec = await parent.receive()
    if not isinstance(spec, SupervisorSpec):
        print(f"first message is {type(spec).__name__}; expected SupervisorSpec", file=sys.stderr)
        return 2
    supervisor = Supervisor(
        spec,
        parent.send,
        write_summary,
        owns_process=True,
        worker_spawner=nursery,
        router_spawner=ProgramSpawner(ROUTER_COMMAND),
    )
    nursery.on_death = lambda line: supervisor.emit(NoteAdded(at=time.monotonic(), text=line))
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
    """Take commands until the parent is gone, and the run with it unless it has detached."""
    reason = "the console is gone"
    is_lifeline = True
    try:
        while (message := await parent.receive()) is not None:
            if isinstance(message, CommandSent):
                supervisor.take(message)
            elif isinstance(message, Ping):
                parent.send(Pong(seq=message.seq))
            elif isinstance(message, Detach):
                is_lifeline = False
                supervisor.emit(NoteAdded(at=time.monotonic(), text=DETACHED))
                parent.send(Detached())
    except StreamError as error:
        reason = f"the parent link broke: {error}"
    if is_lifeline:
        supervisor.request_stop(reason)
