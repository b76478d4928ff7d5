"""Bytes from a URL: http, https or a local file. Errors come out as one line that names the address."""

import base64
import http.client
import io
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Final

TIMEOUT_S: Final = 30.0


class FetchError(Exception):
    """What was asked for cannot be had from where it was looked for; the message is one line.

    ``status`` is the HTTP status of the answer, where there was one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """An open answer. ``url`` is where redirections led; ``headers`` are empty for a local file."""

    url: str
    status: int
    headers: Message
    stream: io.BufferedIOBase

    @property
    def length(self) -> int | None:
        """Bytes of this answer's body, where the server says so."""
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isdecimal() else None


@dataclass(frozen=True, slots=True)
class HttpSource:
    """How to ask. ``headers`` may hold secrets: they go to the first host only, not where it redirects to."""

    ca_file: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = TIMEOUT_S

    @contextmanager
    def open(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[Answer]:
        """The answer to a GET, statuses 200 and 206 only. Raises FetchError."""
        path = local_path(url)
        if path is not None:
            with _open_file(path) as stream:
                yield Answer(url, 200, Message(), stream)
            return
        try:
            request = self._request(url, headers or {})
            response = self._opener().open(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise FetchError(f"{shown_url(url)}: HTTP {error.code} {error.reason}", error.code) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FetchError(f"{shown_url(url)} cannot be reached: {self.reason(error)}") from error
        with response:
            if response.status not in (200, 206):
                raise FetchError(f"{shown_url(url)}: HTTP {response.status}", response.status)
            yield Answer(response.url, response.status, response.headers, response)

    def reason(self, error: Exception) -> str:
        """Why a connection failed, in a few words."""
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            return f"no answer within {self.timeout_s:g} s"
        if isinstance(cause, OSError) and cause.strerror and not isinstance(cause, ssl.SSLError):
            return cause.strerror
        return " ".join(str(cause).split()) or type(cause).__name__

    def _request(self, url: str, headers: Mapping[str, str]) -> urllib.request.Request:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"scheme {parts.scheme!r}; allowed are http, https and file")
        address, at, host = parts.netloc.rpartition("@")
        request = urllib.request.Request(urllib.parse.urlunsplit(parts._replace(netloc=host)))
        request.add_header("Accept-Encoding", "identity")  # ranges count stored bytes
        for name, value in headers.items():
            request.add_header(name, value)
        for name, value in self.headers.items():
            request.add_unredirected_header(name, value)
        if at:
            user = urllib.parse.unquote(address).encode()
            request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(user).decode())
        return request

    def _opener(self) -> urllib.request.OpenerDirector:
        context = ssl.create_default_context(cafile=self.ca_file)
        return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))


def local_path(url: str) -> Path | None:
    """The file or directory that a file URL or a plain path names; None for other URLs."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path))
    return None if "://" in url else Path(url).expanduser()


def shown_url(url: str) -> str:
    """The URL as it may be shown: without name and password."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _open_file(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise FetchError(f"cannot read {path}: {error.strerror}") from error
