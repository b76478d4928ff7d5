"""A router whose decision raised ends: it may hold requests that nobody serves any more."""

import contextlib
import socket

import pytest

from cluster.control import RouterSpec
from cluster.json_stream import JsonStream
from cluster.profile import Profile
from cluster.router import Router
from cluster.router_messages import Stimulus, Ticked
from cluster.router_state import RouterState


async def test_a_decision_that_raises_ends_the_router(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(state: RouterState, stimulus: Stimulus, now: float) -> None:
        raise ZeroDivisionError("of a forecast")

    monkeypatch.setattr(RouterState, "handle", raises)
    ours, theirs = socket.socketpair()
    spec = RouterSpec(
        run="r",
        run_dir="/",
        secret="00",
        token="t",
        profile=Profile(),
        listen_fd=-1,
        mode="disagg",
        codec="raw",
    )
    ended: list[str] = []
    parent = await JsonStream.from_socket(theirs)
    with contextlib.closing(ours):
        router = Router(spec, parent, on_broken=lambda: ended.append("ended"))
        with pytest.raises(ZeroDivisionError):
            router.apply(Ticked())
        await parent.close()
    assert ended == ["ended"]
    assert "ZeroDivisionError: of a forecast" in capsys.readouterr().err
