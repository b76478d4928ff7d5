"""What a receiver says to a sender, from bytes to typed answers."""

from transport.errors import ChecksumError, ProtocolError
from transport.frame import FrameDecoder, FrameType, NeedData
from transport.messages import KVAccept, KVAck, KVFailure, KVReject, decode

Answer = KVAccept | KVReject | KVAck | KVFailure


class AnswerDecoder:
    def __init__(self) -> None:
        self._decoder = FrameDecoder()

    def receive_data(self, data: bytes | memoryview) -> None:
        self._decoder.receive_data(data)

    def next_answer(self) -> tuple[int, Answer] | None:
        """The next whole answer and its transfer id.

        Raises FramingError or ProtocolError for bytes that are no answer; the connection must close.
        """
        try:
            frame = self._decoder.next_frame()
        except ChecksumError as error:
            raise ProtocolError(f"an answer arrived damaged: {error}") from error
        if isinstance(frame, NeedData):
            return None
        if frame.type is FrameType.ACCEPT:
            return frame.transfer_id, decode(frame.payload, KVAccept)
        if frame.type is FrameType.REJECT:
            return frame.transfer_id, decode(frame.payload, KVReject)
        if frame.type is FrameType.ACK:
            return frame.transfer_id, decode(frame.payload, KVAck)
        if frame.type is FrameType.FAIL:
            return frame.transfer_id, decode(frame.payload, KVFailure)
        raise ProtocolError(f"a receiver sent {frame.type.name}; allowed are ACCEPT, REJECT, ACK, FAIL")

    def receive_eof(self) -> None:
        """Raises TruncatedTransfer if an answer had begun."""
        self._decoder.receive_eof()
