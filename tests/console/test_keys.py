"""Every key: the command it sends, and that its effect can be seen."""

from pathlib import Path

import pytest

from cluster.control import AddNote, Command, InjectBurst, KillWorker, SetCodec, SetLoad, SetMode
from cluster.events import CodecChanged, Event, LoadStopped, ModeChanged, ModelDescribed, RunReady, RunStarted
from console.screens.dialog import QuitDialog
from console.screens.main import MainScreen
from console.screens.request_detail import detail_lines
from tests.console.harness import END_OF_STORY, Console, console
from tests.console.history import story


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return story()


SENDS: list[tuple[str, Command]] = [
    ("b", InjectBurst(prompts=2, prompt_tokens=8000, cause="operator, key b")),
    ("i", SetCodec(codec="int8", cause="operator, key i")),
    ("m", SetMode(mode="colocated", cause="operator, key m")),
    ("s", SetLoad(name="", cause="operator, key s")),
    ("k k", KillWorker(worker_id="prefill-0", signal="KILL", cause="operator, key k")),
    ("k t", KillWorker(worker_id="prefill-0", signal="TERM", cause="operator, key k")),
    ("k up s", KillWorker(worker_id="router", signal="STOP", cause="operator, key k")),
    ("k down enter", KillWorker(worker_id="decode-0", signal="KILL", cause="operator, key k")),
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
            SetMode(mode="disagg", cause="operator, key m"), SetCodec(codec="raw", cause="operator, key i"),
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
        await shown.wait_for("Kill a process: this console is read-only")


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
            "Kill a process",
            "INT8 on/off",
            "Mode",
            "Steady load",
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
        await shown.pilot.press(*"INT8")
        while "INT8 on/off  (i)" not in shown.text:
            await shown.pilot.pause(0.02)
        await shown.pilot.press("down", "enter")
        while not shown.cluster.commands:
            await shown.pilot.pause(0.02)
        assert shown.cluster.commands == [SetCodec(codec="int8", cause="operator, key i")]


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


async def test_logs_follow_their_file(tmp_path: Path, events: list[Event]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "decode-0.log").write_text("")
    (logs / "prefill-0.log").write_text("old line\n\x1b[31mred [/x]\n")
    async with console(tmp_path, events) as shown:
        await shown.press("L")
        while "[prefill-0]" not in shown.text:
            await shown.press("right")
        assert "?[31mred [/x]" in shown.text
        with (logs / "prefill-0.log").open("a") as file:
            file.writelines(f"line {number}\n" for number in range(100))
        await shown.settle()
        assert "line 99" in shown.text
        await shown.press("right")
        assert "has no lines yet" in shown.page()
        await shown.press("escape")
        assert isinstance(shown.app.screen, MainScreen)


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
        for stay in ("s", "escape", "n"):
            await shown.press("q", stay)
            assert isinstance(shown.app.screen, MainScreen)
            assert not await ended(shown)


async def test_ctrl_c_works_in_every_dialog(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        await shown.press("a", "ctrl+c")
        assert isinstance(shown.app.screen, QuitDialog)


async def test_other_keys_do_nothing_dangerous(tmp_path: Path, events: list[Event]) -> None:
    async with console(tmp_path, events) as shown:
        for key in ("ctrl+q", "ctrl+z", "x", "K", "B"):
            await shown.pilot.press(key)
            assert not await ended(shown)
        assert isinstance(shown.app.screen, MainScreen)
        assert shown.cluster.commands == []
