"""Both roles of one worker behind one door: what the router asked goes to the side it concerns, and so do the results
of engine steps. Runs in the engine's thread only.
"""

from cluster.control import AbortRequest, StartDecode, StartLocal, StartPrefill
from cluster.decode_side import DecodeSide
from cluster.prefill_side import PrefillSide
from cluster.worker_outbox import WorkerOutbox
from engine.outputs import StepOutput


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

    def stepped(self, output: StepOutput, now: float) -> None:
        """An engine step ended at ``now``."""
        for progress in output.prefilled:
            side = self.prefill if progress.request_id in self.prefill.jobs else self.decode
            side.progressed(progress, now - output.duration_s, now)
        reasons = {finished.request_id: str(finished.reason) for finished in output.finished}
        tokens = []
        for token in output.new_tokens:
            if token.request_id in self.prefill.jobs:
                self.prefill.first_token(token, now)
            else:
                tokens.append(self.decode.token(token, now, reasons.get(token.request_id, "")))
        self._outbox.say_tokens(tokens)
