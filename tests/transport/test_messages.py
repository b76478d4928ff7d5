import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.wire import make_contract, make_header
from transport.errors import MismatchError, ProtocolError, StartTokenError
from transport.messages import (
    SCHEMA_VERSION,
    FailReason,
    KVAccept,
    KVAck,
    KVCommit,
    KVFailure,
    KVHeader,
    KVReject,
    Pong,
    RejectReason,
    check_start_token,
    decode,
    decode_kv_header,
    encode,
    mismatch,
)

MESSAGES = [
    make_header(codec="int8", path="v1"),
    KVAccept(start_token=4096, block_size=16),
    KVReject(reason=RejectReason.FULL, detail="no blocks"),
    KVCommit(
        first_token_id=1,
        seed=2**63 - 1,
        output_position=0,
        prefill_started_at=1.5,
        prefill_done_at=2.5,
        start_token=16,
        num_frames=4,
        payload_bytes=100,
        raw_bytes=200,
        digest=2**64 - 1,
    ),
    KVAck(received_at=1.0, verified_at=2.0),
    KVFailure(reason=FailReason.CHECKSUM, detail="layer 3"),
    Pong(payload_bytes=7),
]
KINDS = [type(message) for message in MESSAGES]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_round_trip(message: KVHeader) -> None:
    assert decode(encode(message), type(message)) == message


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_any_other_payload_is_a_protocol_error(kind: type[KVHeader], payload: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"{kind.__name__} does not decode"):
        decode(payload, kind)


@given(st.data())
def test_a_cut_or_lengthened_payload_is_a_protocol_error(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(MESSAGES))
    payload = encode(message)
    cut = data.draw(st.integers(0, len(payload) - 1))
    for wrong in (payload[:cut], payload + payload[:1]):
        with pytest.raises(ProtocolError):
            decode(wrong, type(message))


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 0},
        {"num_layers": 0},
        {"head_dim": 1 << 20},
        {"dtype": "int4"},
        {"path": "v3"},
        {"request_id": ""},
        {"request_id": "x" * 300},
        {"attempt": -1},
        {"extra": 1},
    ],
    ids=str,
)
def test_header_values_out_of_range_do_not_decode(change: dict[str, object]) -> None:
    payload = msgspec.msgpack.encode(msgspec.to_builtins(make_header()) | change)
    with pytest.raises(ProtocolError):
        decode_kv_header(payload)


def test_another_schema_is_a_mismatch_even_if_nothing_else_is_understood() -> None:
    payload = msgspec.msgpack.encode({"schema_version": 1, "something": "old"})
    with pytest.raises(MismatchError, match="schema_version differs: ours is 3, theirs is 1") as caught:
        decode_kv_header(payload)
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == ("schema_version", "3", "1")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "other"),
        ("num_layers", 3),
        ("num_kv_heads", 1),
        ("head_dim", 16),
        ("dtype", "bfloat16"),
        ("layout", "head_token_dim"),
        ("schema_version", SCHEMA_VERSION + 1),
    ],
)
def test_every_field_of_the_contract_but_the_block_size_is_compared(field: str, value: object) -> None:
    ours = make_contract()
    theirs = make_header(make_contract(**{field: value}))
    assert mismatch(ours, theirs) == (field, str(getattr(ours, field)), str(value))
    assert set(KVHeader.__struct_fields__) >= {field}
    assert mismatch(ours, make_header(make_contract(block_size=32))) is None


@pytest.mark.parametrize(
    ("start_token", "block_size", "num_tokens"),
    [(0, 16, 1), (0, 16, 16), (16, 16, 17), (4080, 16, 4096), (5, 1, 6)],
)
def test_whole_blocks_below_the_last_token_may_be_held(
    start_token: int, block_size: int, num_tokens: int
) -> None:
    check_start_token(start_token, block_size, num_tokens)


@pytest.mark.parametrize(
    ("start_token", "block_size", "num_tokens", "most"),
    [
        (16, 16, 16, 0),  # nothing would be left to send
        (16, 16, 10, 0),
        (32, 16, 17, 16),
        (8, 16, 100, 96),  # half a block
        (-16, 16, 100, 96),
        (2**63, 16, 100, 96),
    ],
)
def test_any_other_number_of_held_tokens_is_an_error_of_its_own(
    start_token: int, block_size: int, num_tokens: int, most: int
) -> None:
    complaint = f"start_token is {start_token}; allowed is 0 to {most} in whole blocks of {block_size} tokens"
    with pytest.raises(StartTokenError, match=complaint) as caught:
        check_start_token(start_token, block_size, num_tokens)
    assert caught.value.start_token == start_token


def test_equal_contracts_match_whatever_the_request() -> None:
    assert mismatch(make_contract(), make_header(request_id="another", num_tokens=99)) is None


def test_raw_bytes_is_the_formula() -> None:
    header = make_header(
        make_contract(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16"), num_tokens=1000
    )
    assert header.raw_bytes == 23_040 * 1000
    assert header.raw_bytes_from(960) == 23_040 * 40
