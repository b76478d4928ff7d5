"""Ready means a token through a pair, and a restarted worker proves itself again."""

from cluster.control import WorkerAddress
from cluster.readiness import Readiness, ports_of
from cluster.selection import WorkerView


def view(worker_id: str, port: int = 1, *, connected: bool = True, role: str = "") -> WorkerView:
    address = WorkerAddress(
        worker_id=worker_id,
        role=role or worker_id.split("-")[0],
        control_host="h",
        control_port=port,
        kv_host="h",
        kv_port=port,
        total_blocks=1,
        block_size=1,
        max_num_seqs=1,
        max_model_len=1,
        kv_bytes_per_token=1,
        fingerprint="f",
    )
    return WorkerView(address, connected)


def workers(*views: WorkerView) -> dict[str, WorkerView]:
    return {v.worker_id: v for v in views}


PAIR = ("prefill-0", "decode-0")


def proven(*, fallback: bool = True) -> Readiness:
    readiness = Readiness(has_prefill=True, fallback=fallback)
    readiness.prove(PAIR, (1, 2))
    return readiness


def test_every_connected_pair_is_probed_once() -> None:
    readiness = Readiness(has_prefill=True, fallback=True)
    both = workers(view("prefill-0"), view("prefill-1"), view("decode-0"), view("decode-1", connected=False))
    assert readiness.start_probes(both) == [("prefill-0", "decode-0"), ("prefill-1", "decode-0")]
    assert readiness.start_probes(both) == []
    readiness.end_probe(PAIR)  # it failed: again
    assert readiness.start_probes(both) == [PAIR]


def test_a_decode_worker_alone_is_a_pair_only_where_no_prefill_worker_is_meant() -> None:
    alone = workers(view("decode-0"))
    assert Readiness(has_prefill=True, fallback=True).start_probes(alone) == []
    assert Readiness(has_prefill=False, fallback=True).start_probes(alone) == [("", "decode-0")]


def test_nothing_proven_is_not_ready_however_connected() -> None:
    readiness = Readiness(has_prefill=True, fallback=True)
    assert readiness.state(workers(view("prefill-0"), view("decode-0", 2)), "disagg") == ""


def test_proven_pair_is_ready_until_a_worker_is_another() -> None:
    readiness = proven()
    assert readiness.state(workers(view("prefill-0"), view("decode-0", 2)), "disagg") == "ready"
    assert readiness.state(workers(view("prefill-0", 9), view("decode-0", 2)), "disagg") == "degraded"
    assert readiness.state(workers(view("prefill-0"), view("decode-0", 9)), "disagg") == ""
    assert readiness.start_probes(workers(view("prefill-0", 9), view("decode-0", 2))) == [PAIR]


def test_a_draining_worker_makes_no_pair_and_is_not_probed() -> None:
    both = workers(view("prefill-0"), view("decode-0", 2))
    both["prefill-0"].set_draining(True, 1.0)
    assert proven().state(both, "disagg") == "degraded"
    assert Readiness(has_prefill=True, fallback=True).start_probes(both) == []
    both["prefill-0"].set_draining(False, 2.0)
    assert proven().state(both, "disagg") == "ready"


def test_a_pair_counts_in_its_roles_only() -> None:
    swapped = workers(view("prefill-0", role="decode"), view("decode-0", 2, role="prefill"))
    assert proven().state(swapped, "disagg") == ""
    assert proven().start_probes(swapped) == [("decode-0", "prefill-0")]


def test_who_was_ready_once_may_let_requests_wait() -> None:
    assert not Readiness(has_prefill=True, fallback=True).has_served
    assert proven().has_served


def test_without_its_prefill_worker_a_cluster_is_degraded_if_fallback_may_help() -> None:
    lonely = workers(view("prefill-0", connected=False), view("decode-0", 2))
    assert ports_of(PAIR, lonely) is None
    assert proven().state(lonely, "disagg") == "degraded"
    assert proven(fallback=False).state(lonely, "disagg") == ""
    assert proven(fallback=False).state(lonely, "colocated") == "degraded"
