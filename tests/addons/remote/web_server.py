"""A web server on loopback whose files fail on request, and settings that make tests quick."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from phasetrain.addons.remote import cache, systems

CHUNK = 1000
"""Bytes of a part of a download in tests."""


@dataclass
class WebServer:
    """The files of a server, and what is to go wrong.

    Attributes:
        url: address, such as `http://127.0.0.1:4000`.
        files: path -> content.
        faults: path -> what happens to the next GETs: a status such as 503, `truncate` (half of the
            answer), `short` (half of it, with a length that says so), or `stall` (half of it, and
            then nothing).
        has_length, has_ranges, has_identity: whether answers have a Content-Length, ranges are
            served, and there is an ETag.
        requests: (method, path, range) of each request.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, deque[int | str]] = field(default_factory=dict)
    has_length: bool = True
    has_ranges: bool = True
    has_identity: bool = True
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def gets(self) -> list[str]:
        """Return the ranges of the GETs."""
        return [span for method, _, span in self.requests if method == "GET"]


@contextmanager
def serve_files() -> Iterator[WebServer]:  # noqa: C901 - a handler within
    """Run a server in a thread."""
    state = WebServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(None)

        def do_GET(self) -> None:
            queue = state.faults.get(self.path.partition("?")[0])
            self.answer(queue.popleft() if queue else None)

        def answer(self, fault: int | str | None) -> None:
            path = self.path.partition("?")[0]
            span = self.headers.get("Range", "")
            state.requests.append((self.command, path, span))
            content = state.files.get(path)
            status = fault if isinstance(fault, int) else 404 if content is None else 200
            if content is None or status != 200:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            identity = sha256(content).hexdigest()[:16]
            if span and state.has_ranges:
                first, _, last = span.removeprefix("bytes=").partition("-")
                content = content[int(first) : int(last) + 1]
                status = 206
            self.send_response(status)
            if not state.has_ranges:
                self.send_header("Accept-Ranges", "none")
            if state.has_identity:
                self.send_header("ETag", identity)
            half = content[: len(content) // 2]
            if fault == "short":
                content = half
            if state.has_length:
                self.send_header("Content-Length", str(len(content)))
            else:
                self.send_header("Connection", "close")
            self.close_connection = not state.has_length or fault is not None
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(half if fault in ("truncate", "stall") else content)
            self.wfile.flush()
            if fault == "stall":
                state.stopped.wait(10)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        state.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def quick_transfers(folder: Path) -> Iterator[Path]:
    """Use an empty cache, short pauses and small parts; yield the cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHASETRAIN_CACHE", str(folder))
        patch.setenv("PHASETRAIN_STALL_SECONDS", "0.3")
        patch.setattr(systems, "FIRST_DELAY_SECONDS", 0.01)
        patch.setattr(cache, "CHUNK_BYTES", CHUNK)
        yield folder
