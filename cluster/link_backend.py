"""Which way the worker-to-worker paths are shaped on this host, and what it cannot do.

- ``netns``: namespaces and ``tc`` (root). Delay and loss by netem where the kernel has it.
- ``pacing``: ``SO_MAX_PACING_RATE`` on the KV sockets; needs no privilege.
- ``none``: bare loopback.

``auto`` takes the first that works. Delay that no queue of the kernel adds is added by the transport, which the
workers are told by ``SetLink``. What is asked and cannot be had is said in words, never passed over.
"""

import socket
import statistics
from typing import Final

from cluster.control import SetLink
from cluster.events import LinkConfigured
from cluster.netns import Fabric, LinkShape, NetnsError
from cluster.profile import Profile
from cluster.start_refused import StartRefused
from cluster.units import format_bits_per_s

REACHED_SHARE: Final = 0.9
"""A path that measures below this share of the asked rate, or of the asked delay, is reported as not reaching it."""

_SO_MAX_PACING_RATE: Final = 47


class LinkBackend:
    """The resolved backend of a run and the shape it carries now. ``warning`` says what ``auto`` had to give up."""

    def __init__(
        self,
        name: str,
        shape: LinkShape,
        fabric: Fabric | None = None,
        warning: str = "",
        num_pairs: int = 1,
    ) -> None:
        self.name = name
        self.shape = shape
        self.warning = warning
        self._fabric = fabric
        self._num_pairs = num_pairs  # of a prefill and a decode worker
        self._reached: dict[tuple[str, str], float] = {}  # (from, to) -> bits/s
        self._rtt_ms: dict[tuple[str, str], float] = {}
        self._kv_ways: set[tuple[str, str]] = set()

    def namespace_fd(self, slot: int) -> int:
        """Descriptor of the namespace of a worker, -1 = none."""
        return self._fabric.namespace_fd(slot) if self._fabric is not None else -1

    def host(self, slot: int) -> str:
        """Address a worker's KV socket listens on."""
        return self._fabric.address(slot) if self._fabric is not None else "127.0.0.1"

    def make_place(self, slot: int) -> None:
        """For one more worker, in a slot that was used before or in the next one. Blocks about 30 ms.

        Raises NetnsError.
        """
        if self._fabric is not None and slot >= self._fabric.num_workers:
            self._fabric.add_worker(self.shape)

    def worker_link(self) -> SetLink:
        """What the workers themselves have to do for this shape."""
        if self.name == "none":
            return SetLink(bits_per_s=0.0)
        if self._fabric is not None and self._fabric.has_netem:
            return SetLink(bits_per_s=0.0)
        rate = 0.0 if self._fabric is not None else self.shape.bits_per_s
        return SetLink(bits_per_s=rate, delay_ms=self.shape.delay_ms, jitter_ms=self.shape.jitter_ms)

    def change(self, shape: LinkShape) -> None:
        """Reshape every path, also while it is in use; the workers need a new ``worker_link``. Blocks about 30 ms.

        Raises NetnsError when ``tc`` refuses, ValueError when this backend cannot shape at all.
        """
        if self.name == "none":
            raise ValueError("link backend none does not shape; allowed: netns or pacing, chosen at start-up")
        if self._fabric is not None:
            self._fabric.shape(shape)
        self.shape = shape
        self._reached.clear()
        self._rtt_ms.clear()

    def measured(self, way: tuple[str, str], bits_per_s: float, rtt_ms: float, *, carries_kv: bool) -> bool:
        """Take a probe's result; True when it changes what ``limit`` says. ``way``: from worker, to worker;
        ``carries_kv``: from prefill to decode."""
        before = self.limit
        self._reached[way], self._rtt_ms[way] = bits_per_s, rtt_ms
        if carries_kv:
            self._kv_ways.add(way)
            self._num_pairs = max(self._num_pairs, len(self._kv_ways))
        return self.limit != before

    @property
    def achieved_bits_per_s(self) -> float:
        """Median over worker pairs of what was measured of this shape, the way KV goes; 0 = nothing yet."""
        rates = [rate for way, rate in self._reached.items() if way in self._kv_ways]
        return statistics.median(rates) if rates else 0.0

    @property
    def limit(self) -> str:
        """What of the asked shape this host does not give; "" = nothing known to be missing."""
        asked = self.shape
        found = [self.warning] if self.warning else []
        if self.name == "none" and (asked.bits_per_s > 0 or asked.needs_netem):
            found.append(f"asked {_in_words(asked)}; backend none leaves loopback unshaped")
        if self.name == "pacing" and asked.bits_per_s > 0 and self._num_pairs > 1:
            found.append(
                "each connection is paced by itself: transfers between different workers do not share a cable"
            )
        if asked.loss > 0 and not (self._fabric is not None and self._fabric.has_netem):
            found.append(
                f"loss of {asked.loss:.2%} is not emulated: that needs backend netns and a kernel with netem"
            )
        slow = {pair: rate for pair, rate in self._reached.items() if rate < REACHED_SHARE * asked.bits_per_s}
        if slow and self.name != "none":
            pair = min(slow, key=lambda pair: slow[pair])
            found.append(
                f"asked {format_bits_per_s(asked.bits_per_s)}; this host reached "
                f"{format_bits_per_s(slow[pair])} ({pair[0]} to {pair[1]})"
            )
        least_ms = 2 * (asked.delay_ms - asked.jitter_ms) * REACHED_SHARE
        quick = {pair: rtt_ms for pair, rtt_ms in self._rtt_ms.items() if rtt_ms < least_ms}
        if quick and self.name != "none":
            pair = min(quick, key=lambda pair: quick[pair])
            found.append(
                f"asked {asked.delay_ms:g} ms one way; the round trip is {quick[pair]:.2g} ms "
                f"({pair[0]} to {pair[1]})"
            )
        return "; ".join(found)

    def describe(self, at: float) -> LinkConfigured:
        return LinkConfigured(
            at=at,
            backend=self.name,
            asked_bits_per_s=self.shape.bits_per_s,
            asked_delay_ms=self.shape.delay_ms,
            asked_jitter_ms=self.shape.jitter_ms,
            asked_loss=self.shape.loss,
            limit=self.limit,
        )

    def close(self) -> None:
        if self._fabric is not None:
            self._fabric.close()


