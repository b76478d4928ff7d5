"""Where a prompt is prefilled, by numbers that add up. No cluster, no clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.handoff_choice import (
    LOCAL,
    MIN_GAIN,
    REMOTE,
    Estimate,
    HandoffChoice,
    OnWire,
    PrefillSite,
    TransferPath,
    choose_handoff,
    estimate_local,
    estimate_remote,
)

SECONDS = st.floats(0, 10)
STEP_S = 0.09  # 512 tokens


def own_s(tokens: int) -> float:
    return tokens * STEP_S / 512


def wire_s(tokens: int, bits_per_s: float) -> float:
    return tokens * 6144 / (bits_per_s / 8)


def choose(
    tokens: int,
    bits_per_s: float = 10e9,
    *,
    streams: int = 0,
    backlog_tokens: int = 0,
    hides: bool = True,
    others: tuple[OnWire, ...] = (),
) -> HandoffChoice:
    prefill = PrefillSite(own_s(tokens), backlog_s=own_s(backlog_tokens), step_s=STEP_S)
    decode = PrefillSite(
        own_s(tokens), step_s=STEP_S, streams=streams, decode_step_s=0.002 if streams else 0.0
    )
    path = TransferPath(wire_s(tokens, bits_per_s), others=others, rest_s=0.002, hides=hides)
    return choose_handoff(estimate_remote(tokens, prefill, path), estimate_local(tokens, decode))


def test_a_long_prompt_beside_streams_goes_to_the_prefill_worker_on_a_fast_link() -> None:
    choice = choose(8000, 10e9, streams=4)
    assert choice.choice == REMOTE
    assert choice.remote is not None
    assert choice.local is not None
    assert choice.remote.transfer_ms == pytest.approx(2.0)  # hidden but for what every handoff takes
    assert choice.local.stall_ms == pytest.approx(4 * own_s(8000) * 1e3)


@pytest.mark.parametrize("tokens", [64, 512, 8000])
def test_a_slow_link_makes_the_decode_worker_prefill(tokens: int) -> None:
    choice = choose(tokens, 10e6)
    assert choice.choice == LOCAL
    assert choice.remote is not None
    exposed_s = wire_s(tokens, 10e6) - own_s(tokens)
    assert choice.remote.transfer_ms == pytest.approx((exposed_s + 0.002) * 1e3)
    assert choose(8000, 10e9).choice == REMOTE


def test_a_short_prompt_does_not_wait_behind_a_burst() -> None:
    """Two prompts of 8,000 tokens are with the only prefill worker; four streams decode."""
    choice = choose(64, streams=4, backlog_tokens=16_000)
    assert choice.choice == LOCAL
    assert choice.remote is not None
    assert choice.local is not None
    # the engine lets it pass in the next step, which is full
    assert choice.remote.queue_ms + choice.remote.prefill_ms == pytest.approx(1.5 * STEP_S * 1e3)
    assert choice.local.total_ms < choice.remote.total_ms
    assert choose(64, streams=4).choice == REMOTE, "without the burst the stall of four streams decides"


def test_a_long_prompt_waits_its_turn_rather_than_stall_streams() -> None:
    choice = choose(8000, streams=4, backlog_tokens=8000)
    assert choice.choice == REMOTE
    assert choice.remote is not None
    assert choice.remote.queue_ms == pytest.approx(own_s(8000) * 1e3)
    assert choose(8000, streams=0, backlog_tokens=8000).choice == LOCAL, "nobody is stalled, and it is sooner"


def test_bulk_begins_at_the_end_of_the_prefill() -> None:
    choice = choose(8000, 1e9, hides=False)
    assert choice.remote is not None
    assert choice.remote.transfer_ms == pytest.approx((wire_s(8000, 1e9) + 0.002) * 1e3)


def test_what_is_on_the_link_is_waited_for() -> None:
    """A transfer that the link cannot carry as fast as it is computed leaves a backlog, which grows until then."""
    slower = OnWire(begin_s=0.0, computed_s=1.0, end_s=3.0)
    assert slower.backlog_s(0.5) == pytest.approx(1.0)
    assert slower.backlog_s(2.0) == pytest.approx(1.0)
    assert slower.backlog_s(4.0) == 0.0
    assert slower.after(1.5).backlog_s(0.0) == pytest.approx(1.5)
    free, busy = choose(64, hides=False), choose(64, hides=False, others=(slower,))
    assert free.remote is not None
    assert busy.remote is not None
    waited_ms = slower.backlog_s(own_s(64)) * 1e3
    assert busy.remote.transfer_ms - free.remote.transfer_ms == pytest.approx(waited_ms)


def test_one_that_the_link_keeps_up_with_is_in_nobodys_way() -> None:
    hidden = OnWire(begin_s=0.0, computed_s=1.0, end_s=1.0)
    assert hidden.backlog_s(0.5) == 0.0


def test_one_whose_bytes_all_come_at_one_moment_is_in_nobodys_way_before() -> None:
    at_once = OnWire(begin_s=2.0, computed_s=2.0, end_s=5.0)
    assert (at_once.backlog_s(1.0), at_once.backlog_s(2.0), at_once.backlog_s(4.0)) == (0.0, 3.0, 1.0)


def test_local_has_to_be_clearly_better() -> None:
    remote = Estimate(REMOTE, 0.0, 100.0, 0.0, 0.0, 0)
    near = Estimate(LOCAL, 0.0, 100.0 * (1 - MIN_GAIN / 2), 0.0, 0.0, 0)
    choice = choose_handoff(remote, near)
    assert choice.choice == REMOTE
    assert "not 10 % below" in choice.reason


def test_streams_of_a_worker_that_does_both_count_on_either_side() -> None:
    both = PrefillSite(own_s(512), step_s=STEP_S, streams=2, decode_step_s=0.002)
    estimate = estimate_remote(512, both, TransferPath(0.001))
    assert estimate.stall_ms == pytest.approx(2 * own_s(512) * 1e3)
    assert "stall of 2 streams" in str(estimate)


@given(
    st.integers(1, 8000),
    SECONDS,
    SECONDS,
    st.integers(0, 4096),
    st.integers(0, 32),
    SECONDS,
    SECONDS,
    st.booleans(),
)
def test_the_reason_holds_the_parts_and_they_add_up(
    tokens: int, own: float, backlog: float, short: int, streams: int, wire: float, rest: float, hides: bool
) -> None:
    site = PrefillSite(own, backlog, short, STEP_S, 512, streams, 0.002)
    remote = estimate_remote(
        tokens, PrefillSite(own, backlog, short, STEP_S), TransferPath(wire, (), rest, hides)
    )
    local = estimate_local(tokens, site)
    choice = choose_handoff(remote, local)
    for estimate in (remote, local):
        parts = (estimate.queue_ms, estimate.prefill_ms, estimate.transfer_ms, estimate.stall_ms)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(estimate.total_ms)
        assert f"{estimate.total_ms:.1f} ms" in choice.reason
    assert choice.chosen is (remote if choice.choice == REMOTE else local)
    if choice.choice == LOCAL:
        assert local.total_ms < remote.total_ms
