"""The tokenizer in a GGUF file's metadata: byte-level BPE, as Llama 3, SmolLM2 and Qwen models have it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.gguf_file import GgufFile
from engine.hf_config import ModelError

_KEY: Final = "tokenizer.ggml."

# GGUF's token types
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How text is cut into pieces before BPE joins the bytes of each piece."""

    pieces: Callable[[], list[pre_tokenizers.PreTokenizer]]
    is_nfc: bool = False  # the text is brought to Unicode's composed form first
    ignores_merges: bool = False  # a piece that is itself a token is taken whole
    adds_bos: bool = False  # unless the file says otherwise


def _gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _digits_then_gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _numbers_of(max_digits: int) -> Callable[[], list[pre_tokenizers.PreTokenizer]]:
    number = r"\p{N}" if max_digits == 1 else rf"\p{{N}}{{1,{max_digits}}}"
    pattern = "|".join((_CONTRACTIONS, _WORDS, number, _SIGNS_AND_SPACES))
    return lambda: [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_LLAMA3: Final = _Splitting(_numbers_of(3), ignores_merges=True, adds_bos=True)

SPLITTINGS: Final = {
    "default": _Splitting(_gpt2),
    "gpt-2": _Splitting(_gpt2),
    "smollm": _Splitting(_digits_then_gpt2),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _Splitting(_numbers_of(1), is_nfc=True),
}
"""``tokenizer.ggml.pre`` -> how text is split."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer with what a chat needs. ``special_tokens``: ``bos_token``, ... by the names templates use."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None


def read_gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Build the tokenizer. Raises ModelError for kinds that are not supported and for metadata that does not fit."""
    kind = file.text(_KEY + "model")
    if kind != "gpt2":
        raise ModelError(
            f"{file.path}: tokenizer {kind!r} is not supported; supported: gpt2 (byte-level BPE)"
        )
    name = file.text(_KEY + "pre", "default")
    if name not in SPLITTINGS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(SPLITTINGS)}"
        )
    splitting = SPLITTINGS[name]
    if file.flag(_KEY + "add_space_prefix", False):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.add_space_prefix true is not supported; supported: false"
        )
    tokens: list[str] = file.list_of(str, _KEY + "tokens")
    types = _token_types(file, len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    if len(vocabulary) != sum(token_type != _UNUSED for token_type in types):
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens names a token twice")
    tokenizer = Tokenizer(
        BPE(vocabulary, _merges(file, vocabulary), ignore_merges=splitting.ignores_merges, fuse_unk=False)
    )
    if splitting.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitting.pieces())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token_type == _CONTROL, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
    )
    special_tokens = _special_tokens(file, tokens, vocabulary)
    _set_first_and_last(file, tokenizer, special_tokens, adds_bos=splitting.adds_bos)
    template = file.text("tokenizer.chat_template") if "tokenizer.chat_template" in file.metadata else None
    return GgufTokenizer(tokenizer, special_tokens, template)


def _token_types(file: GgufFile, num_tokens: int) -> list[int]:
    if _KEY + "token_type" not in file.metadata:
        return [1] * num_tokens
    types: list[int] = file.list_of(int, _KEY + "token_type")
    if len(types) != num_tokens:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} elements, tokenizer.ggml.tokens {num_tokens}"
        )
    return types


def _merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in file.list_of(str, _KEY + "merges"):
        first, _, second = merge.partition(" ")
        if first not in vocabulary or second not in vocabulary or first + second not in vocabulary:
            raise ModelError(
                f"{file.path}: tokenizer.ggml.merges has {merge!r}, which joins no two tokens to a third"
            )
        merges.append((first, second))
    return merges


def _special_tokens(file: GgufFile, tokens: list[str], vocabulary: dict[str, int]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    found = {}
    for name, hugging_face in names.items():
        key = f"{_KEY}{name}_token_id"
        if key not in file.metadata:
            continue
        token_id = file.integer(key)
        if not 0 <= token_id < len(tokens) or tokens[token_id] not in vocabulary:
            raise ModelError(f"{file.path}: {key} is {token_id}, which is none of the {len(tokens)} tokens")
        found[hugging_face] = tokens[token_id]
    return found


def _set_first_and_last(
    file: GgufFile, tokenizer: Tokenizer, special_tokens: dict[str, str], *, adds_bos: bool
) -> None:
    """The tokens that every prompt gets at its beginning and end, where the file asks for any."""
    around = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        if file.flag(f"{_KEY}add_{name}_token", default):
            token = special_tokens.get(f"{name}_token")
            if token is None:
                raise ModelError(
                    f"{file.path}: {_KEY}add_{name}_token is true, but {_KEY}{name}_token_id is missing"
                )
            around[name] = token
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not around:
        tokenizer.post_processor = byte_level
        return
    bos, eos = around.get("bos"), around.get("eos")
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    used = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around.values())]
    template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
    tokenizer.post_processor = processors.Sequence([byte_level, template])
