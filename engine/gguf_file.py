"""A GGUF file's header: its metadata and where its tensors lie. Reads no weights and knows no model.

Layout: magic, version, counts; key-value pairs; one record per tensor; padding to the alignment; tensor data. All
integers are little-endian here.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.hf_config import ModelError

VERSIONS: Final = (2, 3)
"""Format versions that can be read; version 3 differs from 2 only in allowing big-endian files."""

_MAGIC: Final = b"GGUF"
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_STRING: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's value types that are one number, as struct's."""

_LENGTH: Final = struct.Struct("<Q")

_SMALLEST_PAIR: Final = 13  # an empty key, a type and one byte of value
_SMALLEST_TENSOR: Final = 24  # an empty name, no dimensions, type and offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's record. ``shape`` is row-major (rows before columns), the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # GGML's number of the storage format
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header."""

    path: Path
    size: int  # of the file, bytes
    metadata: dict[str, Any]  # numbers, text, or lists of either
    tensors: dict[str, GgufTensor]

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of the metadata. Raises ModelError if it is missing (and has no default) or something else."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.path}: {key} is {_shown(value)}; expected a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {key} is {_shown(value)}; expected a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key} is {_shown(value)}; expected true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.path}: {key} is {_shown(value)}; expected text")
        return value

    def list_of(self, kind: type, key: str) -> list[Any]:
        """A list whose elements are all of ``kind``."""
        value = self._value(key, None)
        if not isinstance(value, list) or any(type(element) is not kind for element in value):
            raise ModelError(f"{self.path}: {key} is not a list of {kind.__name__}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: metadata key {key} is missing")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Parse a file's header.

    Raises ModelError for what is not GGUF, a version that is too old or too new, and a file that is cut off or broken.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            if stream.read(len(_MAGIC)) != _MAGIC:
                raise ModelError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).read()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


class _Reader:
    """A cursor over the file that never reads past its end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._at = len(_MAGIC)

    def read(self) -> GgufFile:
        self._check_version(self._number("I"))
        num_tensors = self._count("tensors", _SMALLEST_TENSOR)
        num_pairs = self._count("metadata keys", _SMALLEST_PAIR)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            if key in metadata:
                raise self._broken(f"metadata key {key!r} is there twice")
            metadata[key] = self._value(key)
        records = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {_shown(alignment)}; allowed are powers of two")
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in records:
            if name in tensors:
                raise self._broken(f"tensor {name!r} is there twice")
            if offset % alignment:
                raise self._broken(f"tensor {name!r} starts at {offset}, not at a multiple of {alignment}")
            if data_start + offset >= self._size:
                raise self._cut_off(f"tensor {name!r} starts at byte {data_start + offset}")
            tensors[name] = GgufTensor(name, shape, type_id, data_start + offset)
        return GgufFile(self._path, self._size, metadata, tensors)

    def _check_version(self, version: int) -> None:
        if version & 0xFFFF == 0:
            raise ModelError(f"{self._path} is a big-endian GGUF file; supported are little-endian ones")
        if version not in VERSIONS:
            age = "newer" if version > max(VERSIONS) else "older"
            raise ModelError(
                f"{self._path}: GGUF version {version} is {age} than what can be read; "
                f"supported: {', '.join(map(str, VERSIONS))}"
            )

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._number("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._broken(
                f"tensor {name!r} has {num_dimensions} dimensions; allowed are up to {_MAX_DIMENSIONS}"
            )
        shape = tuple(self._number("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _value(self, key: str) -> Any:
        kind = self._number("I")
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        return self._number(self._layout(key, kind))

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I")
        if kind == _ARRAY:
            raise self._broken(f"{key!r} is a list of lists")
        if kind == _STRING:
            return self._strings(self._count(f"elements of {key!r}", _LENGTH.size))
        layout = self._layout(key, kind)
        count = self._count(f"elements of {key!r}", struct.calcsize(layout))
        return list(self._unpack(f"<{count}{layout}"))

    def _layout(self, key: str, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._broken(f"{key!r} has value type {kind}, which does not exist")
        return _NUMBERS[kind]

    def _count(self, what: str, smallest: int) -> int:
        """A count that the rest of the file can hold, so that no number of a broken file reserves memory."""
        count: int = self._number("Q")
        if count * smallest > self._size - self._at:
            raise self._cut_off(f"{count} {what} do not fit in it")
        return count

    def _string(self) -> str:
        length = self._number("Q")
        start = self._at
        self._advance(length)
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"the text at byte {start} is not UTF-8") from error

    def _strings(self, count: int) -> list[str]:
        """As ``_string``, many at once: a vocabulary has a hundred thousand of them."""
        data, size, start, texts = self._data, self._size, self._at, []
        for _ in range(count):
            end = start + _LENGTH.size
            if end <= size:
                end += _LENGTH.unpack_from(data, start)[0]
            if end > size:
                raise self._cut_off(f"its header goes on to byte {end} at least")
            texts.append(data[start + _LENGTH.size : end])
            start = end
        self._at = start
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError as error:
            raise self._broken(f"a text before byte {start} is not UTF-8") from error

    def _number(self, layout: str) -> Any:
        return self._unpack("<" + layout)[0]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        start = self._at
        self._advance(struct.calcsize(layout))
        return struct.unpack_from(layout, self._data, start)

    def _advance(self, length: int) -> None:
        if self._at + length > self._size:
            raise self._cut_off(f"its header goes on to byte {self._at + length} at least")
        self._at += length

    def _cut_off(self, why: str) -> ModelError:
        return ModelError(f"{self._path} is cut off at {self._size} bytes or broken: {why}")

    def _broken(self, why: str) -> ModelError:
        return ModelError(f"{self._path} is broken: {why}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
