import msgspec
import pytest

from cluster.control import WorkerAddress, WorkerUp
from cluster.worker_agreement import describe_model, disagreement

UP = WorkerUp(
    pid=1,
    address=WorkerAddress(
        worker_id="prefill-0",
        role="prefill",
        control_host="h",
        control_port=1,
        kv_host="h",
        kv_port=2,
        total_blocks=10,
        block_size=16,
        max_num_seqs=4,
        max_model_len=128,
        kv_bytes_per_token=256,
        fingerprint="f",
    ),
    model="tiny",
    dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    kv_bytes_per_token=256,
)


def other(**address: object) -> WorkerUp:
    return msgspec.structs.replace(
        UP, pid=2, address=msgspec.structs.replace(UP.address, worker_id="decode-0", **address)
    )


def test_same_model_agrees_whatever_the_place_and_size() -> None:
    assert disagreement(UP, other(role="decode", kv_port=9, total_blocks=99)) == ""


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("fingerprint", "g", "model fingerprint"),
        ("block_size", 32, "block_size"),
        ("max_model_len", 64, "max_model_len"),
    ],
)
def test_difference_names_field_and_both_values(field: str, value: object, named: str) -> None:
    ours = getattr(UP.address, field)
    expected = f"workers differ in {named}: prefill-0 has {ours}, decode-0 has {value}"
    assert disagreement(UP, other(**{field: value})) == expected


def test_dtype_differs() -> None:
    theirs = msgspec.structs.replace(other(), dtype="bfloat16")
    assert disagreement(UP, theirs) == "workers differ in dtype: prefill-0 has float32, decode-0 has bfloat16"


def test_model_described_carries_the_shape() -> None:
    event = describe_model(UP, 3.0)
    assert (event.at, event.model, event.num_layers, event.block_size, event.fingerprint) == (
        3.0,
        "tiny",
        2,
        16,
        "f",
    )
