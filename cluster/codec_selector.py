"""What one worker knows of its links and codecs, and so which codec its next transfer takes. May be used by any thread.

A link's rate is learnt from probes and from real transfers to the same address; until then it is what was asked of the
link. A shaper may let a first burst through faster, so no more than the asked rate is believed.
"""

import dataclasses
import threading
from collections.abc import Mapping
from typing import Final

from transport.codec_choice import CodecChoice, CodecRate, LinkRate, choose_codec

Address = tuple[str, int]

MIN_TRANSFER_BYTES: Final = 4 * 2**20
"""On the wire: a shaper lets a first burst through at once, and in a smaller transfer that would count."""

PAUSED: Final = 1.1
"""A transfer that lasted so many times longer than it was busy had pauses."""

_NEW_SHARE: Final = 0.3
"""Weight of the newest transfer in a running mean."""


class CodecSelector:
    def __init__(self, *, allow_lossy: bool) -> None:
        self._allow_lossy = allow_lossy
        self._lock = threading.Lock()
        self._asked_bytes_per_s: float | None = None  # None: not known to this process
        self._achieved: dict[Address, float] = {}
        self._rates: dict[str, CodecRate] = {}

    def codecs_measured(self, rates: Mapping[str, CodecRate]) -> None:
        """By name, on this machine. ``raw`` is not among them."""
        with self._lock:
            self._rates = dict(rates)

    def link_set(self, bytes_per_s: float | None) -> None:
        """The links are shaped anew: what was measured before is history."""
        with self._lock:
            self._asked_bytes_per_s = bytes_per_s
            self._achieved.clear()

    def link_measured(self, address: Address, bytes_per_s: float) -> None:
        """A probe's result."""
        with self._lock:
            self._learn(address, bytes_per_s)

    def transferred(
        self, address: Address, codec: str, raw_bytes: int, wire_bytes: int, busy_s: float, duration_s: float
    ) -> None:
        """A transfer was acknowledged: what its link and codec made of it.

        One that paused for rows to be computed was busy for less than ``duration_s``; ``busy_s`` then says too much.
        """
        if wire_bytes < MIN_TRANSFER_BYTES or busy_s <= 0:
            return
        rate = wire_bytes / busy_s
        with self._lock:
            is_lower_bound = duration_s > PAUSED * busy_s
            if codec == "raw" and not (is_lower_bound and rate < self._achieved.get(address, 0.0)):
                self._learn(address, rate)  # with a codec the socket may have waited for the codec
            elif codec in self._rates and raw_bytes:
                known = self._rates[codec]
                ratio = known.ratio + _NEW_SHARE * (wire_bytes / raw_bytes - known.ratio)
                self._rates[codec] = dataclasses.replace(known, ratio=ratio)

    def links(self) -> dict[str, float]:
        """Bytes/s of every path that was measured, by "host:port"; no more than was asked of it."""
        with self._lock:
            asked = self._asked_bytes_per_s
            return {
                f"{host}:{port}": achieved if asked is None else min(asked, achieved)
                for (host, port), achieved in self._achieved.items()
            }

    def rates(self) -> dict[str, CodecRate]:
        """Of every codec that was measured, by name."""
        with self._lock:
            return dict(self._rates)

    def choose(self, asked: str, address: Address, raw_bytes: int) -> CodecChoice:
        """For a transfer of ``raw_bytes`` stored bytes to ``address``; see ``choose_codec``."""
        with self._lock:
            link = self._link(address)
            return choose_codec(asked, raw_bytes, link, self._rates, allow_lossy=self._allow_lossy)

    def link_bytes_per_s(self, address: Address) -> float | None:
        """Of the path to ``address``, as far as it is known."""
        with self._lock:
            link = self._link(address)
            return None if link is None else link.bytes_per_s

    def _learn(self, address: Address, bytes_per_s: float) -> None:
        before = self._achieved.get(address, bytes_per_s)
        self._achieved[address] = before + _NEW_SHARE * (bytes_per_s - before)

    def _link(self, address: Address) -> LinkRate | None:
        asked, achieved = self._asked_bytes_per_s, self._achieved.get(address)
        if achieved is None:
            return None if asked is None else LinkRate(asked, "asked")
        return LinkRate(achieved if asked is None else min(asked, achieved), "measured")
