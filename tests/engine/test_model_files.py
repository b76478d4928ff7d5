"""Model ids, configs, weights and fingerprints; and that what cannot be used is refused by name."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig
from engine.dtypes import cpu_flags, resolve_dtype
from engine.fingerprint import model_fingerprint
from engine.model_ids import SYNTHETIC_PRESETS, ModelError, read_model_config, resolve_model
from engine.weights import expected_shapes, load_model, synthetic_tensors
from tests.engine.helpers import EOS_ID, LLAMA3_ROPE, VOCAB_SIZE, write_checkpoint


def edit_json(file: Path, **changes: object) -> None:
    value = json.loads(file.read_text())
    for key, new in changes.items():
        if new is None:
            value.pop(key, None)
        else:
            value[key] = new
    file.write_text(json.dumps(value))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    return tmp_path


def test_the_config_of_a_directory(directory: Path) -> None:
    config = read_model_config(directory)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=112,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        max_model_len=1024,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        tie_word_embeddings=True,
        eos_token_ids=(EOS_ID,),
        bos_token_id=1,
    )
    assert config.num_parameters == sum(
        tensor.numel() for tensor in load_file(directory / "model.safetensors").values()
    )


def test_older_config_files_are_read_too(directory: Path) -> None:
    expected = read_model_config(directory)
    (directory / "generation_config.json").unlink()
    edit_json(
        directory / "config.json", rope_parameters=None, rope_theta=5000.0, head_dim=None, hidden_size=96
    )
    assert read_model_config(directory) == replace(expected, hidden_size=96)


def test_end_tokens_come_from_the_generation_config(directory: Path) -> None:
    edit_json(directory / "generation_config.json", eos_token_id=[2, 5])
    assert read_model_config(directory).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, r"architecture \(none\) is not supported"),
        ({"architectures": "LlamaModel"}, "architecture LlamaModel is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
            "RoPE scaling 'yarn' is not supported; supported: default, llama3",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "RoPE scaling 'linear' is not supported",
        ),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn'; expected an object"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 is not supported; supported: 1.0",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
            "key 'factor' is missing",
        ),
        (
            {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 4.0}},
            "high_freq_factor is 4; allowed is more than low_freq_factor 4",
        ),
        (
            {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": "long"}},
            "original_max_position_embeddings is 'long'; allowed is a whole number of 1 or more",
        ),
        ({"mlp_bias": True}, "mlp_bias true is not supported; supported: false"),
        ({"use_sliding_window": True}, "use_sliding_window true is not supported; supported: false"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer type 'sliding_attention' is not supported; supported: full_attention",
        ),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config is set, quantised safetensors are not supported; supported: weights in float32",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"num_hidden_layers": None}, "key 'num_hidden_layers' is missing"),
        ({"num_key_value_heads": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; allowed is a whole number of 1 or more"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5; allowed is a whole number"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; allowed is a whole number"),
        ({"head_dim": 15}, "head_dim is 15; rotary positions need an even number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; allowed is a number above 0"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta is -1.0; allowed is a number above 0"),
        ({"eos_token_id": "end"}, "invalid literal for int"),
    ],
)
def test_configs_that_would_compute_wrongly_are_refused(
    directory: Path, changes: dict[str, object], message: str
) -> None:
    (directory / "generation_config.json").unlink()
    edit_json(directory / "config.json", **changes)
    with pytest.raises(ModelError, match=message) as refused:
        resolve_model(directory)
    assert str(directory / "config.json") in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "architecture",
    [
        "MixtralForCausalLM",
        "GemmaForCausalLM",
        "GPT2LMHeadModel",
        "MistralForCausalLM",
        "Qwen3MoeForCausalLM",
    ],
)
def test_other_architectures_are_refused_by_name(directory: Path, architecture: str) -> None:
    edit_json(directory / "config.json", architectures=[architecture])
    with pytest.raises(
        ModelError,
        match=f"architecture {architecture} is not supported; "
        "supported: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    ):
        resolve_model(directory)


def test_unknown_ids_name_what_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))
    with pytest.raises(
        ModelError, match="'tinny' is neither a directory, a file nor a known id; allowed are tiny, smollm2"
    ):
        resolve_model("tinny")
    with pytest.raises(
        ModelError, match="synthetic preset 'huge' is unknown; allowed are nano, gpt2-small, smollm2"
    ):
        resolve_model("synthetic:huge")
    with pytest.raises(ModelError, match="fetch it with: pdconsole model get smollm2-135m"):
        resolve_model("smollm2-135m")
    with pytest.raises(ModelError, match=r"cannot read .*config.json: No such file"):
        resolve_model(tmp_path)


def test_a_fetched_model_is_found_under_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))
    write_checkpoint(tmp_path / "models" / "smollm2-135m")
    assert resolve_model("smollm2-135m").path == tmp_path / "models" / "smollm2-135m"


def test_presets_have_the_shapes_they_are_named_for() -> None:
    smollm = SYNTHETIC_PRESETS["smollm2-135m"]
    assert smollm.num_parameters == 134_515_008
    assert smollm.kv_bytes_per_token("bfloat16") == 23_040
    assert 120e6 < SYNTHETIC_PRESETS["gpt2-small"].num_parameters < 128e6


def test_broken_weights_are_refused_by_name(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: torch.zeros(3, 3)}, file)
    with pytest.raises(
        ModelError, match=rf"tensor {name} has shape \(3, 3\); config.json asks for \(112, 48\)"
    ):
        load_model(directory)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(
        ModelError, match=rf"tensor {name} is stored as int8; supported: float32, float16, bfloat16"
    ):
        load_model(directory)
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(ModelError, match=rf"tensor {name} is missing"):
        load_model(directory)
    file.write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=r"cannot read weights from .*model.safetensors"):
        load_model(directory)
    file.unlink()
    with pytest.raises(ModelError, match=r"cannot read weights from .*model.safetensors"):
        load_model(directory)


@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "qwen3"])
def test_parts_that_the_config_does_not_name_are_not_left_out_in_silence(tmp_path: Path, family: str) -> None:
    """A Qwen2 whose config says Llama would lose its biases and still give fluent text."""
    write_checkpoint(tmp_path, family=family)
    edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLM"], attention_bias=False)
    with pytest.raises(
        ModelError,
        match=r"tensor model.layers.\d.self_attn.\w+.(bias|weight) has no place in the LlamaForCausalLM",
    ):
        load_model(tmp_path)


def test_tensors_that_repeat_others_are_passed_over(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    expected = load_model(directory).fingerprint
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors | head | frequencies, file)
    assert load_model(directory).fingerprint == expected


@pytest.fixture
def sharded(directory: Path) -> Path:
    """The directory's model in three files, the middle one holding layer 1."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        number = 2 if ".layers.1." in name else 1 if "embed" in name else 3
        shards.setdefault(f"model-0000{number}-of-00003.safetensors", {})[name] = tensor
    for shard, part in shards.items():
        save_file(part, directory / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_shards_are_one_model(sharded: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole")
    assert load_model(sharded).fingerprint == load_model(tmp_path / "whole").fingerprint


def test_a_shard_that_is_missing_or_cut_off_is_named(sharded: Path) -> None:
    middle = sharded / "model-00002-of-00003.safetensors"
    content = middle.read_bytes()
    for length in (0, 4, 100, len(content) // 2, len(content) - 1):
        middle.write_bytes(content[:length])
        with pytest.raises(ModelError, match=f"cannot read weights from {middle}") as refused:
            load_model(sharded)
        assert "\n" not in str(refused.value)
    middle.unlink()
    with pytest.raises(ModelError, match=f"cannot read weights from {middle}: .*No such file"):
        load_model(sharded)


@pytest.mark.parametrize(
    "shard",
    ["../model-00002-of-00003.safetensors", "/etc/model.safetensors", "weights/x.safetensors", "..", "", 7],
)
def test_a_shard_outside_the_directory_is_refused(sharded: Path, shard: object) -> None:
    index = sharded / "model.safetensors.index.json"
    outside = sharded.parent / "model-00002-of-00003.safetensors"
    outside.write_bytes((sharded / "model-00002-of-00003.safetensors").read_bytes())
    weight_map = json.loads(index.read_text())["weight_map"]
    name = "model.layers.1.mlp.up_proj.weight"
    edit_json(index, weight_map=weight_map | {name: shard})
    with pytest.raises(
        ModelError,
        match=rf"{name} is in {re.escape(repr(shard))}; allowed is a .safetensors file in the same",
    ):
        load_model(sharded)


def test_an_index_and_its_shards_must_agree(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = "model.layers.1.mlp.up_proj.weight"
    edit_json(index, weight_map=weight_map | {name: "model-00003-of-00003.safetensors"})
    with pytest.raises(ModelError, match=rf"00003-of-00003.safetensors: tensor {name} is missing"):
        load_model(sharded)
    edit_json(index, weight_map={key: shard for key, shard in weight_map.items() if key != name})
    with pytest.raises(ModelError, match=rf"tensor {name} is missing"):
        load_model(sharded)
    for empty in ({}, None, []):
        edit_json(index, weight_map=empty)
        with pytest.raises(ModelError, match="weight_map is missing"):
            load_model(sharded)


def test_fingerprints_differ_exactly_when_config_or_weights_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", seed=1)
    write_checkpoint(tmp_path / "b", seed=1)
    write_checkpoint(tmp_path / "c", seed=2)
    first = load_model(tmp_path / "a", "float32").fingerprint
    assert load_model(tmp_path / "a", "bfloat16").fingerprint == first
    assert load_model(tmp_path / "b", "float32").fingerprint == first
    assert load_model(tmp_path / "c", "float32").fingerprint != first
    edit_json(tmp_path / "b" / "config.json", rms_norm_eps=1e-6)
    assert load_model(tmp_path / "b", "float32").fingerprint != first
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][7] += 1e-6
    save_file(tensors, file)
    assert load_model(tmp_path / "a", "float32").fingerprint != first


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("qwen2", "self_attn.k_proj.bias"),
        ("llama-bias", "self_attn.o_proj.bias"),
        ("qwen3", "self_attn.q_norm.weight"),
    ],
)
def test_fingerprints_cover_biases_and_head_norms(tmp_path: Path, family: str, part: str) -> None:
    write_checkpoint(tmp_path, family=family)
    first = load_model(tmp_path).fingerprint
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.2.{part}"][3] += 1e-6
    save_file(tensors, file)
    assert load_model(tmp_path).fingerprint != first


def test_fingerprints_cover_the_scaling_of_positions(directory: Path) -> None:
    first = load_model(directory).fingerprint
    edit_json(directory / "config.json", rope_parameters=LLAMA3_ROPE)
    assert load_model(directory).fingerprint != first


def test_a_fingerprint_covers_names_shapes_and_dtypes() -> None:
    config = SYNTHETIC_PRESETS["nano"]
    zeros = torch.zeros(4, 4)
    variants = [("a", zeros), ("b", zeros), ("a", zeros.view(2, 8)), ("a", zeros.view(torch.int32))]
    assert len({model_fingerprint(config, [variant]) for variant in variants}) == len(variants)


def test_synthetic_weights_are_the_same_in_another_process() -> None:
    code = (
        "from engine.weights import load_model; print(load_model('synthetic:nano', 'bfloat16').fingerprint)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == load_model("synthetic:nano", "float32").fingerprint


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "out_bias": True}, {"qk_norm": True}], ids=str)
def test_synthetic_weights_fit_their_config(changes: dict[str, bool]) -> None:
    config = replace(SYNTHETIC_PRESETS["nano"], **changes)
    tensors = synthetic_tensors(config)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected_shapes(config)
    assert config.num_parameters == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("dtype", "device", "flags", "expected"),
    [
        ("auto", "cpu", {"avx2"}, "float32"),
        ("auto", "cpu", {"avx512f", "avx512_bf16"}, "bfloat16"),
        ("auto", "cpu", {"amx_tile", "amx_bf16"}, "bfloat16"),
        ("auto", "cuda:0", set(), "bfloat16"),
        ("float32", "cpu", {"avx512_bf16"}, "float32"),
        ("bfloat16", "cpu", {"avx2"}, "bfloat16"),
    ],
)
def test_auto_is_bfloat16_only_where_it_is_fast(
    dtype: str, device: str, flags: set[str], expected: str
) -> None:
    assert resolve_dtype(dtype, device, frozenset(flags)) == expected


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype is 'float16'; allowed are auto, float32, bfloat16"):
        resolve_dtype("float16")


def test_cpu_flags_are_read_where_the_system_lists_them(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: X\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: 1\n")
    assert cpu_flags(file) == {"fpu", "avx2", "avx512_bf16"}
    assert cpu_flags(tmp_path / "missing") == frozenset()


@pytest.mark.parametrize(
    "module",
    [
        "config",
        "request",
        "model_ids",
        "outputs",
        "tokenizer",
        "scheduler",
        "sequence",
        "block_allocator",
        "dtypes",
        "gguf_convert",
    ],
)
def test_plain_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, engine.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
