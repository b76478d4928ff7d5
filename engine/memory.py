"""What an engine takes of memory, by its configuration alone, and what is free. Imports no torch, allocates nothing."""

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from engine.config import DTYPE_BYTES, EngineConfig, ModelConfig
from engine.dtypes import cpu_flags, resolve_dtype

RUNTIME_BYTES: Final = 215 * 2**20
"""Of a process that runs engines, before weights: the interpreter, torch, what the first steps add.

Of a worker forked from a process that had imported all this, on x86-64 Linux with the CPU build of torch 2.13; one that
imports it itself holds 75 MiB more, all of it file pages that such processes share.
"""

CUDA_LIBRARIES_BYTES: Final = 155 * 2**20
"""What a CUDA build of torch adds to that on a machine without a GPU: the libraries it links with are loaded anyway."""

KERNELS_BYTES: Final = 53 * 2**20
"""The compiler's libraries and the compiled kernels, where there are any for the model."""

BFLOAT16_PRODUCTS_BYTES: Final = 175 * 2**20
"""What oneDNN keeps for the lengths of keys seen, where bfloat16 attention is matrix products of torch."""

AUTO_SHARE: Final = 0.5
"""How much ``auto`` KV pools take, all engines together, of the memory that is free beside weights and work space."""

_SCORE_ROWS: Final = 64
_UNLIMITED: Final = 2**62
"""Limits of control groups from here on mean none."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. The KV pool is resident from the start: see ``PagedKVCache``.

    Not in it: what torch and oneDNN keep for every number of rows that a float32 matrix product had, which in time
    comes to 80 MiB. LIBRARY_SETTINGS of cluster/spawner.py bounds it.
    """

    runtime_bytes: int  # the process itself, kernels included, before it loads a model
    weights_bytes: int  # as they are held: a tied output head a second time, in the layout of matrix products
    kv_pool_bytes: int  # the whole pool; 0 for one that is sized by ``auto_kv_cache_bytes`` yet
    workspace_bytes: int  # the rows of one full step, attention over a full context, logits
    kv_bytes_per_token: int

    @property
    def total_bytes(self) -> int:
        """After a full step over a full context."""
        return self.runtime_bytes + self.weights_bytes + self.workspace_bytes + self.kv_pool_bytes


def memory_plan(config: EngineConfig, model: ModelConfig) -> MemoryPlan:
    """What an engine of this configuration takes with this model. Raises ValueError for an unknown dtype."""
    dtype = resolve_dtype(config.dtype, config.device)
    size = DTYPE_BYTES[dtype]
    per_token = model.kv_bytes_per_token(dtype)
    num_blocks = config.num_blocks or config.kv_cache_bytes // (config.block_size * per_token)
    head_copy = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    rope_tables = model.max_model_len * model.head_dim  # cosine and sine, half a head each
    return MemoryPlan(
        runtime_bytes=_runtime_bytes(config, model, dtype),
        weights_bytes=(model.num_parameters + head_copy + rope_tables) * size,
        kv_pool_bytes=num_blocks * config.block_size * per_token,
        workspace_bytes=_workspace_bytes(config, model, size),
        kv_bytes_per_token=per_token,
    )


def _runtime_bytes(config: EngineConfig, model: ModelConfig, dtype: str) -> int:
    compiled = has_compiled_kernels(config, model)
    has_unit = not cpu_flags().isdisjoint({"amx_bf16", "avx512_bf16"})
    is_compiled = compiled and config.block_size % 16 == 0 and has_unit
    has_products = _is_on_cpu(config) and dtype == "bfloat16" and not is_compiled
    libraries_bytes = CUDA_LIBRARIES_BYTES if has_cuda_build() else 0
    return RUNTIME_BYTES + libraries_bytes + compiled * KERNELS_BYTES + has_products * BFLOAT16_PRODUCTS_BYTES


@functools.cache
def has_cuda_build() -> bool:
    """Whether the torch that is installed was built for CUDA."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()


def has_compiled_kernels(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether an engine takes the compiled operations: one thread of a CPU, and shapes that fill vectors of sixteen."""
    return config.kernels_in_use == "auto" and _is_on_cpu(config) and model.fills_vectors


