"""What of a profile an engine needs. Imports no torch: also who only plans or describes an engine asks this."""

from cluster.profile import Profile
from engine.config import EngineConfig


def engine_config(profile: Profile) -> EngineConfig:
    """The part of a profile that an engine needs. Raises ValueError naming the field."""
    engine = profile.engine
    return EngineConfig(
        block_size=engine.block_size,
        kv_cache_bytes=profile.kv_cache_bytes,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        dtype=profile.model.dtype,
        device=profile.model.device,
        num_threads=profile.cluster.cores_per_worker,
        enable_prefix_caching=engine.prefix_caching,
    )
