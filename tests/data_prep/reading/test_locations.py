"""The same documents from a disk, a bucket, a web server and any fsspec file system, and their failures."""

import contextlib
import gzip
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_data import already_prepared
from pyarrow.fs import S3FileSystem
from web_server import Web, serving

from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading import http as http_files
from multihop.data_prep.reading import identities
from multihop.data_prep.reading.errors import ReadFailed, UnreadableFileError
from multihop.data_prep.reading.locations import filesystem_for
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import InputFile, group_into_splits, list_files

TEXTS = [f"text number {number} " + "word " * (number % 50) for number in range(400)]


def write_all(folder: Path) -> Path:
    """Write the TEXTS in each format, with the same names and bytes in every location; returns the folder."""
    (folder / "inner").mkdir(parents=True)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (folder / "a.jsonl").write_bytes(rows)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(rows, mtime=0))
    table = pa.table({"text": TEXTS})
    pq.write_table(table, folder / "inner" / "c.parquet", row_group_size=30)
    with pa.ipc.new_file(str(folder / "inner" / "d.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    (folder / "inner" / "e with [odd] name?.txt").write_text("one text")
    (folder / "inner" / ".hidden.txt").write_text("not this")
    (folder / "README.md").write_text("nor this")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("places") / "texts")


def upload(folder: Path, url: str, bucket: str) -> None:
    filesystem = S3FileSystem(endpoint_override=url, region="us-east-1")
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{bucket.removeprefix('s3://')}/{path.relative_to(folder)}"
            with filesystem.open_output_stream(key, compression=None) as sink:
                sink.write(path.read_bytes())


def documents(files: list[InputFile], split_bytes: int | None = None) -> list[Any]:
    files = identities.with_identities(files, identities.hash_files(files))
    return [item for split in group_into_splits(files, split_bytes) for part in split for item in read_range(part)]


def test_a_bucket_gives_the_documents_that_the_folder_gives(s3: Any, bucket: str, folder: Path) -> None:
    upload(folder, s3.url, bucket)
    local, remote = list_files([Source(path=str(folder))]), list_files([Source(path=bucket)])
    assert [file.name.removeprefix(bucket) for file in remote] == [
        file.name.removeprefix(str(folder)) for file in local
    ]
    assert [file.size for file in remote] == [file.size for file in local]
    assert documents(local) == documents(remote) == documents(remote, 3_000) == TEXTS * 4 + ["one text"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("/*.jsonl*", ["a.jsonl", "b.jsonl.gz"]),
        ("/**/*.parquet", ["inner/c.parquet"]),
        ("/*/[cd].*", ["inner/c.parquet", "inner/d.arrow"]),
        ("/inner", ["inner/c.parquet", "inner/d.arrow", "inner/e with [odd] name?.txt"]),
        ("/inner/", ["inner/c.parquet", "inner/d.arrow", "inner/e with [odd] name?.txt"]),
        ("/inner/e with [odd] name?.txt", ["inner/e with [odd] name?.txt"]),
        ("/in*/.hidden.*", ["inner/.hidden.txt"]),
        ("/a.jsonl", ["a.jsonl"]),
    ],
)
def test_globs_mean_the_same_here_and_in_a_bucket(
    s3: Any, s3_places: str, folder: Path, pattern: str, names: list[str]
) -> None:
    for root in (str(folder), s3_places):
        result = [file.name for file in list_files([Source(path=root + pattern)])]
        assert result == [f"{root}/{name}" for name in names]


