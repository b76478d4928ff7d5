"""What the console keeps of a run does not grow with the run."""

import pickle
from itertools import takewhile

from console.view_state import ViewState
from tests.console.long_log import long_run


def kept_bytes(state: ViewState) -> dict[str, int]:
    """By attribute; the ids of the last 100,000 requests apart, which have a bound of their own."""
    return {name: len(pickle.dumps(value)) for name, value in vars(state).items() if name != "_filter"}


def test_the_view_of_forty_minutes_is_no_larger_than_that_of_fifteen() -> None:
    """Ten minutes are the longest window; what is counted by number is full before."""
    state = ViewState()
    sizes = []
    events = takewhile(lambda event: event.at < 1000.0 + 40 * 60, long_run(requests_per_s=3.0))
    for event in events:
        if event.at > 1000.0 + 15 * 60 and not sizes:
            sizes.append(kept_bytes(state))
        state.fold(event)
    sizes.append(kept_bytes(state))
    early, late = sizes
    assert state.requests.finished > 6000
    assert {name: size for name, size in late.items() if size > 1.2 * early[name] + 20_000} == {}
