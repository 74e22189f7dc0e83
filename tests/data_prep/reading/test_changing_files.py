"""Files that grow, shrink, are replaced or disappear while they are read."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from one_file import fails, one_part, rows

from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading import identities
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.raw import BadDocument
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import FileRange, InputFile, list_files


def changed_while_read(path: Path, change: Callable[[], object]) -> list[str | BadDocument]:
    """Return the documents of a file that `change` modifies after the first of them was read."""
    reading = read_range(one_part(path))
    first = next(reading)
    change()
    return [first, *reading]


def jsonl(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def test_a_file_that_grows_is_read_as_far_as_it_was_when_it_was_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl("one", "two"))

    def append() -> None:
        with open(path, "ab") as file:
            file.write(jsonl("three"))

    assert changed_while_read(path, append) == ["one", "two"]
    path.write_bytes(jsonl("one", "two")[:-5])
    part = one_part(path)
    path.write_bytes(jsonl("one", "two", "three"))
    assert list(read_range(part)) == ["one", BadDocument(2, "broken JSON")]
    assert identities.content_identity(part.file) == part.file.identity
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl("one", "two")))
    part = one_part(packed)
    packed.write_bytes(packed.read_bytes() + gzip.compress(jsonl("three")))
    assert list(read_range(part)) == ["one", "two"]


@pytest.mark.parametrize("texts", [["six", "two"], ["six", "two", "and more"], ["six"], []])
def test_a_file_that_becomes_another_is_set_aside(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    for replace in (False, True):
        path.write_bytes(jsonl("one", "two"))
        part = one_part(path)
        other = tmp_path / "other"
        (other if replace else path).write_bytes(jsonl(*texts))
        if replace:
            os.replace(other, path)
        assert fails(part) == "changed while being read"


def test_a_file_that_shrinks_or_goes_while_it_is_read_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for change in (lambda: os.truncate(path, 5_000_000), lambda: os.truncate(path, 0), path.unlink):
        path.write_bytes(rows(5_000))
        with pytest.raises(UnreadableFileError, match="changed while being read") as failed:
            changed_while_read(path, change)
        assert failed.value.transient


def test_a_table_that_shrinks_while_it_is_read_is_not_taken_for_a_broken_one(tmp_path: Path) -> None:
    table = pa.table({"text": [json.loads(line)["text"] for line in rows(5_000).splitlines()]})
    for name in ("a.parquet", "a.arrow"):
        path = tmp_path / name
        if name == "a.parquet":
            pq.write_table(table, path, compression="none", use_dictionary=False)
        else:
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=100)
        with pytest.raises(UnreadableFileError, match="changed while being read"):
            changed_while_read(path, lambda path=path: os.truncate(path, 2_500_000))  # type: ignore[misc]


def test_a_file_that_is_gone_after_the_listing_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    files = list_files([Source(path=str(path))])
    part = FileRange(files[0], 0, 3)
    path.unlink()
    assert identities.hash_files(files) == {str(path): identities.UNREADABLE}
    assert fails(part) == "cannot be opened (No such file or directory)"


def test_names_that_print_alike_are_remembered_separately(tmp_path: Path) -> None:
    """A line break in a name is printed as backslash and n, which may be the name of another file."""
    names = ["a\nb.txt", "a\\nb.txt", "a\\\\nb.txt", "caf\xe9.txt", "caf\udce9.txt", "caf\\xe9.txt"]
    for number, name in enumerate(names):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"text {number}")
        os.utime(tmp_path / "texts" / name, (1e9, 1e9))
    files = list_files([Source(path=str(tmp_path / "texts"))])
    hashes = identities.hash_files(files)
    assert len(set(hashes.values())) == len(names)
    identities.save_identities(tmp_path / "inputs.json", files, hashes)
    assert identities.load_identities(tmp_path / "inputs.json", files) == hashes
    for file in files:
        identities.save_identities(tmp_path / "inputs.json", [file], hashes)
        assert identities.load_identities(tmp_path / "inputs.json", files) == {file.path: hashes[file.path]}


def test_what_was_set_aside_for_now_is_read_the_next_time(
    tmp_path: Path, tok: TokenizerConfig, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file was set aside because it changed while being read; with the same bytes, it is read again later."""
    data = DataConfig(sources=[Source(path=str(corpus))], heldout_fraction=0.1, max_bad_fraction=0.1)

    def prepared(hashed: Callable[[list[InputFile]], dict[str, str]]) -> Manifest:
        monkeypatch.setattr("multihop.data_prep.reading.identities.hash_files", hashed)
        return prepare(data, tok, tmp_path / "out")

    whole, text, hash_files = corpus / "a.jsonl", (corpus / "a.jsonl").read_text(), identities.hash_files

    def then_removed(files: list[InputFile]) -> dict[str, str]:
        result = hash_files(files)
        status = whole.stat()
        whole.unlink()
        kept.append(status)
        return result

    kept: list[os.stat_result] = []
    manifest = prepared(then_removed)
    assert manifest.counts["read"] == {"kept": 80, "cannot be opened (No such file or directory)": 1}
    whole.write_text(text)
    os.utime(whole, ns=(kept[0].st_atime_ns, kept[0].st_mtime_ns))
    (tmp_path / "out" / "manifest.json").unlink()
    assert prepared(hash_files).counts["read"] == {"kept": 120}
