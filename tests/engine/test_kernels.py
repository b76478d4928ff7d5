"""Compiled kernels against the same arithmetic in torch, in float64."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.block_table import BlockTable
from engine.bulk_memory import aligned_empty
from engine.compiled_operations import CompiledOperations, supports
from engine.config import ModelConfig
from engine.forward_batch import ChunkRows, ForwardBatch
from engine.kernels import decode_attention, matmul, prefill_attention, prompt_attention
from engine.kernels.decode_attention import Products
from engine.kernels.layer import layer_kernels
from engine.kernels.products import Unit, runs
from engine.kv_cache import PagedKVCache, numbers_of
from engine.linear import Linear
from engine.model import rope_tables
from engine.torch_operations import TorchOperations
from engine.weights import load_model
from tests.engine.helpers import full_logits, make_prompt, write_checkpoint

KINDS = [
    pytest.param(
        kind, marks=pytest.mark.skipif(not runs(kind), reason=f"this processor has no bfloat16 {kind}")
    )
    for kind in get_args(Unit)
]
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


def make_config(num_heads: int, num_kv_heads: int, head_dim: int, **changes: object) -> ModelConfig:
    shape: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 64,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_layers": 1,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_model_len": 2048,
    }
    return ModelConfig(**(shape | changes))  # type: ignore[arg-type]


def filled_cache(config: ModelConfig, block_size: int, num_blocks: int, dtype: torch.dtype) -> PagedKVCache:
    cache = PagedKVCache(1, num_blocks, block_size, config.num_kv_heads, config.head_dim, dtype, "cpu")
    cache.layers[0].normal_()
    return cache


def expected_attention(
    cache: PagedKVCache, config: ModelConfig, queries: torch.Tensor, chunk: ChunkRows
) -> torch.Tensor:
    """(num_rows, heads, head_dim) in float64, from the definition."""
    group = config.num_heads // config.num_kv_heads
    keys, values = (
        cache.layers[0][kv][list(chunk.table)]
        .flatten(0, 1)[: chunk.num_tokens]
        .double()
        .repeat_interleave(group, dim=1)
        .transpose(0, 1)
        for kv in (0, 1)
    )
    rows = queries[chunk.first_row : chunk.first_row + chunk.num_rows].double().transpose(0, 1)
    mask = torch.ones(chunk.num_rows, chunk.num_tokens, dtype=torch.bool).tril(
        chunk.num_tokens - chunk.num_rows
    )
    return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 3, 64), (16, 1, 32), (20, 20, 96)])
@pytest.mark.parametrize("block_size", [16, 24])
def test_attention_of_a_mixed_batch(dtype: torch.dtype, shape: tuple[int, int, int], block_size: int) -> None:
    """Decode rows and prompts of all kinds of lengths, over scattered blocks: each equals the definition."""
    torch.manual_seed(1)
    config = make_config(*shape)
    lengths = [(1, 1), (1, 700), (5, 5), (1, 257), (37, 300), (64, 64), (2, 1000), (300, 513)]
    needed = [-(-total // block_size) for _, total in lengths]
    cache = filled_cache(config, block_size, sum(needed) + 3, dtype)
    order = np.random.default_rng(0).permutation(sum(needed)).tolist()
    chunks, first_row = [], 0
    for (rows, total), blocks in zip(lengths, needed, strict=True):
        table = BlockTable(order[:blocks])
        order = order[blocks:]
        chunks.append(ChunkRows(first_row, rows, 1, total, table, is_prefill=total % 2 == 1))
        first_row += rows
    queries = torch.randn(first_row, config.num_heads, config.head_dim).to(dtype)
    operations = CompiledOperations(config, *rope_tables(config, dtype, torch.device("cpu")), block_size)
    empty = np.empty(0, np.int64)
    operations.begin(ForwardBatch(torch.empty(0), empty, empty, tuple(chunks), torch.empty(0)), cache)
    out = operations.attend(0, queries, tuple(chunks)).view(queries.shape)
    for chunk in chunks:
        expected = expected_attention(cache, config, queries, chunk)
        actual = out[chunk.first_row : chunk.first_row + chunk.num_rows].double()
        torch.testing.assert_close(actual, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    config = make_config(6, 2, 32)
    cache = filled_cache(config, 16, 64, dtype)
    chunks = tuple(
        ChunkRows(i, 1, 1, 100 + i, BlockTable(range(8 * i, 8 * i + 8)), is_prefill=False) for i in range(8)
    )
    queries = torch.randn(8, config.num_heads, config.head_dim).to(dtype)
    operations = CompiledOperations(config, *rope_tables(config, dtype, torch.device("cpu")), 16)
    empty = np.empty(0, np.int64)
    operations.begin(ForwardBatch(torch.empty(0), empty, empty, chunks, torch.empty(0)), cache)
    together = operations.attend(0, queries, chunks).clone()
    for chunk in chunks:
        alone = (ChunkRows(0, 1, 1, chunk.num_tokens, chunk.table, is_prefill=False),)
        row = queries[chunk.first_row : chunk.first_row + 1].clone()
        assert torch.equal(operations.attend(0, row, alone)[0], together[chunk.first_row])


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_attention_reads_nothing_behind_the_last_key(kind: Unit) -> None:
    """NaN in every place that is no key of the sequence changes nothing."""
    torch.manual_seed(3)
    config = make_config(6, 2, 64)
    cache = filled_cache(config, 16, 6, torch.bfloat16)
    clean = cache.layers[0].clone()
    num_keys = 37
    cache.layers[0][:, 4:] = float("nan")
    cache.layers[0][:, 3] = float("nan")
    cache.layers[0][:, 2, num_keys - 32 :] = float("nan")
    outs = []
    for storage in (clean, cache.layers[0]):
        cache.layers[0].copy_(storage)
        keys, values = cache.arrays(0)
        queries = torch.ones(20, config.num_heads, config.head_dim, dtype=torch.bfloat16)
        out = torch.zeros_like(queries)
        scratch = aligned_empty(prefill_attention.scratch_words(20 * 3, 64), np.int32)
        prefill_attention.attend_by(kind)(
            numbers_of(queries),
            keys,
            values,
            np.arange(3),
            numbers_of(out),
            6,
            2,
            64,
            16,
            20,
            num_keys,
            scratch,
        )
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(32, 32), (96, 576), (688 * 2, 256), (256, 688), (64, 50)])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 9, 15, 16, 17, 33, 64, 513, 600])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matmul(kind: Unit, sizes: tuple[int, int], num_rows: int, with_bias: bool) -> None:
    torch.manual_seed(4)
    weight = torch.randn(sizes, dtype=torch.bfloat16) / sizes[1] ** 0.5
    bias = torch.randn(sizes[0], dtype=torch.bfloat16)
    rows = torch.randn(num_rows, sizes[1], dtype=torch.bfloat16)
    out = torch.full((num_rows + 1, sizes[0]), 7.0, dtype=torch.bfloat16)
    scratch = aligned_empty(matmul.scratch_words(num_rows, sizes[1]), np.int32)
    used_bias = numbers_of(bias) if with_bias else np.empty(0, np.uint16)
    packed = matmul.pack(numbers_of(weight).reshape(sizes))
    matmul.multiply_by(kind)(
        numbers_of(rows), packed, used_bias, num_rows, sizes[1], sizes[0], numbers_of(out), scratch
    )
    expected = rows.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    torch.testing.assert_close(out[:num_rows].double(), expected, rtol=8e-3, atol=1e-5 * sizes[1])
    assert (out[num_rows] == 7.0).all(), "written behind the last row"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_two_kinds_of_operations_agree(dtype: torch.dtype, qk_norm: bool) -> None:
    """Norms, positions, cache writes and SiLU: compiled as in torch, within one rounding."""
    torch.manual_seed(5)
    config = make_config(6, 2, 32, qk_norm=qk_norm)
    tables = rope_tables(config, dtype, torch.device("cpu"))
    caches = [PagedKVCache(1, 4, 16, 2, 32, dtype, "cpu") for _ in range(2)]
    for cache in caches:
        cache.layers[0].zero_()
    rows = 19
    hidden, addend = torch.randn(2, rows, 96).to(dtype)
    weight = (torch.rand(96) + 0.5).to(dtype)
    norms = [(torch.rand(32) + 0.5).to(dtype) if qk_norm else None for _ in range(2)]
    qkv = torch.randn(rows, 10 * 32).to(dtype)
    gate_up = (3 * torch.randn(rows, 320)).to(dtype)
    slots = np.random.default_rng(0).permutation(64)[:rows]
    batch = ForwardBatch(torch.empty(0), np.arange(rows) + 40, slots, (), torch.empty(0))
    from_layer = type("Layer", (), {"q_norm": norms[0], "k_norm": norms[1]})()
    results = []
    for operations, cache in zip(
        (TorchOperations(config, *tables), CompiledOperations(config, *tables, 16)), caches, strict=True
    ):
        operations.begin(batch, cache)
        mine = hidden.clone()
        normed = operations.norm(mine, weight).clone()
        added = operations.add_norm(mine, addend, weight).clone()
        queries = operations.rotate_and_write(0, from_layer, qkv.clone()).clone()
        results.append([normed, mine, added, queries, cache.layers[0], operations.silu_multiply(gate_up)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def test_extremes_of_silu() -> None:
    gate = torch.tensor([-1e4, -200.0, -87.0, -1.0, 0.0, 1.0, 87.0, 1e4] * 2)
    gate_up = torch.cat((gate, torch.ones(16))).view(1, 32)
    out = np.empty(16, np.float32)
    layer_kernels(4).silu_multiply(numbers_of(gate_up), 16, out)
    torch.testing.assert_close(torch.from_numpy(out), F.silu(gate), rtol=1e-5, atol=1e-30)


def test_shapes_that_do_not_fill_vectors_are_left_to_torch() -> None:
    cpu = torch.device("cpu")
    assert supports(make_config(6, 2, 32), cpu)
    assert not supports(make_config(6, 2, 16), cpu)
    assert not supports(make_config(6, 2, 32, hidden_size=90), cpu)
    assert not supports(make_config(34, 2, 32), cpu), "seventeen heads to a key head"
    assert not supports(make_config(6, 2, 32), torch.device("meta"))


WAYS: list[tuple[torch.dtype, Products, tuple[int, int, int]]] = [
    (torch.float32, "floats", (9, 3, 64)),
    (torch.float32, "floats", (16, 1, 32)),
    (torch.float32, "floats", (20, 20, 96)),
    (torch.bfloat16, "pairs", (9, 3, 64)),
    (torch.bfloat16, "pairs", (16, 1, 32)),
    (torch.bfloat16, "pairs", (20, 20, 96)),
    (torch.bfloat16, "floats", (9, 3, 64)),
]
"""How attention multiplies without tiles, and for which heads."""


class PairOfKernels:
    """The two kernels over one cache, whose every other place is NaN, in work space whose end is watched."""

    def __init__(
        self, dtype: torch.dtype, products: Products, shape: tuple[int, int, int], total: int
    ) -> None:
        num_heads, self._num_kv_heads, self._head_dim = shape
        self._group, self._total = num_heads // self._num_kv_heads, total
        config = make_config(*shape)
        self._cache = filled_cache(config, 16, -(-total // 16) + 2, dtype)
        places = np.arange(total)
        self._table = np.random.default_rng(5).permutation(self._cache.num_blocks)[: -(-total // 16)]
        kept = self._cache.layers[0].flatten(1, 2)
        slots = torch.from_numpy(self._table[places // 16] * 16 + places % 16)
        clean = torch.full_like(kept, float("nan"))
        clean[:, slots] = kept[:, slots]
        self._cache.layers[0].copy_(clean.view(self._cache.layers[0].shape))
        self._arguments = self._group, self._head_dim, dtype.itemsize
        self._products: Products = products

    def prompt(self, queries: torch.Tensor) -> torch.Tensor:
        """The attention of the last tokens, ``(n, heads, head_dim)``, at once."""
        out = torch.full_like(queries, 3.0)
        needed = prompt_attention.scratch_floats(self._head_dim, self._total)
        with watched(needed) as scratch:
            prompt_attention.attention_for(*self._arguments, self._products == "pairs")(
                numbers_of(queries), *self._cache.arrays(0), self._table, numbers_of(out), self._num_kv_heads,
                16, len(queries), self._total, scratch,
            )  # fmt: skip
        return out

    def decode(self, queries: torch.Tensor) -> torch.Tensor:
        """The same, one after the other."""
        out = torch.full_like(queries, 4.0)
        for row in range(len(queries)):
            count = self._total - len(queries) + row + 1
            needed = decode_attention.scratch_floats(self._group, self._num_kv_heads, self._head_dim, count)
            with watched(needed) as scratch:
                decode_attention.attention_for(*self._arguments, self._products)(
                    numbers_of(queries), *self._cache.arrays(0), self._table, np.array([0]), np.array([count]),
                    np.array([row]), numbers_of(out), self._num_kv_heads, 16, scratch,
                )  # fmt: skip
        return out


@contextmanager
def watched(needed: int) -> Iterator[np.ndarray]:
    """Work space of NaN; nothing may be written behind ``needed``."""
    scratch = aligned_empty(needed + 16, np.float32)
    scratch[:needed] = np.nan
    scratch[needed:] = 7.0
    yield scratch
    assert (scratch[needed:] == 7.0).all()


@pytest.mark.parametrize(("dtype", "products", "shape"), WAYS)
def test_a_prompt_gives_the_bits_that_its_tokens_give_one_by_one(
    dtype: torch.dtype, products: Products, shape: tuple[int, int, int]
) -> None:
    if products == "pairs" and not runs("vectors"):
        pytest.skip("this processor does not multiply bfloat16 two by two")
    for num_new, total in ((1, 1), (2, 2), (5, 33), (37, 300), (64, 64), (1, 257), (90, 401)):
        torch.manual_seed(total)
        kernels = PairOfKernels(dtype, products, shape, total)
        queries = torch.randn(num_new, shape[0], shape[2]).to(dtype)
        at_once = kernels.prompt(queries)
        assert at_once.isfinite().all()
        assert torch.equal(kernels.decode(queries), at_once), f"{num_new} of {total} tokens"
        last = kernels.prompt(queries[num_new // 2 :].clone())
        assert torch.equal(last, at_once[num_new // 2 :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1536, 576), (64, 960), (4864, 96)])
def test_a_product_of_a_row_does_not_depend_on_the_other_rows(
    dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    torch.manual_seed(6)
    inputs, outputs = sizes
    linear = Linear((torch.randn(outputs, inputs) * 0.05).to(dtype), torch.randn(outputs).to(dtype))
    rows = torch.randn(600, inputs).to(dtype)
    together = linear(rows).clone()
    for first, count in ((0, 1), (599, 1), (3, 2), (40, 3), (0, 16), (7, 17), (100, 64), (5, 333), (88, 512)):
        some = linear(rows[first : first + count].clone())
        assert some.shape == (count, outputs)
        assert torch.equal(some, together[first : first + count]), f"{count} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunking_and_company_change_no_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every row is summed in one order: alone, in a batch, in chunks or at once."""
    write_checkpoint(tmp_path, hidden_size=96, intermediate_size=160, head_dim=32, vocab_size=224)
    loaded = load_model(tmp_path, DTYPE_NAMES[dtype])
    tokens = make_prompt(600)
    at_once = full_logits(loaded, tokens, 600)
    for chunk in (300, 64, 37):
        assert torch.equal(full_logits(loaded, tokens, chunk), at_once), f"chunks of {chunk}"
    assert torch.equal(full_logits(loaded, tokens[:90], 1), at_once[:90]), "one by one"


_MISSES = """
import gc
from numba.core.dispatcher import Dispatcher
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_ids import resolve_model
from engine.weights import load_model
for dtype in ("float32", "bfloat16"):
    Engine(EngineConfig(dtype=dtype, num_blocks=64), load_model(resolve_model("tiny").path, dtype)).warm_up()
kept = [each for each in gc.get_objects() if isinstance(each, Dispatcher) and each.stats.cache_path]
used = [each for each in kept if each.stats.cache_hits or each.stats.cache_misses]
assert len(used) > 4, used
print([each.__qualname__ for each in used if each.stats.cache_misses])
"""


@pytest.mark.timeout(300)
def test_machine_code_is_kept_between_runs() -> None:
    """What a first process compiles, a second one finds: seconds of every start of every worker."""
    runs_of = [
        subprocess.run(
            [sys.executable, "-c", _MISSES], capture_output=True, text=True, check=True, timeout=300
        )
        for _ in range(2)
    ]
    assert runs_of[1].stdout.strip() == "[]"
