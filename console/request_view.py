"""One request as the log tells it: attempts with their picks, prefill, transfer, tokens, end. Pure data."""

import itertools
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from cluster.events import FirstToken, TransferCompleted
from console.series import percentile
from console.text_format import short_worker

STORY_LINES: Final = 40
MAX_GAPS: Final = 4096
KEPT_COLUMNS: Final = 120
"""Of an ended request's gaps: the largest of each of so many equal parts."""
MAX_TEXT: Final = 8000

QUEUED: Final = "queued"
PREFILL: Final = "prefill"
TRANSFER: Final = "transfer"
DECODE: Final = "decode"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
REJECTED: Final = "rejected"

TTFT_PARTS: Final = (
    ("queue", "queue_ms"),
    ("prefill", "prefill_ms"),
    ("transfer exposed", "transfer_exposed_ms"),
    ("admit wait", "admit_wait_ms"),
    ("first decode", "first_decode_ms"),
    ("router", "router_ms"),
)
"""Label and field of FirstToken, in the order they happen."""


@dataclass(slots=True)
class AttemptView:
    """One dispatch. Times are seconds of the log's clock, None = not seen."""

    number: int
    at: float | None = None
    mode: str = ""
    codec: str = ""
    decode_worker: str = ""
    decode_reason: str = ""
    prefill_worker: str = ""
    prefill_reason: str = ""
    prefill_started_at: float | None = None
    computed_tokens: int = 0
    prefill_finished_at: float | None = None
    compute_s: float | None = None
    cached_tokens: int = 0
    transfer_started_at: float | None = None
    transfer_raw_bytes: int = 0
    sent_bytes: int = 0  # of transfer_raw_bytes, while it is under way
    skipped: str = ""  # what of the prompt the decode worker held, as ``format_skipped`` says it
    transfer: TransferCompleted | None = None
    admitted_at: float | None = None
    failure: str = ""

    @property
    def transferring(self) -> bool:
        """KV is on its way: the first frame left, neither acknowledged nor failed."""
        return self.transfer_started_at is not None and self.transfer is None and not self.failure

    @property
    def path(self) -> str:
        """ "P0>D0", or "D0" where the decode worker prefills itself."""
        decode = short_worker(self.decode_worker)
        return f"{short_worker(self.prefill_worker)}>{decode}" if self.prefill_worker else decode


