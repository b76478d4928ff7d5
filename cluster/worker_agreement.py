"""Whether the workers of a cluster loaded the same thing. Pure."""

from cluster.control import WorkerUp
from cluster.events import ModelDescribed


def disagreement(first: WorkerUp, other: WorkerUp) -> str:
    """One line naming the first field that differs and both values; "" when KV of one fits the other."""
    for field, ours, theirs in (
        ("model", first.model, other.model),
        ("model fingerprint", first.address.fingerprint, other.address.fingerprint),
        ("dtype", first.dtype, other.dtype),
        ("num_layers", first.num_layers, other.num_layers),
        ("num_kv_heads", first.num_kv_heads, other.num_kv_heads),
        ("head_dim", first.head_dim, other.head_dim),
        ("block_size", first.address.block_size, other.address.block_size),
        ("max_model_len", first.address.max_model_len, other.address.max_model_len),
    ):
        if ours != theirs:
            return (
                f"workers differ in {field}: {first.address.worker_id} has {ours}, "
                f"{other.address.worker_id} has {theirs}"
            )
    return ""


def describe_model(up: WorkerUp, at: float) -> ModelDescribed:
    """The event for what all workers loaded."""
    return ModelDescribed(
        at=at,
        model=up.model,
        fingerprint=up.address.fingerprint,
        dtype=up.dtype,
        num_layers=up.num_layers,
        num_kv_heads=up.num_kv_heads,
        head_dim=up.head_dim,
        kv_bytes_per_token=up.kv_bytes_per_token,
        max_model_len=up.address.max_model_len,
        block_size=up.address.block_size,
    )
