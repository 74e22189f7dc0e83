"""A folder is used the same on a disk and in a bucket."""

import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from multihop.common.errors import UserError
from multihop.common.s3 import Bucket
from multihop.common.storage import open_folder


def test_files_are_written_read_listed_and_removed(location: str) -> None:
    folder = open_folder(location)
    assert folder.names() == [] and folder.size("a") is None
    with pytest.raises(FileNotFoundError):
        folder.read_bytes("a")
    folder.write_atomically("a", b"first")
    folder.write_atomically("a", b"second")
    inner = folder.child("inner")
    inner.write_atomically("b", b"")
    assert (inner.location, inner.names(), inner.read_bytes("b")) == (f"{location}/inner", ["b"], b"")
    assert open_folder(location).names() == ["a", "inner"]
    assert folder.size("a") == 6 and folder.read_bytes("a") == b"second"
    folder.remove("a")
    folder.remove("a")
    assert inner.remove_if_empty() == ["b"]
    inner.remove("b")
    assert inner.remove_if_empty() == inner.remove_if_empty() == []
    assert folder.names() == [] and inner.names() == []


def test_a_large_file_is_streamed_and_read_by_position(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multihop.common.s3._PART_BYTES", 6 * 2**20)  # no multiple of a block's size
    folder, block = open_folder(location), bytes(range(256)) * 4096

    def blocks() -> Iterator[memoryview]:
        for _ in range(25):
            yield memoryview(block)
        assert folder.size("large") is None

    folder.write("large", blocks())
    assert folder.names() == ["large"] and folder.size("large") == 25 * len(block)
    with folder.open("large") as source:
        assert source.size == 25 * len(block)
        assert source.read_at(len(block) - 3, 6) == b"\xfd\xfe\xff\x00\x01\x02"
        assert source.read_at(source.size - 2, 100) == b"\xfe\xff"
        assert b"".join(source.chunks()) == block * 25


@pytest.mark.parametrize("length", [20, 20_000_000])
def test_a_write_that_fails_leaves_what_existed(location: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, or the file before; nobody sees half of the new one at any moment."""
    monkeypatch.setattr("multihop.common.s3._PART_BYTES", 6 * 2**20)
    folder = open_folder(location)
    folder.write_atomically("kept", b"old")

    def half() -> Iterator[bytes]:
        yield b"x" * length
        raise KeyError("stop")

    for name in ("kept", "new"):
        with pytest.raises(KeyError):
            folder.write(name, half())
    assert folder.names() == ["kept"] and folder.read_bytes("kept") == b"old"


def test_an_upload_that_fails_leaves_no_parts_to_pay_for(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    monkeypatch.setattr("multihop.common.s3._PART_BYTES", 6 * 2**20)

    def half() -> Iterator[bytes]:
        yield b"x" * 20_000_000
        raise KeyError("stop")

    with pytest.raises(KeyError):
        open_folder(bucket).write("new", half())
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=bucket.removeprefix("s3://"))


def test_a_file_is_created_by_one_of_many(tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path / "new"))
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        start.wait()
        return folder.create("a", b"%d" % number, f"by-{number}")

    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(create, range(8)))
    assert created.count(True) == 1 and folder.names() == ["a"]
    assert folder.read_bytes("a") == b"%d" % created.index(True)


def test_a_file_system_without_links_creates_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    folder = open_folder(str(tmp_path))
    assert folder.create("a", b"first", "x") and not folder.create("a", b"second", "x")
    assert folder.names() == ["a"] and folder.read_bytes("a") == b"first"


def test_a_link_whose_response_was_lost_counts_as_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def repeated(source: Any, target: Any) -> None:
        """As NFS does."""
        link(source, target)
        link(source, target)

    monkeypatch.setattr("os.link", repeated)
    folder = open_folder(str(tmp_path))
    assert folder.create("a", b"first", "x") and not folder.create("a", b"second", "x")
    assert folder.names() == ["a"] and folder.read_bytes("a") == b"first"


def test_in_a_bucket_too_a_file_is_created_once(bucket: str) -> None:
    folder = open_folder(f"{bucket}/run")
    assert folder.create("a", b"first", "x") and not folder.create("a", b"second", "x")
    assert folder.read_bytes("a") == b"first"


def test_a_file_is_replaced_only_in_the_version_that_was_seen(location: str) -> None:
    folder = open_folder(location)
    with pytest.raises(FileNotFoundError):
        folder.read("a")
    first = folder.replace("a", b"first", None)
    assert first is not None and folder.read("a") == (b"first", first)
    assert folder.replace("a", b"another", None) is None
    second = folder.replace("a", b"second", first)
    assert second is not None and second != first
    assert folder.replace("a", b"late", first) is None and folder.read("a") == (b"second", second)
    folder.remove("a")
    assert folder.replace("a", b"late", second) is None and folder.size("a") is None


def test_a_version_is_replaced_by_one_of_many(location: str) -> None:
    folder = open_folder(location)
    version, start = folder.replace("a", b"first", None), threading.Barrier(8)

    def replace(number: int) -> str | None:
        start.wait()
        return folder.replace("a", b"%d" % number, version)

    with ThreadPoolExecutor(8) as threads:
        replaced = list(threads.map(replace, range(8)))
    (winner,) = [number for number, new in enumerate(replaced) if new is not None]
    assert folder.read("a") == (b"%d" % winner, replaced[winner])


def test_a_replacement_whose_response_was_lost_is_one(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library sends the request again, which then finds the version that the first one wrote."""
    folder = open_folder(bucket)
    first = folder.replace("a", b"first", None)
    put_if = Bucket._put_if

    def twice(*request: Any) -> str | None:
        put_if(*request)
        return put_if(*request)

    monkeypatch.setattr(Bucket, "_put_if", twice)
    second = folder.replace("a", b"second", first)
    assert second is not None and folder.read("a") == (b"second", second)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("fifo", "endless"):
        with pytest.raises(OSError, match="not a regular file"):
            open_folder(str(tmp_path)).read_bytes(name)


def test_a_folder_gets_another_name(location: str) -> None:
    folder = open_folder(location).child("old")
    for name in ("a", "b"):
        folder.write_atomically(name, name.encode())
    folder.move_to(open_folder(location).child("new"))
    moved = open_folder(f"{location}/new")
    assert open_folder(location).names() == ["new"] and moved.names() == ["a", "b"] and moved.read_bytes("b") == b"b"


def test_a_relative_path_and_a_trailing_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_folder("here/").write_atomically("a", b"1")
    assert (tmp_path / "here" / "a").read_bytes() == b"1"


def test_a_bucket_that_answers_busy_is_retried(s3: Any, bucket: str) -> None:
    folder = open_folder(f"{bucket}/run")
    before = len(s3.requests)
    s3.failures = 2
    folder.write_atomically("a", b"whole")
    s3.failures = 2
    assert folder.read_bytes("a") == b"whole"
    s3.failures = 2
    assert folder.read("a")[0] == b"whole"
    assert s3.failures == 0 and len(s3.requests) > before + 6


def test_a_bucket_that_is_busy_again_and_again_is_retried_for_ever(s3: Any, bucket: str) -> None:
    """More often than the 100 times that pyarrow's standard strategy retries in the life of a file system."""
    folder = open_folder(f"{bucket}/run")
    folder.write_atomically("a", b"whole")
    for _ in range(120):
        s3.failures = 1
        assert folder.read_bytes("a") == b"whole" and s3.failures == 0
        folder.write_atomically("b", b"too")


def test_requests_that_the_caller_repeats_fail_soon(s3: Any, bucket: str) -> None:
    folder = open_folder(f"{bucket}/run", polled=True).child("control")
    folder.write_atomically("a", b"1")
    assert folder.read_bytes("a") == b"1"
    for request in (folder.names, partial(folder.write_atomically, "b", b"2"), partial(folder.remove, "a")):
        before, s3.failures = len(s3.requests), 1000
        with pytest.raises(OSError):
            request()
        assert 1 < len(s3.requests) - before <= 4
        s3.failures = 0
    assert folder.names() == ["a"]


def test_without_boto3_a_bucket_is_read_and_not_written(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(f"{bucket}/run")
    folder.write_atomically("a", b"1")
    for module in ("boto3.exceptions", "boto3.s3.transfer", "boto3.session"):
        monkeypatch.setitem(sys.modules, module, None)
    for write in (
        lambda: folder.write_atomically("b", b"2"),
        lambda: folder.create("b", b"2", "x"),
        lambda: folder.write("b", []),
    ):
        with pytest.raises(UserError, match=r"needs boto3; pip install 'multihop\[s3\]'"):
            write()
    assert folder.names() == ["a"] and folder.read_bytes("a") == b"1"


@pytest.mark.parametrize("location", ["s3://AKIA:wJalr@bucket/x", "s3://AKIA:wJa/lr@bucket/x", "s3://wJalr@bucket/x"])
def test_credentials_in_a_location_are_refused_and_not_shown(location: str) -> None:
    with pytest.raises(UserError, match=r"s3://…@bucket/x contains credentials, .*set AWS_ACCESS_KEY_ID") as refused:
        open_folder(location)
    assert not any(part in str(refused.value) for part in ("wJa", "lr@", "AKIA"))


def test_only_files_of_exactly_a_name_are_removed(bucket: str) -> None:
    names = ["run/step-00000100/a", "run/step-000001000/a", "run/step-00000100.damaged-x/a", "run2/step-00000100/a"]
    for name in names:
        folder, _, file = name.rpartition("/")
        open_folder(f"{bucket}/{folder}").write_atomically(file, b"1")
    step = open_folder(f"{bucket}/run/step-00000100")
    step.remove("a")
    assert step.remove_if_empty() == []
    assert open_folder(f"{bucket}/run").names() == ["step-00000100.damaged-x", "step-000001000"]
    assert open_folder(f"{bucket}/run2/step-00000100").names() == ["a"]


@pytest.mark.parametrize("location", ["gs://bucket/a", "s3://", "s3://what:ever/a", "http://host/a"])
def test_other_schemes_are_refused(location: str) -> None:
    with pytest.raises(
        UserError, match=r"is not a location that can be written to; give a directory or s3://BUCKET/PREFIX"
    ):
        open_folder(location)


def test_a_bucket_that_does_not_exist(s3: Any) -> None:
    with pytest.raises(UserError, match=r"bucket nowhere at http://127\.0\.0\.1:\d+ does not exist"):
        open_folder("s3://nowhere/run")


def test_nobody_listens(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UserError, match=r"cannot be used \(.*check checkpoint\.location") as failed:
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
    with pytest.raises(UserError, match=r"cannot be used \(.*the credentials \(AWS_ACCESS_KEY_ID"):
        open_folder("s3://bucket/run")
    server.shutdown()
