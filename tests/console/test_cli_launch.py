"""The console's end of the parent link, against real processes that answer, refuse, die or do not listen."""

import asyncio
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from cluster.control import AddNote, SupervisorSpec
from cluster.log_lines import last_lines
from cluster.profile import Profile, SupervisorSection
from console import launch
from console.launch import LaunchError, SupervisorClient

MODULE = "tests.console.scripted_supervisor"


async def launched(run_dir: Path, behaviour: str) -> SupervisorClient:
    profile = Profile(supervisor=SupervisorSection(stop_grace_s=0.1))
    spec = SupervisorSpec(run="r", run_dir=str(run_dir), profile=profile, load=behaviour)
    return await SupervisorClient.launch(spec, module=MODULE)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_up_commands_and_stop(tmp_path: Path) -> None:
    client = await launched(tmp_path, "obey")
    up = await client.wait_up()
    assert (up.pid, up.url) == (client.pid, "http://127.0.0.1:1")
    answers = await asyncio.gather(*(client.send_command(AddNote(text=str(number))) for number in range(20)))
    assert [answer.message for answer in answers] == [f"noted {number}" for number in range(20)]
    assert len({answer.command_id for answer in answers}) == 20
    await client.stop("the test is over")
    assert (tmp_path / "stopped").read_text() == "the test is over"
    assert client.stopped is not None
    assert client.is_gone
    assert not is_running(client.pid)
    await client.stop("again")


async def test_a_refused_start_has_the_supervisor_s_words_and_exit_code(tmp_path: Path) -> None:
    client = await launched(tmp_path, "refuse")
    with pytest.raises(LaunchError, match="port 80 is in use") as caught:
        await client.wait_up()
    assert caught.value.exit_code == 2
    await client.stop("")


async def test_a_supervisor_that_dies_first_is_told_with_its_last_log_lines(tmp_path: Path) -> None:
    client = await launched(tmp_path, "die")
    with pytest.raises(LaunchError, match=r"signal 9[\s\S]*last words") as caught:
        await client.wait_up()
    assert caught.value.exit_code == 1
    await client.stop("")


async def test_a_supervisor_that_sends_nonsense_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_LIFELINE_WAIT_S", 0.2)
    client = await launched(tmp_path, "nonsense")
    with pytest.raises(LaunchError, match="not a control message"):
        await client.wait_up()
    await client.stop("")
    assert not is_running(client.pid)


async def test_commands_end_when_the_supervisor_does(tmp_path: Path) -> None:
    client = await launched(tmp_path, "obey")
    await client.wait_up()
    answer = await client.send_command(AddNote(text="die"))
    assert (answer.ok, answer.message) == (False, "the cluster is gone")
    await client.wait_gone()
    assert client.stopped is None
    assert "signal 9" in await client.death_report()
    assert not (await client.send_command(AddNote(text="still there?"))).ok
    await client.stop("")


async def test_a_supervisor_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STOP_MARGIN_S", 0.1)
    monkeypatch.setattr(launch, "_LIFELINE_WAIT_S", 0.2)
    client = await launched(tmp_path, "deaf")
    await client.wait_up()
    await client.stop("")
    assert not is_running(client.pid)
    assert client.stopped is None


async def test_without_us_the_supervisor_reads_the_end_of_its_lifeline(tmp_path: Path) -> None:
    client = await launched(tmp_path, "obey")
    await client.wait_up()
    await client._stream.close()  # what the kernel does when this process is killed
    await asyncio.to_thread(client._process.wait, 10)
    assert (tmp_path / "lifeline").read_text() == "cut"
    await client.stop("")


async def test_a_detached_supervisor_takes_the_end_of_the_link_for_no_news(tmp_path: Path) -> None:
    client = await launched(tmp_path, "obey")
    await client.wait_up()
    process = psutil.Process(client.pid)
    assert await client.detach()
    assert client.detached
    await asyncio.to_thread(process.wait, 10)
    assert (tmp_path / "detached").read_text() == "cut"
    assert not (tmp_path / "stopped").exists()


async def test_detach_is_refused_by_one_that_does_not_answer_or_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STOP_MARGIN_S", 0.1)
    monkeypatch.setattr(launch, "_LIFELINE_WAIT_S", 0.2)
    monkeypatch.setattr(launch, "SILENCE_LIMIT_S", 0.2)
    client = await launched(tmp_path, "deaf")
    await client.wait_up()
    assert not await client.detach()
    await client.stop("")
    assert not await client.detach()
    assert not is_running(client.pid)


async def test_a_console_that_was_stopped_itself_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ctrl+z and fg: what the supervisor said meanwhile is still to be read."""
    monkeypatch.setattr(launch, "SILENCE_LIMIT_S", 1.2)
    client = await launched(tmp_path, "obey")
    await client.wait_up()
    for _ in range(2):
        time.sleep(2.0)  # noqa: ASYNC251 - nothing runs in this process, as while it is stopped
        done = await client.send_command(AddNote(text="on"))
        await asyncio.sleep(1.0)  # its next looks at the supervisor
        assert (done.ok, client.is_gone) == (True, False)
    await client.stop("")


def test_the_spec_s_secret_is_not_in_argv(tmp_path: Path) -> None:
    """Specs travel over the link: a command line can be read by every user of the machine."""

    async def command_line() -> list[str]:
        client = await launched(tmp_path, "obey")
        await client.wait_up()  # before, the kernel may not have the new program's arguments in place
        try:
            return psutil.Process(client.pid).cmdline()
        finally:
            await client.stop("")

    words = asyncio.run(command_line())
    assert words[1:5] == ["-P", "-m", MODULE, "--fd"]
    assert len(words) == 6
    assert words[5].isdigit()


def test_last_lines_of_missing_empty_and_long_files(tmp_path: Path) -> None:
    file = tmp_path / "log"
    assert last_lines(file, 3) == []
    file.write_text("")
    assert last_lines(file, 3) == []
    file.write_bytes(b"".join(b"line %d\n" % number for number in range(9)) + b"\xff cut")
    assert last_lines(file, 2) == ["line 8", "\ufffd cut"]


def test_a_profile_survives_the_link() -> None:
    spec = SupervisorSpec(run="r", run_dir="/d", profile=Profile(name="x"), load="steady")
    assert msgspec.json.decode(msgspec.json.encode(spec), type=SupervisorSpec) == spec
