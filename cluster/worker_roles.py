"""What a worker is used for. Every worker can do everything; its role is what new requests use it for."""

from typing import Final

PREFILL_ROLES: Final = ("prefill", "both")
DECODE_ROLES: Final = ("decode", "both")
WORKER_ROLES: Final = ("prefill", "decode", "both")
