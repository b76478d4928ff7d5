"""``python -m cluster.worker_main --fd N``: one worker, spawned by a supervisor over an inherited parent link."""

import os
import sys

import torch

from cluster.child_main import child_main
from cluster.control import StartFailed, WorkerSpec
from cluster.engine_settings import engine_config
from cluster.json_stream import JsonStream, listen_on_loopback
from cluster.memory_fit import memory_problem, worker_plan
from cluster.process_guard import enter_netns, pin_to
from cluster.profile import Profile
from cluster.worker import Worker
from engine.engine import Engine
from engine.memory import free_memory_bytes, return_freed_memory
from engine.model_ids import ModelError, resolve_model
from engine.weights import load_model

EXIT_WRONG_USE = 2
EXIT_ENVIRONMENT = 3


async def run(fd: int) -> int:
    """Read the spec, load, serve. Returns the exit code."""
    parent = await JsonStream.from_fd(fd)
    spec = await parent.receive()
    if spec is None:
        return 0
    if not isinstance(spec, WorkerSpec):
        raise ValueError(f"the first message is {type(spec).__name__}, not a WorkerSpec")
    # the request port stays in the namespace it was made in, so that control never crosses the shaped link
    listener = listen_on_loopback()
    if spec.netns_fd >= 0:
        enter_netns(spec.netns_fd)
        os.close(spec.netns_fd)
    pin_to(spec.cpus)
    torch.set_num_interop_threads(1)  # the engine is one thread; what it has more of are its own threads
    try:
        problem = _memory_problem(spec.profile)
        if problem:
            return await _refuse(parent, f"{spec.worker_id}: {problem}", EXIT_ENVIRONMENT)
        model, config = spec.profile.model, engine_config(spec.profile)
        loaded = load_model(model.id, model.dtype, model.device, config.kernels_in_use)
        engine = Engine(config, loaded)
    except (ModelError, ValueError) as error:
        return await _refuse(parent, f"{spec.worker_id}: {error}", EXIT_WRONG_USE)
    engine.warm_up()
    return_freed_memory()
    worker = Worker(spec, parent, listener, engine, loaded)
    await worker.run()
    return 0


def _memory_problem(profile: Profile) -> str:
    """Why this worker must not start; "" = it may. Raises ModelError, and ValueError naming a field."""
    if not profile.model.device.startswith("cpu"):
        return ""
    plan = worker_plan(profile, resolve_model(profile.model.id).config)
    return memory_problem(
        plan, 1, free_memory_bytes() + plan.runtime_bytes
    )  # what it imported is here already


async def _refuse(parent: JsonStream, message: str, exit_code: int) -> int:
    parent.send(StartFailed(message=message, exit_code=exit_code))
    await parent.drain()
    return exit_code


if __name__ == "__main__":
    sys.exit(child_main("cluster.worker_main", run))
