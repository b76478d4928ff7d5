"""Counts what an engine's steps did since it started. Written by the engine's thread, read by any."""

from typing import Final

from cluster.events import MIN_PREFILL_TOKENS
from engine.outputs import StepOutput

SMOOTHING: Final = 0.2


class StepMeter:
    """``prefill_tokens_per_s`` is a moving average over steps that computed prompts and nothing else, ``decode_step_s``
    over steps without prompts; 0.0 = none yet."""

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.busy_s = 0.0
        self.last_step_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0

    def add(self, output: StepOutput) -> None:
        self.prefill_tokens += output.num_prefill_tokens
        self.decode_tokens += output.num_batched_tokens - output.num_prefill_tokens
        self.busy_s += output.duration_s
        self.last_step_s = output.duration_s
        if output.num_batched_tokens and not output.num_prefill_tokens:
            before_s = self.decode_step_s or output.duration_s
            self.decode_step_s = before_s + SMOOTHING * (output.duration_s - before_s)
        is_prefill_only = output.num_prefill_tokens == output.num_batched_tokens >= MIN_PREFILL_TOKENS
        if is_prefill_only and output.duration_s > 0:
            rate = output.num_prefill_tokens / output.duration_s
            before = self.prefill_tokens_per_s or rate
            self.prefill_tokens_per_s = before + SMOOTHING * (rate - before)
