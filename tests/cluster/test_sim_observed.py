"""Which gaps of a run's log are decode steps, and which of them had no core to spare."""

from cluster.events import Event, PrefillFinished, PrefillStarted
from cluster.sim_machine import Cores, SimMachine
from cluster.sim_observed import observed_steps
from tests.cluster.histories import handed_off

CORES = Cores(SimMachine((0, 1)), ["prefill-0"], ["decode-0"])


def prefill(worker_id: str, began: float, ended: float, request_id: str = "other") -> list[Event]:
    about = {"request_id": request_id, "attempt": 1, "worker_id": worker_id}
    return [
        PrefillStarted(at=began, **about),  # type: ignore[arg-type]
        PrefillFinished(at=ended, prompt_tokens=9, compute_s=ended - began, **about),  # type: ignore[arg-type]
    ]


def ms(gaps_s: list[float]) -> list[int]:
    return sorted(round(each * 1000) for each in gaps_s)


def test_gaps_beside_a_busy_prefill_worker_are_of_their_own_kind() -> None:
    """First token at 10.1, then gaps of 10, 20, 30 and 40 ms; the other core is busy from 10.125 to 10.155."""
    log = handed_off("a", 10.0, gaps_s=(0.01, 0.02, 0.03, 0.04)) + prefill("prefill-0", 10.112, 10.155)
    found = observed_steps(log, CORES)
    assert ms(found.free) == [10, 40]
    assert ms(found.full) == [20, 30]


def test_a_step_with_a_prompt_is_no_decode_step() -> None:
    log = handed_off("a", 10.0, gaps_s=(0.01, 0.02, 0.03)) + prefill("decode-0", 10.112, 10.128)
    found = observed_steps(log, CORES)
    assert ms(found.free) == [10, 30]
    assert found.full == []


def test_streams_of_two_workers_fill_two_cores() -> None:
    log: list[Event] = []
    for request_id in ("a", "b"):
        log += handed_off(request_id, 10.0, gaps_s=(0.01, 0.02))
    one_worker = observed_steps(log, CORES)
    assert (len(one_worker.free), len(one_worker.full)) == (4, 0)
    together = Cores(SimMachine((0,)), [], ["decode-0"])
    assert len(observed_steps(log, together).full) == 4, "one core, and it is busy"
