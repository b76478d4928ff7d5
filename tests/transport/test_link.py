import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.busy_meter import BusyMeter, BusyTime
from transport.faults import CorruptNextFrame, Cut, FaultQueue, Stall
from transport.link import (
    MAX_FRAME_BYTES,
    MAX_SEND_BUFFER_BYTES,
    MIN_FRAME_BYTES,
    SO_MAX_PACING_RATE,
    UNSHAPED,
    DelayLine,
    LinkShape,
    frame_bytes,
    send_buffer_bytes,
    shape_socket,
)


def drain(line: DelayLine[int], now: float) -> list[int]:
    items = []
    while (item := line.pop(now)) is not None:
        items.append(item)
    return items


def test_frames_wait_side_by_side() -> None:
    line: DelayLine[int] = DelayLine(LinkShape(delay_s=0.5))
    for index in range(10):
        line.put(index, now=index * 0.01)
    assert line.next_at() == 0.5
    assert drain(line, 0.4999) == []
    assert drain(line, 0.5 + 9 * 0.01) == list(range(10))
    assert line.next_at() is None


@given(st.lists(st.floats(0, 0.1), min_size=1, max_size=50), st.integers(0, 1000))
def test_jitter_moves_frames_within_its_bounds_and_never_past_each_other(
    gaps: list[float], seed: int
) -> None:
    line: DelayLine[int] = DelayLine(LinkShape(delay_s=0.2, jitter_s=0.1), seed)
    now, entered = 0.0, []
    for index, gap in enumerate(gaps):
        now += gap
        entered.append(now)
        line.put(index, now)
    for index, at in enumerate(entered):
        eligible_at = line.next_at()
        assert eligible_at is not None
        latest = max(entered[: index + 1]) + 0.3
        assert at + 0.1 - 1e-9 <= eligible_at <= latest + 1e-9
        assert line.pop(eligible_at) == index


def test_jitter_repeats_with_its_seed() -> None:
    def times(seed: int) -> list[float | None]:
        line: DelayLine[int] = DelayLine(LinkShape(delay_s=1.0, jitter_s=0.5), seed)
        seen = []
        for index in range(5):
            line.put(index, now=10.0 * index)
            seen.append(line.next_at())
            line.pop(1e9)
        return seen

    assert times(4) == times(4)
    assert times(4) != times(5)


def test_a_change_of_shape_does_not_reorder() -> None:
    line: DelayLine[int] = DelayLine(LinkShape(delay_s=1.0))
    line.put(0, now=0.0)
    line.shape = UNSHAPED
    line.put(1, now=0.1)
    assert drain(line, 0.5) == []
    assert drain(line, 1.0) == [0, 1]


def test_discard_takes_out_what_is_unwanted() -> None:
    line: DelayLine[int] = DelayLine(UNSHAPED)
    for index in range(6):
        line.put(index, now=0.0)
    line.discard(lambda item: item % 2 == 0)
    assert drain(line, 0.0) == [1, 3, 5]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s is 0; allowed is 1 or more, or None"),
        ({"delay_s": -1}, "delay_s is -1"),
        ({"jitter_s": 99}, "jitter_s is 99"),
    ],
)
def test_impossible_shapes_are_refused(fields: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LinkShape(**fields)


def test_slow_links_get_small_frames_and_buffers() -> None:
    slow, fast = LinkShape(12.5e6), LinkShape(1.25e9)
    assert MIN_FRAME_BYTES < frame_bytes(slow) < frame_bytes(fast) == frame_bytes(UNSHAPED) == MAX_FRAME_BYTES
    assert send_buffer_bytes(slow) < send_buffer_bytes(fast) == MAX_SEND_BUFFER_BYTES


def test_a_socket_can_be_shaped_again_and_again() -> None:
    with socket.socket() as sock:
        for rate in (12.5e6, 12.5e9, None, 125e6):
            shape_socket(sock, LinkShape(rate))
        assert sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == 125_000_000
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_faults_happen_once_each_and_in_order() -> None:
    faults = FaultQueue()
    assert not faults.take_corruption()
    assert faults.bytes_before(0, 100) is None
    faults.add(CorruptNextFrame())
    faults.add(Stall(1.5))
    assert faults.bytes_before(0, 100) is None
    assert faults.take_corruption()
    assert not faults.take_corruption()
    assert faults.bytes_before(20, 100) == 30
    assert faults.bytes_before(80, 100) == 0
    assert faults.take() == Stall(1.5)
    faults.add(Cut())
    assert not faults.take_corruption()
    assert faults.take() == Cut()


def test_a_fault_of_every_frame_stays_until_its_time_is_over() -> None:
    faults = FaultQueue()
    faults.add(Cut(), until=10.0, every_frame=True)
    for now in (1.0, 9.9):
        faults.expire(now)
        assert faults.bytes_before(0, 100) == 50
        assert faults.take() == Cut()
    faults.expire(10.0)
    assert faults.bytes_before(0, 100) is None


def test_a_fault_that_found_no_frame_in_time_is_forgotten() -> None:
    faults = FaultQueue()
    faults.add(CorruptNextFrame(), until=10.0)
    faults.expire(10.0)
    assert not faults.take_corruption()


def test_busy_time_is_shared_by_those_who_write_and_leaves_out_pauses() -> None:
    meter, first, second = BusyMeter(), BusyTime(), BusyTime()
    meter.writing(first, now=0.0)
    meter.writing(second, now=1.0)
    meter.writing(first, now=3.0)
    meter.idle(now=4.0, drained_at=4.5)
    meter.idle(now=4.2, drained_at=9.0)  # still the same pause
    meter.writing(second, now=10.0)
    meter.idle(now=11.0, drained_at=11.0)
    meter.drained(first, received_at=4.4, now=11.5)  # not the one being charged: too late to correct
    meter.drained(second, received_at=11.25, now=11.5)
    meter.stopped(now=20.0)
    assert first.busy_s == pytest.approx(1.0 + 1.5)
    assert second.busy_s == pytest.approx(2.0 + 1.25)


def test_a_pause_counts_as_far_as_the_kernel_was_busy_in_it() -> None:
    meter, account = BusyMeter(), BusyTime()
    meter.writing(account, now=0.0)
    meter.idle(now=1.0, drained_at=1.0, kernel_busy_s=50.0)
    assert meter.is_paused
    meter.resumes(kernel_busy_s=50.5)
    meter.writing(account, now=3.0)
    assert not meter.is_paused
    assert meter.spent_s(account, now=3.0) == pytest.approx(1.5)
    meter.idle(now=4.0, drained_at=4.0, kernel_busy_s=60.0)
    meter.resumes(kernel_busy_s=99.0)  # its clock is coarse: never more than the pause
    meter.writing(account, now=5.0)
    assert meter.spent_s(account, now=5.0) == pytest.approx(3.5)


def test_a_receivers_time_from_another_clock_is_not_believed() -> None:
    meter, account = BusyMeter(), BusyTime()
    meter.writing(account, now=5.0)
    meter.idle(now=6.0, drained_at=6.0)
    meter.drained(account, received_at=1234.0, now=7.0)
    assert account.busy_s == pytest.approx(2.0)
