"""Interference: what is in a burst and what is not, from logs told by hand; arms, validity, verdict and cost."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.events import (
    Event,
    FellBack,
    FirstToken,
    NoteAdded,
    RequestCancelled,
    RequestFailed,
    RequestRejected,
    RouterStats,
    TransferCompleted,
    WorkerExited,
    WorkerStats,
)
from cluster.interference_bench import (
    Arm,
    ClientFigures,
    InterferenceResult,
    InterferenceSpec,
    Round,
    arm_profile,
    make_arms,
    rounds_in_order,
    streams_of,
)
from cluster.interference_bench_fold import (
    ALONE,
    BURSTS,
    IncompleteRound,
    PhaseFigures,
    RoundFold,
    begin_note,
    end_note,
    fold_round,
    merged,
    touches,
)
from cluster.interference_bench_report import CURVE_SHARES, interference_document
from cluster.metrics import Slos
from cluster.profile import Profile
from engine.model_ids import SYNTHETIC_PRESETS
from tests.cluster.histories import arrived, finished, run_started, tokens

NO_SLOS = Slos()


def phase(name: str, begin: float, end: float, *events: Event) -> list[Event]:
    return [
        NoteAdded(at=begin, text=begin_note(name)),
        *events,
        NoteAdded(at=end, text=end_note(name)),
    ]


def stream(request_id: str, at: float, *token_at: float, label: str = "steady") -> list[Event]:
    """Arrives, gets its tokens, finishes with the last."""
    return [
        arrived(request_id, at, label=label, prompt_tokens=64 if label == "steady" else 8000),
        FirstToken(at=token_at[0], request_id=request_id, ttft_ms=(token_at[0] - at) * 1e3),
        tokens(request_id, 0, *token_at),
        finished(
            request_id,
            token_at[-1],
            output_tokens=len(token_at),
            e2el_ms=(token_at[-1] - at) * 1e3,
            tpot_ms=1.0 if len(token_at) > 1 else None,
        ),
    ]


def fold(*events: Event, slos: Slos = NO_SLOS, streams: int = 1) -> RoundFold:
    return fold_round(events, slos, streams)


# --- what is in a burst --------------------------------------------------------------------------------------------


def test_a_gap_is_in_a_burst_when_a_burst_prompt_waits_in_any_part_of_it() -> None:
    log = phase(
        BURSTS,
        10.0,
        20.0,
        *stream("s", 10.5, 11.0, 11.9, 12.1, 13.1, 14.0, 14.1),
        *stream("b", 12.0, 13.0, 13.5, label="burst"),
    )
    found = fold(*log).figures(BURSTS)
    assert found.itl_ms == pytest.approx([900.0, 900.0, 100.0])
    assert found.burst_itl_ms == pytest.approx([200.0, 1000.0])
    assert found.burst_seconds == pytest.approx(1.0)
    assert found.bursts == 1
    assert found.prompt_ttft_ms == pytest.approx([1000.0])


def test_bursts_that_overlap_are_one_and_the_last_first_token_ends_it() -> None:
    log = phase(
        BURSTS,
        10.0,
        20.0,
        *stream("s", 10.5, 11.0, 13.5, 14.5),
        *stream("b1", 12.0, 13.0, label="burst"),
        *stream("b2", 12.5, 14.0, label="burst"),
    )
    found = fold(*log).figures(BURSTS)
    assert found.burst_seconds == pytest.approx(2.0)
    assert len(found.burst_itl_ms) == 2
    assert found.itl_ms == []


def test_a_burst_that_failed_lasted_until_it_failed() -> None:
    log = phase(
        BURSTS,
        10.0,
        20.0,
        *stream("s", 10.5, 11.0, 12.5, 14.0, 15.0),
        arrived("b", 12.0, label="burst"),
        RequestFailed(at=13.0, request_id="b", reason="crash"),
    )
    found = fold(*log).figures(BURSTS)
    assert len(found.burst_itl_ms) == 2
    assert len(found.itl_ms) == 1
    assert found.bursts == 0
    assert found.failed == {"crash": 1}


def test_gaps_belong_to_the_phase_in_which_they_end() -> None:
    log = [
        *phase(ALONE, 10.0, 20.0),
        *phase(BURSTS, 20.5, 30.0),
        *stream("s", 9.0, 9.5, 10.5, 19.5, 20.2, 21.0, 30.5),
    ]
    folded = fold(*log)
    assert folded.figures(ALONE).itl_ms == pytest.approx([1000.0, 9000.0])
    assert folded.figures(BURSTS).itl_ms == pytest.approx([800.0])
    assert folded.figures(ALONE).stream_tokens == 2


def test_a_short_prompt_that_waits_in_a_burst_is_told_apart_and_one_that_never_got_a_token_is_counted() -> (
    None
):
    log = phase(
        BURSTS,
        10.0,
        20.0,
        *stream("before", 10.1, 10.2, 10.3),
        *stream("b", 12.0, 15.0, label="burst"),
        *stream("beside", 13.0, 14.0, 14.1),
        *stream("later", 19.0, 20.5, 20.6),
        arrived("never", 19.5),
        RequestCancelled(at=21.0, request_id="never", phase="queued"),
    )
    found = fold(*log).figures(BURSTS)
    assert found.ttft_ms == pytest.approx([100.0])
    assert found.burst_ttft_ms == pytest.approx([1000.0])
    assert found.unanswered == 2


def test_tokens_are_counted_for_streams_for_bursts_and_with_computed_prompts() -> None:
    log = phase(
        BURSTS,
        10.0,
        20.0,
        *stream("s", 10.5, 11.0, 12.5, 12.6, 19.0),
        *stream("b", 12.0, 13.0, 13.1, label="burst"),
    )
    found = fold(*log).figures(BURSTS)
    assert found.stream_tokens == 4
    assert found.burst_stream_tokens == 2
    assert found.tokens == 4 + 2 + 64 + 8000


def test_good_requests_keep_every_limit_and_each_label_counts_for_itself() -> None:
    log = phase(
        BURSTS,
        10.0,
        20.0,
        *stream("good", 10.0, 10.1, 10.12, 10.14),
        *stream("stalled", 11.0, 11.1, 11.12, 11.5),
        *stream("late", 12.0, 15.0, 15.01),
        *stream("b", 16.0, 17.0, label="burst"),
    )
    found = fold(*log, slos=Slos(ttft_ms=2000.0, itl_ms=50.0)).figures(BURSTS)
    assert found.finished == {"steady": 3, "burst": 1}
    assert found.good == {"steady": 1, "burst": 1}


def test_probes_and_others_are_no_part_of_it() -> None:
    log = phase(
        ALONE,
        10.0,
        20.0,
        *stream("p", 10.5, 11.0, 11.1, label="probe"),
        *stream("c", 10.5, 11.0, 11.1, label="client"),
        RequestRejected(at=12.0, reason="queue_full", status=429),
    )
    found = fold(*log).figures(ALONE)
    assert found.itl_ms == []
    assert found.tokens == 0
    assert found.failed == {"queue_full": 1}


# --- the cluster beside it -----------------------------------------------------------------------------------------


def transfer(request_id: str, at: float) -> Event:
    return TransferCompleted(
        at=at,
        request_id=request_id,
        attempt=1,
        from_worker="prefill-0",
        to_worker="decode-0",
        codec="int8",
        tokens=64,
        raw_bytes=1000,
        wire_bytes=600,
        duration_s=0.1,
        exposed_s=0.1,
        busy_s=0.1,
    )


def test_kv_and_fallbacks_are_those_of_the_phase_whoever_tells_first() -> None:
    """A worker's events may come before the router's, which says whose request it is."""
    log = phase(
        ALONE,
        10.0,
        20.0,
        transfer("s", 11.0),
        transfer("probe", 11.0),
        transfer("s", 25.0),
        FellBack(
            at=12.0, request_id="s", attempt=1, worker_id="decode-0", reason="decode_full", prompt_tokens=64
        ),
        *stream("s", 10.5, 11.0, 11.1),
    )
    found = fold(*log).figures(ALONE)
    assert (found.transfers, found.kv_bytes, found.kv_wire_bytes, found.fallbacks) == (1, 1000, 600, 1)


def test_cpu_is_the_samples_share_of_the_phase() -> None:
    def sample(at: float, percent: float) -> Event:
        return WorkerStats(at=at, worker_id="decode-0", role="decode", cpu_percent=percent)

    log = phase(
        ALONE,
        10.0,
        20.0,
        sample(9.0, 500.0),  # of before
        sample(11.0, 100.0),
        sample(13.0, 50.0),
        RouterStats(at=9.0, cpu_percent=1.0),
        RouterStats(at=30.0, cpu_percent=20.0),
        *stream("s", 10.5, 11.0),
    )
    found = fold(*log).figures(ALONE)
    assert found.cpu == pytest.approx({"decode-0": (1.0 * 1.0 + 2.0 * 0.5) / 3.0, "router": 0.2})


def test_streams_without_an_open_request_waited_for_the_load_generator() -> None:
    log = phase(
        ALONE,
        10.0,
        20.0,
        *stream("a", 9.0, 10.5, 14.0),  # stream 1 until 14
        *stream("b", 15.0, 15.5, 25.0),  # and again from 15
        *stream("c", 8.0, 9.0, 30.0),  # stream 2 all the time
    )
    assert fold(*log, streams=2).figures(ALONE).idle_share == pytest.approx(1 / 20)


def test_a_round_that_broke_or_has_no_end_says_so() -> None:
    died = WorkerExited(at=12.0, worker_id="decode-0", role="decode", pid=1, signal=9)
    with pytest.raises(IncompleteRound, match="decode-0 ended while it was measured: crash"):
        fold(*phase(ALONE, 10.0, 20.0, died)).figures(ALONE)
    with pytest.raises(IncompleteRound, match="the log does not tell"):
        fold(NoteAdded(at=10.0, text=begin_note(ALONE))).figures(ALONE)
    stopped = WorkerExited(at=21.0, worker_id="decode-0", role="decode", pid=1, cause="stop")
    fold(*run_started(), *phase(ALONE, 10.0, 20.0), stopped).figures(ALONE)


def test_spans_are_merged_and_touched() -> None:
    windows = merged([(5.0, 6.0), (1.0, 2.0), (1.5, 3.0)])
    assert windows == [(1.0, 3.0), (5.0, 6.0)]
    assert [touches(windows, *span) for span in ((0.0, 0.9), (0.0, 1.1), (3.5, 4.5), (4.0, 7.0), (6.5, 7.0))] == [
        False, True, False, True, False,
    ]  # fmt: skip


# --- arms ----------------------------------------------------------------------------------------------------------


def test_arms_differ_in_nothing_but_mode_budget_and_handoff() -> None:
    profile = Profile()
    arms = make_arms(profile, [512, 128], ["always", "auto"])
    assert [arm.name for arm in arms] == [
        "co-located whole prompts",
        "co-located 512 a step",
        "co-located 128 a step",
        "disaggregated",
        "disaggregated auto",
    ]
    whole = arms[0]
    assert whole.budget == 2 * 8000 + 4 * 65, "both prompts of a burst and every stream's fit one step"
    for arm in arms:
        served = arm_profile(profile, arm)
        assert served.engine.max_num_batched_tokens == arm.budget
        assert served.cluster.mode == arm.mode
        assert (served.cluster.prefill, served.cluster.decode, served.load, served.link) == (
            1, 1, profile.load, profile.link,
        )  # fmt: skip
    assert arm_profile(profile, arms[4]).cluster.handoff == "auto"
    assert streams_of(profile).load["mixed"].burst_every_s == 0.0
    assert streams_of(profile).load["mixed"].streams == 4


def test_arms_take_turns_and_another_one_begins_each_repeat() -> None:
    arms = [Arm(name, "colocated", 1) for name in "abc"]
    order = rounds_in_order(arms, 3)
    assert "".join(arm.name for _, arm in order) == "abcbcacab"
    assert [repeat for repeat, _ in order] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


# --- the document --------------------------------------------------------------------------------------------------


CALM = ClientFigures(lag_p99_ms=1.0, lag_max_ms=2.0, burst_lag_ms=1.0, cpu=0.1)
MACHINE = {"cpu": "A CPU", "flags": ["fma"], "cores": 2, "load_average": 0.5, "system": "Linux 6"}
ARMS = make_arms(Profile(), [512, 128], ["always"])


def phases(
    itl_ms: float, ttft_ms: float = 500.0, tokens_per_s: float = 1000.0
) -> tuple[PhaseFigures, PhaseFigures]:
    alone = PhaseFigures(10.0, itl_ms=[2.0, 2.0], ttft_ms=[20.0], stream_tokens=5000, tokens=10_000)
    bursts = PhaseFigures(
        10.0,
        burst_seconds=5.0,
        bursts=4,
        burst_itl_ms=[itl_ms] * 3,
        burst_ttft_ms=[40.0],
        prompt_ttft_ms=[ttft_ms],
        tokens=int(tokens_per_s * 10),
    )
    return alone, bursts


def document(
    itl_ms: dict[str, Sequence[float]], client: ClientFigures = CALM, **disagg: float
) -> dict[str, Any]:
    """One round for each value."""
    result = InterferenceResult()
    for arm in ARMS:
        for repeat, value in enumerate(itl_ms[arm.name]):
            alone, bursts = phases(value, **(disagg if arm.is_disagg else {}))
            result.rounds.append(Round(arm.name, repeat, f"r{repeat}", alone, bursts, CALM, client))
    spec = InterferenceSpec(ARMS, 10.0, 3, Slos(itl_ms=50.0))
    return interference_document(spec, Profile(), SYNTHETIC_PRESETS["nano"], "float32", MACHINE, result)


WINS = {
    "co-located whole prompts": (400.0, 420.0, 380.0),
    "co-located 512 a step": (60.0, 70.0, 65.0),
    "co-located 128 a step": (30.0, 32.0, 31.0),
    "disaggregated": (4.0, 4.4, 4.2),
}


def test_the_verdict_compares_with_whole_prompts_the_best_chunks_and_itself() -> None:
    made = document(WINS)
    json.dumps(made, allow_nan=False)
    assert made["verdict"] == [
        "disaggregated WINS: streams' ITL in bursts p99 4.2 ms, longest 4.2 ms; "
        "p99 95x better than 400 ms, longest 95x better than 400 ms of co-located whole prompts; "
        "p99 7.4x better than 31 ms, longest 7.4x better than 31 ms of co-located 128 a step; "
        "p99 is 2.10x its own without bursts"
    ]
    figures = made["arms"][3]["summary"]["bursts"]["burst_itl_ms"]["p99"]
    assert figures == {"median": pytest.approx(4.2), "min": pytest.approx(4.0), "max": pytest.approx(4.4)}
    assert made["model"]["kv_bytes_per_token"] > 0


def test_the_cost_is_against_the_best_co_located_arm_in_each_figure() -> None:
    said = document(WINS, ttft_ms=1500.0, tokens_per_s=400.0)["cost"][0]
    assert "TTFT of burst prompts 1.5 s (3.0x worse than 500 ms of co-located" in said
    assert "TTFT of short prompts in bursts 40 ms (no clear difference from 40 ms of co-located" in said
    assert "all tokens beside bursts 200 tok/s a core (2.5x worse than 500 tok/s a core of" in said


def test_it_says_when_disaggregation_loses_and_when_nothing_is_to_be_seen() -> None:
    loses = document(WINS | {"disaggregated": (50.0, 55.0, 60.0)})["verdict"][0]
    assert loses.startswith("disaggregated LOSES: ")
    assert "1.8x worse than 31 ms of co-located 128 a step" in loses
    near = document(WINS | {"disaggregated": (29.5, 29.6, 29.7)})["verdict"][0]
    assert near.startswith("disaggregated IS NO BETTER: "), "apart, but by less than a tenth"
    once = document({name: values[:1] for name, values in WINS.items()})["verdict"][0]
    assert once.startswith("disaggregated WINS (one round: no spread is known): ")
    same = document(WINS | {"disaggregated": (20.0, 30.5, 90.0)})["verdict"][0]
    assert same.startswith("disaggregated IS NO BETTER: ")
    assert "no clear difference from 31 ms of co-located 128 a step" in same


def test_the_longest_gap_counts_beside_p99() -> None:
    """A stall of seconds is one gap among hundreds of short ones, and p99 does not see it."""

    def made(longest_ms: float, usual_ms: float) -> str:
        result = InterferenceResult()
        for arm in ARMS:
            for repeat in range(2):
                alone, bursts = phases(4.0)
                gap_ms, last_ms = (usual_ms, longest_ms) if arm.is_disagg else (4.0, 2000.0)
                bursts.burst_itl_ms = [gap_ms] * 1000 + [last_ms]
                result.rounds.append(Round(arm.name, repeat, "r", alone, bursts, CALM, CALM))
        spec = InterferenceSpec(ARMS, 10.0, 2, Slos())
        return str(
            interference_document(spec, Profile(), SYNTHETIC_PRESETS["nano"], "float32", MACHINE, result)[
                "verdict"
            ][0]
        )

    assert made(20.0, 4.0).startswith(
        "disaggregated WINS: streams' ITL in bursts p99 4 ms, longest 20 ms; p99 no clear difference from 4 ms"
    )
    assert made(20.0, 8.0).startswith("disaggregated IS MIXED: ")
    assert made(2000.0, 8.0).startswith("disaggregated LOSES: ")
    assert made(2000.0, 4.0).startswith("disaggregated IS NO BETTER: ")


def test_the_curve_of_an_arm_counts_time_not_gaps() -> None:
    """Ninety short gaps of 10 ms and one of 900 ms: half of the time is the long one's."""
    result = InterferenceResult()
    for arm in ARMS:
        alone, bursts = phases(1.0)
        bursts.burst_itl_ms = [10.0] * 90 + [900.0]
        result.rounds.append(Round(arm.name, 0, "r", alone, bursts, CALM, CALM))
    spec = InterferenceSpec(ARMS, 10.0, 1, Slos())
    made = interference_document(spec, Profile(), SYNTHETIC_PRESETS["nano"], "float32", MACHINE, result)
    curve = dict(zip(CURVE_SHARES, made["arms"][0]["curves"]["in_burst"], strict=True))
    assert [curve[share] for share in (1.0, 0.6, 0.4, 0.0)] == [10.0, 10.0, 900.0, 900.0]
    assert made["arms"][0]["curves"]["alone"][0] == 2.0


