"""A web server on loopback that a test fills with answers, good and bad, and asks what it was asked."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """What one path answers. ``cuts``: of how many bytes each answer consists before the connection ends; the
    answers after these are whole."""

    body: bytes = b""
    content_type: str = "application/octet-stream"
    status: int = 200
    has_ranges: bool = True
    cuts: list[int] = field(default_factory=list)
    location: str = ""
    authorization: str = ""  # what it asks for, if anything
    headers: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None  # the answer ends only when it is set


@dataclass(frozen=True)
class Asked:
    path: str
    headers: Message

    @property
    def range(self) -> str | None:
        return self.headers.get("Range")


class FileServer:
    def __init__(self, url: str) -> None:
        self.url = url
        self.replies: dict[str, Reply] = {}
        self.asked: list[Asked] = []

    def ranges_of(self, path: str) -> list[str | None]:
        return [asked.range for asked in self.asked if asked.path == path]


@contextmanager
def file_server() -> Iterator[FileServer]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    http.files = FileServer(f"http://127.0.0.1:{http.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield http.files  # type: ignore[attr-defined]
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        files: FileServer = self.server.files  # type: ignore[attr-defined]
        files.asked.append(Asked(self.path, self.headers))
        reply = files.replies.get(self.path)
        if reply is None:
            self.send_error(404)
            return
        if reply.authorization and self.headers.get("Authorization") != reply.authorization:
            self.send_error(401)
            return
        if reply.location:
            self.send_response(302)
            self.send_header("Location", reply.location)
            self.end_headers()
            return
        start = 0
        asked = self.headers.get("Range")
        if asked and reply.has_ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(reply.body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(reply.body) - 1}/{len(reply.body)}")
        else:
            self.send_response(reply.status)
        content = reply.body[start:]
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: reply.cuts.pop(0)] if reply.cuts else content)
        if reply.hold is not None:
            reply.hold.wait()

    def log_message(self, format: str, *args: object) -> None:
        """Silent: pytest would show it."""
