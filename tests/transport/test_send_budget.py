"""The engine's share of a core that a sender runs on."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.wire import PREFILL, SECRET, KVMemory, RealLink, make_contract, make_header
from transport import send_budget
from transport.events import TransferAcked
from transport.send_budget import BURST_S, MOST_DELAY_S, SHARE, SendBudget
from transport.sender import KVSender


def test_a_burst_is_free_and_the_rest_is_paid_with_computing() -> None:
    budget = SendBudget()
    budget.refill(5.0)
    budget.spent(BURST_S)
    assert budget.rest_s(5.0, NOW) == 0.0
    budget.spent(0.003)
    assert budget.rest_s(5.0, NOW) == pytest.approx(0.003 / SHARE)
    assert budget.rest_s(5.0 + 0.002 / SHARE, NOW) == pytest.approx(0.001 / SHARE)
    assert budget.rest_s(5.0 + 0.003 / SHARE, NOW) == pytest.approx(0.0, abs=1e-9)


def test_long_computing_buys_no_more_than_a_burst() -> None:
    budget = SendBudget()
    assert budget.rest_s(1000.0, NOW) == 0.0
    budget.spent(BURST_S + 0.001)
    assert budget.rest_s(1000.0, NOW) == pytest.approx(0.001 / SHARE)
    budget.refill(1000.0)
    assert budget.rest_s(1000.0, NOW) == 0.0


def test_what_falls_behind_rests_no_more_until_all_has_left() -> None:
    budget = SendBudget()
    budget.spent(1.0)
    assert budget.rest_s(0.0, NOW) > 0
    assert budget.rest_s(0.1, NOW + 0.9 * MOST_DELAY_S) > 0
    for later in (1.0, 5.0):
        assert budget.rest_s(0.2, NOW + later * MOST_DELAY_S) == 0.0
    budget.caught_up()
    assert budget.rest_s(0.3, NOW + 6 * MOST_DELAY_S) > 0
    budget.refill(0.3)
    assert budget.rest_s(0.3, NOW + 6 * MOST_DELAY_S) == 0.0


@given(st.lists(st.tuples(st.floats(0, 0.01), st.floats(0, 0.1)), max_size=200))
def test_who_rests_when_told_never_takes_more_than_the_share(writes: list[tuple[float, float]]) -> None:
    budget, process_s, spent_s, largest_s = SendBudget(), 0.0, 0.0, 0.0
    for cpu_s, computed_s in writes:
        process_s += computed_s
        process_s += budget.rest_s(process_s, NOW)
        assert budget.rest_s(process_s, NOW) == pytest.approx(0.0, abs=1e-9)
        budget.spent(cpu_s)
        spent_s += cpu_s
        largest_s = max(largest_s, cpu_s)
    assert spent_s <= BURST_S + SHARE * process_s + largest_s + 1e-9


NOW = 100.0
MB = make_contract(num_layers=2, num_kv_heads=4, head_dim=64, block_size=512)  # 4 KiB per token


def test_a_sender_rests_beside_an_engine_that_computes_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With next to nothing allowed it writes one frame, and the others once the engine has stopped."""
    monkeypatch.setattr(send_budget, "SHARE", 1e-9)
    monkeypatch.setattr(send_budget, "BURST_S", 0.0)
    header = make_header(MB, num_tokens=2048)  # 8 MiB in 8 frames
    source = KVMemory(MB, header.num_tokens)
    source.storage[:] = bytes(range(256)) * (len(source.storage) // 256)
    has_rested = threading.Event()

    def is_computing() -> bool:
        if link.sender.num_rests >= 3:
            has_rested.set()
        return not has_rested.is_set()

    with RealLink(MB) as link:
        link.sender.close()
        link.sender = KVSender(link.receiver.address, SECRET, link.events.put, is_computing=is_computing)
        assert isinstance(link.transfer(header, source), TransferAcked)
        assert has_rested.is_set()
        assert link.handler.memories["r1", 0].content() == source.content()
        assert link.end().commit is not None


def test_kv_of_a_prompt_that_is_being_computed_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three quarters leave before the rest exists, although the engine computes all the time."""
    header = make_header(MB, num_tokens=8192)
    source = KVMemory(MB, header.num_tokens)
    spent: list[float] = []
    monkeypatch.setattr(SendBudget, "spent", lambda budget, cpu_s: spent.append(cpu_s))
    with RealLink(MB) as link:
        link.sender.close()
        link.sender = KVSender(link.receiver.address, SECRET, link.events.put, is_computing=lambda: True)
        transfer_id = link.sender.open(header)
        for layer in range(MB.num_layers):
            for kv in (0, 1):
                views = source.views(layer, kv, 0, 6144)
                link.sender.send(transfer_id, layer, kv, 0, 6144, views)
        while link.sender.written_raw_bytes(transfer_id) < header.raw_bytes * 3 // 4:
            link.handler.first_data.wait(0.01)
        assert spent == []
        for layer in range(MB.num_layers):
            for kv in (0, 1):
                views = source.views(layer, kv, 6144, 2048)
                link.sender.send(transfer_id, layer, kv, 6144, 2048, views)
        link.sender.commit(transfer_id, PREFILL)
        assert isinstance(link.last_event(), TransferAcked)
        assert link.sender.num_rests == 0


def test_a_short_prompt_never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_budget, "SHARE", 1e-9)
    monkeypatch.setattr(send_budget, "BURST_S", 0.0)
    header = make_header(MB, num_tokens=512)  # 2 MiB in 4 frames
    source = KVMemory(MB, header.num_tokens)
    with RealLink(MB) as link:
        link.sender.close()
        link.sender = KVSender(link.receiver.address, SECRET, link.events.put, is_computing=lambda: True)
        assert isinstance(link.transfer(header, source), TransferAcked)
        assert link.sender.num_rests == 0
