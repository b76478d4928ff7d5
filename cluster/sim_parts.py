"""What a simulated cluster is built of, by its spec: workers, and what the router is told of them. Pure."""

from cluster.control import WorkerAddress
from cluster.sim_gaps import StepGaps
from cluster.sim_spec import SimSpec
from cluster.sim_worker import SimWorker
from engine.block_allocator import BlockAllocator
from engine.scheduler import Scheduler


def sim_worker(worker_id: str, spec: SimSpec, gaps: StepGaps) -> SimWorker:
    scheduler = Scheduler(
        BlockAllocator(spec.num_blocks, spec.block_size),
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=_longest(spec),
        prefill_chunk_tokens=spec.prefill_chunk_tokens,
        enable_prefix_caching=spec.prefix_caching,
    )
    return SimWorker(worker_id, scheduler, spec.costs, spec.overheads, gaps)


def worker_address(spec: SimSpec, index: int, worker_id: str, role: str) -> WorkerAddress:
    return WorkerAddress(
        worker_id=worker_id,
        role=role,
        control_host="",
        control_port=index,
        kv_host="",
        kv_port=index,
        total_blocks=spec.num_blocks,
        block_size=spec.block_size,
        max_num_seqs=spec.max_num_seqs,
        max_model_len=_longest(spec),
        kv_bytes_per_token=spec.kv_bytes_per_token,
        fingerprint="",
    )


def _longest(spec: SimSpec) -> int:
    return min(spec.max_model_len, spec.num_blocks * spec.block_size)
