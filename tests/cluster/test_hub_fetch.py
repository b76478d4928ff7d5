"""Fetching from a hub: a server that answers as the Hugging Face Hub's API does, with a small model."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from cluster.http_source import FetchError
from cluster.hub_fetch import fetch_from_hub
from engine.model_ids import ModelError, fetched_hub_models, resolve_model
from engine.weights import load_model
from tests.cluster.file_server import FileServer, Reply, file_server
from tests.engine.gguf_files import train_tokenizer
from tests.engine.helpers import write_checkpoint

MODEL_ID = "hf:some-org/Some.Model-1"
REPOSITORY = "some-org/Some.Model-1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_model(path)
    return path


def write_model(path: Path) -> PreTrainedModel:
    model = write_checkpoint(path, num_hidden_layers=1, vocab_size=330)
    train_tokenizer(330).save(str(path / "tokenizer.json"))
    (path / "README.md").write_text("not needed")
    (path / "pytorch_model.bin").write_bytes(b"not needed")
    return model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCONSOLE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "home"


@pytest.fixture
def hub() -> Iterator[FileServer]:
    with file_server() as server:
        yield server


def serve(hub: FileServer, directory: Path, *, changed: dict[str, bytes] | None = None) -> None:
    """Answer for REPOSITORY with the files of ``directory``; ``changed`` contents do not fit what is listed."""
    siblings = []
    for file in sorted(directory.iterdir()):
        content = file.read_bytes()
        sibling: dict[str, object] = {
            "rfilename": file.name,
            "size": len(content),
            "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
        }
        if file.suffix == ".safetensors":
            digest = hashlib.sha256(content).hexdigest()
            sibling["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
        siblings.append(sibling)
        served = (changed or {}).get(file.name, content)
        hub.replies[path_of(file.name)] = Reply(served)
    document = {
        "_id": "0",
        "id": REPOSITORY,
        "sha": COMMIT,
        "siblings": siblings,
        "tags": [],
        "private": False,
    }
    hub.replies[f"/api/models/{REPOSITORY}?blobs=true"] = Reply(
        json.dumps(document).encode(), "application/json"
    )


def path_of(name: str) -> str:
    return f"/{REPOSITORY}/resolve/{COMMIT}/{name}"


def fetch(hub: FileServer, model_id: str = MODEL_ID, *, force: bool = False) -> Path | None:
    return fetch_from_hub(model_id, lambda step, done, total, unit: None, force=force, endpoint=hub.url)


def test_only_what_a_model_needs_is_fetched(hub: FileServer, checkpoint: Path, home: Path) -> None:
    serve(hub, checkpoint)
    target = fetch(hub)
    assert target == home / "models" / "hf" / "some-org" / "Some.Model-1"
    names = {"config.json", "generation_config.json", "model.safetensors", "origin.json", "tokenizer.json"}
    assert {file.name for file in target.iterdir()} == names
    assert json.loads((target / "origin.json").read_text()) == {"model": REPOSITORY, "commit": COMMIT}
    assert fetched_hub_models() == (MODEL_ID,)
    assert resolve_model(MODEL_ID).path == target
    assert load_model(MODEL_ID, "float32").fingerprint == load_model(checkpoint, "float32").fingerprint
    asked = len(hub.asked)
    assert fetch(hub) is None
    assert len(hub.asked) == asked
    assert fetch(hub, force=True) == target


def test_shards_are_those_of_the_index(hub: FileServer, tmp_path: Path) -> None:
    directory = tmp_path / "sharded"
    directory.mkdir()
    model = write_model(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="100KB")
    (directory / "consolidated.safetensors").write_bytes(b"a second copy")
    serve(hub, directory)
    target = fetch(hub)
    assert target is not None
    fetched = {file.name for file in target.glob("*.safetensors")}
    assert fetched == {file.name for file in directory.glob("model-*.safetensors")}
    assert len(fetched) > 1
    assert load_model(MODEL_ID, "float32").fingerprint == load_model(directory, "float32").fingerprint


def test_a_broken_fetch_goes_on(hub: FileServer, checkpoint: Path) -> None:
    serve(hub, checkpoint)
    hub.replies[path_of("model.safetensors")].cuts = [1000, 0, 0, 0]
    with pytest.raises(FetchError, match="broke off at 1000 B"):
        fetch(hub)
    with pytest.raises(ModelError, match=f"model '{MODEL_ID}' is not on this machine"):
        resolve_model(MODEL_ID)
    assert fetch(hub) is not None
    assert hub.ranges_of(path_of("model.safetensors")) == [None, *["bytes=1000-"] * 4]
    assert hub.ranges_of(path_of("tokenizer.json")) == [None], "what was complete is not fetched again"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_content_that_is_not_the_listed_one_is_removed(hub: FileServer, checkpoint: Path, name: str) -> None:
    content = (checkpoint / name).read_bytes()
    serve(hub, checkpoint, changed={name: content[:-1] + bytes([content[-1] ^ 1])})
    with pytest.raises(FetchError, match=f"{name} has the wrong content"):
        fetch(hub)
    hub.replies[path_of(name)].body = content
    assert fetch(hub) is not None


def test_models_that_cannot_be_used_are_refused_before_their_weights_are_fetched(
    hub: FileServer, checkpoint: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "other"
    directory.mkdir()
    for file in checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["MixtralForCausalLM"]}))
    serve(hub, directory)
    with pytest.raises(ModelError, match="architecture MixtralForCausalLM is not supported"):
        fetch(hub)
    assert hub.ranges_of(path_of("model.safetensors")) == []


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", f"{MODEL_ID} holds no config.json"),
        ("tokenizer.json", f"{MODEL_ID} holds no tokenizer.json"),
        ("model.safetensors", f"{MODEL_ID} holds no model.safetensors; supported are safetensors weights"),
    ],
)
def test_repositories_that_hold_no_model(
    hub: FileServer, checkpoint: Path, tmp_path: Path, missing: str, message: str
) -> None:
    directory = tmp_path / "partial"
    directory.mkdir()
    for file in checkpoint.iterdir():
        if file.name != missing:
            (directory / file.name).write_bytes(file.read_bytes())
    serve(hub, directory)
    with pytest.raises(ModelError, match=message):
        fetch(hub)


@pytest.mark.parametrize("weight_map", [{"x": "../../x.safetensors"}, {}, None, ["x"]])
def test_an_index_that_names_nothing_or_files_elsewhere_is_refused(
    hub: FileServer, checkpoint: Path, tmp_path: Path, weight_map: object
) -> None:
    directory = tmp_path / "partial"
    directory.mkdir()
    for file in checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    serve(hub, directory)
    with pytest.raises(ModelError, match=r"model.safetensors.index.json (names|has no weight_map)"):
        fetch(hub)


def test_a_token_goes_to_the_hub_and_not_to_where_it_redirects(
    hub: FileServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    serve(hub, checkpoint)
    for path in (path_of("config.json"), path_of("model.safetensors")):
        hub.replies[path].authorization = "Bearer hf_secret"
    with file_server() as elsewhere:
        elsewhere.replies["/cdn"] = Reply(hub.replies[path_of("model.safetensors")].body)
        hub.replies[path_of("model.safetensors")].location = elsewhere.url + "/cdn"
        assert fetch(hub) is not None
        assert elsewhere.asked[0].headers["Authorization"] is None


def test_a_gated_model_is_told(hub: FileServer, checkpoint: Path) -> None:
    serve(hub, checkpoint)
    hub.replies[path_of("model.safetensors")].authorization = "Bearer another"
    with pytest.raises(FetchError, match=f"{MODEL_ID} is gated: accept its terms .* HF_TOKEN"):
        fetch(hub)


def test_a_hub_that_does_not_know_the_model(hub: FileServer) -> None:
    hub.replies[f"/api/models/{REPOSITORY}?blobs=true"] = Reply(
        b"{}", "application/json", status=404, headers={"X-Error-Code": "RepoNotFound"}
    )
    with pytest.raises(ModelError, match=f"{MODEL_ID} is not on the Hugging Face Hub, or is private"):
        fetch(hub)


def test_a_hub_that_is_broken_or_away(hub: FileServer) -> None:
    with pytest.raises(
        FetchError, match=f"the Hugging Face Hub did not tell what {MODEL_ID} holds: .*404"
    ) as raised:
        fetch(hub)
    assert "\n" not in str(raised.value)
    with file_server() as away:
        pass
    with pytest.raises(FetchError, match=r"did not tell what .* holds: .*Connection refused"):
        fetch(away)


@pytest.mark.parametrize("model_id", ["hf:org", "hf:--/..", "hf:a/b/c", "hf:/x", "hf:a/../b", "tiny"])
def test_ids_that_name_no_repository(hub: FileServer, model_id: str) -> None:
    with pytest.raises(
        ModelError, match=rf"'{model_id}' cannot be fetched; allowed are smollm2-135m, or hf:ORG/NAME"
    ):
        fetch(hub, model_id)


def test_ids_that_the_hub_does_not_allow(hub: FileServer) -> None:
    with pytest.raises(ModelError, match="hf:a--b/c cannot be fetched"):
        fetch(hub, "hf:a--b/c")
    assert hub.asked == []
