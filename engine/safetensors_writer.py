"""Writes a safetensors file tensor by tensor, so that a model need not fit in memory twice. Uses numpy, not torch."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_BFLOAT16_BYTES = 2
_HEADER_ALIGNMENT = 8


def write_bfloat16_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, npt.NDArray[Any]]]
) -> None:
    """Store ``tensors``, which come in the order of ``shapes``, rounded to bfloat16.

    Raises OSError, and ValueError for a tensor that is not the next of ``shapes``; the file is then incomplete.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * _BFLOAT16_BYTES
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    expected = iter(shapes.items())
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, values in tensors:
            if (name, values.shape) != next(expected, None):
                raise ValueError(f"tensor {name} {values.shape} is not the next that was announced")
            stream.write(to_bfloat16(values).data)
    missing = next(expected, None)
    if missing is not None:
        raise ValueError(f"tensor {missing[0]} was announced and did not come")


def to_bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16 values, ties to even as torch rounds; not-a-number stays that."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded
