"""The requests that a cluster answers so that a forecast learns its overheads. Pure, and always the same ones."""

import math
import random
from typing import Final

from cluster.sim_cost import StepCosts
from cluster.trace import ScaledTrace, TraceRequest

NUM_REQUESTS: Final = 90
SHORTEST_PROMPT: Final = 32
MOST_PREFILL_S: Final = 0.5
"""No prompt takes longer: on a slow engine the calibration would."""

_LOAD: Final = 1.0
"""Seconds of prompts that arrive in a second: one worker is busy nearly all the time, and so are both cores of two. A
core that often idles computes slower (caches, clocks), which would be taken for the speed that decides how long queues get."""

_OUTPUT_TOKENS: Final = (8, 48)


def calibration_trace(costs: StepCosts, max_model_len: int, seed: int = 0) -> ScaledTrace:
    """Prompts of any length up to half of the context, arriving at random, at a load that ``costs`` can serve."""
    rng = random.Random(f"calibration {seed}")
    longest = max(SHORTEST_PROMPT + 1, max_model_len // 2)
    while longest > SHORTEST_PROMPT + 1 and costs.prefill_s(longest) > MOST_PREFILL_S:
        longest = max(SHORTEST_PROMPT + 1, longest * 3 // 4)
    lengths = [
        round(math.exp(rng.uniform(math.log(SHORTEST_PROMPT), math.log(longest))))
        for _ in range(NUM_REQUESTS)
    ]
    interval_s = sum(map(costs.prefill_s, lengths)) / NUM_REQUESTS / _LOAD
    at_s, requests = 0.0, []
    for prompt_tokens in lengths:
        output_tokens = min(rng.randint(*_OUTPUT_TOKENS), max_model_len - prompt_tokens)
        requests.append(TraceRequest(at_s, prompt_tokens, output_tokens))
        at_s += rng.expovariate(1 / interval_s)
    return ScaledTrace(
        tuple(requests),
        NUM_REQUESTS,
        0,
        0,
        f"{NUM_REQUESTS} prompts of {SHORTEST_PROMPT} to {longest} tokens",
    )
