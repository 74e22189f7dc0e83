"""A folder with all kinds of bad input: each has its outcome and its reason, and the rest is read."""

import bz2
import gzip
import json
import lzma
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from one_file import fails, one_part, rows
from prepared_data import already_prepared

from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading import identities
from multihop.data_prep.reading.raw import MAX_DOCUMENT_BYTES, BadDocument
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import list_files


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd,
    "bz2": bz2.compress,
    "xz": partial(lzma.compress, preset=0),
}
NAMES = {"gz": "gzip", "zst": "zstd", "bz2": "bzip2", "xz": "xz"}


@pytest.mark.parametrize("packing", PACK)
def test_a_compressed_file_is_read_whole_or_not_at_all(tmp_path: Path, packing: str) -> None:
    data, path = rows(1_500), tmp_path / f"a.jsonl.{packing}"
    packed = PACK[packing](data)
    path.write_bytes(packed)
    texts = [json.loads(line)["text"] for line in data.splitlines()]
    assert list(read_range(one_part(path))) == texts
    path.write_bytes(packed + PACK[packing](data[:100]) + PACK[packing](data[100:]))
    assert list(read_range(one_part(path))) == texts * 2, "files joined of several are usual"
    pack, (start, end) = PACK[packing], (data[:100], data[100:])
    for joined in ([b"", start, end], [start, b"", b"", end], [start, end, b""]):
        path.write_bytes(b"".join(map(pack, joined)))
        assert list(read_range(one_part(path))) == texts, "a log that is closed empty is packed too"
    path.write_bytes(b"")
    assert list(read_range(one_part(path))) == []
    damaged = bytearray(packed)
    damaged[len(packed) // 2 if packing != "zst" else 0] ^= 1  # a frame of zstd may have no checksum
    for broken in (packed[:-1], packed[: len(packed) // 2], packed[:3], packed + b"more", bytes(damaged), data):
        path.write_bytes(broken)
        assert fails(one_part(path)) == f"broken {NAMES[packing]}"


def test_what_takes_too_much_memory_to_unpack_says_so(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**29}]
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b"{}", filters=filters))
    assert fails(one_part(tmp_path / "a.jsonl.xz")) == "xz that takes too much memory to unpack"
    # RFC 8878, section 3.1.1: magic number, a header without content size, a window of 256 MiB, an empty last block.
    (tmp_path / "a.jsonl.zst").write_bytes(bytes.fromhex("28b52ffd 00 90 010000"))
    assert fails(one_part(tmp_path / "a.jsonl.zst")) == "zstd that takes too much memory to unpack"


def test_xz_may_be_padded_between_its_streams(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"text": "one"}\n') + bytes(8) + lzma.compress(b'{"text": "two"}\n') + bytes(4))
    assert list(read_range(one_part(path))) == ["one", "two"]


@pytest.mark.parametrize("packing", ["gz", "zst", "xz"])
def test_a_bomb_is_one_line_that_is_too_long(tmp_path: Path, packing: str) -> None:
    bomb = PACK[packing](bytes(MAX_DOCUMENT_BYTES + 2**20) + b"\n" + b'{"text": "one"}\n')
    assert len(bomb) < 200_000
    path = tmp_path / f"a.jsonl.{packing}"
    path.write_bytes(bomb)
    assert list(read_range(one_part(path))) == [BadDocument(1, "longer than 64 MiB"), "one"]
    path = path.rename(tmp_path / f"a.txt.{packing}")
    assert fails(one_part(path)) == "longer than 64 MiB"


