"""What the keys of the action table send, by what the log says."""

import pytest

from cluster.control import SetCodec, SetHandoff
from cluster.events import CodecChanged, HandoffChanged, RunStarted
from console.action_commands import next_codec, next_handoff
from console.view_state import ViewState


def started(codec: str = "raw", handoff: str = "always") -> ViewState:
    state = ViewState()
    run = RunStarted(
        at=1.0, run="r", profile="p", model="x", mode="disagg", codec=codec, handoff=handoff, wall_at=0.0
    )
    state.fold(run)
    return state


@pytest.mark.parametrize(
    ("own", "seen"),
    [
        ("raw", ["int8", "lossless", "raw"]),
        ("int8", ["lossless", "raw", "int8"]),
        ("lossless", ["raw", "int8", "lossless"]),
        ("auto", ["raw", "int8", "lossless", "auto"]),
    ],
)
def test_the_codec_key_comes_back_to_what_the_profile_asked_for(own: str, seen: list[str]) -> None:
    state = started(codec=own)
    for codec in seen:
        command = next_codec(state)
        assert isinstance(command, SetCodec)
        assert command.codec == codec
        state.fold(CodecChanged(at=2.0, codec=codec))
    assert state.codec == own


def test_handoff_goes_in_turn() -> None:
    state = started(handoff="auto")
    for handoff in ("never", "always", "auto"):
        command = next_handoff(state)
        assert isinstance(command, SetHandoff)
        assert command.handoff == handoff
        state.fold(HandoffChanged(at=2.0, handoff=handoff))
