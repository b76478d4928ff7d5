"""Fetching a model of the Hugging Face Hub. The hub's library lists and authorises; the bytes come by ``download``,
which, unlike that library, goes on with a file that an earlier attempt left unfinished.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
from huggingface_hub import HfApi, get_token, hf_hub_url
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoSibling

from cluster.download import Checksum, download
from cluster.fetch_place import FetchPlace, fetch_place
from cluster.http_source import FetchError, HttpSource
from cluster.model_fetch import FetchProgress
from engine.model_ids import HUB_PREFIX, ModelError, read_model_config

_CONFIGURATION: Final = ("config.json", "generation_config.json")
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_REQUIRED: Final = ("config.json", "tokenizer.json")
_INDEX: Final = "model.safetensors.index.json"
_NEEDS_ACCESS: Final = (401, 403)


@dataclass(frozen=True, slots=True)
class _Listing:
    """One commit of a repository: the files in its root."""

    endpoint: str | None
    repository: str
    commit: str
    files: dict[str, RepoSibling]


def fetch_from_hub(
    model_id: str, progress: FetchProgress, *, force: bool = False, endpoint: str | None = None
) -> Path | None:
    """Bring ``hf:ORG/NAME`` to this machine; the directory, or None if it was there (and not ``force``).

    ``endpoint`` None: the hub that the library is set up for (``HF_ENDPOINT``).

    Configuration comes first, so that a model that cannot be used is refused before its weights are fetched. Raises
    FetchError (what was downloaded stays for the next attempt), and ModelError for a model that does not exist or
    cannot be used.
    """
    with fetch_place(model_id) as place:
        if place.is_complete and not force:
            return None
        listing = _list_files(model_id, endpoint)
        for name in _REQUIRED:
            if name not in listing.files:
                raise ModelError(f"{model_id} holds no {name}, which a model must have")
        place.draft.mkdir(exist_ok=True)
        token = get_token()
        source = HttpSource(headers={"Authorization": f"Bearer {token}"} if token else {})

        def bring(names: Iterable[str]) -> list[str]:
            present = [name for name in names if name in listing.files]
            for name in present:
                _bring_file(source, listing, name, place, progress)
            return present

        brought = bring(_CONFIGURATION)
        read_model_config(place.draft)
        if _INDEX in listing.files:
            brought += bring([_INDEX])
            weights = _shards(place.draft / _INDEX)
        else:
            weights = ["model.safetensors"]
        absent = [name for name in weights if name not in listing.files]
        if absent:
            raise ModelError(f"{model_id} holds no {absent[0]}; supported are safetensors weights")
        place.need_bytes(_missing_bytes(listing, weights, place.draft))
        brought += bring((*_TOKENIZER, *weights))
        origin = {"model": model_id.removeprefix(HUB_PREFIX), "commit": listing.commit}
        (place.draft / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")
        _remove_others(place.draft, {*brought, "origin.json"})
        place.finish()
        return place.target


def _list_files(model_id: str, endpoint: str | None) -> _Listing:
    repository = model_id.removeprefix(HUB_PREFIX)
    try:
        info = HfApi(endpoint).model_info(repository, files_metadata=True)
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{model_id} is not on the Hugging Face Hub, or is private: that needs a token (HF_TOKEN)"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{model_id} cannot be fetched: {error}") from error
    except (OSError, httpx2.HTTPError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FetchError(f"the Hugging Face Hub did not tell what {model_id} holds: {reason}") from error
    if info.sha is None:
        raise FetchError(f"the Hugging Face Hub names no commit of {model_id}")
    return _Listing(endpoint, info.id, info.sha, {file.rfilename: file for file in info.siblings or ()})


def _bring_file(
    source: HttpSource, listing: _Listing, name: str, place: FetchPlace, progress: FetchProgress
) -> None:
    file = listing.files[name]
    checksum = Checksum("sha256", file.lfs.sha256) if file.lfs else Checksum("git", file.blob_id or "")
    url = hf_hub_url(listing.repository, name, revision=listing.commit, endpoint=listing.endpoint)
    try:
        download(
            source,
            url,
            place.draft / name,
            checksum,
            lambda done, total: progress(f"download {name}", done, total or file.size, "bytes"),
        )
    except FetchError as error:
        if error.status in _NEEDS_ACCESS:
            raise FetchError(
                f"{place.model_id} is gated: accept its terms on the Hugging Face Hub and set HF_TOKEN ({error})",
                error.status,
            ) from error
        raise


def _shards(index: Path) -> list[str]:
    """The weight files that an index names, all in the root."""
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        names = []
    if not names:
        raise ModelError(f"{index.name} has no weight_map")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index.name} names {name!r}; allowed are .safetensors files beside it")
    return names


def _missing_bytes(listing: _Listing, names: Iterable[str], directory: Path) -> int:
    missing = 0
    for name in names:
        there = [directory / name, directory / f"{name}.part"]
        missing += (listing.files[name].size or 0) - sum(
            file.stat().st_size for file in there if file.is_file()
        )
    return max(missing, 0)


def _remove_others(directory: Path, names: set[str]) -> None:
    """What an earlier attempt brought of another commit."""
    for path in directory.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
