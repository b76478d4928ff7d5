"""Text to ids and back, streaming included, for byte-level, byte-fallback and synthetic tokenizers."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers.trainers import BpeTrainer

from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.model_ids import ModelError, resolve_model
from engine.tokenizer import ByteTokenizer, Tokenizer, hugging_face_tokenizer, load_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café, 日本語 and 🙂 emoji 🙃",
    "def f(x):\n    return x\n",
]


def write_byte_level(path: Path) -> None:
    tokenizer = TokenizersTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 3,
        BpeTrainer(vocab_size=330, special_tokens=["<|end|>", "<|user|>"], initial_alphabet=alphabet),
    )
    tokenizer.add_tokens([AddedToken("«plain added»", special=False)])
    tokenizer.save(str(path / "tokenizer.json"))


def write_byte_fallback(path: Path) -> None:
    """As Llama 2's: spaces are ▁, characters that are not in the vocabulary are tokens <0x00> to <0xFF>."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyzé",
        "th",
        "the",
        "▁the",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = TokenizersTokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(path / "tokenizer.json"))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in ("level", "fallback")}
    write_byte_level(paths["level"])
    write_byte_fallback(paths["fallback"])
    return paths


@pytest.fixture(scope="module")
def every(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    return {
        "level": hugging_face_tokenizer(directories["level"], (0,)),
        "fallback": hugging_face_tokenizer(directories["fallback"], (0,)),
        "bytes": ByteTokenizer(512, (256,)),
    }


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


KINDS = pytest.mark.parametrize("kind", ["level", "fallback", "bytes"])


@KINDS
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=40))
def test_streamed_text_is_the_text(every: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = every[kind]
    token_ids = tokenizer.encode(text)
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    if kind != "fallback":  # its normalizer puts a space before the text, and its decoder takes one away
        assert tokenizer.decode(token_ids) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces), "a piece ended in half a character"


@KINDS
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_streaming_any_ids_equals_decoding_them_at_once(
    every: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = every[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@KINDS
def test_a_character_appears_when_its_last_byte_is_here(every: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every[kind]
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("the 🦜")
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces).startswith("the")
    assert pieces[0] != ""
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)
    cut = tokenizer.detokenizer()
    for token_id in ids[:-1]:
        assert "\ufffd" not in cut.push(token_id)
    assert "\ufffd" in cut.flush()


def test_byte_level_specials_have_no_text_and_added_tokens_do(every: dict[str, Tokenizer]) -> None:
    tokenizer = every["level"]
    ids = tokenizer.encode("the<|user|>fox«plain added»é<|end|>")
    assert 0 in ids
    assert tokenizer.decode(ids) == "the" + "fox" + "«plain added»é"
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_the_byte_tokenizer_shows_ids_that_are_no_bytes(every: dict[str, Tokenizer]) -> None:
    tokenizer = every["bytes"]
    assert tokenizer.encode("hé") == [104, 195, 169]
    assert tokenizer.decode([104, 256, 400, 511]).isprintable()
    assert len(tokenizer.decode([104, 256, 400, 511])) == 3
    assert tokenizer.eos_token_ids == (256,)


def test_synthetic_models_get_the_byte_tokenizer() -> None:
    tokenizer = load_tokenizer(resolve_model("synthetic:nano"))
    assert tokenizer.decode(tokenizer.encode("round trip ✓")) == "round trip ✓"
    assert tokenizer.vocab_size == 512


CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|user|>default\n{% endif %}"
    "<|user|>{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_the_chat_template_is_found_and_rendered(tmp_path: Path, place: str) -> None:
    write_byte_level(tmp_path)
    config: dict[str, object] = {"eos_token": {"content": "<|end|>"}, "bos_token": None}
    if place == "config":
        config["chat_template"] = CHATML
    if place == "list":
        config["chat_template"] = [
            {"name": "other", "template": "x"},
            {"name": "default", "template": CHATML},
        ]
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = hugging_face_tokenizer(tmp_path, (0,))
    messages = [{"role": "user", "content": "the fox"}]
    text = "<|user|>default\n<|user|>user\nthe fox<|end|>\n<|user|>assistant\n"
    assert tokenizer.apply_chat_template(messages) == text
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text)
    assert tokenizer.encode_chat(messages).count(0) == 1  # the special token, not its letters


def test_a_model_without_a_template_gets_the_plain_contents(every: dict[str, Tokenizer]) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert every["bytes"].apply_chat_template(messages) == "be brief\nhi\n"
    assert every["level"].apply_chat_template(messages) == "be brief\nhi\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "refused the messages"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ ().__class__.__mro__ }}", "refused the messages"),
    ],
)
def test_a_template_can_refuse_and_cannot_reach_out(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer.json"):
        hugging_face_tokenizer(tmp_path, ())
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"cannot read tokenizer from .*tokenizer.json"):
        hugging_face_tokenizer(tmp_path, ())
    write_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match="the chat template is not valid"):
        hugging_face_tokenizer(tmp_path, ())