@dataclass(slots=True)
class RequestView:
    """One request from its arrival on; what of it was seen so far."""

    request_id: str
    arrived_at: float
    prompt_tokens: int = 0
    max_tokens: int = 0
    label: str = ""
    client_id: str = ""
    load: str = ""  # that ran when it arrived; "" for requests that are not of its steady streams
    attempts: dict[int, AttemptView] = field(default_factory=dict)
    first_token: FirstToken | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    out_tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    text: str = ""  # of the answer, where the log has it
    prompt_text: str = ""
    end: str = ""  # "" while alive, else done | failed | cancelled | rejected
    ended_at: float | None = None
    end_detail: str = ""
    e2el_ms: float | None = None
    tpot_ms: float | None = None
    fallback: str = ""  # reason of the last one
    retries: int = 0
    migrations: int = 0
    story: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=STORY_LINES))
    _itl: tuple[int, float, float] | None = None
    _kept_gaps_ms: "array[float]" = field(default_factory=lambda: array("d"))
    _latest: AttemptView | None = None

    @property
    def live(self) -> bool:
        return not self.end

    def attempt(self, number: int) -> AttemptView:
        """The attempt of that number, made when its first event comes before its dispatch."""
        found = self.attempts.get(number)
        if found is None:
            found = self.attempts[number] = AttemptView(number)
            if self._latest is None or number > self._latest.number:
                self._latest = found
        return found

    @property
    def latest(self) -> AttemptView | None:
        return self._latest

    @property
    def phase(self) -> str:
        """Derived from what was seen, so that the order in which two processes' events arrive does not matter."""
        if self.end:
            return self.end
        attempt = self.latest
        if attempt is None:
            return DECODE if self.first_token is not None else QUEUED
        if attempt.admitted_at is not None:
            return DECODE
        if attempt.prefill_finished_at is not None:
            return TRANSFER if attempt.prefill_worker else DECODE
        if attempt.prefill_started_at is not None:
            return PREFILL
        return DECODE if self.first_token is not None and len(self.attempts) == 1 else QUEUED

    @property
    def wait_ms(self) -> float | None:
        """Arrival to the first chunk of the attempt that counts; None while it waits."""
        attempt = self.latest
        if attempt is None or attempt.prefill_started_at is None:
            return None
        return max(attempt.prefill_started_at - self.arrived_at, 0.0) * 1000

    @property
    def prefill_ms(self) -> float | None:
        attempt = self.latest
        return None if attempt is None or attempt.compute_s is None else attempt.compute_s * 1000

    @property
    def exposed_ms(self) -> float | None:
        """Of its TTFT, once the first token is there; until then the transfer's own, which is measured otherwise."""
        if self.first_token is not None:
            return self.first_token.transfer_exposed_ms if self.transfer is not None else None
        return self.transfer.exposed_s * 1000 if self.transfer is not None else None

    @property
    def transfer(self) -> TransferCompleted | None:
        """The completed transfer of the newest attempt that has one."""
        for number in sorted(self.attempts, reverse=True):
            if self.attempts[number].transfer is not None:
                return self.attempts[number].transfer
        return None

    @property
    def mode(self) -> str:
        """disagg | colocated, as its newest attempt was sent; "" before the first."""
        return self._latest.mode if self._latest is not None else ""

    @property
    def codec(self) -> str:
        attempt = self.latest
        return attempt.codec if attempt is not None and attempt.prefill_worker else ""

    @property
    def path(self) -> str:
        return self.latest.path if self.latest is not None else ""

    @property
    def outcome(self) -> str:
        """What became of it, the exceptional first: one word with its count."""
        words = []
        if self.end == FAILED:
            words.append("FAILED")
        if self.end == CANCELLED:
            words.append("client gone")
        if self.end == REJECTED:
            words.append("rejected")
        if self.fallback:
            words.append("FALLBACK")
        if self.migrations:
            words.append(f"MIGRATED {self.migrations}")
        if self.retries:
            words.append(f"RETRY {self.retries}")
        return " ".join(words) if words else "ok" if self.end == DONE else ""

    def add_tokens(self, first_position: int, token_at: tuple[float, ...]) -> list[tuple[float, float]]:
        """Count tokens; returns (at, gap in ms) of each consecutive pair, across batches too."""
        if not token_at:
            return []
        times = token_at if self.last_token_at is None else (self.last_token_at, *token_at)
        gaps = [
            (at, (at - before) * 1000 if at > before else 0.0) for before, at in itertools.pairwise(times)
        ]
        self.last_token_at = token_at[-1]
        self.out_tokens = max(self.out_tokens, first_position + len(token_at))
        if not self.end and len(self.gaps_ms) < MAX_GAPS:
            self.gaps_ms += [gap for _, gap in gaps]
        return gaps

    def itl_ms(self) -> tuple[float | None, float | None]:
        """p50 and p99 of the gaps between this request's tokens."""
        if self._itl is None or self._itl[0] != len(self.gaps_ms):
            if not self.gaps_ms:
                return (None, None) if self._itl is None else (self._itl[1], self._itl[2])
            ordered = sorted(self.gaps_ms)
            self._itl = (len(ordered), percentile(ordered, 0.5), percentile(ordered, 0.99))
        return self._itl[1], self._itl[2]

    def gap_columns(self, count: int) -> list[float]:
        """The gaps between its tokens in at most ``count`` columns, the largest of each in ms."""
        gaps = self.gaps_ms or list(self._kept_gaps_ms)
        if len(gaps) <= count:
            return gaps
        edges = [len(gaps) * place // count for place in range(count + 1)]
        return [max(gaps[low:high]) for low, high in itertools.pairwise(edges)]

    def close(self, at: float, end: str, detail: str = "") -> None:
        """The end; per-token gaps are folded into their two percentiles and dropped."""
        self.end, self.ended_at, self.end_detail = end, at, detail
        p50, p99 = self.itl_ms()
        self._kept_gaps_ms = array("d", self.gap_columns(KEPT_COLUMNS))
        self.gaps_ms = []
        if p50 is not None and p99 is not None:
            self._itl = (0, p50, p99)

    def tell(self, at: float, text: str) -> None:
        """One line of the request's own history."""
        self.story.append((at, text))
