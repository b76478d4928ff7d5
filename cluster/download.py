"""One file from a URL to the disk: goes on where an earlier attempt ended, and is checked before it gets its name."""

import hashlib
import http.client
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from cluster.http_source import Answer, FetchError, HttpSource, shown_url
from cluster.units import format_bytes

Progress = Callable[[int, int | None], None]
"""Hears bytes there and bytes in all (None: the server does not say)."""

_CHUNK_BYTES: Final = 256 * 1024
_MAX_FRUITLESS: Final = 3
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_RANGE_NOT_SATISFIABLE: Final = 416


@dataclass(frozen=True, slots=True)
class Checksum:
    """What a file's content must hash to. ``kind``: sha256, or git (SHA-1 of a git blob)."""

    kind: str
    value: str

    def of(self, path: Path) -> str:
        """A file's digest of this kind. Raises OSError."""
        with path.open("rb") as stream:
            if self.kind == "sha256":
                return hashlib.file_digest(stream, "sha256").hexdigest()
            digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
            return digest.hexdigest()


def download(
    source: HttpSource,
    url: str,
    target: Path,
    checksum: Checksum,
    progress: Progress = lambda done, total: None,
) -> None:
    """Put the file at ``target``, whose directory exists. A target with the right content is left as it is.

    The bytes gather in ``target`` + ``.part``. An interruption leaves that file, and the next call goes on from its
    end. Raises FetchError when the source cannot be reached, breaks off without bringing more, or sends other content
    (``.part`` is then removed); OSError when the disk does not take it.
    """
    if target.is_file() and checksum.of(target) == checksum.value:
        return
    part = target.with_name(target.name + ".part")
    with part.open("ab") as stream:
        fruitless = 0
        while True:
            before = stream.tell()
            problem = _append(source, url, stream, progress)
            if not problem:
                break
            fruitless = fruitless + 1 if stream.tell() <= before else 0
            if fruitless == _MAX_FRUITLESS:
                raise FetchError(
                    f"{shown_url(url)} broke off at {format_bytes(stream.tell())}: {problem}; "
                    "the same command goes on from there"
                )
    found = checksum.of(part)
    if found != checksum.value:
        part.unlink()
        raise FetchError(
            f"{shown_url(url)} has the wrong content: its {checksum.kind} is {found}, expected {checksum.value}; "
            "what was fetched of it is removed"
        )
    part.replace(target)


def _append(source: HttpSource, url: str, stream: BinaryIO, progress: Progress) -> str:
    """Bring what is missing. Empty when the file is complete, else why the source broke off."""
    start = stream.tell()
    try:
        with source.open(url, {"Range": f"bytes={start}-"} if start else {}) as answer:
            total = _position(answer, stream, start)
            progress(stream.tell(), total)
            while True:
                try:
                    chunk = answer.stream.read1(_CHUNK_BYTES)
                except (OSError, http.client.HTTPException) as error:
                    return source.reason(error)
                if not chunk:
                    break
                stream.write(chunk)
                progress(stream.tell(), total)
    except FetchError as error:
        if error.status != _RANGE_NOT_SATISFIABLE or not start:
            raise
        return _after_the_end(stream, url, source)
    if total is not None and stream.tell() < total:
        return f"the connection ended before {format_bytes(total)}"
    return ""


def _after_the_end(stream: BinaryIO, url: str, source: HttpSource) -> str:
    """The server has nothing past what is here: all of it is, unless what is here is something else."""
    with source.open(url) as answer:
        if answer.length == stream.tell():
            return ""
    stream.truncate(0)
    stream.seek(0)
    return "what was fetched before is longer than the file"


def _position(answer: Answer, stream: BinaryIO, start: int) -> int | None:
    """Set the stream to where the answer begins; the whole file's bytes, where they are known."""
    if not answer.headers:  # a local file
        size = answer.stream.seek(0, 2)
        answer.stream.seek(min(start, size))
        if start > size:
            stream.truncate(0)
            answer.stream.seek(0)
        return size
    span = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if answer.status == 206 and span and int(span[1]) == start:
        return int(span[2]) if span[2] != "*" else None
    if answer.status == 206:
        raise FetchError(f"{shown_url(answer.url)} sent another part of the file than it was asked for")
    if start:  # the server does not do ranges
        stream.truncate(0)
        stream.seek(0)
    return answer.length
