"""A folder is used the same on a disk and in a bucket."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pretrain.storage import open_folder


def test_files_are_written_read_listed_and_removed(place: str) -> None:
    folder = open_folder(place)
    assert folder.names() == [] and folder.size("a") is None
    with pytest.raises(FileNotFoundError):
        folder.read_bytes("a")
    folder.write_atomically("a", b"first")
    folder.write_atomically("a", b"second")
    inner = folder.child("inner")
    inner.write_atomically("b", b"")
    assert (inner.location, inner.names(), inner.read_bytes("b")) == (f"{place}/inner", ["b"], b"")
    assert open_folder(place).names() == ["a", "inner"]
    assert folder.size("a") == 6 and folder.read_bytes("a") == b"second"
    folder.remove("a")
    folder.remove("a")
    inner.remove_tree()
    inner.remove_tree()
    assert folder.names() == [] and inner.names() == []


def test_a_large_file_is_streamed_and_read_by_position(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.storage._UPLOAD_AHEAD", 6_000_000)  # no multiple of a part's size
    folder, block = open_folder(place), bytes(range(256)) * 4096
    with folder.writing("large") as file:
        for _ in range(25):
            file.write(memoryview(block))
        assert folder.size("large") is None
    assert folder.names() == ["large"] and folder.size("large") == 25 * len(block)
    with folder.open("large") as source:
        assert source.size == 25 * len(block)
        assert source.read_at(len(block) - 3, 6) == b"\xfd\xfe\xff\x00\x01\x02"
        assert source.read_at(source.size - 2, 100) == b"\xfe\xff"
        assert b"".join(source.chunks()) == block * 25


def test_a_write_that_fails_leaves_nothing(place: str) -> None:
    folder = open_folder(place)
    folder.write_atomically("kept", b"kept")
    with pytest.raises(KeyError), folder.writing("half") as file:
        file.write(b"x" * 20_000_000)
        raise KeyError("stop")
    assert folder.names() == ["kept"]


def test_a_folder_gets_another_name(place: str) -> None:
    folder = open_folder(place).child("old")
    for name in ("a", "b"):
        folder.write_atomically(name, name.encode())
    folder.move_to(open_folder(place).child("new"))
    moved = open_folder(f"{place}/new")
    assert open_folder(place).names() == ["new"] and moved.names() == ["a", "b"] and moved.read_bytes("b") == b"b"


def test_a_relative_path_and_a_trailing_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_folder("here/").write_atomically("a", b"1")
    assert (tmp_path / "here" / "a").read_bytes() == b"1"


def test_a_bucket_that_answers_busy_is_asked_again(s3: Any, bucket: str) -> None:
    folder = open_folder(f"{bucket}/run")
    before = len(s3.requests)
    s3.failures = 2
    folder.write_atomically("a", b"whole")
    s3.failures = 2
    assert folder.read_bytes("a") == b"whole"
    assert s3.failures == 0 and len(s3.requests) > before + 4


@pytest.mark.parametrize("location", ["gs://bucket/a", "s3://", "http://host/a"])
def test_other_schemes_are_refused(location: str) -> None:
    with pytest.raises(ValueError, match=r"is no place for checkpoints; give a folder or s3://BUCKET/PREFIX"):
        open_folder(location)


def test_a_bucket_that_is_not_there(s3: Any) -> None:
    with pytest.raises(ValueError, match=r"bucket nowhere at http://127\.0\.0\.1:\d+ does not exist"):
        open_folder("s3://nowhere/run")


def test_nobody_listens(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ValueError, match=r"cannot be used \(.*check checkpoint\.location") as failed:
            open_folder("s3://bucket/run")
    assert "secret" not in str(failed.value) and "\n" not in str(failed.value)


def test_no_credentials(s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """moto lets everybody in: this is answered by a server that does not."""

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(403)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """A line a request helps nobody."""

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=r"cannot be used \(.*the credentials \(AWS_ACCESS_KEY_ID"):
        open_folder("s3://bucket/run")
    server.shutdown()
