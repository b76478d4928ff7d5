from collections.abc import Callable

import msgspec
import pytest

from tests.transport.wire import ACCEPT, PREFILL, make_contract, make_header
from transport.errors import ChecksumError, InvalidTransition, ProtocolError, StartTokenError, TransferTimeout
from transport.frame import DataSlice
from transport.kv_transfer import (
    RECEIVER_TRANSITIONS,
    SENDER_TRANSITIONS,
    ReceiverState,
    ReceiverTransfer,
    SenderState,
    SenderTransfer,
    TransferLimits,
)
from transport.messages import KVAccept, KVCommit

LIMITS = TransferLimits(accept_timeout_s=1, stall_timeout_s=2, ack_timeout_s=3, idle_timeout_s=4)
HEADER = make_header(make_contract(num_layers=1), num_tokens=6)
KEYS, VALUES = DataSlice(0, 0, 0, 6), DataSlice(0, 1, 0, 6)
BYTES = 6 * HEADER.token_bytes


def make_sender() -> SenderTransfer:
    return SenderTransfer(7, HEADER, LIMITS)


def make_receiver() -> ReceiverTransfer:
    return ReceiverTransfer(7, HEADER, LIMITS)


def right_commit() -> KVCommit:
    sender = sender_in(SenderState.SENDING)
    return sender.commit_sent(PREFILL, 5.0)


SENDER_EVENTS: dict[str, Callable[[SenderTransfer], object]] = {
    "open_sent": lambda t: t.open_sent(1.0),
    "accepted": lambda t: t.accepted(ACCEPT, 2.0),
    "data_sent": lambda t: t.data_sent(KEYS, BYTES, 1, 3.0),
    "commit_sent": lambda t: t.commit_sent(PREFILL, 5.0),
    "acked": lambda t: t.acked(6.0),
    "failed": lambda t: t.failed(7.0),
}
RECEIVER_EVENTS: dict[str, Callable[[ReceiverTransfer], object]] = {
    "opened": lambda t: t.opened(1.0),
    "reserved": lambda t: t.reserved(ACCEPT, 2.0),
    "data_received": lambda t: t.data_received(KEYS, BYTES, 1, 3.0),
    "committed": lambda t: t.committed(right_commit(), 5.0),
    "completed": lambda t: t.completed(6.0),
    "failed": lambda t: t.failed(7.0),
}


def sender_in(state: SenderState) -> SenderTransfer:
    transfer = make_sender()
    path: list[Callable[[SenderTransfer], object]] = [
        SENDER_EVENTS["open_sent"],
        SENDER_EVENTS["accepted"],
        lambda t: (t.data_sent(KEYS, BYTES, 1, 3.0), t.data_sent(VALUES, BYTES, 2, 4.0)),
        SENDER_EVENTS["commit_sent"],
        SENDER_EVENTS["acked"],
    ]
    order = list(SenderState)
    for step in path[: order.index(state)] if state is not SenderState.FAILED else [SENDER_EVENTS["failed"]]:
        step(transfer)
    assert transfer.state is state
    return transfer


def receiver_in(state: ReceiverState) -> ReceiverTransfer:
    transfer = make_receiver()
    path: list[Callable[[ReceiverTransfer], object]] = [
        RECEIVER_EVENTS["opened"],
        RECEIVER_EVENTS["reserved"],
        lambda t: (t.data_received(KEYS, BYTES, 1, 3.0), t.data_received(VALUES, BYTES, 2, 4.0)),
        RECEIVER_EVENTS["committed"],
        RECEIVER_EVENTS["completed"],
    ]
    order = list(ReceiverState)
    for step in (
        path[: order.index(state)] if state is not ReceiverState.FAILED else [RECEIVER_EVENTS["failed"]]
    ):
        step(transfer)
    assert transfer.state is state
    return transfer


@pytest.mark.parametrize("event", SENDER_EVENTS)
@pytest.mark.parametrize("state", SenderState)
def test_sender_allows_what_the_table_allows_and_nothing_else(state: SenderState, event: str) -> None:
    transfer = sender_in(state)
    expected = SENDER_TRANSITIONS.get((state, event))
    if event == "data_sent" and state is SenderState.SENDING:
        transfer = make_sender()
        transfer.open_sent(1.0)
        transfer.accepted(ACCEPT, 2.0)
        transfer.data_sent(VALUES, BYTES, 2, 3.0)
    if expected is None:
        with pytest.raises(ProtocolError):
            SENDER_EVENTS[event](transfer)
        assert transfer.state is state
    else:
        SENDER_EVENTS[event](transfer)
        assert transfer.state == expected


@pytest.mark.parametrize("event", RECEIVER_EVENTS)
@pytest.mark.parametrize("state", ReceiverState)
def test_receiver_allows_what_the_table_allows_and_nothing_else(state: ReceiverState, event: str) -> None:
    transfer = receiver_in(state)
    expected = RECEIVER_TRANSITIONS.get((state, event))
    if event == "data_received" and state is ReceiverState.RECEIVING:
        transfer = receiver_in(ReceiverState.RESERVED)
        transfer.data_received(VALUES, BYTES, 2, 3.0)
    if expected is None:
        with pytest.raises(ProtocolError):
            RECEIVER_EVENTS[event](transfer)
        assert transfer.state is state
    else:
        RECEIVER_EVENTS[event](transfer)
        assert transfer.state == expected


