"""Every key: the command it sends, and that its effect can be seen."""

from pathlib import Path

import pytest

from cluster.control import (
    AddNote,
    AddWorker,
    ChangeLink,
    Command,
    DrainWorker,
    HealFaults,
    InjectBurst,
    InjectLinkFault,
    KillWorker,
    RemoveWorker,
    RestartWorker,
    ResumeWorker,
    SetCodec,
    SetLoad,
    SetMode,
    SetRole,
)
from cluster.events import (
    CodecChanged,
    DecodeAdmitted,
    Event,
    FaultInjected,
    LoadStopped,
    ModeChanged,
    ModelDescribed,
    PrefillStarted,
    RequestArrived,
    RunReady,
    RunStarted,
    WorkerDraining,
    WorkerExited,
)
from console.actions import ACTIONS, REPLAY
from console.panels.events import EventsPanel
from console.panels.line_view import ChoiceLines
from console.screens.dialog import QuitDialog
from console.screens.help import HelpScreen
from console.screens.main import MainScreen
from console.screens.request_detail import detail_lines
from tests.console.harness import END_OF_STORY, Console, console
from tests.console.history import start, story


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return story()


K, L, R, D, PALETTE = (
    "operator, key k", "operator, key l", "operator, key R", "operator, key D", "operator, palette",
)  # fmt: skip
SENDS: list[tuple[str, Command]] = [
    ("b", InjectBurst(prompts=2, prompt_tokens=8000, cause="operator, key b")),
    ("B 3 enter", InjectBurst(prompts=3, prompt_tokens=8000, cause="operator, key b")),
    ("i", SetCodec(codec="int8", cause="operator, key i")),
    ("m", SetMode(mode="colocated", cause="operator, key m")),
    ("s", SetLoad(name="", cause="operator, key s")),
    ("k k", KillWorker(worker_id="prefill-0", signal="KILL", cause=K)),
    ("k t", KillWorker(worker_id="prefill-0", signal="TERM", cause=K)),
    ("k up right s", KillWorker(worker_id="router", signal="STOP", seconds=5.0, cause=K)),
    ("k c", KillWorker(worker_id="prefill-0", signal="CONT", cause=K)),
    ("k down enter", KillWorker(worker_id="decode-0", signal="KILL", cause=K)),
    ("l l", InjectLinkFault(worker_id="prefill-0", kind="cut", seconds=2.0, cause=L)),
    ("l left o", InjectLinkFault(worker_id="prefill-0", kind="corrupt", seconds=1.0, cause=L)),
    ("l a", InjectLinkFault(worker_id="prefill-0", kind="stall", seconds=2.0, cause=L)),
    ("l end l", ChangeLink(bits_per_s=1e9, delay_ms=20.05, seconds=2.0, cause=L)),
    ("l end r enter", ChangeLink(bits_per_s=1e10, delay_ms=0.05, cause=L)),
    ("R R", RestartWorker(worker_id="prefill-0", cause=R)),
    ("R n", RestartWorker(worker_id="prefill-0", drain_s=0.0, cause=R)),
    ("D D", DrainWorker(worker_id="prefill-0", cause=D)),
    ("1 down down D D", DrainWorker(worker_id="decode-0", cause=D)),
    ("a h i enter", AddNote(text="hi")),
]


