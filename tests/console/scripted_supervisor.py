"""A process that speaks the supervisor's side of the parent link and misbehaves as its spec's ``load`` says.

Only the link is tested with it: the real supervisor is tested end to end.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

from cluster.control import (
    AddNote,
    AnyMessage,
    CommandDone,
    CommandSent,
    Detach,
    Detached,
    Ping,
    Pong,
    StartFailed,
    StopCluster,
    SupervisorSpec,
    SupervisorStopped,
    SupervisorUp,
    decode_message,
    encode_message,
)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
    lines = link.makefile("rb")

    def send(message: AnyMessage) -> None:
        link.sendall(encode_message(message))

    spec = decode_message(lines.readline())
    assert isinstance(spec, SupervisorSpec)
    behaviour = spec.load
    print("scripted supervisor:", behaviour, flush=True)
    if behaviour == "refuse":
        send(StartFailed(message="port 80 is in use", exit_code=2))
        return
    if behaviour == "die":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "nonsense":
        link.sendall(b"hello?\n")
        time.sleep(60)
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send(SupervisorUp(pid=os.getpid(), url="http://127.0.0.1:1"))
    detached = False
    for line in lines:
        message = decode_message(line)
        if isinstance(message, Detach) and behaviour != "deaf":
            detached = True
            send(Detached())
        if isinstance(message, Ping) and behaviour != "deaf":
            send(Pong(seq=message.seq))
        if not isinstance(message, CommandSent):
            continue
        match message.command:
            case StopCluster() if behaviour == "deaf":
                pass
            case StopCluster(reason=reason):
                Path(spec.run_dir, "stopped").write_text(reason)
                send(CommandDone(command_id=message.command_id, ok=True, message="stopping"))
                send(SupervisorStopped(orphans=0))
                return
            case AddNote(text="die"):
                os.kill(os.getpid(), signal.SIGKILL)
            case AddNote(text=text):
                # twice, the first for a command that nobody sent: answers are matched by id
                send(CommandDone(command_id=message.command_id + 1000, ok=True, message="not yours"))
                send(CommandDone(command_id=message.command_id, ok=True, message=f"noted {text}"))
    if behaviour == "deaf":
        time.sleep(60)
    Path(spec.run_dir, "detached" if detached else "lifeline").write_text("cut")


main()
