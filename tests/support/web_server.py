"""A web server for tests whose misbehaviour is set by class attributes."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest


class Web(http.server.SimpleHTTPRequestHandler):
    """Python's own server, without ETags. Tests set what it shall do with `monkeypatch.setattr`."""

    failing_every = 0
    """Every n-th request fails; 0: none does."""
    cutting_every = 0
    """Every n-th response is cut after 1,000 bytes; 0: none is."""
    ranges = False
    """Whether range requests are supported."""
    claims = ""
    """The Content-Length that HEAD responds; "": the true one."""
    requests = 0
    moved_to: str | None = None
    """Where /moved/NAME redirects to."""
    seen: ClassVar[list[str | None]] = []
    """The Authorization header of each request."""

    def _is_moved(self) -> bool:
        self.seen.append(self.headers.get("Authorization"))
        if self.moved_to is None or not self.path.startswith("/moved"):
            return False
        self.send_response(302)
        self.send_header("Location", self.moved_to + self.path.removeprefix("/moved"))
        self.end_headers()
        return True

    def do_HEAD(self) -> None:
        if self._is_moved():
            return
        if not self.claims:
            super().do_HEAD()
            return
        self.send_response(200)
        self.send_header("Content-Length", self.claims)
        self.end_headers()

    def do_GET(self) -> None:
        if self._is_moved():
            return
        cls = type(self)
        cls.requests += 1
        if cls.failing_every and cls.requests % cls.failing_every == 0:
            self.send_error(503)
            return
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data, start = path.read_bytes(), 0
        asked = self.headers.get("Range")
        if asked and cls.ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        cut = cls.cutting_every and cls.requests % cls.cutting_every == 0
        self.wfile.write(data[start : start + 1000] if cut else data[start:])

    def end_headers(self) -> None:
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server of the files in `folder`; its attributes are reset afterwards."""
    for name in ("failing_every", "cutting_every", "requests", "ranges", "claims", "moved_to"):
        monkeypatch.setattr(Web, name, getattr(Web, name))
    monkeypatch.setattr(Web, "seen", [])
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *arguments: Web(*arguments, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
