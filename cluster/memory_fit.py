"""Whether the workers' memory is there, and how much of it an ``auto`` KV pool takes. Pure: told what is free."""

import msgspec

from cluster.engine_settings import engine_config
from cluster.profile import Profile
from cluster.start_refused import StartRefused
from cluster.units import format_bytes
from engine.config import ModelConfig
from engine.memory import MemoryPlan, auto_kv_cache_bytes, memory_plan
from engine.model_ids import resolve_model

EXIT_WRONG_USE = 2
EXIT_ENVIRONMENT = 3


def fitted(profile: Profile, free_bytes: int) -> Profile:
    """The profile with the size of its KV pools settled, when all its workers fit into what is free.

    Raises StartRefused when they do not. Memory of other devices than the CPU is not looked at.
    """
    if not profile.model.device.startswith("cpu"):
        return profile
    try:
        model = resolve_model(profile.model.id).config
        settled = with_kv_cache(profile, model, free_bytes)
        plan = worker_plan(settled, model)
    except ValueError as error:
        raise StartRefused(str(error), EXIT_WRONG_USE) from error
    problem = memory_problem(plan, profile.cluster.prefill + profile.cluster.decode, free_bytes)
    if problem:
        raise StartRefused(problem, EXIT_ENVIRONMENT)
    return settled


def worker_plan(profile: Profile, model: ModelConfig) -> MemoryPlan:
    """What one worker of this profile takes. Raises ValueError naming the field that is wrong."""
    return memory_plan(engine_config(profile), model)


def with_kv_cache(profile: Profile, model: ModelConfig, free_bytes: int) -> Profile:
    """The profile with a size for ``engine.kv_cache = "auto"``: the same for all of its workers, restarted ones too.

    Raises ValueError where none has room for one block.
    """
    if profile.kv_cache_bytes:
        return profile
    num_workers = profile.cluster.prefill + profile.cluster.decode
    pool_bytes = auto_kv_cache_bytes(engine_config(profile), model, free_bytes, num_workers)
    if not pool_bytes:
        needed = num_workers * worker_plan(profile, model).total_bytes
        raise ValueError(
            f"engine.kv_cache is auto: {num_workers} workers need {format_bytes(needed)} without it, "
            f"{format_bytes(free_bytes)} of memory are free"
        )
    engine = msgspec.structs.replace(profile.engine, kv_cache=f"{pool_bytes}B")
    return msgspec.structs.replace(profile, engine=engine)


def memory_problem(plan: MemoryPlan, num_workers: int, free_bytes: int) -> str:
    """One line when ``num_workers`` such workers do not fit into what is free; "" when they do."""
    if num_workers * plan.total_bytes <= free_bytes:
        return ""
    who = "1 worker takes" if num_workers == 1 else f"{num_workers} workers take"
    parts = (
        f"KV pool {format_bytes(plan.kv_pool_bytes)}, weights {format_bytes(plan.weights_bytes)}, "
        f"work space {format_bytes(plan.workspace_bytes)}, process {format_bytes(plan.runtime_bytes)}"
    )
    return (
        f"{who} up to {format_bytes(num_workers * plan.total_bytes)} ({'' if num_workers == 1 else 'each '}{parts}); "
        f"{format_bytes(free_bytes)} of memory are free; make engine.kv_cache smaller"
    )