def _is_on_cpu(config: EngineConfig) -> bool:
    return config.device.split(":")[0] == "cpu"


def _workspace_bytes(config: EngineConfig, model: ModelConfig, size: int) -> int:
    """Tensors that live at the same time in a layer, at the size of the largest step that can be."""
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden_rows = 4 * model.hidden_size  # before and after a layer's half, normed, added
    attention_rows = (q_size + 2 * kv_size) + 3 * q_size  # joint projection; rotated, attended, projected
    mlp_rows = 3 * model.intermediate_size  # gate and up, their product
    rows = config.max_num_batched_tokens * (hidden_rows + attention_rows + mlp_rows) * size
    group = model.num_heads // model.num_kv_heads
    scores = _SCORE_ROWS * group * model.max_model_len * 4
    gathered = 2 * kv_size * model.max_model_len * size  # of a sequence whose blocks lie apart
    logits = config.max_num_seqs * model.vocab_size * size
    sampling = 4 * model.vocab_size * 8  # one row at a time
    return rows + scores + gathered + logits + sampling


def auto_kv_cache_bytes(
    config: EngineConfig, model: ModelConfig, free_bytes: int, num_engines: int = 1
) -> int:
    """A KV pool for each of ``num_engines`` equal engines that are to start with ``free_bytes`` free; whole blocks.

    AUTO_SHARE of what the engines leave free, but no more than ``max_num_seqs`` full contexts can use. 0: no room.
    """
    plan = memory_plan(config, model)
    fixed_bytes = plan.total_bytes - plan.kv_pool_bytes
    spare_bytes = int((free_bytes - num_engines * fixed_bytes) * AUTO_SHARE) // num_engines
    block_bytes = config.block_size * plan.kv_bytes_per_token
    most_blocks = config.max_num_seqs * -(-model.max_model_len // config.block_size)
    return max(0, min(spare_bytes // block_bytes, most_blocks)) * block_bytes


def num_kv_blocks(config: EngineConfig, model: ModelConfig, dtype: str) -> int:
    """Blocks of the pool of an engine whose model has been loaded in ``dtype``.

    Raises ValueError where not one block fits.
    """
    if config.num_blocks:
        return config.num_blocks
    block_bytes = config.block_size * model.kv_bytes_per_token(dtype)
    pool_bytes, given = config.kv_cache_bytes, f"{config.kv_cache_bytes}"
    if not pool_bytes:
        config = replace(config, dtype=dtype)
        plan = memory_plan(config, model)
        present_bytes = plan.runtime_bytes + plan.weights_bytes
        pool_bytes = auto_kv_cache_bytes(config, model, free_memory_bytes() + present_bytes)
        given = f"0 (auto: {pool_bytes} of the memory that is free)"
    if pool_bytes < block_bytes:
        raise ValueError(f"engine.kv_cache_bytes is {given}; allowed is {block_bytes} (one block) or more")
    return pool_bytes // block_bytes


def return_freed_memory() -> None:
    """Give back to the system what the allocator keeps of freed memory: after loading, the stored weights."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's; others keep little
        libc.malloc_trim(0)


def free_memory_bytes(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """What this process can still take: of the machine, and of every control group (container) that it is in."""
    machine: int = psutil.virtual_memory().available
    return min([machine, *_cgroup_rooms(cgroup_root, membership)])


def _cgroup_rooms(root: Path, membership: Path) -> Iterator[int]:
    """Limit less usage, for each group from the process's own up to the root; none where there is no limit."""
    for group in _memory_groups(root, membership):
        for limit_name, usage_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _number_in(group / limit_name), _number_in(group / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                yield max(0, limit - usage + _reclaimable(group / "memory.stat", cache_name))


def _memory_groups(root: Path, membership: Path) -> Iterator[Path]:
    """Directories of the groups: one tree for everything, or one of its own for memory."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        group = top / path.lstrip("/")
        yield from (each for each in (group, *group.parents) if each.is_relative_to(top))


def _number_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max": no limit


def _reclaimable(stat: Path, name: str) -> int:
    """File pages nobody used lately count as used, and are given up first."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
