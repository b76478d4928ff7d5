"""``python -m cluster.worker_main --fd N``: one worker, spawned by a supervisor over an inherited parent link."""

import os
import socket
import sys

from cluster.child_main import child_main
from cluster.control import StartFailed, WorkerSpec
from cluster.json_stream import JsonStream
from cluster.process_guard import enter_netns, pin_to
from cluster.profile import Profile
from cluster.worker import Worker
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_ids import ModelError
from engine.weights import load_model

EXIT_WRONG_USE = 2


def engine_config(profile: Profile) -> EngineConfig:
    """The part of a profile that an engine needs. Raises ValueError naming the field."""
    engine = profile.engine
    return EngineConfig(
        block_size=engine.block_size,
        kv_cache_bytes=profile.kv_cache_bytes,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        dtype=profile.model.dtype,
        device=profile.model.device,
        num_threads=1,
        enable_prefix_caching=engine.prefix_caching,
    )


async def run(fd: int) -> int:
    """Read the spec, load, serve. Returns the exit code."""
    parent = await JsonStream.from_fd(fd)
    spec = await parent.receive()
    if spec is None:
        return 0
    if not isinstance(spec, WorkerSpec):
        raise ValueError(f"the first message is {type(spec).__name__}, not a WorkerSpec")
    # the request port stays in the namespace it was made in, so that control never crosses the shaped link
    listener = socket.create_server(("127.0.0.1", 0))
    if spec.netns_fd >= 0:
        enter_netns(spec.netns_fd)
        os.close(spec.netns_fd)
    pin_to(spec.cpus)
    try:
        loaded = load_model(spec.profile.model.id, spec.profile.model.dtype, spec.profile.model.device)
        engine = Engine(engine_config(spec.profile), loaded)
    except (ModelError, ValueError) as error:
        parent.send(StartFailed(message=f"{spec.worker_id}: {error}", exit_code=EXIT_WRONG_USE))
        await parent.drain()
        return EXIT_WRONG_USE
    engine.warm_up()
    worker = Worker(spec, parent, listener, engine, loaded)
    await worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(child_main("cluster.worker_main", run))
