"""Text to token ids and back. Knows no torch and no model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders

from engine.chat_template import PLAIN_TEMPLATE, ChatTemplate, ChatTemplateError, read_chat_template
from engine.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from engine.gguf_file import read_gguf
from engine.gguf_tokenizer import read_gguf_tokenizer
from engine.model_ids import ModelError, ModelSource, read_json


class Tokenizer(Protocol):
    """What the router needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        ...

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text than this."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects at its start.

        A long text takes seconds; other threads run meanwhile.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids; special tokens have none."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a chat, ready for the assistant's turn. Raises ChatTemplateError."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt ids of a chat; the template alone decides on special tokens. Raises ChatTemplateError."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh stream."""
        ...


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a resolved model: its file's own, or bytes for synthetic ones. Raises ModelError."""
    config = source.config
    if source.path is None:
        return ByteTokenizer(config.vocab_size, config.eos_token_ids)
    if source.is_gguf:
        return gguf_tokenizer(source.path, config.eos_token_ids)
    return hugging_face_tokenizer(source.path, config.eos_token_ids)


def hugging_face_tokenizer(path: Path, eos_token_ids: tuple[int, ...]) -> "TextTokenizer":
    """A directory's ``tokenizer.json`` and chat template. Raises ModelError naming the file at fault."""
    file = path / "tokenizer.json"
    read_json(file)  # its own message for a file that is missing or not JSON
    return TextTokenizer(_parse_tokenizer(file), read_chat_template(path), eos_token_ids)


def gguf_tokenizer(path: Path, eos_token_ids: tuple[int, ...]) -> "TextTokenizer":
    """The tokenizer and chat template in a GGUF file's metadata. Raises ModelError naming what is at fault."""
    read = read_gguf_tokenizer(read_gguf(path))
    template = PLAIN_TEMPLATE if read.chat_template is None else read.chat_template
    try:
        chat_template = ChatTemplate(template, read.special_tokens)
    except ChatTemplateError as error:
        raise ModelError(f"{path}: {error}") from error
    return TextTokenizer(read.tokenizer, chat_template, eos_token_ids)


class TextTokenizer:
    """A trained tokenizer with its model's chat template."""

    def __init__(
        self, tokenizer: TokenizersTokenizer, chat_template: ChatTemplate, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._eos_token_ids = eos_token_ids
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        # a byte-level token has one character for each byte
        sizes = (len(t) if self._is_byte_level else len(t.encode()) for t in tokenizer.get_vocab())
        self._longest_token_bytes = max(sizes, default=1)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    @property
    def longest_token_bytes(self) -> int:
        return self._longest_token_bytes

    def encode(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._chat_template.render(messages)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._ids(self.apply_chat_template(messages), add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A batch of one, because ``encode`` keeps the interpreter's lock all the time."""
        return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def detokenizer(self) -> Detokenizer:
        if self._is_byte_level:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.decode, self._is_byte_token)

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        try:
            return bytes(_CHARACTER_TO_BYTE[character] for character in token)
        except KeyError:  # an added token is plain text
            return str(token).encode()

    def _is_byte_token(self, token_id: int) -> bool:
        """A byte of a character that the vocabulary lacks, as SentencePiece models write it."""
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


class ByteTokenizer:
    """For models whose weights mean nothing: ids 0 to 255 are the bytes of UTF-8.

    Random weights also produce ids that no text encodes to; these are shown as printable ASCII characters, so that a
    stream of them can be watched.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._chat_template = ChatTemplate()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    @property
    def longest_token_bytes(self) -> int:
        return 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self._token_bytes, token_ids)).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._chat_template.render(messages)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode(self.apply_chat_template(messages))

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(self._token_bytes)

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._eos_token_ids:
            return b""
        return bytes([token_id if token_id < 256 else 32 + token_id % 95])


def _parse_tokenizer(file: Path) -> TokenizersTokenizer:
    try:
        return TokenizersTokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"cannot read tokenizer from {file}: {error}") from error


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted: printable Latin-1 stands for itself, the rest is moved up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(moved)
    }


_CHARACTER_TO_BYTE = _byte_level_alphabet()
