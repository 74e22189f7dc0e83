"""Web servers that send bytes other than requested, change a file while it is read, or are very slow."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_data import already_prepared
from web_server import Web, serving

from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading import http as http_files
from multihop.data_prep.reading import identities
from multihop.data_prep.reading.errors import ReadFailed, UnreadableFileError
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import InputFile, group_into_splits, list_files

TEXTS = [f"text number {number} " + "word " * (number % 50) for number in range(400)]
OTHERS = [text.replace("word", "WORD") for text in TEXTS]
"""Other texts of the same lengths in bytes."""
NAMES = ["a.jsonl", "b.jsonl.gz", "c.parquet"]


def write(folder: Path, texts: list[str]) -> None:
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "a.jsonl").write_bytes(rows)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(rows, 0, mtime=0))
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet", compression="none", use_dictionary=False)


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(http_files, "_MAX_WAIT_S", 0.01)
    write(tmp_path, TEXTS)
    with serving(tmp_path, monkeypatch) as url:
        monkeypatch.setattr(Web, "ranges", True)
        yield url


def listed(url: str) -> list[InputFile]:
    files = list_files([Source(path=url)])
    return identities.with_identities(files, identities.hash_files(files))


def documents(files: list[InputFile]) -> list[Any]:
    return [item for split in group_into_splits(files, 5_000) for part in split for item in read_range(part)]


@pytest.mark.parametrize("name", NAMES)
def test_a_range_that_begins_before_the_requested_byte_is_accepted(
    web: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Caches may send whole blocks."""
    monkeypatch.setattr(Web, "aligned", 4_096)
    monkeypatch.setattr(Web, "cutting_every", 3)
    assert documents(listed(f"{web}/{name}")) == TEXTS


def test_a_range_without_the_requested_bytes_is_refused(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = listed(f"{web}/a.jsonl")
    with monkeypatch.context() as later:
        later.setattr(Web, "off_by", 1)
        with pytest.raises(
            ReadFailed, match="asked for the bytes from 4,999 on, and sent those from 5,000 on; download"
        ):
            documents(files)
    monkeypatch.setattr(Web, "names_range", False)
    assert documents(files) == TEXTS, "as many bytes as are left are those that are left"
    monkeypatch.setattr(Web, "aligned", 4_096)
    with pytest.raises(ReadFailed, match="asked for the bytes from 4,999 on, and sent others; download it"):
        documents(files)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tells", ["", "etag"])
def test_a_file_replaced_by_one_of_its_size_after_hashing_is_set_aside(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tells: str
) -> None:
    monkeypatch.setattr(Web, "tells", tells)
    files = listed(f"{web}/{name}")
    assert files[0].is_splittable == (tells == "etag" and name != "b.jsonl.gz")
    assert documents(files) == TEXTS
    write(tmp_path, OTHERS)
    with pytest.raises(UnreadableFileError, match="changed while being read") as failed:
        documents(files)
    assert failed.value.transient
    assert documents(listed(f"{web}/{name}")) == OTHERS


@pytest.mark.parametrize("tells", ["", "etag"])
@pytest.mark.parametrize("ranges", [False, True])
def test_a_file_that_changes_between_two_requests_is_not_read_as_a_mixture(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: str, ranges: bool
) -> None:
    """The first version is there again when the reader checks at the end."""
    monkeypatch.setattr(Web, "tells", tells)
    monkeypatch.setattr(Web, "ranges", ranges)
    files = listed(f"{web}/a.jsonl")
    first = Web.requests
    monkeypatch.setattr(Web, "cutting_every", first + 1)
    monkeypatch.setattr(Web, "before_get", lambda number: write(tmp_path, OTHERS if number == first + 2 else TEXTS))
    with pytest.raises(UnreadableFileError, match="changed while being read"):
        documents(files)
    if ranges:
        assert len(Web.conditions) == 1 and (Web.conditions[0] is None) == (tells == "")


def test_a_file_is_identified_by_its_listed_version_and_not_by_its_time(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Web, "tells", "both")
    data, tok = DataConfig(sources=[Source(path=f"{web}/a.jsonl")]), TokenizerConfig(vocab_size=64, threads=1)
    os.utime(tmp_path / "a.jsonl", (1e9, 1e9))
    first = prepare(data, tok, tmp_path / "out")
    assert already_prepared(data, tok, tmp_path / "out") == first
    write(tmp_path, OTHERS)
    os.utime(tmp_path / "a.jsonl", (1e9, 1e9))
    assert already_prepared(data, tok, tmp_path / "out") is None
    second = prepare(data, tok, tmp_path / "out")
    assert second.counts["read"] == {"kept": 400} and second.fingerprint != first.fingerprint


@pytest.mark.parametrize("tells", ["etag", "modified"])
def test_a_stale_head_response_of_a_cache_does_not_hide_a_change(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: str
) -> None:
    monkeypatch.setattr(Web, "tells", tells)
    (tmp_path / "old.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    os.utime(tmp_path / "old.jsonl", (1e9, 1e9))
    write(tmp_path, OTHERS)
    monkeypatch.setattr(Web, "head_of", "old.jsonl")
    with pytest.raises(UnreadableFileError, match="changed while being read"):
        documents(listed(f"{web}/a.jsonl"))


@pytest.mark.parametrize("status", [403, 405, 501])
@pytest.mark.parametrize("ranges", [False, True])
def test_if_head_is_refused_one_byte_is_requested(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, ranges: bool
) -> None:
    monkeypatch.setattr(Web, "head_status", status)
    monkeypatch.setattr(Web, "ranges", ranges)
    files = listed(f"{web}/a.jsonl?X-Amz-Signature=0123")
    assert files[0].size == (tmp_path / "a.jsonl").stat().st_size and files[0].is_splittable == ranges
    assert documents(files) == TEXTS
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert documents(listed(f"{web}/empty.jsonl")) == []
    with pytest.raises(UserError, match="does not exist"):
        list_files([Source(path=f"{web}/nothing.jsonl")])


def test_interrupted_connections_suffice_if_each_makes_progress(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Web, "cutting_every", 1)
    assert documents(listed(f"{web}/a.jsonl")) == TEXTS
    assert Web.requests > 40
    files = listed(f"{web}/a.jsonl")
    monkeypatch.setattr(Web, "ranges", False)  # none gets further than the first 1,000 bytes
    with pytest.raises(ReadFailed, match=r"the connection was cut.*start again"):
        documents(files)


@pytest.mark.parametrize("ranges", [False, True])
def test_a_server_that_is_too_slow_is_an_error(web: str, monkeypatch: pytest.MonkeyPatch, ranges: bool) -> None:
    files = listed(f"{web}/a.jsonl")
    monkeypatch.setattr(http_files, "_SLOW_AFTER_S", 0.2)
    monkeypatch.setattr(Web, "ranges", ranges)
    monkeypatch.setattr(Web, "drips", 0.02)
    with pytest.raises(ReadFailed, match="sends less than 10,000 bytes a second; download it and give its path"):
        documents(files)


def test_a_file_without_versions_is_prepared_like_any_other(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Web, "tells", "")
    tok = TokenizerConfig(vocab_size=64, threads=1)
    remote = DataConfig(sources=[Source(path=f"{web}/{name}") for name in NAMES])
    local = DataConfig(sources=[Source(path=str(tmp_path / name)) for name in NAMES])
    assert prepare(remote, tok, tmp_path / "remote").fingerprint == prepare(local, tok, tmp_path / "local").fingerprint
