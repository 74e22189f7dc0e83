"""A web server for tests whose misbehavior is set by class attributes."""

import hashlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest


class Web(http.server.SimpleHTTPRequestHandler):
    """A server of files. Tests set its behavior with `monkeypatch.setattr`."""

    failing_every = 0
    """Every n-th request fails; 0: none does."""
    cutting_every = 0
    """Every n-th response is cut after 1,000 bytes; 0: none is."""
    ranges = False
    """True if range requests are supported."""
    claims = ""
    """The Content-Length in responses to HEAD; "": the true one."""
    requests = 0
    tells = "modified"
    """The headers of the file's version that are sent: etag, modified, both, or "" for none."""
    head_status = 0
    """The status of HEAD; 0: the right one."""
    head_of = ""
    """HEAD is answered for the file of this name; "": for the right one."""
    aligned = 1
    """A range begins at a multiple of this, at or before what was asked for."""
    off_by = 0
    """Number of bytes by which a range begins later than it should."""
    names_range = True
    """True if Content-Range names the range."""
    drips = 0.0
    """Seconds before each 10 bytes; 0: all at once."""
    moved_to: str | None = None
    """Target of the redirect from /moved/NAME."""
    before_get: ClassVar[Callable[[int], None] | None] = None
    """Called before each GET is answered, with its number from 1."""
    seen: ClassVar[list[str | None]] = []
    """The Authorization header of each request."""
    conditions: ClassVar[list[str | None]] = []
    """The If-Range header of each request for a range."""

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
        if self.claims:
            self.send_response(200)
            self.send_header("Content-Length", self.claims)
            self.send_header("Last-Modified", self.date_time_string())
            self.end_headers()
        elif self.head_status:
            self.send_error(self.head_status)
        else:
            self._send(None)

    def do_GET(self) -> None:
        if self._is_moved():
            return
        cls = type(self)
        cls.requests += 1
        if cls.before_get is not None:
            cls.before_get(cls.requests)
        if cls.failing_every and cls.requests % cls.failing_every == 0:
            self.send_error(503)
            return
        self._send(self.headers.get("Range") if cls.ranges else None)

    def _send(self, asked: str | None) -> None:
        path = Path(self.translate_path(self.path))
        if self.head_of and self.command == "HEAD":
            path = path.with_name(self.head_of)
        if not path.is_file():
            self.send_error(404)
            return
        data, start = path.read_bytes(), 0
        etag, modified = f'"{hashlib.sha256(data).hexdigest()}"', self.date_time_string(int(path.stat().st_mtime))
        if asked is not None:
            condition = self.headers.get("If-Range")
            self.conditions.append(condition)
            if condition in (None, etag, modified):
                start = int(asked.removeprefix("bytes=").partition("-")[0])
            else:
                asked = None
        if asked is not None and start >= len(data):
            self.send_error(416)
            return
        if start:
            start = min(len(data), start // self.aligned * self.aligned + self.off_by)
        stop = 1 if asked == "bytes=0-0" else len(data)
        self.send_response(200 if asked is None else 206)
        if asked is not None and self.names_range:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        if self.tells:
            told = {"etag": {"ETag": etag}, "modified": {"Last-Modified": modified}}
            told["both"] = told["etag"] | told["modified"]
            for name, value in told[self.tells].items():
                self.send_header(name, value)
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.cutting_every and self.requests % self.cutting_every == 0
        sent = data[start : start + 1000] if cut else data[start:stop]
        with suppress(ConnectionError):
            for at in range(0, len(sent), 10) if self.drips else ():
                time.sleep(self.drips)
                self.wfile.write(sent[at : at + 10])
            if not self.drips:
                self.wfile.write(sent)

    def end_headers(self) -> None:
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Log no requests."""


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the files in `folder`; yields the URL. The attributes of `Web` are reset afterwards."""
    settings = ("failing_every", "cutting_every", "requests", "ranges", "claims", "moved_to", "tells", "head_status")
    for name in (*settings, "aligned", "off_by", "names_range", "drips", "before_get", "head_of"):
        monkeypatch.setattr(Web, name, getattr(Web, name))
    monkeypatch.setattr(Web, "seen", [])
    monkeypatch.setattr(Web, "conditions", [])
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *arguments: Web(*arguments, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
