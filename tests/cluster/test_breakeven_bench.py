"""Break-even: the forecast's arithmetic, what is taken from a log, where curves cross, how far off a forecast was."""

import itertools
import json

import pytest

from cluster.breakeven_bench import (
    BreakevenResult,
    BreakevenSpec,
    Calibration,
    MeasuredLink,
    MeasuredRequest,
    RecomputeSample,
    TransferSample,
)
from cluster.breakeven_bench_forecast import (
    BULK,
    DELIVERIES,
    STREAM,
    ForecastInputs,
    KVGeometry,
    PrefillCurve,
    break_even_bytes_per_s,
    calibration_tokens,
    fit_prefill,
    forecast,
    last_piece_share,
)
from cluster.breakeven_bench_report import breakeven_document, crossing
from cluster.events import (
    Event,
    FellBack,
    FirstToken,
    PrefillFinished,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    TransferCompleted,
    TransferFailed,
)
from cluster.planner import HANDOFF_OVERHEAD_S, kv_transfer_ms
from cluster.profile import Profile
from engine.model_ids import SYNTHETIC_PRESETS
from transport.codec_choice import CodecRate

RAW = CodecRate(float("inf"), float("inf"), 1.0)
INT8 = CodecRate(4e9, 8e9, 0.53, is_lossy=True)
INPUTS = ForecastInputs(
    prefill=PrefillCurve(per_token_s=1 / 5000),
    codecs={"raw": RAW, "int8": INT8},
    kv=KVGeometry(num_layers=8, num_kv_heads=4, head_dim=32, dtype="bfloat16", chunk_tokens=512),
)


# --- prefill -------------------------------------------------------------------------------------------------------


def test_a_known_prefill_curve_is_found_again() -> None:
    curve = PrefillCurve(0.002, 1e-4, 3e-8)
    lengths = calibration_tokens(8000)
    assert lengths == [250, 1000, 3000, 6000]
    found = fit_prefill(lengths, [curve.seconds(tokens) for tokens in lengths])
    assert found.seconds(8000) == pytest.approx(curve.seconds(8000))
    assert found.seconds(100) == pytest.approx(curve.seconds(100))
    assert found.tokens_per_s(1000) == pytest.approx(1000 / 0.132)


def test_no_part_of_a_prefill_curve_is_negative() -> None:
    """Times that grow more slowly than the tokens would give attention a negative price."""
    found = fit_prefill([100, 1000, 3000, 6000], [0.02, 0.1, 0.28, 0.5])
    assert min(found.fixed_s, found.per_token_s, found.per_pair_s) >= 0
    assert found.seconds(3000) == pytest.approx(0.28, rel=0.15)


def test_few_lengths_give_fewer_parts_and_none_is_an_error() -> None:
    assert fit_prefill([1000], [0.5]) == PrefillCurve(per_token_s=pytest.approx(0.0005))
    two = fit_prefill([100, 1000], [0.15, 0.6])
    assert (two.fixed_s, two.per_token_s, two.per_pair_s) == (pytest.approx(0.1), pytest.approx(0.0005), 0.0)
    assert calibration_tokens(1) == [1]
    with pytest.raises(ValueError, match="at least one length"):
        fit_prefill([], [])
    with pytest.raises(ValueError, match="times above 0"):
        fit_prefill([1], [0.0])


# --- transfers -----------------------------------------------------------------------------------------------------


def test_a_raw_bulk_transfer_is_the_planners_time_on_the_wire_and_the_handoffs_cost() -> None:
    expected = forecast(8000, BULK, "raw", 12.5e6, delay_ms=20.0, inputs=INPUTS)
    planned = kv_transfer_ms(8000 * 4096, 12.5e6) + HANDOFF_OVERHEAD_S * 1e3 + 20.0
    assert expected.transfer_ms == pytest.approx(planned, rel=0.01)
    assert expected.recompute_ms == pytest.approx(1600.0)
    assert not expected.transfer_pays


def test_a_streamed_transfer_leaves_what_prefill_does_not_hide_or_its_last_piece() -> None:
    moving_ms = 8000 * 4096 / 12.5e6 * 1e3
    slow = forecast(8000, STREAM, "raw", 12.5e6, 0.0, INPUTS)
    assert slow.transfer_ms == pytest.approx(moving_ms - 1600.0 + 2.0, rel=0.01)
    fast = forecast(8000, STREAM, "raw", 1.25e9, 0.0, INPUTS)
    last_ms = last_piece_share(8000, INPUTS.kv) * moving_ms / 100
    assert fast.transfer_ms == pytest.approx(last_ms + 2.0, rel=0.05)