def test_a_broken_file_in_several_parts_gives_no_document_from_any_of_them(
    tmp_path: Path, tok: TokenizerConfig, corpus: Path, document: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multihop.data_prep.reading.sources.MIN_SPLIT_BYTES", 4_000)
    table = pa.table({"text": [document(number) for number in range(1_000, 1_200)]})
    pq.write_table(table, corpus / "c.parquet", row_group_size=20, compression="none", use_dictionary=False)
    monkeypatch.setattr("multihop.data_prep.reading.sources._TARGET_SPLITS", 10**6)
    data = DataConfig(sources=[Source(path=str(corpus))], heldout_fraction=0.1, max_bad_fraction=0.1)
    assert prepare(data, tok, tmp_path / "whole").counts["read"] == {"kept": 320}
    damaged = bytearray((corpus / "c.parquet").read_bytes())
    page = damaged.index(document(1_100).encode())
    damaged[page - 40 : page] = b"\xff" * 40
    (corpus / "c.parquet").write_bytes(damaged)
    manifest = prepare(data, tok, tmp_path / "out")
    assert manifest.counts["read"] == {"kept": 120, "broken parquet": 1}
    assert [entry.path for entry in manifest.set_aside] == [str(corpus / "c.parquet")]
    assert already_prepared(data, tok, tmp_path / "out") == manifest


def test_a_file_that_is_unreadable_for_one_source_is_read_for_another(
    tmp_path: Path, tok: TokenizerConfig, document: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multihop.data_prep.reading.sources.MIN_SPLIT_BYTES", 4_000)
    for name, columns in (("a", {"text": 1_000}), ("b", {"text": 2_000, "summary": 3_000})):
        table = pa.table({each: [document(first + n) for n in range(200)] for each, first in columns.items()})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=20, compression="none", use_dictionary=False)
    sources = [Source(path=f"{tmp_path}/*.parquet"), Source(path=f"{tmp_path}/*.parquet", field="summary")]
    manifest = prepare(DataConfig(sources=sources, max_bad_fraction=0.3), tok, tmp_path / "out")
    assert manifest.counts["read"] == {"kept": 600, "no field 'summary'": 1}
    assert [entry.path for entry in manifest.set_aside] == [str(tmp_path / "a.parquet")]


def test_documents_before_a_break_are_taken_back_and_the_rest_of_the_split_is_read(
    tmp_path: Path, tok: TokenizerConfig, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multihop.data_prep.stages.documents.BATCH_BYTES", 10_000)
    data = DataConfig(sources=[Source(path=str(corpus))], heldout_fraction=0.1, max_bad_fraction=0.1)
    wanted = prepare(data, tok, tmp_path / "without")
    (corpus / "aa.jsonl.gz").write_bytes(gzip.compress(b"{\n" * 3 + rows(2_000))[:-9])
    (corpus / "ab.jsonl.zst").write_bytes(zstd(b"{\n" * 3 + rows(2_000))[:-9])
    manifest = prepare(data, tok, tmp_path / "out")
    assert manifest.counts["read"] == {"kept": 120, "broken gzip": 1, "broken zstd": 1}
    assert manifest.fingerprint == wanted.fingerprint


DAMAGES = """
import random, sys
from pathlib import Path
from multihop.data_prep.config import Source
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import FileRange, list_files

path, rng, broken = Path(sys.argv[1]), random.Random(0), 0
good = path.read_bytes()
for _ in range(250):
    damaged = bytearray(good)
    damaged[rng.randrange(len(good))] = rng.randrange(256)
    path.write_bytes(damaged[: rng.randrange(len(good))] if rng.random() < 0.1 else damaged)
    (file,) = list_files([Source(path=str(path))])
    try:
        list(read_range(FileRange(file, 0, file.size)))
    except UnreadableFileError:
        broken += 1
print(broken)
"""


@pytest.mark.parametrize("kind", ["parquet", "file", "stream", "dictionary"])
def test_no_damage_of_a_table_ends_the_process(tmp_path: Path, kind: str) -> None:
    """pyarrow trusts what it reads: without checks some of these abort, and some read foreign memory."""
    table = pa.table({"number": list(range(300)), "text": [f"text {number % 9} " * 5 for number in range(300)]})
    if kind == "dictionary":
        table = table.set_column(1, "text", table.column("text").dictionary_encode())
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=70)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    assert int(_run(DAMAGES, path)) >= 25


ENDS_AT_ONCE = """
import io, sys, time
from multihop.data_prep.config import Source
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.file_reader import FileReader
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import FileRange, list_files

class LetGoSlowly(bytearray):
    def __del__(self):
        time.sleep(0.2)

class Stream(io.BufferedReader):
    def read(self, size=-1):
        return LetGoSlowly(super().read(size))

stream = FileReader.stream
FileReader.stream = lambda opened: Stream(stream(opened).detach())
(file,) = list_files([Source(path=sys.argv[1])])
try:
    list(read_range(FileRange(file, 0, file.size)))
except UnreadableFileError:
    print("broken")
"""


def test_a_process_that_ends_after_a_broken_footer_ends_well(tmp_path: Path) -> None:
    """pyarrow reads it in a thread of its own, which aborts the process if it releases the bytes too late."""
    path = tmp_path / "a.arrow"
    path.write_bytes(b"ARROW1\0\0" + b"x" * 100 + b"\xff\xff\xff\x0fARROW1")
    assert _run(ENDS_AT_ONCE, path) == "broken\n"


def _run(code: str, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[Path]:
    """A folder with all kinds of bad input, and three good documents."""
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "good.jsonl").write_text('{"text": "The good."}\n\n{"text": ["list"]}\n{"text": null}\n{"text": 1}\n{\n')
    (folder / "missing.jsonl").write_text('{"body": "x"}\n["text"]\n"text"\n')
    (folder / "nul.jsonl").write_bytes(b'{"text": "a\0b"}\n\0\0\0\n{"text": "The nul\\u0000escaped."}\n')
    (folder / "nul.txt").write_bytes(b"text \0 text")
    (folder / "latin.txt").write_bytes("für".encode("latin-1"))
    (folder / "utf16.txt").write_bytes("text".encode("utf-16"))
    (folder / "utf16le.txt").write_bytes("text".encode("utf-16-le"))
    (folder / "utf16.jsonl").write_bytes('{"text": "one"}\n{"text": "two"}\n'.encode("utf-16"))
    (folder / "empty.txt").write_bytes(b"")
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "empty.parquet").write_bytes(b"")
    (folder / "empty.arrow").write_bytes(b"")
    pq.write_table(pa.table({"body": ["x"]}), folder / "other.parquet")
    pq.write_table(pa.table({"text": [1]}), folder / "number.parquet")
    with pa.ipc.new_file(str(folder / "other.arrow"), pa.schema({"body": pa.string()})):
        pass
    with pa.ipc.new_file(str(folder / "number.arrow"), pa.schema({"text": pa.list_(pa.string())})):
        pass
    (folder / "name\nof two lines.txt").write_text("The line break.")
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text("The name of bytes.")
    (folder / "itself.txt").symlink_to(folder / "itself.txt")
    (folder / "nothing.jsonl").symlink_to(folder / "not there")
    (folder / "deep").mkdir()
    (folder / "deep" / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.txt")
    return folder


def test_each_kind_of_bad_input_has_its_reason_and_the_rest_is_read(
    tmp_path: Path, odd: Path, document: Callable[[int], str]
) -> None:
    (odd / "words.txt").write_text(" ".join(map(document, range(50))))
    data = DataConfig(sources=[Source(path=str(odd))], heldout_fraction=0.0, max_bad_fraction=1.0)
    manifest = prepare(data, TokenizerConfig(vocab_size=64, threads=1), tmp_path / "out")
    result = {entry.path.removeprefix(f"{odd}/"): entry.reason for entry in manifest.set_aside}
    assert result == {
        "good.jsonl:2": "empty",
        "good.jsonl:3": "field 'text' is not text",
        "good.jsonl:4": "field 'text' is not text",
        "good.jsonl:5": "field 'text' is not text",
        "good.jsonl:6": "broken JSON",
        "missing.jsonl:1": "no field 'text'",
        "missing.jsonl:2": "no field 'text'",
        "missing.jsonl:3": "no field 'text'",
        "nul.jsonl:1": "broken JSON",
        "nul.jsonl:2": "broken JSON",
        "nul.txt": "NUL bytes",
        "latin.txt": "not UTF-8",
        "utf16.txt": "not UTF-8",
        "utf16le.txt": "NUL bytes",
        "utf16.jsonl:1": "not UTF-8",
        "utf16.jsonl:2": "broken JSON",
        "utf16.jsonl:3": "broken JSON",
        "empty.txt": "empty",
        "empty.parquet": "broken parquet",
        "empty.arrow": "broken arrow",
        "other.parquet": "no field 'text'",
        "number.parquet": "field 'text' is not text",
        "other.arrow": "no field 'text'",
        "number.arrow": "field 'text' is not text",
        "itself.txt": "link loop",
        "nothing.jsonl": "broken link",
        "deep/loop": "link loop",
        "pipe.txt": "not a file",
    }
    assert manifest.counts["read"]["kept"] == 5
    assert sum(manifest.counts["read"].values()) == 5 + len(result)
    assert len(open_dataset(tmp_path / "out").train) == 5
    assert already_prepared(data, TokenizerConfig(vocab_size=64, threads=1), tmp_path / "out") == manifest


def test_names_that_do_not_print_are_one_line_of_utf8_and_lead_back_to_the_file(odd: Path) -> None:
    (newline,) = list_files([Source(path=f"{odd}/name*")])
    (bytes_,) = list_files([Source(path=f"{odd}/caf*")])
    assert newline.name == f"{odd}/name\\nof two lines.txt" and bytes_.name == f"{odd}/caf\\udce9.txt"
    for file in (newline, bytes_):
        assert json.dumps(file.name).encode().decode() and os.path.exists(file.path)
        assert file.name.encode().decode("unicode_escape") == file.path


def test_identities_of_names_that_do_not_print_are_remembered(tmp_path: Path, odd: Path) -> None:
    files = list_files([Source(path=str(odd))])
    identities.save_identities(tmp_path / "inputs.json", files, identities.hash_files(files))
    again = identities.load_identities(tmp_path / "inputs.json", files)
    assert {file.path for file in files} == again.keys()


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that any user may enter, unlike pytest's folders."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
        for path in Path(folder).rglob("*"):
            path.chmod(0o755)


def test_what_may_not_be_read_is_set_aside_until_it_may(readable: Path) -> None:
    (readable / "closed").mkdir()
    (readable / "closed" / "a.txt").write_text("one")
    (readable / "b.txt").write_text("two")
    (readable / "c.txt").write_text("three")
    (readable / "b.txt").chmod(0)
    (readable / "closed").chmod(0)
    program = """
import os, sys
from multihop.data_prep.reading import identities
from multihop.data_prep.config import Source
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import group_into_splits, list_files
if os.geteuid() == 0:  # root may read everything
    "".encode("utf-8-sig")  # the codec is imported by who may
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
files = list_files([Source(path=sys.argv[1])])
files = identities.with_identities(files, identities.hash_files(files))
for split in group_into_splits(files):
    for part in split:
        try:
            print(part.file.name.removeprefix(sys.argv[1]), list(read_range(part)))
        except UnreadableFileError as error:
            print(part.file.name.removeprefix(sys.argv[1]), error, error.transient)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", program, str(readable)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "/b.txt cannot be opened (Permission denied) True",
        "/c.txt ['three']",
        "/closed cannot be opened (Permission denied) False",
    ]


def test_links_to_folders_and_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("one")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "texts" / "b.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")
    for path in ("texts", "texts/**", "texts/**/*.txt", "texts/*"):
        files = list_files([Source(path=str(tmp_path / path))])
        assert [file.name for file in files] == [f"{tmp_path}/texts/b.txt", f"{tmp_path}/texts/folder/a.txt"]
        assert stat.S_ISLNK(os.lstat(files[0].path).st_mode)