@pytest.fixture(scope="module")
def s3_places(s3_server: Any, folder: Path) -> str:
    """Location of a bucket with the folder's files, which all tests may read."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ACCESS_KEY_ID", "somebody")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-theirs")
        bucket = f"s3://{s3_server.make_bucket()}"
        upload(folder, s3_server.url, bucket)
    return bucket


def test_a_bucket_is_known_by_its_etags_and_read_once(s3: Any, s3_places: str) -> None:
    files = list_files([Source(path=f"{s3_places}/*.jsonl")])
    before = len(s3.requests)
    (identity,) = identities.hash_files(files).values()
    assert identity.startswith("etag ") and {method for method, _ in s3.requests[before:]} == {"HEAD"}


def test_an_endpoint_that_refuses_every_fifth_request_gives_the_same_bytes(
    s3: Any, s3_places: str, folder: Path, tmp_path: Path
) -> None:
    tok = TokenizerConfig(vocab_size=64, threads=1)
    local = prepare(DataConfig(sources=[Source(path=f"{folder}/*.jsonl*")]), tok, tmp_path / "local")
    before = len(s3.requests)
    s3.failing_every = 5
    data = DataConfig(sources=[Source(path=f"{s3_places}/*.jsonl*")])
    remote = prepare(data, tok, tmp_path / "remote")
    s3.failing_every = 0
    assert remote.fingerprint == local.fingerprint and remote.counts == local.counts
    assert (len(s3.requests) - before) // 5 >= 2
    assert already_prepared(data, tok, tmp_path / "remote") == remote


def test_an_object_that_is_replaced_or_removed_while_it_is_read_is_set_aside_for_now(
    s3: Any, bucket: str, tmp_path: Path
) -> None:
    path = f"{bucket.removeprefix('s3://')}/a.jsonl"
    filesystem = S3FileSystem(endpoint_override=s3.url, region="us-east-1")

    def put(text: str) -> None:
        with filesystem.open_output_stream(path) as sink:
            sink.write(json.dumps({"text": text}).encode() + b"\n")

    for change in (lambda: put("1ne"), lambda: put("two and more"), lambda: filesystem.delete_file(path)):
        put("one")
        files = list_files([Source(path=f"{bucket}/a.jsonl")])
        (file,) = identities.with_identities(files, identities.hash_files(files))
        ((part,),) = group_into_splits([file])
        assert list(read_range(part)) == ["one"]
        reading = read_range(part)
        assert next(reading) == "one"
        change()
        with pytest.raises(UnreadableFileError, match="changed while being read") as failed:
            list(reading)
        assert failed.value.transient


def test_an_endpoint_that_goes_away_stops_the_reading_instead_of_losing_a_file(
    s3: Any, s3_places: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multihop.common.s3._RETRIES", 2)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody-else")  # another file system, which asks twice only
    files = list_files([Source(path=f"{s3_places}/**")])
    files = identities.with_identities(files, identities.hash_files(files))
    for file in files:
        s3.failures, s3.failure = 10_000, "500 Internal Server Error"
        ((part,),) = group_into_splits([file])
        with pytest.raises(ReadFailed, match="start again"):
            list(read_range(part))
        s3.failures = 0


@pytest.mark.parametrize("name", ["inner/c.parquet", "inner/d.arrow"])
def test_an_endpoint_that_goes_away_is_not_taken_for_a_broken_table(
    s3: Any, s3_places: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("multihop.common.s3._RETRIES", 2)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody-else")
    monkeypatch.setattr("multihop.data_prep.reading.file_reader.block_bytes", lambda path: 1_000)
    ((part,),) = group_into_splits(list_files([Source(path=f"{s3_places}/{name}")]))
    reading = read_range(part)
    assert next(reading) == TEXTS[0]
    s3.failures, s3.failure = 10_000, "500 Internal Server Error"
    with pytest.raises(ReadFailed, match="start again"):
        list(reading)


def test_an_object_that_may_not_be_read_is_set_aside_for_now(s3: Any, s3_places: str) -> None:
    files = list_files([Source(path=f"{s3_places}/**")])
    assert identities.UNREADABLE not in identities.hash_files(files).values()  # the bucket itself is open to it
    s3.failures, s3.failure = 10_000, "403 Forbidden"
    assert set(identities.hash_files(files).values()) == {identities.UNREADABLE}
    for split in group_into_splits(files):
        for part in split:
            with pytest.raises(UnreadableFileError, match=r"cannot be opened \(Permission denied\)") as failed:
                list(read_range(part))
            assert failed.value.transient


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("s3://nowhere/a", r"bucket nowhere at http://127\.0\.0\.1:\d+ does not exist; create it"),
        ("{bucket}/nothing/*.txt", r"data\.sources\[0\]\.path=s3://.*/nothing/\*\.txt does not exist"),
        ("{bucket}", "does not exist|has no file ending in .txt"),
        ("ftpx://host/a.txt", r"data\.sources\[0\]\.path: ftpx:// cannot be read .*use a path, s3://"),
    ],
)
def test_a_wrong_location_is_one_sentence(s3: Any, bucket: str, path: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as failed:
        list_files([Source(path=path.format(bucket=bucket))])
    assert "\n" not in str(failed.value)


def test_nobody_listens_is_one_sentence(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_files, "_MAX_WAIT_S", 0.01)
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for path in ("s3://bucket/a.txt", f"http://127.0.0.1:{port}/a.txt"):
            with pytest.raises(UserError, match=r"data\.sources\[0\]\.path") as failed:
                list_files([Source(path=path)])
            assert "\n" not in str(failed.value)


def test_other_file_systems_of_fsspec_are_read_too(folder: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/texts/{name}": (folder / name).read_bytes() for name in ("a.jsonl", "b.jsonl.gz", "README.md")})
    assert documents(list_files([Source(path="memory:///texts/*")]), 3_000) == TEXTS * 2
    assert documents(list_files([Source(path="memory:///texts/a.jsonl")])) == TEXTS


@pytest.fixture
def web(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(http_files, "_MAX_WAIT_S", 0.01)
    with serving(folder, monkeypatch) as url:
        yield url


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("trouble", ["", "failing_every", "cutting_every"])
@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz?download=1", "inner/c.parquet", "inner/d.arrow"])
def test_a_web_server_gives_a_file_through_interruptions(
    web: str, monkeypatch: pytest.MonkeyPatch, name: str, trouble: str, ranges: bool
) -> None:
    monkeypatch.setattr(Web, "ranges", ranges)
    files = list_files([Source(path=f"{web}/{name}")])
    assert files[0].is_splittable == (ranges and ".gz" not in name)
    if trouble:
        monkeypatch.setattr(Web, trouble, 3)
    assert documents(files, 5_000) == TEXTS


def test_a_file_that_is_not_on_the_web_server_is_refused(web: str) -> None:
    with pytest.raises(UserError, match=r"data\.sources\[0\]\.path=http.*does not exist"):
        list_files([Source(path=f"{web}/nothing.txt")])
    with pytest.raises(UserError, match="has no file ending in"):
        list_files([Source(path=f"{web}/README.md")])


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        (str(2**56), r"cannot be read \(larger than 70,368,744,177,664 bytes\); correct the path"),
        ("9" * 30, "does not report the file's size"),
        ("-5", "does not report the file's size"),
        ("many", "does not report the file's size"),
        ("1e3", "does not report the file's size"),
    ],
)
def test_a_size_that_no_file_has_is_refused(web: str, monkeypatch: pytest.MonkeyPatch, claims: str, why: str) -> None:
    for ranges in (True, False):
        monkeypatch.setattr(Web, "ranges", ranges)
        monkeypatch.setattr(Web, "claims", claims)
        with pytest.raises(UserError, match=why) as refused:
            list_files([Source(path=f"{web}/a.jsonl")])
        assert "\n" not in str(refused.value) and f"{web}/a.jsonl" in str(refused.value)


def test_files_of_a_petabyte_in_all_are_refused(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Web, "ranges", True)
    monkeypatch.setattr(Web, "claims", str(2**46))
    ((file,), sources) = list_files([Source(path=f"{web}/a.jsonl")]), [Source(path=f"{web}/a.jsonl")] * 17
    assert len(group_into_splits([file])) == 2**18
    with pytest.raises(UserError, match=r"data\.sources have 1,196,268,651,020,288 bytes in total, more than"):
        list_files(sources)


def test_a_web_server_that_stays_away_stops_the_reading(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ((part,),) = group_into_splits(list_files([Source(path=f"{web}/a.jsonl")]))
    monkeypatch.setattr(Web, "failing_every", 1)
    with pytest.raises(ReadFailed, match=r"HTTP status 503.*start again"):
        list(read_range(part))


OURS = "Basic dXNlcjpwdw=="  # user:pw


@pytest.mark.parametrize(
    ("entry", "sent"),
    [("machine 127.0.0.1 login user password pw", OURS), ("default login user password pw", None), ("", None)],
)
def test_a_web_server_gets_the_password_that_netrc_has_for_its_host(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, sent: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text(entry)
    (tmp_path / ".netrc").chmod(0o600)
    assert documents(list_files([Source(path=f"{web}/a.jsonl")])) == TEXTS
    assert len(Web.seen) > 1 and set(Web.seen) == {sent}


def test_a_password_follows_to_the_same_location_only(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password pw\nmachine localhost password theirs")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for target, followed in (("", OURS), (web, OURS), (web.replace("127.0.0.1", "localhost"), None)):
        monkeypatch.setattr(Web, "moved_to", target)
        Web.seen.clear()
        assert documents(list_files([Source(path=f"{web}/moved/a.jsonl")])) == TEXTS
        assert Web.seen[:2] == [OURS, followed] and set(Web.seen) == {OURS, followed}


def test_a_netrc_that_cannot_be_used_is_one_sentence_without_what_it_holds(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text, mode, complaint in (
        ("machine a login b password hunter 2", 0o600, "line 1 is malformed"),
        ("machine a login b password hunter2", 0o644, "other users may read it"),
    ):
        (tmp_path / ".netrc").write_text(text)
        (tmp_path / ".netrc").chmod(mode)
        with pytest.raises(UserError, match=complaint) as failed:
            list_files([Source(path=f"{web}/a.jsonl")])
        assert "hunter" not in str(failed.value)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"NETRC=.* does not exist"):
        list_files([Source(path=f"{web}/a.jsonl")])


def wait_for(port: int) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise TimeoutError("the server does not start")


def test_a_bucket_of_gs_gives_the_documents_that_the_folder_gives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gcp_storage_emulator", reason="gcp-storage-emulator is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A process of its own: in a thread of this one it did not answer pyarrow.
    command = ["-m", "gcp_storage_emulator", "start", "--in-memory", "--default-bucket=texts"]
    server = subprocess.Popen([sys.executable, *command, "--host=127.0.0.1", f"--port={port}"])
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    try:
        wait_for(port)
        filesystem, _ = filesystem_for("gs://texts/")
        for path in folder.rglob("*.*"):
            with filesystem.open_output_stream(f"texts/{path.relative_to(folder)}", compression=None) as sink:
                sink.write(path.read_bytes())
        files = list_files([Source(path="gs://texts")])
        assert documents(files) == documents(files, 3_000) == documents(list_files([Source(path=str(folder))]))
        assert all(identity.startswith("etag ") for identity in identities.hash_files(files).values())
        for pattern in ("gs://texts/**/*.parquet", "gs://texts/*/c.*", "gs://texts/inner/c.parquet"):
            assert [file.name for file in list_files([Source(path=pattern)])] == ["gs://texts/inner/c.parquet"]
        with pytest.raises(UserError, match=r"data\.sources\[0\]\.path=gs://nowhere/a\.txt does not exist"):
            list_files([Source(path="gs://nowhere/a.txt")])
    finally:
        server.terminate()
        server.wait()