def test_only_the_whole_path_leads_to_complete() -> None:
    into_complete = [key for key, state in RECEIVER_TRANSITIONS.items() if state == ReceiverState.COMPLETE]
    assert into_complete == [(ReceiverState.VERIFYING, "completed")]
    into_verifying = [key for key, state in RECEIVER_TRANSITIONS.items() if state == ReceiverState.VERIFYING]
    assert into_verifying == [(ReceiverState.RECEIVING, "committed")]


def test_an_invalid_transition_tells_the_story() -> None:
    transfer = sender_in(SenderState.ACCEPTED)
    with pytest.raises(InvalidTransition) as caught:
        transfer.acked(9.0)
    error = caught.value
    assert (error.transfer, error.state, error.event) == ("r1/0", "ACCEPTED", "acked")
    assert error.story == ("IDLE", "open_sent at 1.000000 -> OPENED", "accepted at 2.000000 -> ACCEPTED")
    assert str(error).startswith(
        "transfer r1/0: acked is not allowed in state ACCEPTED; story: IDLE, open_sent"
    )


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (DataSlice(0, 0, 0, 3), "duplicate DATA: layer 0, kv 0 starts at token 0; due is 3"),
        (DataSlice(0, 0, 4, 1), "out of order DATA: layer 0, kv 0 starts at token 4; due is 3"),
        (DataSlice(0, 1, 1, 1), "out of order DATA: layer 0, kv 1 starts at token 1; due is 0"),
        (DataSlice(1, 0, 0, 6), "DATA for layer 1, kv 0; allowed is layer 0 to 0"),
        (DataSlice(0, 2, 0, 6), "kv 2; allowed is layer 0 to 0, kv 0 or 1"),
        (DataSlice(0, 0, 3, 4), "tokens 3 to 7; the transfer has 6 tokens"),
        (DataSlice(0, 0, 3, 0), "tokens 3 to 3"),
    ],
)
def test_parts_come_in_order_once_and_within_bounds(part: DataSlice, complaint: str) -> None:
    receiver = receiver_in(ReceiverState.RESERVED)
    receiver.data_received(DataSlice(0, 0, 0, 3), BYTES // 2, 1, 3.0)
    for check in (
        lambda: receiver.data_begins(part, 4.0),
        lambda: receiver.data_received(part, BYTES // 2, 1, 4.0),
    ):
        with pytest.raises(ProtocolError, match=complaint):
            check()


def test_layers_and_chunks_may_interleave() -> None:
    """As a prefill that streams chunk by chunk would send them."""
    receiver = receiver_in(ReceiverState.RESERVED)
    sender = sender_in(SenderState.ACCEPTED)
    for start in (0, 2, 4):
        for kv in (1, 0):
            part = DataSlice(0, kv, start, 2)
            sender.data_sent(part, BYTES // 3, start * 2 + kv, 3.0)
            receiver.data_received(part, BYTES // 3, start * 2 + kv, 3.0)
    receiver.committed(sender.commit_sent(PREFILL, 5.0), 5.0)
    assert receiver.state is ReceiverState.VERIFYING


def test_commit_before_all_data_is_refused_at_both_ends() -> None:
    sender, receiver = sender_in(SenderState.ACCEPTED), receiver_in(ReceiverState.RESERVED)
    sender.data_sent(KEYS, BYTES, 1, 3.0)
    receiver.data_received(KEYS, BYTES, 1, 3.0)
    with pytest.raises(ProtocolError, match="COMMIT before all data: 6 of 12 token rows"):
        sender.commit_sent(PREFILL, 4.0)
    with pytest.raises(ProtocolError, match="COMMIT before all data: 6 of 12 token rows"):
        receiver.committed(right_commit(), 4.0)


@pytest.mark.parametrize("field", ["start_token", "num_frames", "payload_bytes", "raw_bytes", "digest"])
def test_a_commit_with_one_wrong_count_is_refused(field: str) -> None:
    receiver = receiver_in(ReceiverState.RECEIVING)
    commit = right_commit()
    wrong = msgspec.structs.replace(commit, **{field: msgspec.structs.asdict(commit)[field] ^ 1})
    with pytest.raises(ChecksumError if field == "digest" else ProtocolError):
        receiver.committed(wrong, 5.0)
    assert receiver.state is ReceiverState.RECEIVING


def test_the_digest_depends_on_the_order_of_frames() -> None:
    receiver = receiver_in(ReceiverState.RESERVED)
    receiver.data_received(VALUES, BYTES, 2, 3.0)
    receiver.data_received(KEYS, BYTES, 1, 4.0)
    with pytest.raises(ChecksumError):
        receiver.committed(right_commit(), 5.0)


HELD = KVAccept(start_token=4, block_size=4)
REST = [DataSlice(0, 0, 4, 2), DataSlice(0, 1, 4, 2)]


def both_ends_from_token_4() -> tuple[SenderTransfer, ReceiverTransfer]:
    sender, receiver = sender_in(SenderState.OPENED), receiver_in(ReceiverState.OPENED)
    sender.accepted(HELD, 2.0)
    receiver.reserved(HELD, 2.0)
    return sender, receiver


def test_only_tokens_that_the_receiver_does_not_hold_are_due() -> None:
    sender, receiver = both_ends_from_token_4()
    for checksum, part in enumerate(REST):
        sender.data_sent(part, BYTES // 3, checksum, 3.0)
        receiver.data_begins(part, 3.0)
        receiver.data_received(part, BYTES // 3, checksum, 3.0)
    commit = sender.commit_sent(PREFILL, 5.0)
    assert (commit.start_token, commit.num_frames) == (4, 2)
    assert commit.payload_bytes == commit.raw_bytes == HEADER.raw_bytes_from(4) == HEADER.raw_bytes // 3
    receiver.committed(commit, 5.0)
    assert receiver.state is ReceiverState.VERIFYING


def test_tokens_that_the_receiver_holds_may_not_come() -> None:
    sender, receiver = both_ends_from_token_4()
    for part in (KEYS, DataSlice(0, 0, 0, 4), DataSlice(0, 1, 3, 2)):
        for check in (
            lambda part=part: sender.data_sent(part, BYTES, 1, 3.0),
            lambda part=part: receiver.data_begins(part, 3.0),
            lambda part=part: receiver.data_received(part, BYTES, 1, 3.0),
        ):
            with pytest.raises(ProtocolError, match="the receiver holds those before 4"):
                check()


def test_a_commit_of_all_tokens_does_not_fit_a_transfer_of_the_rest() -> None:
    sender, receiver = both_ends_from_token_4()
    for checksum, part in enumerate(REST):
        receiver.data_received(part, BYTES // 3, checksum, 3.0)
    with pytest.raises(ProtocolError, match="COMMIT says start_token is 0; here it is 4"):
        receiver.committed(right_commit(), 5.0)
    with pytest.raises(ProtocolError, match="COMMIT before all data: 0 of 4 token rows"):
        sender.commit_sent(PREFILL, 4.0)


@pytest.mark.parametrize(
    "accept",
    [
        KVAccept(start_token=8, block_size=4),
        KVAccept(start_token=6, block_size=6),
        KVAccept(start_token=3, block_size=4),
        KVAccept(start_token=-4, block_size=4),
    ],
    ids=str,
)
def test_both_ends_refuse_a_start_that_cannot_be(accept: KVAccept) -> None:
    sender, receiver = sender_in(SenderState.OPENED), receiver_in(ReceiverState.OPENED)
    with pytest.raises(StartTokenError, match=f"start_token is {accept.start_token}; allowed is 0 to"):
        sender.accepted(accept, 2.0)
    with pytest.raises(StartTokenError, match=f"start_token is {accept.start_token}; allowed is 0 to"):
        receiver.reserved(accept, 2.0)
    assert (sender.state, receiver.state) == (SenderState.OPENED, ReceiverState.OPENED)


def test_commit_states_what_was_sent() -> None:
    commit = right_commit()
    assert (commit.num_frames, commit.payload_bytes, commit.raw_bytes) == (2, 2 * BYTES, HEADER.raw_bytes)
    assert (commit.first_token_id, commit.seed, commit.prefill_done_at) == (17, 3, 2.0)


@pytest.mark.parametrize(
    ("state", "since", "limit_s", "what"),
    [(SenderState.OPENED, 1.0, 1, "ACCEPT"), (SenderState.COMMITTED, 5.0, 3, "ACK")],
)
def test_sender_waits_for_answers_so_long(
    state: SenderState, since: float, limit_s: float, what: str
) -> None:
    transfer = sender_in(state)
    transfer.check_deadline(since + limit_s - 0.01)
    with pytest.raises(TransferTimeout, match=f"no {what} for transfer r1/0 within {limit_s} s"):
        transfer.check_deadline(since + limit_s)


@pytest.mark.parametrize(
    "state", [SenderState.IDLE, SenderState.ACCEPTED, SenderState.SENDING, SenderState.DONE]
)
def test_sender_does_not_hurry_its_own_side(state: SenderState) -> None:
    sender_in(state).check_deadline(1e9)


def test_receiver_waits_for_a_decision_and_for_frames_so_long() -> None:
    opened = receiver_in(ReceiverState.OPENED)
    opened.check_deadline(1.99)
    with pytest.raises(TransferTimeout, match="no decision about OPEN"):
        opened.check_deadline(2.0)
    receiving = receiver_in(ReceiverState.RECEIVING)
    receiving.check_deadline(7.99)
    with pytest.raises(TransferTimeout, match="no frame for transfer r1/0 within 4 s"):
        receiving.check_deadline(8.0)


def test_a_limit_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="ack_timeout_s is 0; allowed is above 0"):
        TransferLimits(ack_timeout_s=0)