def test_a_codec_that_is_slower_than_the_link_bounds_the_transfer() -> None:
    slow = ForecastInputs(INPUTS.prefill, {"int8": CodecRate(1e8, 1e9, 0.53)}, INPUTS.kv)
    found = forecast(8000, BULK, "int8", 1.25e9, 0.0, slow)
    assert found.transfer_ms == pytest.approx(8000 * 4096 / 1e8 * 1e3, rel=0.1)


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("tokens", [100, 1000, 8000])
def test_the_decision_turns_at_the_break_even_link(delivery: str, codec: str, tokens: int) -> None:
    even = break_even_bytes_per_s(tokens, delivery, codec, 0.1, INPUTS)
    assert even is not None
    assert not forecast(tokens, delivery, codec, even * 0.9, 0.1, INPUTS).transfer_pays
    at_fast = forecast(tokens, delivery, codec, even * 1.1, 0.1, INPUTS)
    assert at_fast.transfer_pays
    assert at_fast.transfer_ms < at_fast.recompute_ms


def test_no_link_is_fast_enough_for_a_prompt_that_costs_less_than_a_handoff() -> None:
    assert break_even_bytes_per_s(9, BULK, "raw", 0.0, INPUTS) is None
    assert break_even_bytes_per_s(200, STREAM, "raw", 40.0, INPUTS) is None
    assert not forecast(9, BULK, "raw", 1e12, 0.0, INPUTS).transfer_pays


@pytest.mark.parametrize("tokens", [1024, 8192, 8200])
def test_the_last_piece_is_at_least_a_layer_and_at_most_a_chunk(tokens: int) -> None:
    """How rows are gathered is the stream's own affair; these bounds hold however it does that."""
    kv = INPUTS.kv
    last_chunk = tokens % kv.chunk_tokens or kv.chunk_tokens
    least, most = last_chunk / tokens / kv.num_layers, (last_chunk + kv.chunk_tokens) / tokens
    assert least <= last_piece_share(tokens, kv) <= most


def test_a_prompt_too_short_for_a_piece_is_its_own_last_piece() -> None:
    assert last_piece_share(100, INPUTS.kv) == 1.0


# --- one request's events ------------------------------------------------------------------------------------------


ARRIVED = RequestArrived(at=1.0, request_id="r1", prompt_tokens=10, max_tokens=2)
PREFILLED = PrefillFinished(
    at=2.0, request_id="r1", attempt=1, worker_id="prefill-0", prompt_tokens=10, compute_s=0.25
)
MOVED = TransferCompleted(
    at=3.0,
    request_id="r1",
    attempt=1,
    from_worker="prefill-0",
    to_worker="decode-0",
    codec="raw",
    tokens=10,
    raw_bytes=640,
    wire_bytes=640,
    duration_s=0.5,
    exposed_s=0.125,
    busy_s=0.4,
)
FIRST = FirstToken(at=3.1, request_id="r1", ttft_ms=400.0)
FINISHED = RequestFinished(at=3.2, request_id="r1", finish_reason="length", output_tokens=2, e2el_ms=410.0)


@pytest.mark.parametrize("order", list(itertools.permutations([ARRIVED, PREFILLED, MOVED, FIRST, FINISHED])))
def test_a_request_is_complete_when_all_is_told_in_whatever_order(order: tuple[Event, ...]) -> None:
    request = MeasuredRequest(handed_off=True)
    other = RequestArrived(at=0.5, request_id="p", prompt_tokens=1, max_tokens=1, label="probe")
    request.fold(other)
    for event in order:
        assert not request.is_complete
        request.fold(event)
    assert request.is_complete
    assert (request.compute_s, request.ttft_ms, request.transfer, request.problem) == (0.25, 400.0, MOVED, "")


