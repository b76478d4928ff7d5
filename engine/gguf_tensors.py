"""A GGUF file's weights, dequantised, in Hugging Face's names and row order. Uses numpy, not torch."""

import math
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig
from engine.gguf_config import ModelTensor, model_tensors
from engine.gguf_file import GgufFile, GgufTensor
from engine.hf_config import ModelError


def read_gguf_tensors(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Name and values of every tensor of the model, one at a time: float16 where stored so, else float32.

    Raises ModelError, before the first tensor, for storage formats that are not known and a file that is cut off.
    """
    tensors = model_tensors(file, config)
    for tensor in tensors:
        _check_extent(file, tensor.stored)
    return _read(file, tensors)


def stored_formats(file: GgufFile) -> dict[str, int]:
    """How many weights the file stores in each format (``Q4_1``, ``F32``, ...), most first. Raises ModelError."""
    counts: dict[str, int] = {}
    for tensor in file.tensors.values():
        name = _format(file, tensor).name
        counts[name] = counts.get(name, 0) + math.prod(tensor.shape)
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _read(file: GgufFile, tensors: list[ModelTensor]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    content = np.memmap(file.path, mode="r")
    for tensor in tensors:
        stored = tensor.stored
        end = stored.offset + _num_bytes(file, stored)
        values = _dequantised(file, stored, content[stored.offset : end])
        if tensor.interleaved_heads:
            values = _halves_apart(file, stored, values, tensor.interleaved_heads)
        yield tensor.name, values


def _dequantised(file: GgufFile, stored: GgufTensor, content: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    format_ = _format(file, stored)
    rows = np.ascontiguousarray(content).reshape(*stored.shape[:-1], -1)
    if format_ is gguf.GGMLQuantizationType.F16:
        return rows.view(np.float16).copy()
    try:
        with np.errstate(all="ignore"):  # scales of a broken file may be infinite
            values = gguf.dequantize(rows, format_)
    except NotImplementedError as error:
        raise ModelError(
            f"{file.path}: tensor {stored.name} is stored as {format_.name}, which cannot be dequantised"
        ) from error
    return np.array(values, dtype=np.float32).reshape(stored.shape)


def _halves_apart(
    file: GgufFile, stored: GgufTensor, values: npt.NDArray[Any], heads: int
) -> npt.NDArray[Any]:
    """Rows of each head from ``0, half, 1, half + 1, ...`` to ``0, 1, ..., half, half + 1, ...``."""
    if stored.shape[0] % (2 * heads):
        raise ModelError(
            f"{file.path}: tensor {stored.name} has {stored.shape[0]} rows, which {heads} heads do not share evenly"
        )
    pairs = values.reshape(heads, stored.shape[0] // (2 * heads), 2, *stored.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(stored.shape)


def _check_extent(file: GgufFile, stored: GgufTensor) -> None:
    end = stored.offset + _num_bytes(file, stored)
    if end > file.size:
        raise ModelError(
            f"{file.path} is cut off at {file.size} bytes or broken: tensor {stored.name} goes on to byte {end}"
        )


def _num_bytes(file: GgufFile, stored: GgufTensor) -> int:
    format_ = _format(file, stored)
    values_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[format_]
    if not stored.shape or 0 in stored.shape or stored.shape[-1] % values_per_block:
        raise ModelError(
            f"{file.path} is broken: tensor {stored.name} of shape {stored.shape} cannot be stored as {format_.name}, "
            f"whose rows are multiples of {values_per_block}"
        )
    return math.prod(stored.shape) // values_per_block * bytes_per_block


def _format(file: GgufFile, stored: GgufTensor) -> gguf.GGMLQuantizationType:
    try:
        return gguf.GGMLQuantizationType(stored.type_id)
    except ValueError as error:
        known = max(gguf.GGMLQuantizationType)
        raise ModelError(
            f"{file.path}: tensor {stored.name} has storage format {stored.type_id}, which is not known "
            f"(the newest known is {known.value}, {known.name})"
        ) from error
