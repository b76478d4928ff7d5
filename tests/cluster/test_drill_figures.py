"""Figures one by one, where a number is more than a count."""

from dataclasses import replace

import pytest

from cluster.drill_figures import FIGURES
from cluster.drill_file import drill_from_tree
from cluster.drill_judge import judge
from cluster.drill_open_faults import OpenFaults
from cluster.drill_story import AFTER, UNDISTURBED, DoneFault
from cluster.events import FaultHealed, WorkerExited, WorkerReady
from tests.cluster.drill_histories import Told, ToldFault, kept

TREE = {
    "title": "t",
    "promise": "p",
    "requests": {
        "chat": {"count": 3},
        "crowd": {"count": 2, "is_disturbance": True},
    },
    "expect": {"finished": "all"},
}


@pytest.fixture
def told() -> Told:
    return kept(drill_from_tree(TREE, "d", "d"))


def value(told: Told, name: str, key: str = "") -> float | None:
    return FIGURES[name](told.story(), key).value


def text(told: Told, name: str) -> str:
    return FIGURES[name](told.story(), "").text


def test_a_stream_that_broke_with_the_router_failed_by_the_rule(told: Told) -> None:
    (first, second, *_) = told.of()
    first.fail("broken_stream")
    assert value(told, "failed_without_rule") == 1
    told.faults = [ToldFault(0, "kill", "router", first.sent_at + 0.2)]
    assert value(told, "failed_without_rule") == 0
    assert value(told, "failed") == 1
    second.fail("error_event")
    assert value(told, "failed_without_rule") == 1


def test_first_tokens_are_compared_with_the_same_prompt_and_disturbers_are_left_out(told: Told) -> None:
    for request in told.of(UNDISTURBED):
        request.ttft_s = 1.0 + request.prompt
    for request in told.of():
        request.ttft_s = 1.5 + request.prompt
    for request in told.of(group="crowd"):
        request.ttft_s = 100.0
    assert value(told, "worst_ttft_added_s") == pytest.approx(0.5)
    assert text(told, "worst_ttft_added_s") == "worst TTFT +0.50 s"


def test_faster_than_undisturbed_counts_as_nothing_added(told: Told) -> None:
    for request in told.of():
        request.ttft_s = 0.01
    assert value(told, "worst_ttft_added_s") == 0.0
    assert text(told, "worst_ttft_added_s") == "worst TTFT -0.09 s"


@pytest.mark.parametrize(
    ("before_s", "during_s", "ratio", "said"),
    [
        (0.010, 0.025, 2.5, "ITL p99 25.0 ms, undisturbed 10.0 ms"),
        (0.001, 0.010, 2.5, "ITL p99 10.0 ms, undisturbed 1.0 ms (counts as 4)"),
    ],
)
def test_gaps_shorter_than_a_tick_of_the_scheduler_count_as_one(
    told: Told, before_s: float, during_s: float, ratio: float, said: str
) -> None:
    for request in told.requests:
        request.gap_s = before_s if request.round == UNDISTURBED else during_s
    assert value(told, "itl_p99_ratio", "chat") == pytest.approx(ratio)
    assert text(told, "itl_p99_ratio") == said


def test_another_number_of_tokens_differs_even_with_the_same_text(told: Told) -> None:
    told.of()[0].max_tokens += 1
    assert value(told, "tokens_differ") == 1


def test_tokens_of_the_requests_afterwards_are_compared_too(told: Told) -> None:
    told.of(AFTER)[0].text = "something else"
    assert value(told, "tokens_differ") == 1


def test_an_answer_without_anything_to_compare_with_differs(told: Told) -> None:
    for request in told.of(UNDISTURBED):
        request.fail("http_500")
    assert value(told, "tokens_differ") == len(told.of()) + len(told.of(AFTER))


def test_a_failed_transfer_is_told_by_both_ends_and_counts_once(told: Told) -> None:
    told.of()[0].transfers_failed = ["checksum"]
    assert value(told, "transfer_failures") == 1
    assert value(told, "transfer_failures", "checksum") == 1
    assert value(told, "transfer_failures", "timeout") == 0


def test_a_fault_that_is_never_noticed_meets_no_bound(told: Told) -> None:
    told.faults = [ToldFault(0, "kill", "decode-0", 110.0, comes_back=False)]
    assert value(told, "noticed_s") == pytest.approx(0.1)
    assert value(told, "recovered_s") is None
    assert text(told, "recovered_s") == "recovered after: never, for 1 of 1 faults"


