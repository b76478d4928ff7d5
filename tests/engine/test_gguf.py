"""GGUF files: the model in one computes what transformers computes on the same dequantised weights."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer as TokenizersTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine.gguf_convert import convert_gguf, describe_formats
from engine.gguf_file import read_gguf
from engine.gguf_tensors import read_gguf_tensors
from engine.gguf_tokenizer import read_gguf_tokenizer
from engine.model_ids import ModelError, resolve_model
from engine.safetensors_writer import to_bfloat16, write_bfloat16_safetensors
from engine.tokenizer import load_tokenizer
from engine.weights import load_model
from tests.engine.gguf_files import BEGIN_ID, CHAT_TEMPLATE, END_ID, train_tokenizer, write_gguf
from tests.engine.helpers import drive, full_logits, make_engine, make_prompt, make_request, write_checkpoint

FAMILIES = ("llama", "llama-bias", "qwen2", "qwen3")
VOCAB_SIZE = 330
MESSAGES = [{"role": "user", "content": "Where is the café, at 12345?"}]
TEXTS = [
    "the quick  brown fox's 1234567 tails",
    "  naïve\n\n\tcafé 日本語🙂 ",
    "<|turn|>user\nx<|end|>",
    "it'S we'LL I'd",
    "cafe\u0301",
    "",
]


def small_model(path: Path, family: str = "llama", **changes: object) -> PreTrainedModel:
    """Row lengths are multiples of 32, which block formats need."""
    shape: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return write_checkpoint(path / "checkpoint", family=family, **(shape | changes))


@pytest.fixture(scope="module")
def tokenizer() -> TokenizersTokenizer:
    return train_tokenizer(VOCAB_SIZE)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """For tests that store it as F32, which leaves its weights as they are."""
    return small_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory, tokenizer: TokenizersTokenizer) -> Path:
    """A file with everything in it. Tests read it and write changed copies elsewhere."""
    path = tmp_path_factory.mktemp("gguf")
    model = small_model(path, num_hidden_layers=1)
    write_gguf(path / "whole.gguf", model, stored_as="Q8_0", tokenizer=tokenizer)
    return path / "whole.gguf"


def assert_same_logits(path: Path, model: PreTrainedModel) -> None:
    prompt = make_prompt(90)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    actual = full_logits(load_model(path, "float32"), prompt, 40, "torch")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.std().item())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_files_compute_what_transformers_computes(tmp_path: Path, family: str, tied: bool) -> None:
    model = small_model(tmp_path, family, tied=tied)
    write_gguf(tmp_path / "m.gguf", model)
    assert_same_logits(tmp_path / "m.gguf", model)


@pytest.mark.parametrize(
    ("family", "stored_as"),
    [
        ("llama", "F16"),
        ("llama", "BF16"),
        ("llama", "Q8_0"),
        ("llama", "Q4_0"),
        ("llama", "Q4_1"),
        ("llama", "Q5_1"),
        ("qwen2", "Q4_1"),
        ("qwen3", "Q5_0"),
    ],
)
def test_stored_formats_are_dequantised(tmp_path: Path, family: str, stored_as: str) -> None:
    model = small_model(tmp_path, family)
    write_gguf(tmp_path / "m.gguf", model, stored_as=stored_as)
    assert_same_logits(tmp_path / "m.gguf", model)


def test_greedy_tokens_of_a_quantised_file_are_those_of_generate(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    write_gguf(tmp_path / "m.gguf", model, stored_as="Q4_1")
    prompt = make_prompt(30)
    ids = torch.tensor([prompt])
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    engine = make_engine(load_model(tmp_path / "m.gguf", "float32"), kernels="torch")
    driven = drive(engine, [make_request("a", prompt, max_tokens=24)])
    assert driven.tokens["a"] == generated[0, len(prompt) :].tolist()
    assert len(set(driven.tokens["a"])) > 4


def test_every_format_that_the_library_dequantises_is_read(tmp_path: Path) -> None:
    """Random bytes: only that they are found, cut and put in place is ours."""
    generator = np.random.default_rng(0)
    rows, columns = 4, 256
    read = []
    for format_ in gguf.GGMLQuantizationType:
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[format_]
        stored = generator.integers(0, 256, (rows, columns // per_block * block_bytes), dtype=np.uint8)
        try:
            with np.errstate(all="ignore"):
                expected = gguf.dequantize(stored, format_)
        except NotImplementedError:
            continue
        path = tmp_path / f"{format_.name}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor("output.weight", stored, raw_dtype=format_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        (name, values), *others = read_gguf_tensors(read_gguf(path), resolve_model("synthetic:nano").config)
        assert (name, others) == ("lm_head.weight", [])
        np.testing.assert_array_equal(values.astype(np.float32), expected)
        read.append(format_.name)
    assert {"F32", "F16", "BF16", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"} <= set(read)


def test_llama3_rope_factors_are_applied(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = small_model(tmp_path, rope_parameters=scaling)
    plain = 5000.0 ** -(np.arange(0, 32, 2) / 32)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 7.9
    write_gguf(tmp_path / "m.gguf", model, rope_factors=factors)
    assert_same_logits(tmp_path / "m.gguf", model)
    with pytest.raises(ModelError, match="RoPE factors cannot be written"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_the_shape_is_that_of_the_metadata(whole_file: Path) -> None:
    source = resolve_model(whole_file)
    config = source.config
    assert source.is_gguf
    assert source.path == whole_file
    assert (config.architecture, config.vocab_size, config.hidden_size) == (
        "LlamaForCausalLM",
        VOCAB_SIZE,
        96,
    )
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (1, 6, 2, 32)
    assert (config.max_model_len, config.rope_theta, config.rms_norm_eps) == (1024, 5000.0, 1e-5)
    assert (config.eos_token_ids, config.bos_token_id) == ((END_ID,), BEGIN_ID)
    assert config.tie_word_embeddings
    assert config.num_parameters == sum(v.size for _, v in read_gguf_tensors(read_gguf(whole_file), config))
    assert describe_formats(whole_file).startswith("Q8_0 100 %")


def test_ends_of_a_turn_end_a_sequence_too(
    tmp_path: Path, llama: PreTrainedModel, tokenizer: TokenizersTokenizer
) -> None:
    write_gguf(
        tmp_path / "m.gguf",
        llama,
        tokenizer=tokenizer,
        changes={"tokenizer.ggml.eot_token_id": 2},
    )
    assert resolve_model(tmp_path / "m.gguf").config.eos_token_ids == (END_ID, 2)


# the tokenizer


def test_text_and_chats_are_tokenized_as_by_the_tokenizer_that_was_stored(
    whole_file: Path, tokenizer: TokenizersTokenizer
) -> None:
    ours = load_tokenizer(resolve_model(whole_file))
    for text in TEXTS:
        assert ours.encode(text) == tokenizer.encode(text).ids
        assert ours.decode(ours.encode(text)) == tokenizer.decode(tokenizer.encode(text).ids)
    chat = "<|begin|><|turn|>user\nWhere is the café, at 12345?<|end|>\n<|turn|>assistant\n"
    assert ours.apply_chat_template(MESSAGES) == chat
    assert ours.encode_chat(MESSAGES) == tokenizer.encode(chat).ids
    assert ours.eos_token_ids == (END_ID,)
    assert ours.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", " 12345", " AB", "'s", " \n", "\n", "x"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "5", " AB", "'s", " \n", "\n", "x"]),
        ("llama-bpe", ["it", "'s", " ", "123", "45", " AB", "'s", " \n\n", "x"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "5", " AB", "'s", " \n\n", "x"]),
    ],
)
def test_text_is_split_as_each_kind_of_model_was_trained(
    tmp_path: Path, llama: PreTrainedModel, tokenizer: TokenizersTokenizer, pre: str, pieces: list[str]
) -> None:
    write_gguf(tmp_path / "m.gguf", llama, tokenizer=tokenizer, pre=pre)
    built = read_gguf_tokenizer(read_gguf(tmp_path / "m.gguf")).tokenizer
    text = "it's 12345 AB's \n\nx"
    spans = [text[start:end] for _, (start, end) in built.pre_tokenizer.pre_tokenize_str(text)]
    assert spans == pieces
    first = [BEGIN_ID] if pre == "llama-bpe" else []
    assert built.encode("x").ids == [*first, *tokenizer.encode("x").ids]


@pytest.mark.parametrize(
    ("changes", "around"),
    [
        ({}, ("", "")),
        ({"tokenizer.ggml.add_bos_token": True}, ("<|begin|>", "")),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True},
            ("<|begin|>", "<|end|>"),
        ),
    ],
)
def test_prompts_begin_and_end_as_the_file_says(
    tmp_path: Path,
    llama: PreTrainedModel,
    tokenizer: TokenizersTokenizer,
    changes: dict[str, object],
    around: tuple[str, str],
) -> None:
    write_gguf(tmp_path / "m.gguf", llama, tokenizer=tokenizer, changes=changes)
    ours = load_tokenizer(resolve_model(tmp_path / "m.gguf"))
    assert ours.encode("the fox") == tokenizer.encode(f"{around[0]}the fox{around[1]}").ids
    assert ours.encode_chat(MESSAGES)[:2] == [BEGIN_ID, 2], "the template alone decides in a chat"


def test_unused_tokens_are_no_tokens(
    tmp_path: Path, llama: PreTrainedModel, tokenizer: TokenizersTokenizer
) -> None:
    types = [3, 3, 3, *[1] * (VOCAB_SIZE - 3)]
    types[7] = 5
    unused = tokenizer.id_to_token(7)
    write_gguf(
        tmp_path / "m.gguf",
        llama,
        tokenizer=tokenizer,
        changes={"tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": ["h e"]},
    )
    built = read_gguf_tokenizer(read_gguf(tmp_path / "m.gguf")).tokenizer
    assert built.token_to_id(unused) is None
    assert load_tokenizer(resolve_model(tmp_path / "m.gguf")).decode([7]) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer 'llama' is not supported; supported: gpt2"),
        ({"tokenizer.ggml.model": None}, "metadata key tokenizer.ggml.model is missing"),
        (
            {"tokenizer.ggml.pre": "tekken"},
            "tokenizer.ggml.pre 'tekken' is not supported; supported: default, gpt-2",
        ),
        (
            {"tokenizer.ggml.merges": ["xx yy"]},
            "tokenizer.ggml.merges has 'xx yy', which joins no two tokens",
        ),
        ({"tokenizer.ggml.merges": [1]}, "tokenizer.ggml.merges is not a list of str"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "token_type has 330 elements, tokenizer.ggml.tokens 2"),
        ({"tokenizer.ggml.tokens": ["a"] * 330}, "tokenizer.ggml.tokens names a token twice"),
        ({"tokenizer.ggml.bos_token_id": 330}, "bos_token_id is 330, which is none of the 330 tokens"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix true is not supported"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
            "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing",
        ),
        ({"tokenizer.chat_template": "{% if %}"}, "the chat template is not valid"),
    ],
)
def test_tokenizers_that_cannot_be_built_are_refused(
    tmp_path: Path,
    llama: PreTrainedModel,
    tokenizer: TokenizersTokenizer,
    changes: dict[str, object],
    message: str,
) -> None:
    write_gguf(tmp_path / "m.gguf", llama, tokenizer=tokenizer, changes=changes)
    source = resolve_model(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=message):
        load_tokenizer(source)


# files that cannot be used


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "a mixture of experts is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn' is not supported"),
        ({"llama.attention.sliding_window": 512}, "a sliding window of 512 tokens is not supported"),
        (
            {"llama.rope.dimension_count": 16},
            "llama.rope.dimension_count is 16; supported is the head size, 32",
        ),
        ({"llama.attention.head_count": None}, "metadata key llama.attention.head_count is missing"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0; allowed is 1 or more"),
        (
            {"llama.attention.head_count": [6, 6, 6]},
            r"llama.attention.head_count is \[6, 6, 6\]; expected a whole",
        ),
        ({"llama.attention.head_count_kv": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "rms_epsilon is 'small'; expected a number"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base is -1; allowed is a number above 0"),
        (
            {"llama.block_count": 4_000_000_000},
            "llama.block_count is 4000000000, but there are only 29 tensors",
        ),
        ({"split.count": 3}, "is one of 3 parts; supported are whole files"),
        ({"general.alignment": 33}, "general.alignment is 33; allowed are powers of two"),
    ],
)
def test_models_that_would_compute_wrongly_are_refused(
    tmp_path: Path, llama: PreTrainedModel, changes: dict[str, object], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", llama, changes=changes)
    with pytest.raises(ModelError, match=message):
        resolve_model(tmp_path / "m.gguf")


def test_other_architectures_are_refused_by_name(tmp_path: Path, llama: PreTrainedModel) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match="architecture 'gemma2' is not supported; supported: llama, qwen2, qwen3"
    ):
        resolve_model(tmp_path / "m.gguf")


def test_tensors_without_a_place_are_refused(whole_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(whole_file.read_bytes().replace(b"blk.0.ffn_gate.weight", b"blk.0.ffn_gatx.weight"))
    with pytest.raises(ModelError, match=r"tensor blk.0.ffn_gatx.weight has no place in a LlamaForCausalLM"):
        load_model(file)


def test_a_missing_tensor_is_named(whole_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(whole_file.read_bytes().replace(b"blk.0.ffn_gate.weight", b"blk.9.ffn_gate.weight"))
    with pytest.raises(ModelError, match=r"model.layers.0.mlp.gate_proj.weight is missing"):
        load_model(file)


def test_storage_formats_of_the_future_are_named(whole_file: Path, tmp_path: Path) -> None:
    content = bytearray(whole_file.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16  # dimensions' count, two dimensions
    assert struct.unpack_from("<I", content, at)[0] == gguf.GGMLQuantizationType.Q8_0
    struct.pack_into("<I", content, at, 999)
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(
        ModelError, match=r"tensor blk.0.ffn_up.weight has storage format 999, which is not known"
    ):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file: it does not begin with GGUF"),
        (b"PK\x03\x04 a wheel", "is not a GGUF file"),
        (b"GGUF", "is cut off at 4 bytes or broken"),
        (b"GGUF" + struct.pack("<I", 4), "GGUF version 4 is newer than what can be read; supported: 2, 3"),
        (b"GGUF" + struct.pack("<I", 1), "GGUF version 1 is older"),
        (b"GGUF" + struct.pack(">I", 3), "is a big-endian GGUF file; supported are little-endian ones"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1), "1152921504606846976 tensors do not fit in it"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(99), "is cut off at 131 bytes or broken"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"\xff\xff", 4) + bytes(99), "is not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77) + bytes(99), "'a' has value type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sII", 3, 0, 1, 1, b"a", 9, 9) + bytes(99), "'a' is a list of lists"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<Q1sIB", 1, b"a", 0, 5) * 2,
            "metadata key 'a' is there twice",
        ),
    ],
)
def test_what_is_not_a_whole_gguf_file_is_told_in_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=message) as raised:
        resolve_model(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_cut_off_anywhere_is_refused(whole_file: Path, tmp_path: Path) -> None:
    content = whole_file.read_bytes()
    header_end = min(tensor.offset for tensor in read_gguf(whole_file).tensors.values())
    last = max(read_gguf(whole_file).tensors.values(), key=lambda tensor: tensor.offset)
    assert last.shape == (96,)
    end = last.offset + 96 * 4
    lengths = {*range(0, header_end, 101), header_end, *range(header_end, end, 4099), end - 1}
    file = tmp_path / "m.gguf"
    for length in sorted(lengths):
        file.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"is cut off|is not a GGUF file"):
            load_model(file)
    file.write_bytes(content[:end])
    assert load_model(file).fingerprint == load_model(whole_file).fingerprint


def test_a_broken_header_is_refused_or_harmless(whole_file: Path, tmp_path: Path) -> None:
    """Never another exception than ModelError, whichever byte is wrong."""
    content = whole_file.read_bytes()
    header_end = min(tensor.offset for tensor in read_gguf(whole_file).tensors.values())
    file = tmp_path / "m.gguf"
    generator = random.Random(0)
    refused = 0
    for _ in range(400):
        broken = bytearray(content)
        broken[generator.randrange(header_end)] ^= 1 << generator.randrange(8)
        file.write_bytes(broken)
        try:
            source = resolve_model(file)
            list(read_gguf_tensors(read_gguf(file), source.config))
            load_tokenizer(source).encode("the fox")
        except ModelError:
            refused += 1
    assert 100 < refused < 400


def test_a_path_that_is_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m.gguf' is neither a directory, a file nor a known id"):
        resolve_model(tmp_path / "m.gguf")


# conversion


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_directory_is_what_transformers_loads(
    tmp_path: Path, tokenizer: TokenizersTokenizer, family: str
) -> None:
    model = small_model(tmp_path, family)
    pre = "qwen2" if family.startswith("qwen") else "gpt-2"  # transformers knows how Qwen's text is split
    write_gguf(tmp_path / "m.gguf", model, stored_as="Q8_0", tokenizer=tokenizer, pre=pre)
    directory = tmp_path / "converted"
    directory.mkdir()
    heard: list[tuple[int, int]] = []
    convert_gguf(tmp_path / "m.gguf", directory, lambda done, total: heard.append((done, total)))
    assert heard[0][0] == 0
    num_stored = len(model.state_dict()) - 1  # without the tied head
    assert heard[-1] == (num_stored, num_stored)
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert type(loaded) is type(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name
    assert_same_logits(directory, loaded)
    assert loaded.generation_config.eos_token_id == END_ID
    theirs, ours = AutoTokenizer.from_pretrained(directory), load_tokenizer(resolve_model(directory))
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids
    chat = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(MESSAGES) == chat
    assert theirs.chat_template == CHAT_TEMPLATE
    assert (theirs.bos_token_id, theirs.eos_token_id) == (BEGIN_ID, END_ID)


@settings(max_examples=200, deadline=None)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_bfloat16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    numbers = np.array(values, dtype=np.float32)
    ours = torch.from_numpy(to_bfloat16(numbers).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(numbers).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()].view(torch.int16), theirs[~theirs.isnan()].view(torch.int16))


def test_a_weight_file_holds_what_was_announced_or_is_refused(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (2, 3), "b": (5,)}
    tensors = [("a", np.arange(6.0, dtype=np.float32).reshape(2, 3)), ("b", np.ones(5, dtype=np.float16))]
    file = tmp_path / "model.safetensors"
    write_bfloat16_safetensors(file, shapes, tensors)
    assert {name: tensor.tolist() for name, tensor in load_file(file).items()} == {
        "a": [[0, 1, 2], [3, 4, 5]],
        "b": [1] * 5,
    }
    with pytest.raises(ValueError, match=r"tensor b \(5,\) is not the next that was announced"):
        write_bfloat16_safetensors(file, shapes, tensors[::-1])
    with pytest.raises(ValueError, match="tensor b was announced and did not come"):
        write_bfloat16_safetensors(file, shapes, tensors[:1])
    with pytest.raises(SafetensorError):
        load_file(file)
