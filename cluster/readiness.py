"""When a cluster is ready: a real token went through a prefill x decode pair. Pure: worker views in, answers out.

A draining worker makes no pair.
A pair is known by its workers' control ports too, so a restarted worker has to prove itself again.
"""

from collections.abc import Mapping

from cluster.selection import WorkerView

Pair = tuple[str, str]
"""Prefill worker ("" = the decode worker prefills), decode worker."""

Ports = tuple[int, int]


def ports_of(pair: Pair, workers: Mapping[str, WorkerView]) -> Ports | None:
    """The control ports of a pair's workers; None unless both may be used now, each in its role."""
    prefill, decode = (workers.get(worker_id) for worker_id in pair)
    if decode is None or not decode.is_available or not decode.is_decode():
        return None
    if not pair[0]:
        return decode.address.control_port, decode.address.control_port
    if prefill is None or not prefill.is_available or not prefill.is_prefill():
        return None
    return prefill.address.control_port, decode.address.control_port


class Readiness:
    """``has_prefill``: the cluster is meant to have prefill workers, so a decode worker alone is not a pair yet.

    ``has_served``: some pair of this run was ready once, here or at an earlier router. Requests may wait then.
    """

    def __init__(self, *, has_prefill: bool, fallback: bool, has_served: bool = False) -> None:
        self.has_prefill = has_prefill
        self.has_served = has_served
        self._fallback = fallback
        self._proven: dict[Pair, Ports] = {}
        self._probing: set[Pair] = set()

    def start_probes(self, workers: Mapping[str, WorkerView]) -> list[Pair]:
        """Pairs of connected workers that are neither proven nor being probed; they are, from now on."""
        available = [view for view in workers.values() if view.is_available]
        prefills = [view.worker_id for view in available if view.is_prefill()]
        started: list[Pair] = []
        for decode in (view.worker_id for view in available if view.is_decode()):
            others = [worker_id for worker_id in prefills if worker_id != decode]
            pairs: list[Pair] = [(prefill, decode) for prefill in others]
            if not others and not self.has_prefill:
                pairs = [("", decode)]
            for pair in pairs:
                if pair not in self._probing and self._proven.get(pair) != ports_of(pair, workers):
                    self._probing.add(pair)
                    started.append(pair)
        return started

    def prove(self, pair: Pair, ports: Ports) -> None:
        """A token came through this pair."""
        self._proven[pair] = ports
        self.has_served = True

    def end_probe(self, pair: Pair) -> None:
        self._probing.discard(pair)

    def state(self, workers: Mapping[str, WorkerView], mode: str) -> str:
        """What can be served now.

        ``ready``: both workers of a proven pair are connected. ``degraded``: only the decode worker of one is, and it
        may prefill by itself. Empty: nothing.
        """
        if any(ports_of(pair, workers) == ports for pair, ports in self._proven.items()):
            return "ready"
        may_prefill = self._fallback or mode == "colocated"
        decodes = {(pair[1], ports[1]) for pair, ports in self._proven.items()}
        if may_prefill and any(ports_of(("", decode), workers) == (port, port) for decode, port in decodes):
            return "degraded"
        return ""