def resolve_link(profile: Profile) -> LinkBackend:
    """Set up the backend the profile names, or the best that works for ``auto``.

    Raises StartRefused when a backend named outright cannot work here.
    """
    asked = profile.link.backend
    shape = LinkShape(
        bits_per_s=profile.link_bits_per_s,
        delay_ms=profile.link.delay_ms,
        jitter_ms=profile.link.jitter_ms,
        loss=profile.link.loss,
    )
    num_prefill, num_decode = profile.cluster.prefill, profile.cluster.decode
    if asked == "none":
        return LinkBackend("none", shape)
    reasons = []
    if asked in ("auto", "netns"):
        try:
            fabric = _shaped_fabric(num_prefill + num_decode, shape)
        except NetnsError as error:
            if asked == "netns":
                raise StartRefused(f"link backend netns cannot work here: {error}") from error
            reasons.append(f"netns: {error}")
        else:
            return LinkBackend("netns", shape, fabric)
    reason = pacing_problem()
    if not reason:
        return LinkBackend("pacing", shape, num_pairs=num_prefill * num_decode)
    if asked == "pacing":
        raise StartRefused(f"link backend pacing cannot work here: {reason}")
    reasons.append(f"pacing: {reason}")
    return LinkBackend("none", shape, warning=f"no way to shape links here ({'; '.join(reasons)})")


def pacing_problem() -> str:
    """Why sockets cannot be paced on this host; "" = they can."""
    asked = 125_000_000
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, asked)
            taken = sock.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE)
        except OSError as error:
            return f"SO_MAX_PACING_RATE: {error.strerror}"
    return "" if taken == asked else "the kernel ignores SO_MAX_PACING_RATE"


def _shaped_fabric(num_workers: int, shape: LinkShape) -> Fabric:
    fabric = Fabric.create(num_workers)
    try:
        fabric.shape(shape)
    except NetnsError:
        fabric.close()
        raise
    return fabric


def _in_words(shape: LinkShape) -> str:
    delay = f" with {shape.delay_ms:g} ms delay" if shape.delay_ms > 0 else ""
    return f"{format_bits_per_s(shape.bits_per_s)}{delay}"