async def test_every_key_sends_its_command(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        for keys, command in SENDS:
            shown.cluster.message = f"answer to {keys}"
            await shown.press(*keys.split())
            assert shown.cluster.commands[-1:] == [command]
            await shown.wait_for(f"answer to {keys}")
        assert len(shown.cluster.commands) == len(SENDS)


async def test_toggles_follow_what_the_log_says(tmp_path: Path, events: list[Event]) -> None:
    changes = [
        ModeChanged(at=1039.9, mode="colocated", cause="operator, key m"),
        CodecChanged(at=1039.91, codec="int8", cause="operator, key i"),
        LoadStopped(at=1039.92, name="steady", cause="operator, key s"),
    ]
    async with console(tmp_path, events) as shown:
        assert "load steady" in shown.text
        await shown.append(changes)
        assert "| COLOC  | int8 |" in shown.lines[0]
        assert "load off" in shown.text
        assert "load steady stopped (operator, key s)" in shown.text
        await shown.press("m", "i", "s")
        assert [type(command) for command in shown.cluster.commands] == [SetMode, SetCodec, SetLoad]
        mode, codec, load = shown.cluster.commands
        assert (mode, codec) == (
            SetMode(mode="disagg", cause="operator, key m"), SetCodec(codec="lossless", cause="operator, key i"),
        )  # fmt: skip
        assert load == SetLoad(name="steady", cause="operator, key s")


async def test_the_burst_is_not_longer_than_the_model_allows(tmp_path: Path) -> None:
    small = ModelDescribed(
        at=1.5, model="x", fingerprint="f", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8,
        kv_bytes_per_token=64, max_model_len=2048, block_size=16,
    )  # fmt: skip
    run = RunStarted(at=1.0, run="r", profile="p", model="x", mode="disagg", codec="raw", wall_at=0.0)
    async with console(tmp_path, [run, small, RunReady(at=2.0, after_s=1.0, url="u")], now=3.0) as shown:
        await shown.press("b")
        assert shown.cluster.commands == [InjectBurst(prompt_tokens=2032, cause="operator, key b")]


async def test_a_refused_command_is_a_toast_and_a_line(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events, (160, 45)) as shown:
        shown.cluster.ok, shown.cluster.message = False, "codec: [int8] is not built in"
        await shown.press("i")
        while shown.text.count("codec: [int8] is not built in") < 2:
            await shown.pilot.pause(0.01)
        shown.cluster.error = ConnectionRefusedError("nobody there")
        await shown.press("b")
        await shown.wait_for("Burst: the cluster cannot be reached: nobody there")


async def test_read_only_sends_nothing_and_says_so(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events, (160, 45), read_only=True) as shown:
        assert shown.lines[0].startswith(" read-only")
        await shown.press("b", "i", "m", "s", "k", "a")
        assert isinstance(shown.app.screen, MainScreen)
        assert shown.cluster.commands == []
        await shown.wait_for("Break a process: this console is read-only")


async def test_the_picker_shows_every_process(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("k")
        for worker_id in ("router", "prefill-0", "decode-0"):
            assert f"{worker_id:<12} * busy" in shown.text
        await shown.press("escape")
        assert shown.cluster.commands == []


async def test_export_asks_the_format_once(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("e")
        assert "CSV" in shown.text
        await shown.press("c")
        assert shown.exported == ["csv"]
        await shown.wait_for("export written")
        await shown.press("e")
        assert shown.exported == ["csv", "csv"]


async def test_help_lists_every_key(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("question_mark")
        for word in (
            "Burst",
            "Break a process",
            "Codec",
            "Mode",
            "Load on/off",
            "Export",
            "Quit",
            "Marks",
        ):
            assert word in shown.page()
        assert "Burst" in shown.text
        await shown.press("question_mark")
        assert isinstance(shown.app.screen, MainScreen)


async def test_the_palette_runs_an_action(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.pilot.press("ctrl+p")
        await shown.pilot.press("escape")
        await shown.pilot.press("colon")
        await shown.pilot.press(*"Mode")
        while "Mode  (m)" not in shown.text:
            await shown.pilot.pause(0.02)
        await shown.pilot.press("down", "enter")
        while not shown.cluster.commands:
            await shown.pilot.pause(0.02)
        assert shown.cluster.commands == [SetMode(mode="colocated", cause="operator, key m")]


async def test_pause_freezes_the_view_and_catches_up(tmp_path: Path, events: list[Event]) -> None:
    moment = [1040.0]
    async with console(tmp_path, events, now=lambda: moment[0]) as shown:
        await shown.press("p")
        frozen = shown.text
        assert shown.lines[0].startswith("PAUSED")
        moment[0] = 1045.0
        await shown.append([CodecChanged(at=1044.0, codec="int8")])
        assert shown.text == frozen
        await shown.press("p")
        await shown.append([])
        assert "| int8 |" in shown.lines[0]
        assert shown.lines[0].endswith("00:00:45")


async def test_focus_zoom_and_back(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        for key, alone, gone in (("1", "1 workers", "2 requests"), ("2", "2 requests", "4 events"),
                                 ("3", "3 ITL ms", "2 requests"), ("4", "4 events", "1 workers")):  # fmt: skip
            await shown.press(key, "z")
            await shown.settle(charts=True)
            assert alone in shown.text
            assert gone not in shown.text
            await shown.press("escape" if key in "13" else "z")
            await shown.settle()
            assert "1 workers" in shown.text
            assert "4 events" in shown.text


async def test_filter(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("slash", *"FALLB", "enter")
        assert "/FALLB" in shown.text
        assert "rc00000 done" in shown.text
        assert "rd00000" not in shown.text
        assert shown.cluster.commands == []  # letters typed into the filter are no keys
        await shown.press("escape")
        assert "rd00000" in shown.text


async def test_sorting(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("greater_than_sign")
        assert "sort prompt v" in shown.text
        assert "8,000" in shown.lines[10]
        await shown.press("I")
        assert "sort prompt ^" in shown.text
        assert "8,000" not in shown.lines[10]
        await shown.press("less_than_sign", "less_than_sign")
        assert "sort kv ^" in shown.text


async def test_feed_categories(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events, (160, 45)) as shown:
        assert "arrived" not in shown.text
        await shown.press("f")
        assert "FALLBACK local prefill" in shown.text
        assert "cluster READY" not in shown.text
        await shown.press("f", "f", "f")
        assert "arrived: 128 tokens in" in shown.text


async def test_request_detail_sums_its_ttft(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("slash", *"rb00000", "enter", "enter")
        page = shown.page()
        assert "request rb00000a11ce" in shown.text
        first = shown.app.state.requests.get("rb00000a11ce")
        assert first is not None
        assert first.first_token is not None
        ttft_ms = first.first_token.ttft_ms
        parts = [
            float(line.split(" ms")[0].split()[-1].replace(",", ""))
            for line in page.split("\n")
            if "%" in line
        ]
        assert len(parts) == 6
        residual = next(float(line.split()[1]) for line in page.split("\n") if "residual" in line)
        assert sum(parts) + residual == pytest.approx(ttft_ms, abs=0.6)
        for text in (
            "prefill-0: least queued (0)",
            "decode-0: most free blocks (1245)",
            "transfer 23.4 MiB raw",
        ):
            assert text in page
        fallen_back = shown.app.state.requests.get("rc0000012345")
        assert fallen_back is not None
        told = "\n".join(line.plain for line in detail_lines(shown.app.state, fallen_back, END_OF_STORY, 78))
        for text in (
            "attempt 1  P0>D0", "failed   peer_closed", "attempt 2  D0", "FALLBACK on decode-0: prefill_died",
        ):  # fmt: skip
            assert text in told


@pytest.mark.parametrize("opens", [("2", "enter"), ("1", "down", "enter")])
@pytest.mark.parametrize("key", ["question_mark", "f1"])
async def test_a_page_has_help_too(
    tmp_path: Path, events: list[Event], opens: tuple[str, ...], key: str
) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press(*opens)
        page = shown.app.screen
        await shown.press(key)
        assert isinstance(shown.app.screen, HelpScreen)
        await shown.press("escape")
        assert shown.app.screen is page


async def test_a_requests_history_is_in_the_order_of_time(tmp_path: Path) -> None:
    late = [
        RequestArrived(at=1010.0, request_id="r1", prompt_tokens=1, max_tokens=1),
        DecodeAdmitted(at=1012.0, request_id="r1", attempt=1, worker_id="decode-0", verified_at=1011.9),
        PrefillStarted(at=1011.0, request_id="r1", attempt=1, worker_id="prefill-0"),
    ]
    async with console(tmp_path, [*start(), *late]) as shown:
        await shown.press("2", "enter")
        page = shown.page()
        assert page.index("arrived") < page.index("prefill started") < page.index("admitted to decode")


async def test_logs_follow_their_file(tmp_path: Path, events: list[Event]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "decode-0.log").write_text("")
    (logs / "prefill-0.log").write_text("old line\n\x1b[31mred [/x]\n")
    async with console(tmp_path, events) as shown:
        await shown.press("1", "down", "L")
        assert "output 2 lines  following" in shown.text
        assert "?[31mred [/x]" in shown.text
        with (logs / "prefill-0.log").open("a") as file:
            file.writelines(f"line {number}\n" for number in range(100))
        await shown.settle()
        assert "line 99" in shown.text
        await shown.press("slash", *"line 5", "enter")
        assert "output 102 lines  /line 5 11" in shown.text
        first = shown.text
        await shown.press("n")
        assert shown.text != first
        assert "s follows" in shown.text
        await shown.press("N")
        assert shown.text == first
        await shown.press("s")
        assert "line 99" in shown.text
        await shown.press("t", *"0:30", "enter")
        assert "events 7 lines" in shown.text  # only what the run's log says has times
        assert "00:30.0 prefill-0 EXITED signal 9" in shown.text
        await shown.press("right")
        assert "decode-0 READY" in shown.text
        await shown.press("o", "w")
        assert "has no lines yet" in shown.text
        await shown.press("escape")
        assert isinstance(shown.app.screen, MainScreen)


async def test_a_process_has_a_page(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events, (120, 40)) as shown:
        await shown.press("1", "down", "enter")
        for text in (
            "* busy", "pid 4399", "restarts 1", "held 512 of 2,048", "stranded 0", "as prefill: least queued (0)",
            "prefill-0 EXITED signal 9 (operator)", "2,961 tok/s in its last prompt-only steps",
        ):  # fmt: skip
            assert text in shown.text
        await shown.press("left")
        assert "in flight" in shown.text  # the router's page
        await shown.press("q")
        await shown.press("4")
        while not (
            entry := shown.app.screen.query_one(EventsPanel).entry(
                shown.app.screen.query_one(EventsPanel).key
            )
        ):
            await shown.pilot.pause()
        await shown.press("enter")
        assert entry.worker_id
        assert "state       " in shown.text


async def test_screenshot(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("ctrl+s")
        assert "rd00000" in (tmp_path / "screen-39s.svg").read_text().replace("&#160;", " ")


async def ended(shown: Console) -> bool:
    await shown.pilot.pause()
    return shown.app._exit


@pytest.mark.parametrize("keys", [["q", "ctrl+c"], ["ctrl+c", "q"]])
async def test_quit_asks_and_stops(tmp_path: Path, events: list[Event], keys: list[str]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press(keys[0])
        assert isinstance(shown.app.screen, QuitDialog)
        assert not await ended(shown)
        await shown.pilot.press(keys[1])
        assert await ended(shown)
        assert shown.app.quit_choice == "stop"
        assert shown.app.return_code == 0


async def test_quit_can_be_taken_back(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        for stay in ("s", "escape", "n", "enter"):
            await shown.press("q", stay)
            assert isinstance(shown.app.screen, MainScreen)
            assert not await ended(shown)


async def test_quit_can_leave_the_cluster_to_itself(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("q")
        await shown.pilot.press("d")
        assert await ended(shown)
        assert (shown.app.quit_choice, shown.app.return_code) == ("detach", 0)


@pytest.mark.parametrize(
    ("keys", "choice"),
    [
        (["q", "enter"], "detach"),
        (["q", "q"], "detach"),
        (["q", "x"], "stop"),
        (["ctrl+c", "ctrl+c"], "detach"),
    ],
)
async def test_an_attached_console_stops_the_cluster_only_when_told_to(
    tmp_path: Path, events: list[Event], keys: list[str], choice: str
) -> None:
    async with console(tmp_path, events, owns_cluster=False) as shown:
        await shown.press(keys[0])
        assert isinstance(shown.app.screen, QuitDialog)
        await shown.pilot.press(keys[1])
        assert await ended(shown)
        assert (shown.app.quit_choice, shown.app.return_code) == (choice, 0)


async def test_ctrl_c_works_in_every_dialog(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("a", "ctrl+c")
        assert isinstance(shown.app.screen, QuitDialog)


async def test_other_keys_do_nothing_dangerous(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        for key in ("ctrl+q", "ctrl+z", "K", "j", "G"):
            await shown.pilot.press(key)
            assert not await ended(shown)
        assert isinstance(shown.app.screen, MainScreen)
        assert shown.cluster.commands == []


async def test_what_was_broken_is_healed(tmp_path: Path, events: list[Event]) -> None:
    hang = FaultInjected(at=1039.5, fault="hang", target="decode-0", cause="test", seconds=30.0)
    async with console(tmp_path, [*events, hang]) as shown:
        await shown.press("5")
        assert "! broken now: hang decode-0" in shown.text
        await shown.press("x")
        assert shown.cluster.commands == [HealFaults(cause="operator, key x")]


async def test_a_drain_ends_by_the_same_key(tmp_path: Path, events: list[Event]) -> None:
    draining = WorkerDraining(at=1039.9, worker_id="prefill-0", reason="drain", cause="test")
    async with console(tmp_path, [*events, draining]) as shown:
        assert "prefill-0  ~ draining" in shown.text
        await shown.press("D", "D")
        assert shown.cluster.commands == [ResumeWorker(worker_id="prefill-0", cause=D)]


PALETTE_SENDS: list[tuple[str, str, Command]] = [
    ("Codec auto", "", SetCodec(codec="auto", cause=PALETTE)),
    ("Start a load", "mixed", SetLoad(name="mixed", cause=PALETTE)),
    ("Add a prefill worker", "", AddWorker(role="prefill", cause=PALETTE)),
    ("Add a decode worker", "", AddWorker(role="decode", cause=PALETTE)),
]


async def test_actions_of_the_palette_alone(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        runs = {action.title.rstrip("."): action.run for action in ACTIONS if not action.keys}
        for title, typed, command in PALETTE_SENDS:
            await shown.app.run_action(runs[title])
            await shown.settle()
            if typed:
                await shown.press(*typed, "enter")
            await shown.settle()
            assert shown.cluster.commands[-1:] == [command]
        await shown.app.run_action(runs["Switch the role of a worker"])
        await shown.settle()
        await shown.press("b")
        assert shown.cluster.commands[-1] == SetRole(worker_id="prefill-0", role="both", cause=PALETTE)
        await shown.app.run_action(runs["Remove a worker"])
        await shown.settle()
        await shown.press("enter")
        assert shown.cluster.commands[-1] == RemoveWorker(worker_id="prefill-0", cause=PALETTE)
        await shown.app.run_action(runs["Show the last fallback"])
        await shown.settle()
        assert "FALLBACK on decode-0: prefill_died" in shown.page()


async def test_the_palette_follows_a_request_or_the_events_and_changes_colours(
    tmp_path: Path, events: list[Event]
) -> None:
    async with console(tmp_path, events) as shown:
        await shown.app.run_action("follow_request")
        await shown.settle()
        await shown.press(*"zz", "enter")
        assert "no request that is kept begins with 'zz'" in shown.text
        await shown.press("backspace", "backspace", *"rd00000", "enter")
        assert "request rd0000012345" in shown.text
        await shown.press("escape", "4", "f", "f", *["down"] * 12)
        assert shown.app.screen.query_one("#events", ChoiceLines).chosen_key
        await shown.app.run_action("screen.follow")
        await shown.settle()
        view = shown.app.screen.query_one("#events", ChoiceLines)
        assert (view.chosen_key, view.scroll_offset.y, view.has_focus) == ("", 0, True)
        await shown.app.run_action("change_theme")
        await shown.press(*"nord", "down", "enter")
        assert shown.app.theme == "nord"


async def test_copies(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("y")
        assert shown.app.clipboard == "rd0000012345"
        await shown.press("1", "down", "y")
        assert shown.app.clipboard == "prefill-0"
        await shown.press("k", "y", "escape")
        assert shown.app.clipboard == "kill -KILL 4399"
        await shown.app.run_action("copy_curl")
        assert shown.app.clipboard.startswith("curl -N http://127.0.0.1:8765/v1/completions -d ")


async def test_a_number_that_cannot_be_is_not_taken(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("B", *" x", "enter")
        assert "is not a burst; allowed" in shown.text
        await shown.press("escape", "l", "end", "r", *"1gbit zz", "enter")
        assert "'zz' is not a delay; allowed: 0 to 10000 ms" in shown.text
        assert shown.cluster.commands == []


async def test_tab_goes_round_the_panels(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        seen = []
        for _ in range(5):
            await shown.press("tab")
            assert shown.app.screen.focused is not None
            seen.append(shown.app.screen.focused.id)
        assert seen == ["strips", "events", "verdict", "workers", "requests-table"]
        await shown.press("shift+tab")
        assert shown.app.screen.focused.id == "workers"


def test_every_action_is_tried() -> None:
    """Each row of the table that a live console has is pressed or run by a test of this file, or named here."""
    tried = {keys.split()[0] for keys, _ in SENDS}
    elsewhere = {
        "help", "heal", "drill", "export", "pause", "logs", "zoom", "filter", "feed", "sort-next", "sort-back",
        "sort-invert", "copy", "panel-1", "panel-2", "panel-3", "panel-4", "panel-5", "panel-next", "panel-back",
        "back", "palette", "screenshot", "quit", "interrupt", "handoff",
        "codec-auto", "load-ask", "role", "add-prefill", "add-decode", "remove", "last-fallback", "curl", "run-dir",
        "follow-request", "follow-events", "theme",
    }  # fmt: skip
    missing = [
        action.id
        for action in ACTIONS
        if action.where != REPLAY
        and not action.page
        and action.keys not in tried
        and action.id not in elsewhere
    ]
    assert missing == []


async def test_a_dead_process_has_no_pid_to_kill(tmp_path: Path, events: list[Event]) -> None:
    gone = WorkerExited(at=1039.9, worker_id="prefill-0", role="prefill", pid=4399, signal=9, cause="crash")
    async with console(tmp_path, [*events, gone]) as shown:
        await shown.press("k")
        assert "prefill-0 is not running: it has no pid now" in shown.text
        assert "4399" not in shown.text.partition("KILL")[2]
