"""Finding one file in package indexes: the simple repository API, as JSON or HTML, by HTTP or from a directory."""

import http.client
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from cluster.http_source import FetchError, HttpSource, local_path, shown_url
from cluster.pip_settings import PipSettings

_JSON: Final = "application/vnd.pypi.simple.v1+json"
_ACCEPT: Final = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_MAX_PAGE_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class IndexFile:
    """One file as an index lists it; ``sha256`` is empty where the index gives none."""

    name: str
    url: str
    sha256: str = ""


def find_file(source: HttpSource, settings: PipSettings, distribution: str, name: str) -> IndexFile:
    """The first listing of file ``name``, index after index. Raises FetchError that tells what each place answered."""
    project = re.sub(r"[-_.]+", "-", distribution).lower()
    pages = [(f"{index.rstrip('/')}/{project}/", index) for index in settings.indexes]
    pages += [(place, place) for place in settings.find_links]
    answers = []
    for page, place in pages:
        try:
            listed = read_page(source, page)
        except FetchError as error:
            answers.append(str(error))
            continue
        for file in listed:
            if file.name == name:
                return file
        answers.append(f"{shown_url(place)} does not list it")
    reasons = "; ".join(answers) or "pip is told to use no index and no other place"
    raise FetchError(f"{name} was not found: {reasons}")


def read_page(source: HttpSource, url: str) -> list[IndexFile]:
    """Every file that a page lists. A directory is its ``index.html``, or else the files in it. Raises FetchError."""
    path = local_path(url)
    if path is not None and path.is_dir():
        page = path / "index.html"
        if not page.is_file():
            return [IndexFile(file.name, file.resolve().as_uri()) for file in sorted(path.iterdir())]
        url = page.resolve().as_uri()
    with source.open(url, {"Accept": _ACCEPT}) as answer:
        kind = answer.headers.get_content_type()
        try:
            text = answer.stream.read(_MAX_PAGE_BYTES).decode()
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise FetchError(f"{shown_url(url)} cannot be read: {source.reason(error)}") from error
        parse: Callable[[str, str], list[IndexFile]] = parse_json if kind == _JSON else parse_html
        return parse(text, answer.url)


def parse_json(text: str, url: str) -> list[IndexFile]:
    """The files of a JSON page that came from ``url``. Raises FetchError if it is not such a page."""
    try:
        files: list[dict[str, Any]] = json.loads(text)["files"]
        return [
            IndexFile(file["filename"], urljoin(url, file["url"]), file["hashes"].get("sha256", ""))
            for file in files
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{shown_url(url)} is not a page of a package index") from error


def parse_html(text: str, url: str) -> list[IndexFile]:
    """The files of an HTML page that came from ``url``: what its links name, with the hash in the link's fragment."""
    links = _Links()
    links.feed(text)
    base = urljoin(url, links.base)
    return [_linked(urljoin(base, link)) for link in links.found]


def _linked(link: str) -> IndexFile:
    address, fragment = urldefrag(link)
    kind, _, value = fragment.partition("=")
    return IndexFile(Path(unquote(urlsplit(address).path)).name, address, value if kind == "sha256" else "")


class _Links(HTMLParser):
    """The targets of a page's links, and its base address."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "a" and target:
            self.found.append(target)
        elif tag == "base" and target and not self.base:
            self.base = target
