"""Both roles of one worker behind one door: what the router asked goes to the side it concerns, and so do the results
of engine steps. Runs in the engine's thread only.
"""

from typing import Final

from cluster.control import AbortRequest, StartDecode, StartLocal, StartPrefill
from cluster.decode_side import DecodeSide
from cluster.prefill_side import PrefillSide
from cluster.worker_outbox import WorkerOutbox
from engine.outputs import PrefillProgress, StepOutput

ALONE_SHARE: Final = 0.9
"""Of a step's prompt tokens: what others add to the time is then less than what it varies by."""


class WorkerSides:
    """See the module's docstring."""

    def __init__(self, prefill: PrefillSide, decode: DecodeSide, outbox: WorkerOutbox) -> None:
        self.prefill = prefill
        self.decode = decode
        self._outbox = outbox

    def start(self, message: StartPrefill | StartDecode | StartLocal) -> None:
        match message:
            case StartPrefill():
                self.prefill.start(message)
            case StartDecode():
                self.decode.start_decode(message)
            case StartLocal():
                self.decode.start_local(message)

    def abort(self, message: AbortRequest) -> None:
        """Drop an attempt wherever it is; nothing happens when it is over already."""
        if not self.prefill.abort(message):
            self.decode.abort(message)

    def abort_all(self, reason: str) -> None:
        prefilling = [job.message for job in self.prefill.jobs.values()]
        decoding = [job.message for job in self.decode.jobs.values()]
        for message in (*prefilling, *decoding):
            self.abort(AbortRequest(request_id=message.request_id, attempt=message.attempt, reason=reason))

    def owner_of(self, key: str) -> tuple[str, str]:
        """Which side frees an attempt's blocks (prefill | decode, "" = none), and the worker at the other end of its
        transfer ("" = none)."""
        prefill = self.prefill.jobs.get(key)
        if prefill is not None:
            return "prefill", prefill.message.decode_worker
        decode = self.decode.jobs.get(key)
        if decode is None:
            return "", ""
        message = decode.message
        return "decode", message.prefill_worker if isinstance(message, StartDecode) else ""

    def stepped(self, output: StepOutput, now: float, decode_step_s: float = 0.0) -> None:
        """An engine step ended at ``now``; one without prompts takes ``decode_step_s``, 0.0 = not known."""
        for progress in output.prefilled:
            side = self.prefill if progress.request_id in self.prefill.jobs else self.decode
            side.progressed(progress, now - output.duration_s, now, _own_s(progress, output, decode_step_s))
        reasons = {finished.request_id: str(finished.reason) for finished in output.finished}
        tokens = []
        for token in output.new_tokens:
            if token.request_id in self.prefill.jobs:
                self.prefill.first_token(token, now)
            else:
                tokens.append(self.decode.token(token, now, reasons.get(token.request_id, "")))
        self._outbox.say_tokens(tokens)


def _own_s(progress: PrefillProgress, output: StepOutput, decode_step_s: float) -> float | None:
    """What of a step one prompt took; None where other prompts were in it."""
    if progress.num_tokens - progress.num_cached < ALONE_SHARE * output.num_prefill_tokens:
        return None
    decodes = output.num_batched_tokens > output.num_prefill_tokens
    return max(0.0, output.duration_s - (decode_step_s if decodes else 0.0))
