"""A worker's ends of the KV wire: one receiver, one sender per decode worker, and the way from their threads to the
engine's. Decides nothing; see ``prefill_side`` and ``decode_side``.
"""

from collections.abc import Callable, Sequence
from typing import Final

from cluster.attempt import attempt_key
from cluster.codec_selector import CodecSelector
from cluster.control import InjectLinkFault, LinkMeasured, ProbeLink, SetLink, WorkerSpec
from cluster.decode_side import DecodeSide
from cluster.engine_thread import EngineThread
from cluster.fault_kinds import ARMED_S
from cluster.prefill_side import PrefillSide
from transport.codec import Codec, RawCodec
from transport.codec_rates import measure_codec
from transport.errors import AuthError, TransportError
from transport.events import ReceiveStats, TransferEvent
from transport.faults import CorruptNextFrame, Cut, LinkFault, Stall
from transport.int8_codec import Int8Codec
from transport.kv_transfer import TransferLimits
from transport.link import LinkShape
from transport.lossless_codec import LosslessCodec
from transport.messages import FailReason, KVCommit, KVContract, KVHeader
from transport.probe import probe
from transport.receiver import KVReceiver
from transport.receiver_peer import OpenReply
from transport.sender import KVSender


class WorkerKV:
    """Listens from construction on (in the process's network namespace); ``address`` is where."""

    def __init__(
        self,
        spec: WorkerSpec,
        contract: KVContract,
        thread: EngineThread,
        on_refused: Callable[[str, AuthError], None],
    ) -> None:
        self._secret = bytes.fromhex(spec.secret)
        self._thread = thread
        self._limits = TransferLimits(
            accept_timeout_s=spec.profile.kv.accept_timeout_s, stall_timeout_s=spec.profile.kv.stall_timeout_s
        )
        self._contract = contract
        self._codecs: tuple[Codec, ...] = (RawCodec(), Int8Codec(), LosslessCodec())
        self.codec_selector: Final = CodecSelector(allow_lossy=spec.profile.kv.allow_lossy)
        self._shape = LinkShape()
        self._senders: dict[tuple[str, int], KVSender] = {}
        self._shares_core = bool(spec.cpus) and spec.profile.model.device == "cpu"
        self._faults: list[
            tuple[LinkFault, float, bool]
        ] = []  # (what, until, does it last), for senders to come
        self._prefill: PrefillSide | None = None
        self._decode: DecodeSide | None = None
        self._receiver = KVReceiver(
            self,
            contract,
            self._secret,
            host=spec.kv_host,
            codecs=self._codecs,
            limits=self._limits,
            shape=self._shape,
            on_refused=on_refused,
        )
        self.address: Final = self._receiver.address

    def connect(self, prefill: PrefillSide, decode: DecodeSide) -> None:
        """Before the engine's thread starts."""
        self._prefill, self._decode = prefill, decode
        decode.receiver = self._receiver

    def measure_codecs(self) -> None:
        """Find out what each codec does on this machine. Some ten milliseconds, seconds where they must be compiled."""
        dtype, head_dim = self._contract.dtype, self._contract.head_dim
        self.codec_selector.codecs_measured(
            {
                codec.name: measure_codec(codec, dtype, head_dim)
                for codec in self._codecs
                if not codec.is_identity
            }
        )

    # --- sending ----------------------------------------------------------------------------------------------

    def sender_to(self, host: str, port: int) -> KVSender:
        """The persistent connection to a decode worker. A restarted one has another port and gets its own."""
        sender = self._senders.get((host, port))
        if sender is None:
            sender = KVSender(
                (host, port),
                self._secret,
                self._transfer_event,
                codecs=self._codecs,
                limits=self._limits,
                shape=self._shape,
                is_computing=self._is_computing,
            )
            self._senders[host, port] = sender
            for fault, until, lasts in self._faults:
                sender.inject(fault, until, every_frame=lasts)
            self._faults = [armed for armed in self._faults if armed[2]]
        return sender

    def _is_computing(self) -> bool:
        """An engine's step needs the core that the senders' threads run on."""
        return self._shares_core and self._thread.is_stepping

    def _transfer_event(self, event: TransferEvent) -> None:
        prefill = self._prefill
        if prefill is not None:
            key = attempt_key(event.request_id, event.attempt)
            self._thread.post(lambda: prefill.transfer_event(event, key))

    # --- receiving: KVHandler ---------------------------------------------------------------------------------

    def on_open(self, header: KVHeader, reply: OpenReply) -> None:
        decode = self._decode
        if decode is not None:
            self._thread.post(lambda: decode.opened(header, reply))

    def on_complete(self, header: KVHeader, commit: KVCommit, stats: ReceiveStats) -> bool:
        decode = self._decode
        if decode is None:
            return False
        # waits for the engine's current step, so the ACK says what is true: the sequence was admitted
        return self._thread.ask(lambda: decode.completed(header, commit, stats.verified_at)).result()

    def on_failed(self, header: KVHeader, reason: FailReason, error: TransportError) -> None:
        decode = self._decode
        if decode is not None:
            self._thread.post(lambda: decode.failed(header, str(reason), str(error)))

    # --- the link ---------------------------------------------------------------------------------------------

    def set_link(self, message: SetLink) -> None:
        """Both directions: data from the senders, answers from the receiver."""
        self._shape = LinkShape(
            bandwidth_bytes_per_s=message.bits_per_s / 8 if message.bits_per_s > 0 else None,
            delay_s=message.delay_ms / 1e3,
            jitter_s=message.jitter_ms / 1e3,
        )
        self.codec_selector.link_set(self._shape.bandwidth_bytes_per_s)
        self._receiver.set_link(self._shape)
        for sender in list(self._senders.values()):
            sender.set_link(self._shape)

    def heal(self) -> None:
        """No fault is on any more, and none waits for a frame."""
        self._faults.clear()
        for sender in list(self._senders.values()):
            sender.heal()

    def inject(self, message: InjectLinkFault, now: float) -> None:
        """Break what this worker sends: once, or for a time on every connection there is and comes."""
        fault: LinkFault
        match message.kind:
            case "corrupt":
                fault = CorruptNextFrame()
            case "cut":
                fault = Cut()
            case "stall":
                fault = Stall(message.seconds)
            case _:
                raise ValueError(f"{message.kind!r} is not a link fault")
        lasts = message.seconds > 0 and message.kind != "stall"
        until = now + (message.seconds if lasts else ARMED_S)
        self._faults = [armed for armed in self._faults if now < armed[1]]
        if lasts or not self._senders:
            self._faults.append((fault, until, lasts))
        for sender in list(self._senders.values()):
            sender.inject(fault, until, every_frame=lasts)

    def probe(self, message: ProbeLink) -> LinkMeasured:
        """Measure the path to another worker's receiver. Blocks."""
        try:
            result = probe((message.kv_host, message.kv_port), self._secret, self._shape, message.num_bytes)
        except TransportError as error:
            return LinkMeasured(to_worker=message.to_worker, error=str(error))
        self.codec_selector.link_measured((message.kv_host, message.kv_port), result.achieved_bytes_per_s)
        return LinkMeasured(
            to_worker=message.to_worker,
            achieved_bits_per_s=result.achieved_bytes_per_s * 8,
            rtt_ms=result.rtt_s * 1e3,
        )

    @property
    def num_late_frames(self) -> int:
        senders: Sequence[KVSender] = list(self._senders.values())
        return self._receiver.counts().late_frames + sum(sender.num_late_frames for sender in senders)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._receiver.close()
