"""An S3 endpoint on this machine for tests of several packages: moto's server, which can be made to fail.

`python s3_endpoint.py ADDRESS PORT FAILING_EVERY CUT_EVERY` runs one in a process of its own, on another host.
"""

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest


@dataclass
class S3:
    """A running endpoint."""

    url: str = ""
    failures: int = 0
    """Number of requests that fail from now on."""
    failing_every: int = 0
    """Every n-th request fails too; 0: none does."""
    failing_method: str = ""
    """HTTP method whose requests all fail too, such as GET or PUT; "": none."""
    failure: str = "503 Slow Down"
    """Status line of the responses to failing requests."""
    cut_every: int = 0
    """Every n-th upload is cut off in the middle; 0: none is."""
    without_header: str = ""
    """Request header that is ignored, as WSGI calls it."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request, including failed ones."""
    names: Iterator[int] = field(default_factory=count)

    def stop_failing(self) -> None:
        """Answer all requests again, as at the start."""
        self.failures, self.failing_every, self.failing_method = 0, 0, ""
        self.failure, self.cut_every, self.without_header = "503 Slow Down", 0, ""

    def make_bucket(self) -> str:
        """Make a bucket; returns its name."""
        from pyarrow.fs import S3FileSystem

        name = f"bucket-{next(self.names)}"
        S3FileSystem(endpoint_override=self.url, region="us-east-1", allow_bucket_creation=True).create_dir(name)
        return name


@contextmanager
def serving(s3: S3, address: str = "127.0.0.1", port: int = 0) -> Iterator[S3]:
    """Serve the endpoint until the block ends; port 0 means any free port."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any) -> None:
            """Log no requests."""

    moto, one_at_a_time, uploads = DomainDispatcherApplication(create_backend_app), threading.Lock(), count(1)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        s3.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        size = int(environ.get("CONTENT_LENGTH") or 0)
        unlucky = s3.failing_every and len(s3.requests) % s3.failing_every == 0
        if s3.failures or unlucky or environ["REQUEST_METHOD"] == s3.failing_method:
            s3.failures = max(0, s3.failures - 1)
            environ["wsgi.input"].read(size)
            start_response(s3.failure, [("Content-Length", "0")])
            return [b""]
        environ.pop(s3.without_header, None)
        if environ["REQUEST_METHOD"] == "PUT":
            if s3.cut_every and next(uploads) % s3.cut_every == 0:
                environ["wsgi.input"].read(size // 2)
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError
            with one_at_a_time:  # S3 checks a condition and writes atomically, moto does not
                return moto(environ, start_response)
        return moto(environ, start_response)

    server = make_server(address, port, answer, threaded=True, request_handler=Quiet)
    s3.url = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield s3
    server.shutdown()
    thread.join()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    """The endpoint, started once for all tests."""
    with serving(S3()) as found:
        yield found


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """The endpoint, as the environment names it."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-theirs")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield s3_server
    s3_server.stop_failing()  # fixtures of the session use the endpoint too


@pytest.fixture
def bucket(s3: S3) -> str:
    """The location of an empty bucket."""
    return f"s3://{s3.make_bucket()}"


if __name__ == "__main__":
    address, *numbers = sys.argv[1:]
    port, failing_every, cut_every = (int(number) for number in numbers)
    with serving(S3(failing_every=failing_every, cut_every=cut_every), address, port):
        threading.Event().wait()
