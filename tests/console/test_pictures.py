"""What the README shows is what the console draws now."""

import gzip
import html
import re

import pytest

from docs.make_pictures import DOCS, PICTURES, RECORDED, Picture, draw

_TEXT = re.compile(r"<text [^>]*>(.*?)</text>")


def words(svg: str) -> list[str]:
    return [html.unescape(text) for text in _TEXT.findall(svg)]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
async def test_pictures_are_not_stale(picture: Picture) -> None:
    """After a wanted change: make pictures."""
    lines = gzip.decompress(RECORDED.read_bytes()).splitlines(keepends=True)
    kept = (DOCS / f"{picture.name}.svg").read_text(encoding="utf-8")
    assert words(await draw(picture, lines)) == words(kept)
