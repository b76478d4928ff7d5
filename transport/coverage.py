"""Which tokens of a transfer have passed, in what frames. Both ends count alike, so a COMMIT can be checked.

Tokens before ``start_token`` never pass: the receiver holds them already.
"""

from transport.errors import ChecksumError, ProtocolError
from transport.frame import DataSlice, TransferDigest
from transport.messages import KVCommit, KVHeader, PrefillResult


class Coverage:
    """Which tokens of which (layer, kv) have passed, and the counts and digest that a COMMIT states."""

    def __init__(self, header: KVHeader, start_token: int = 0) -> None:
        self.start_token = start_token
        self._header = header
        self._next_token = [start_token] * (2 * header.num_layers)
        self._num_rows = 2 * header.num_layers * (header.num_tokens - start_token)
        self._num_rows_due = self._num_rows
        self._digest = TransferDigest()
        self.num_frames = 0
        self.payload_bytes = 0
        self.raw_bytes = 0

    def check(self, part: DataSlice) -> None:
        """Raises ProtocolError unless exactly this part may come next."""
        header = self._header
        if part.layer >= header.num_layers or part.kv not in (0, 1):
            raise ProtocolError(
                f"DATA for layer {part.layer}, kv {part.kv}; allowed is layer 0 to {header.num_layers - 1}, kv 0 or 1"
            )
        if part.num_tokens < 1 or part.end_token > header.num_tokens:
            raise ProtocolError(
                f"DATA for tokens {part.start_token} to {part.end_token}; the transfer has {header.num_tokens} tokens"
            )
        if part.start_token < self.start_token:
            raise ProtocolError(
                f"DATA for tokens {part.start_token} to {part.end_token}; the receiver holds those "
                f"before {self.start_token}"
            )
        due = self._next_token[2 * part.layer + part.kv]
        if part.start_token != due:
            what = "duplicate" if part.start_token < due else "out of order"
            raise ProtocolError(
                f"{what} DATA: layer {part.layer}, kv {part.kv} starts at token {part.start_token}; due is {due}"
            )

    def add(self, part: DataSlice, wire_bytes: int, checksum: int) -> None:
        self._next_token[2 * part.layer + part.kv] = part.end_token
        self._num_rows_due -= part.num_tokens
        self._digest.update(checksum)
        self.num_frames += 1
        self.payload_bytes += wire_bytes
        self.raw_bytes += part.num_tokens * self._header.token_bytes

    def require_complete(self) -> None:
        if self._num_rows_due:
            raise ProtocolError(
                f"COMMIT before all data: {self._num_rows - self._num_rows_due} of {self._num_rows} token rows "
                "have been sent"
            )

    def commit(self, prefill: PrefillResult) -> KVCommit:
        return KVCommit(
            first_token_id=prefill.first_token_id,
            seed=prefill.seed,
            output_position=prefill.output_position,
            prefill_started_at=prefill.prefill_started_at,
            prefill_done_at=prefill.prefill_done_at,
            start_token=self.start_token,
            num_frames=self.num_frames,
            payload_bytes=self.payload_bytes,
            raw_bytes=self.raw_bytes,
            digest=self._digest.value(),
        )

    def verify(self, commit: KVCommit) -> None:
        """Raises ProtocolError for missing data or wrong counts, ChecksumError for a wrong digest."""
        self.require_complete()
        for name, ours, theirs in (
            ("start_token", self.start_token, commit.start_token),
            ("num_frames", self.num_frames, commit.num_frames),
            ("payload_bytes", self.payload_bytes, commit.payload_bytes),
            ("raw_bytes", self.raw_bytes, commit.raw_bytes),
        ):
            if ours != theirs:
                raise ProtocolError(f"COMMIT says {name} is {theirs}; here it is {ours}")
        if commit.digest != self._digest.value():
            raise ChecksumError("the digest of the whole transfer does not match its COMMIT")
