"""The requests that a cluster answers so that a forecast learns its overheads. Pure.

Of a trace's own lengths, since what a token costs router and clients is taken from the cores that compute prompts; but
drawn anew, and arriving at times of their own.
"""

import random
from collections.abc import Sequence
from typing import Final

from cluster.sim_calibration import MIN_REQUESTS
from cluster.sim_cost import StepCosts
from cluster.trace import ScaledTrace, TraceRequest

MOST_REQUESTS: Final = 90
MOST_PREFILL_S: Final = 20.0
"""Of all prompts together: on a slow engine there are fewer, down to what can be learned from."""

_LOAD: Final = 1.0
"""Seconds of prompts that arrive in a second: one worker is busy nearly all the time. A core that often idles computes
slower (caches, clocks), and how long queues get is decided by one that does not."""


def calibration_trace(trace: Sequence[TraceRequest], costs: StepCosts, seed: int = 0) -> ScaledTrace:
    """``trace`` is not empty. No prompt shares tokens with another one."""
    rng = random.Random(f"calibration {seed}")
    mean_s = sum(costs.prefill_s(each.prompt_tokens) for each in trace) / len(trace)
    count = max(MIN_REQUESTS, min(MOST_REQUESTS, int(MOST_PREFILL_S / mean_s)))
    drawn = [trace[rng.randrange(len(trace))] for _ in range(count)]
    interval_s = sum(costs.prefill_s(each.prompt_tokens) for each in drawn) / count / _LOAD
    at_s, requests = 0.0, []
    for each in drawn:
        requests.append(TraceRequest(at_s, each.prompt_tokens, each.output_tokens))
        at_s += rng.expovariate(1 / interval_s)
    return ScaledTrace(tuple(requests), count, 0, 0, f"{count} requests of the trace's lengths")
