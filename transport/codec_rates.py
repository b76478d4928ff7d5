"""How fast a codec is on this machine, measured on a small piece of made-up KV. Takes a few milliseconds a codec.

The numbers are normal with another size in every column, which in sign and exponent is much like KV; the ratio of a
codec that compresses is therefore an estimate until real transfers say better.
"""

import time
from typing import Any, Final

import numpy as np

from transport.codec import LOSSY_CODECS, Codec, RowShape
from transport.codec_choice import CodecRate
from transport.messages import DTYPE_BYTES

SAMPLE_BYTES: Final = 512 * 1024
_REPEATS: Final = 3


def measure_codec(codec: Codec, dtype: str, head_dim: int) -> CodecRate:
    """The best of a few repeats each way, on the core this thread has now; the first call may compile."""
    shape = RowShape(max(1, SAMPLE_BYTES // (head_dim * DTYPE_BYTES[dtype])), head_dim, dtype)
    stored = memoryview(bytearray(_sample(shape)))
    wire = memoryview(bytearray(codec.wire_bytes_range(shape)[1]))
    num_bytes = codec.encode([stored], shape, wire)
    encode_s, decode_s = [], []
    for _ in range(_REPEATS):
        began_at = time.monotonic()
        codec.encode([stored], shape, wire)
        encoded_at = time.monotonic()
        codec.decode(wire[:num_bytes], shape, [stored])
        encode_s.append(encoded_at - began_at)
        decode_s.append(time.monotonic() - encoded_at)
    return CodecRate(
        encode_bytes_per_s=shape.raw_bytes / max(min(encode_s), 1e-9),
        decode_bytes_per_s=shape.raw_bytes / max(min(decode_s), 1e-9),
        ratio=num_bytes / shape.raw_bytes,
        is_lossy=codec.name in LOSSY_CODECS,
    )


def _sample(shape: RowShape) -> Any:
    """Rows as stored, as flat bytes."""
    generator = np.random.default_rng(0)
    sizes = np.exp(generator.standard_normal(shape.head_dim))
    values: Any = (generator.standard_normal((shape.num_rows, shape.head_dim)) * sizes).astype(np.float32)
    if shape.dtype == "bfloat16":
        values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(shape.dtype if shape.dtype == "float16" else values.dtype).reshape(-1).view(np.uint8)