def test_a_prompt_computed_locally_has_no_transfer() -> None:
    request = MeasuredRequest(handed_off=False)
    for event in (ARRIVED, PREFILLED, FIRST, FINISHED):
        request.fold(event)
    assert request.is_complete
    assert request.transfer is None


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (
            FellBack(at=2, request_id="r1", attempt=1, worker_id="d", reason="prefill_died", prompt_tokens=9),
            "the handoff failed: prefill_died",
        ),
        (
            TransferFailed(at=2, request_id="r1", attempt=1, worker_id="p", reason="timeout", detail="5 s"),
            "the handoff failed: timeout 5 s",
        ),
        (RequestFailed(at=2, request_id="r1", reason="no_worker"), "the request failed: no_worker"),
        (RequestRejected(at=2, reason="queue_full", status=429), "the request was refused: queue_full"),
        (
            PrefillFinished(
                at=2, request_id="r1", attempt=1, worker_id="p", prompt_tokens=9, compute_s=1, cached_tokens=8
            ),
            "8 tokens came from a prefix cache",
        ),
    ],
)
def test_a_request_that_went_another_way_is_no_sample(event: Event, problem: str) -> None:
    request = MeasuredRequest(handed_off=True)
    request.fold(ARRIVED)
    request.fold(event)
    assert request.problem == problem


# --- the document --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ([4.0, 1.0, 0.25], (10.0, "")),
        ([10.0, 0.1, 0.01], (10.0**0.5, "")),
        ([0.9, 0.5, 0.1], (None, "below")),
        ([9.0, 5.0, 1.0], (None, "above")),
        ([0.9, 2.0, 0.5], (10.0**1.5, "")),  # the last one counts: from there on moving is faster
    ],
)
def test_crossing_is_found_on_logarithmic_axes(ratios: list[float], found: tuple[float | None, str]) -> None:
    rate, side = crossing([1.0, 10.0, 100.0], ratios)
    assert (rate, side) == (pytest.approx(found[0]) if found[0] is not None else None, found[1])


def test_errors_and_decisions_come_from_the_samples() -> None:
    """1,000 tokens of 4,096 bytes: 200 ms to compute, forecast 200; two links of 80 and 320 Mb/s."""
    spec = BreakevenSpec((1000,), (8e7, 3.2e8), ("raw",), (BULK,), repeats=2)
    links = [MeasuredLink(BULK, asked, asked, asked, 0.0, "netns", "") for asked in spec.links]
    took_s = {8e7: (0.4, 0.44), 3.2e8: (0.1, 0.12)}
    transfers = [
        TransferSample(BULK, asked, "raw", 1000, 4_096_000, seconds, seconds, 0.2, 1e3 * seconds + 200)
        for asked, both in took_s.items()
        for seconds in both
    ]
    recomputes = [RecomputeSample(BULK, asked, 1000, 0.2, 205.0) for asked in spec.links for _ in range(2)]
    result = BreakevenResult({BULK: "run-a"}, links, transfers, recomputes)
    calibration = Calibration(INPUTS, {1000: 0.2}, "bfloat16", "2", "compiled")
    document = breakeven_document(spec, Profile(), SYNTHETIC_PRESETS["nano"], {}, calibration, result)
    json.dumps(document, allow_nan=False)
    slow, fast = document["transfers"]
    assert slow["transfer_ms"]["median"] == pytest.approx(420.0)
    assert (slow["pays"], slow["forecast_pays"]) == (False, False)
    assert (fast["pays"], fast["forecast_pays"]) == (True, True)
    assert fast["forecast_ms"] == pytest.approx(102.4 + 2.0, rel=0.02)
    assert fast["error"] == pytest.approx(fast["forecast_ms"] / 110.0 - 1)
    assert fast["ttft_ms"]["median"] == pytest.approx(310.0)
    assert document["recompute"][0]["error"] == pytest.approx(0.0)
    (curve,) = document["curves"]
    # 420 to 110 ms over a factor of 4: 200 ms lies log(2.1) / log(420 / 110) of the way
    assert curve["break_even_bits_per_s"] == pytest.approx(8e7 * 4**0.5538, rel=0.001)
    assert curve["forecast_break_even_bits_per_s"] == pytest.approx(4_096_000 * 8 / 0.198)
    assert [step["bits_per_s"] for step in curve["forecast"]][:: len(curve["forecast"]) - 1] == [
        pytest.approx(8e7),
        pytest.approx(3.2e8),
    ]
    judged = document["forecast"]
    assert (judged["decisions"], judged["decisions_right"], judged["wrong_decisions"]) == (2, 2, [])
    assert judged["transfer_error"]["count"] == 2
    assert judged["transfer_error"]["max"] == pytest.approx(max(abs(slow["error"]), abs(fast["error"])))
