"""The calibration's requests: the trace's lengths at other times, always the same, of bounded length."""

import pytest

from cluster.calibration_trace import MOST_PREFILL_S, MOST_REQUESTS, calibration_trace
from cluster.sim_calibration import MIN_REQUESTS
from cluster.trace import TraceRequest
from tests.cluster.sim_setup import plain_costs

TRACE = [TraceRequest(index * 9.0, 100 + 10 * index, 1 + index, prefix_ids=(1, 2)) for index in range(40)]


@pytest.mark.parametrize("s_per_token", [1e-6, 1e-3, 5e-2])
def test_it_has_the_traces_lengths_and_fits_the_engine(s_per_token: float) -> None:
    costs = plain_costs(s_per_token)
    found = calibration_trace(TRACE, costs).requests
    assert found == calibration_trace(TRACE, costs).requests
    lengths = {(each.prompt_tokens, each.output_tokens) for each in TRACE}
    assert {(each.prompt_tokens, each.output_tokens) for each in found} <= lengths
    assert not any(each.prefix_ids for each in found)
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    assert MIN_REQUESTS <= len(found) <= MOST_REQUESTS
    if len(found) > MIN_REQUESTS:
        assert sum(costs.prefill_s(each.prompt_tokens) for each in found) <= 1.5 * MOST_PREFILL_S


def test_one_worker_is_just_busy() -> None:
    costs = plain_costs(1e-3)
    found = calibration_trace(TRACE, costs).requests
    work_s = sum(costs.prefill_s(each.prompt_tokens) for each in found)
    assert found[-1].at_s == pytest.approx(work_s, rel=0.3)
