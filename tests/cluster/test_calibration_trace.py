"""The calibration's requests: always the same, within the context, and of bounded length whatever the engine."""

import pytest

from cluster.calibration_trace import MOST_PREFILL_S, NUM_REQUESTS, calibration_trace
from tests.cluster.sim_setup import plain_costs


@pytest.mark.parametrize("s_per_token", [1e-6, 1e-4, 5e-3])
@pytest.mark.parametrize("max_model_len", [128, 8192])
def test_it_fits_model_and_engine(s_per_token: float, max_model_len: int) -> None:
    costs = plain_costs(s_per_token)
    trace = calibration_trace(costs, max_model_len)
    assert trace == calibration_trace(costs, max_model_len)
    assert len(trace.requests) == NUM_REQUESTS
    assert all(each.prompt_tokens + each.output_tokens <= max_model_len for each in trace.requests)
    assert [each.at_s for each in trace.requests] == sorted(each.at_s for each in trace.requests)
    longest_s = max(costs.prefill_s(each.prompt_tokens) for each in trace.requests)
    assert longest_s <= MOST_PREFILL_S + 1e-9
    assert trace.requests[-1].at_s <= 2 * NUM_REQUESTS * MOST_PREFILL_S
