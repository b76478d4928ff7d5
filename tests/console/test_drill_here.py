"""Drills of the console: what is offered, what is said before, and the verdict that a run's directory keeps."""

import json
from pathlib import Path

from cluster.control import AddNote, SetLoad
from cluster.drill_file import load_drill
from cluster.events import (
    CodecChanged,
    Event,
    LoadStopped,
    ModeChanged,
    NoteAdded,
    RequestCancelled,
    WorkerDraining,
    encode_event,
)
from cluster.profile import load_profile
from cluster.run_dir import ClockAnchor, RunInfo, write_run_info
from console.drill_here import all_differences, differences
from console.drill_verdict import VERDICT_FILE, read_verdict
from console.screens.main import MainScreen
from console.view_state import ViewState
from tests.console.harness import console
from tests.console.history import story


def run_info(run_dir: Path) -> RunInfo:
    return RunInfo(
        run="r", profile=load_profile("10gbe", {}), versions={}, clock=ClockAnchor(wall=0.0, monotonic=0.0),
        supervisor_pid=1, url="http://127.0.0.1:1", token_path=str(run_dir / "token"),
    )  # fmt: skip


def test_what_a_cluster_has_otherwise_is_named() -> None:
    drill = load_drill("kill-prefill")
    found = differences(drill, load_profile("10gbe", {}))
    assert "cluster.prefill 1 here, 2 in the drill" in found
    assert "engine.prefix_caching True here, False in the drill" in found
    assert not any(line.startswith("router.port") for line in found)
    same = load_profile("10gbe", {
        "cluster.prefill": 2, "engine.prefix_caching": False, "engine.prefill_chunk_tokens": 64,
        "model.dtype": "float32",
    })  # fmt: skip
    assert differences(drill, same) == []


def test_what_an_operator_has_changed_is_named_too() -> None:
    state = ViewState()
    changes = [
        ModeChanged(at=1020.0, mode="colocated", cause="operator, key m"),
        CodecChanged(at=1021.0, codec="lossless", cause="operator, key i"),
        WorkerDraining(at=1022.0, worker_id="prefill-0", reason="drain", cause="operator, key D"),
    ]
    for event in [*story(), *changes]:
        state.fold(event)
    found = all_differences(load_drill("cut-link"), load_profile("10gbe", {}), state)
    assert found[:3] == [
        "mode colocated here, disagg in the drill",
        "codec lossless here, raw in the drill",
        "prefill-0 is drained",
    ]


async def test_drills_are_offered_with_what_they_promise(tmp_path: Path) -> None:
    idle: list[Event] = [*story(), LoadStopped(at=1040.0, name="steady")]
    write_run_info(tmp_path, run_info(tmp_path))
    async with console(tmp_path, idle, (120, 40)) as shown:
        await shown.press("d")
        for text in ("kill-prefill", "rolling-restart", "this cluster differs: ", "expects finished all"):
            await shown.wait_for(text)
        await shown.press("escape")
        assert isinstance(shown.app.screen, MainScreen)
        assert shown.cluster.commands == []


async def test_a_drill_stops_the_load_and_waits_for_its_requests(tmp_path: Path) -> None:
    write_run_info(tmp_path, run_info(tmp_path))
    async with console(tmp_path, story(), (120, 40)) as shown:
        running = list(shown.app.state.requests.live)
        assert running
        await shown.press("d")
        await shown.wait_for("first: the load steady is stopped and drained")
        await shown.pilot.press("d")
        while not shown.cluster.commands:
            await shown.pilot.pause(0.01)
        shown.app.draw()
        await shown.wait_for("RUNNING: waits until no request runs")
        assert shown.cluster.commands == [SetLoad(name="", cause="drill burst")]
        at = shown.app.state.last_at
        ended = [RequestCancelled(at=at, request_id=it, phase="decode") for it in running]
        with shown.path.open("ab") as file:
            for event in (LoadStopped(at=at, name="steady"), *ended):
                file.write(encode_event(event) + b"\n")
        await shown.app.feed.read_available()
        while len(shown.cluster.commands) < 2:
            await shown.pilot.pause(0.01)
        assert shown.cluster.commands[1] == AddNote(text="drill burst begins")


async def test_how_earlier_drills_ended_stays_in_their_tab(tmp_path: Path) -> None:
    notes = [
        NoteAdded(at=1030.0, text="drill burst PASS: 6/6 finished"),
        NoteAdded(at=1031.0, text="drill cut FAIL: 1 answer was wrong"),
        NoteAdded(at=1032.0, text="drill PASS without a name"),
    ]
    async with console(tmp_path, [*story(), *notes], (120, 40)) as shown:
        await shown.press("5", "f", "f")
        await shown.wait_for("earlier, 00:31.0: drill cut FAIL: 1 answer was wrong")
        assert "earlier, 00:30.0: drill burst PASS: 6/6 finished" in shown.text
        assert "earlier, 00:32" not in shown.text


async def test_a_run_without_its_description_has_no_drills(tmp_path: Path) -> None:
    idle: list[Event] = [*story(), LoadStopped(at=1040.0, name="steady")]
    async with console(tmp_path, idle) as shown:
        await shown.press("d")
        await shown.wait_for("run.json cannot be read")


async def test_the_verdict_of_a_run_is_shown(tmp_path: Path) -> None:
    document = {
        "drill": "burst", "verdict": "fail", "headline": "5/6 finished", "run": "r",
        "expectations": [
            {"name": "finished", "expected": "all", "actual": 5, "ok": False, "text": "5/6", "look_at": ["r1"]}
        ],
    }  # fmt: skip
    (tmp_path / VERDICT_FILE).write_text(json.dumps(document))
    async with console(tmp_path, story(), (120, 40)) as shown:
        assert "drill burst FAIL 0/1: 5/6 finished" in shown.text
        assert "XX finished: 5/6 (expected all); look at r1" in shown.text


def test_a_verdict_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_verdict(tmp_path) is None
    (tmp_path / VERDICT_FILE).write_text('{"drill": 1}')
    assert read_verdict(tmp_path) is None
