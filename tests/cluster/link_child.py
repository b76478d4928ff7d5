"""A small real child that speaks the parent link: ``python -m tests.cluster.link_child MODE --fd N``.

It answers pings, says ready as a worker or a router according to the first message, and does what its mode says.
"""

import argparse
import os
import signal
import subprocess
import sys
from itertools import product

from cluster.control import (
    AddNote,
    AnyMessage,
    CommandSent,
    Events,
    LinkMeasured,
    MeasurePrefill,
    Ping,
    Pong,
    PrefillMeasured,
    ProbeLink,
    RouterPairReady,
    RouterSpec,
    RouterUp,
    SetMode,
    SetWorkers,
    Shutdown,
    StartFailed,
    WorkerAddress,
    WorkerSpec,
    WorkerUp,
    decode_message,
    encode_message,
)
from cluster.events import HeartbeatMissed, NoteAdded, PrefillFinished, WorkerDrained
from cluster.process_guard import ParentGone, die_with_parent, keep_from_children

GRANDCHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
PROBED_BITS_PER_S = 9.5e8
PREFILL_TOKENS_PER_S = 3000.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    mode: str = arguments.mode
    if mode not in ("lifeline", "unguarded"):
        try:
            die_with_parent(arguments.fd)
        except ParentGone:
            return 0
    keep_from_children(arguments.fd)
    with os.fdopen(arguments.fd, "r+b", buffering=0) as link:

        def say(*messages: AnyMessage) -> None:
            link.write(b"".join(encode_message(message) for message in messages))

        reader = os.fdopen(os.dup(arguments.fd), "rb")
        first = decode_message(reader.readline())
        print(f"{mode} started", flush=True)
        print("to standard error", file=sys.stderr, flush=True)
        return behave(mode, first, say, reader)


def behave(mode, first, say, reader) -> int:  # type: ignore[no-untyped-def]
    """Returns the exit code."""
    if mode == "crash":
        print("cannot go on", flush=True)
        return 7
    if mode == "refuse":
        say(StartFailed(message="model 'none' is unknown; allowed: some", exit_code=2))
        return 2
    if mode == "garbage":
        os.write(reader.fileno(), b"this is no message\n")
        signal.pause()
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "grandchild":
        grandchild = subprocess.Popen([sys.executable, "-c", GRANDCHILD])
        say(Events(events=(NoteAdded(at=1.0, text=str(grandchild.pid)),)))
    if mode == "guarded":
        say(Events(events=(NoteAdded(at=1.0, text="guarded"),)))
        signal.pause()  # never looks at its link: only the kernel can end it with its parent
    if mode == "last-words":
        say(Events(events=(NoteAdded(at=1.0, text="last words"),)))
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "stuck" and isinstance(first, WorkerSpec) and first.role == "decode":
        missed = HeartbeatMissed(at=1.0, worker_id=first.worker_id, silent_s=9.0, part="engine")
        say(ready(mode, first), Events(events=(missed,)))
        signal.pause()
    if isinstance(first, RouterSpec):
        print(f"begins with {first.mode} {first.codec}", flush=True)
    say(ready(mode, first))
    for line in reader:
        message = decode_message(line)
        match message:
            case Ping(seq=seq):
                say(Pong(seq=seq))
            case ProbeLink(to_worker=to_worker):
                say(LinkMeasured(to_worker=to_worker, achieved_bits_per_s=PROBED_BITS_PER_S, rtt_ms=8.0))
            case MeasurePrefill() if mode == "unmeasured":
                say(PrefillMeasured(request_id="m", error="no worker takes it"))
            case MeasurePrefill():
                say(*measured(message))
            case SetWorkers(workers=workers, absent=absent, draining=draining):
                prefills = [worker.worker_id for worker in workers if worker.role == "prefill"]
                decodes = [worker.worker_id for worker in workers if worker.role == "decode"]
                say(
                    *(
                        RouterPairReady(prefill_worker=p, decode_worker=d)
                        for p, d in product(prefills, decodes)
                    )
                )
                say(Events(events=(NoteAdded(at=1.0, text=f"knows {[w.worker_id for w in workers]}"),)))
                print(f"absent {[(w.worker_id, w.is_coming) for w in absent]}", flush=True)
                if mode != "busy":  # whoever drains has nothing left
                    say(
                        Events(
                            events=tuple(WorkerDrained(at=1.0, worker_id=w, after_s=0.0) for w in draining)
                        )
                    )
            case SetMode() if mode == "asking":
                say(CommandSent(command_id=77, command=AddNote(text="by way of the router")))
            case Shutdown() if mode not in ("deaf", "lifeline"):
                say(Events(events=(NoteAdded(at=1.0, text="goodbye"),)))
                return 0
            case _:
                print(type(message).__name__, message, flush=True)
    return 0


def measured(asked: MeasurePrefill) -> tuple[AnyMessage, AnyMessage]:
    """The router's answer first, then what the worker says of the same prompt."""
    num_tokens = len(asked.prompt_token_ids)
    finished = PrefillFinished(
        at=1.0,
        request_id="m",
        attempt=0,
        worker_id=asked.prefill_worker or asked.decode_worker,
        prompt_tokens=num_tokens,
        compute_s=num_tokens / PREFILL_TOKENS_PER_S,
    )
    return PrefillMeasured(request_id="m"), Events(events=(finished,))


def ready(mode: str, first: AnyMessage) -> AnyMessage:
    if isinstance(first, RouterSpec):
        return RouterUp(pid=os.getpid(), url="http://127.0.0.1:1")
    worker_id, role = (first.worker_id, first.role) if isinstance(first, WorkerSpec) else ("alone", "decode")
    return WorkerUp(
        pid=os.getpid(),
        address=WorkerAddress(
            worker_id=worker_id,
            role=role,
            control_host="127.0.0.1",
            control_port=1,
            kv_host="127.0.0.1",
            kv_port=2,
            total_blocks=10,
            block_size=16,
            max_num_seqs=4,
            max_model_len=128,
            kv_bytes_per_token=256,
            fingerprint=f"of {role}" if mode == "mismatch" else "same",
        ),
        model="none",
        dtype="float32",
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        kv_bytes_per_token=256,
    )


if __name__ == "__main__":
    sys.exit(main())
