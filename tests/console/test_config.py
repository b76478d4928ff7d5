"""The operator's own settings: what the file may say, what it may not, and that it reaches the console."""

from pathlib import Path

import pytest

from cluster.events import Event
from console.actions import ACTIONS, LIVE, actions_of, find_key, footer_text
from console.cli import main
from console.config import DEFAULT_THEME, Config, ConfigError, config_path, load_config
from console.doctor_command import config_checks
from tests.console.harness import console
from tests.console.history import story

FULL = """
[console]
theme = "nord"
ascii = true
redraws_per_s = 4

[keys]
burst = "f5"
faster = "plus, ctrl+f"
load = ""
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path))
    return tmp_path / "config.toml"


def test_without_a_file_everything_has_its_default(file: Path) -> None:
    assert config_path() == file
    config = load_config()
    assert (config.theme, config.ascii_only, config.redraws_per_s, dict(config.keymap)) == (
        DEFAULT_THEME,
        False,
        2.0,
        {},
    )
    assert [source for _, _, source in config.rows()] == ["default"] * 3


def test_what_the_file_says_counts_and_doctor_says_so(file: Path) -> None:
    file.write_text(FULL)
    config = load_config()
    assert (config.theme, config.ascii_only, config.redraws_per_s) == ("nord", True, 4.0)
    assert dict(config.keymap) == {"burst": "f5", "faster": "plus,ctrl+f", "load": ""}
    told = {check.name: (check.value, check.detail) for check in config_checks()}
    assert told["config theme"] == ("nord", f"from {file}")
    assert told["config keys.burst"] == ("f5", f"from {file}")
    assert told["config keys.load"] == ("(no key)", f"from {file}")
    file.write_text("[console]\nascii = true\n")
    told = {check.name: (check.value, check.detail) for check in config_checks()}
    assert told["config theme"] == (DEFAULT_THEME, "from default")
    assert told["config ascii"] == ("true", f"from {file}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[consle]", "section consle is unknown; did you mean console?"),
        ("[console]\nthem = 'nord'", "console.them is unknown; did you mean theme?"),
        ("[console]\ntheme = 'Nord'", "console.theme is 'Nord'; allowed: ansi-dark, "),
        ("[console]\nascii = 1", "console.ascii is 1; allowed: true, false"),
        ("[console]\nredraws_per_s = 99", "console.redraws_per_s is 99; allowed: 0.2 to 10"),
        ("[console]\nredraws_per_s = true", "console.redraws_per_s is True; allowed: 0.2 to 10"),
        ("[console]\nredraws_per_s = nan", "console.redraws_per_s is nan; allowed: 0.2 to 10"),
        ("console = 3", "console is 3; allowed is a section [console]"),
        ("[keys]\nbrust = 'b'", "keys.brust is unknown; did you mean burst?"),
        ("[keys]\nburst = 5", "keys.burst is 5; allowed is text such as"),
        ("[keys]\nburst = 'm'", "key m is that of burst and of mode; give one of them another in [keys]"),
        ("[keys]\nburst = '?'", "keys.burst: '?' is no key; allowed: b, B, f5, ctrl+b, space, question_mark"),
        ("[keys]\nburst = 'b,,c'", "keys.burst: '' is no key"),
        ("[keys]\nquit = ''", "keys.quit is empty; allowed is one key or several"),
        ("[keys", "cannot be read: "),
        ("\udcff", "cannot be read: "),
    ],
)
def test_what_it_may_not_say_is_named(
    file: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as refused:
        load_config()
    assert str(refused.value).startswith(str(file))
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2
    (check,) = config_checks()
    assert (check.status, complaint in check.detail) == ("warn", True)


def test_two_keys_may_be_exchanged(file: Path) -> None:
    file.write_text("[keys]\nburst = 'm'\nmode = 'b'\n")
    keys = {action.id: action.keys for action in actions_of(LIVE, load_config().keymap)}
    assert (keys["burst"], keys["mode"]) == ("m", "b")
    assert len(keys) == len([action for action in ACTIONS if action.where != "replay"])


async def test_a_changed_key_works_and_is_shown_everywhere(tmp_path: Path) -> None:
    events: list[Event] = story()
    config = Config(Path("x"), theme="nord", keymap={"burst": "f5", "quit": "Q"})
    async with console(tmp_path, events, config=config) as shown:
        assert shown.app.theme == "nord"
        assert "Q quit" in shown.text
        assert "f5 burst" in shown.text
        await shown.press("b")
        assert shown.cluster.commands == []
        await shown.press("f5")
        assert [type(command).__name__ for command in shown.cluster.commands] == ["InjectBurst"]
        await shown.press("question_mark")
        assert "f5         Burst" in shown.page()
    actions = actions_of(LIVE, config.keymap)
    assert find_key(actions, "burst") == "f5"
    assert "f5 burst" in footer_text(160, read_only=False, actions=actions)


def test_a_console_is_not_opened_with_settings_that_are_wrong(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("[console]\ntheme = 'pink'\n")
    monkeypatch.setattr("console.up.why_no_screen", lambda: "")
    assert main(["up"]) == 2
    assert "console.theme is 'pink'" in capsys.readouterr().err
    assert not (file.parent / "runs").exists()
