"""``pdconsole load`` as a process against a small server of the test."""

import asyncio
import json
import sys
from pathlib import Path

from aiohttp import web

from tests.cluster.test_load import MODEL, serving

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 {clock}.0000000,10,5\n" for clock in ("18:00:00", "18:00:00", "18:00:00", "19:00:00")
)
REFUSAL = "the prompt is\x1b[2J not to be had"


def refusing_server() -> web.Application:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "max_model_len": 512}]})

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": REFUSAL}}, status=400)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", refuse)
    return app


async def load(*argv: str) -> tuple[int, str]:
    """Exit code and stdout."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "console", "load", *argv,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    out, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode()


async def test_a_trace_cut_short_says_how_much_was_sent_and_why_nothing_was_answered(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    async with serving(refusing_server()) as url:
        options = (str(file), "--url", url, "--duration", "5")
        (code, page), (_, text) = await asyncio.gather(load(*options), load(*options, "--json"))
    assert code == 1
    assert "4 of 4 requests over 3,600.0 s; 3 of 4 requests sent\n" in page
    assert "failures  3 http_400\nfirst http_400  the prompt is?[2J not to be had\n" in page
    document = json.loads(text)
    assert (document["trace"]["requests"], document["requests"]["sent"]) == (4, 3)
    assert document["requests"]["complaints"] == {"http_400": REFUSAL}