def test_a_slow_client_makes_a_round_invalid_and_the_verdict_silent() -> None:
    made = document(WINS, client=ClientFigures(80.0, 90.0, 1.0, 1.0))
    assert {arm["valid"] for arm in made["arms"]} == {0}
    assert made["arms"][0]["rounds"][0]["invalid"] == "the load generator was 80 ms late; the limit is 50 ms"
    assert (
        "nothing can be said; the load generator was the bottleneck in every round of" in made["verdict"][0]
    )
    assert made["arms"][0]["summary"]["bursts"]["burst_itl_ms"]["p99"]["median"] == pytest.approx(400.0)


def test_an_invalid_round_is_left_out_of_the_medians() -> None:
    result = InterferenceResult()
    for arm in ARMS:
        for repeat, (value, idle) in enumerate(((10.0, 0.0), (999.0, 0.2), (12.0, 0.0))):
            alone, bursts = phases(value)
            bursts.idle_share = idle
            result.rounds.append(Round(arm.name, repeat, "r", alone, bursts, CALM, CALM))
    spec = InterferenceSpec(ARMS, 10.0, 3, Slos())
    made = interference_document(spec, Profile(), SYNTHETIC_PRESETS["nano"], "float32", MACHINE, result)
    assert made["arms"][0]["valid"] == 2
    assert made["arms"][0]["rounds"][1]["invalid"].startswith("streams waited for the load generator 20%")
    assert made["arms"][0]["summary"]["bursts"]["burst_itl_ms"]["max"]["max"] == pytest.approx(12.0)


def test_where_nothing_fell_into_a_burst_nothing_is_said() -> None:
    result = InterferenceResult()
    for arm in ARMS:
        result.rounds.append(Round(arm.name, 0, "r", PhaseFigures(10.0), PhaseFigures(10.0), CALM, CALM))
    spec = InterferenceSpec(ARMS, 10.0, 1, Slos())
    made = interference_document(spec, Profile(), SYNTHETIC_PRESETS["nano"], "float32", MACHINE, result)
    json.dumps(made, allow_nan=False)
    assert "too few gaps between tokens fell into bursts" in made["verdict"][0]
    assert made["arms"][0]["summary"]["bursts"]["burst_itl_ms"]["p99"] is None
    assert made["arms"][0]["curves"]["in_burst"] == []
    assert "TTFT of burst prompts not measured" in made["cost"][0]