def test_a_fault_of_one_frame_is_over_at_the_next_transfer_and_one_with_a_time_not_before_its_end() -> None:
    told = kept(drill_from_tree(TREE, "d", "d"))
    story = told.story()
    (first, *_) = story.sent()
    cut = DoneFault(0, "cut", "prefill-0", first.sent_at)
    story.healed = [FaultHealed(at=first.sent_at + 50.0, fault="cut", target="prefill-0", after_s=1.0)]
    story.facts = replace(story.facts, faults=(cut,))
    assert FIGURES["recovered_s"](story, "").value == pytest.approx(0.1)
    story.facts = replace(story.facts, faults=(replace(cut, seconds=1.0),))
    value_s = FIGURES["recovered_s"](story, "").value
    assert value_s is not None
    assert value_s > 50.0


def test_the_longest_of_several_faults_counts(told: Told) -> None:
    told.faults = [
        ToldFault(0, "kill", "decode-0", 110.0, recovered_s=1.0),
        ToldFault(0, "kill", "prefill-0", 110.0, recovered_s=3.0),
    ]
    assert value(told, "recovered_s") == pytest.approx(3.0)
    assert value(told, "recovered_s", "hang") is None


def test_a_restart_while_the_cluster_came_up_is_not_the_drills(told: Told) -> None:
    told.faults = [ToldFault(0, "kill", "decode-0", 2.0)]
    assert value(told, "restarts") == 0


def test_memory_that_shrinks_has_not_grown(told: Told) -> None:
    told.growth_mib = -5.0
    assert value(told, "memory_growth_mib") == 0.0
    told.growth_mib = 7.0
    assert value(told, "memory_growth_mib") == pytest.approx(7.0)
    assert value(told, "memory_growth_mib", "router") is None


def test_the_headline_says_what_was(told: Told) -> None:
    told.of()[0].retried = ["prefill_died"]
    told.of()[1].text = "something else"
    assert judge(told.story()).headline == (
        "5/5 finished, 1 retried on prefill-0, 1 tokens differ, 0 blocks stranded, 0 orphans"
    )


def test_a_verdict_as_json_names_each_expectation(told: Told) -> None:
    told.orphans = ("pid 7 (decode-0) is sleeping",)
    rows = {row["name"]: row for row in (judged.as_json() for judged in judge(told.story()).expectations)}
    assert rows["finished"] == {
        "name": "finished", "expected": "all", "actual": 5, "ok": True, "text": "5/5 finished",
    }  # fmt: skip
    assert rows["orphans"] == {
        "name": "orphans", "expected": "0", "actual": 1, "ok": False, "text": "1 orphans",
        "look_at": ["pid 7 (decode-0) is sleeping"],
    }  # fmt: skip


KILLED = DoneFault(0, "kill", "decode-0", 10.0)


def test_a_killed_process_is_healed_when_it_is_ready_again() -> None:
    open_faults = OpenFaults()
    open_faults.take(WorkerReady(at=9.0, worker_id="decode-0", role="decode", pid=1, after_s=1.0))
    open_faults.add(KILLED)
    open_faults.take(WorkerReady(at=9.9, worker_id="decode-0", role="decode", pid=1, after_s=1.0))
    open_faults.take(WorkerReady(at=11.0, worker_id="prefill-0", role="prefill", pid=1, after_s=1.0))
    open_faults.take(WorkerExited(at=10.1, worker_id="decode-0", role="decode", pid=1))
    open_faults.take(FaultHealed(at=11.5, fault="cut", target="decode-0", after_s=1.0))
    assert not open_faults.are_over(1000.0)
    open_faults.take(WorkerReady(at=12.0, worker_id="decode-0", role="decode", pid=2, after_s=1.0))
    assert open_faults.are_over(12.0)


def test_a_link_is_healed_when_its_time_is_over_and_a_refused_fault_at_once() -> None:
    open_faults = OpenFaults()
    open_faults.add(replace(KILLED, refusal="decode-0 is not running"))
    assert open_faults.are_over(10.0)
    open_faults.add(DoneFault(0, "cut", "prefill-0", 10.0, seconds=2.0))
    open_faults.take(FaultHealed(at=12.0, fault="cut", target="prefill-0", after_s=2.0))
    assert not open_faults.are_over(12.0)
    assert open_faults.are_over(12.5)
