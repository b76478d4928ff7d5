"""What a worker takes of memory with a model, as the default profile would run it."""

from cluster.engine_settings import engine_config
from cluster.profile import Profile
from cluster.units import format_bytes
from engine.config import ModelConfig
from engine.memory import memory_plan


def worker_memory(model: ModelConfig) -> dict[str, int]:
    """Bytes by purpose."""
    plan = memory_plan(engine_config(Profile()), model)
    return {
        "runtime_bytes": plan.runtime_bytes,
        "weights_bytes": plan.weights_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "kv_pool_bytes": plan.kv_pool_bytes,
        "total_bytes": plan.total_bytes,
    }


def memory_line(memory: dict[str, int]) -> str:
    """``worker_memory`` in one line."""
    parts = {
        "process": memory["runtime_bytes"],
        "weights": memory["weights_bytes"],
        "work space": memory["workspace_bytes"],
        "KV pool": memory["kv_pool_bytes"],
    }
    told = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return f"up to {format_bytes(memory['total_bytes'])} = {told}"
