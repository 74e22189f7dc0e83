"""Peak memory of a process that reads, whatever the size of a file, a line, a document or a row group."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is told by Linux")

READ = """
import sys
from multihop.data_prep.config import Source
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.raw import BadDocument
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import group_into_splits, list_files
import pyarrow.parquet

def peak():  # getrusage's begins with that of the process that started this one
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024

before, texts, bad = peak(), 0, {}
(file,) = list_files([Source(path=sys.argv[1], documents=sys.argv[2])])
for split in group_into_splits([file]):
    for part in split:
        try:
            for item in read_range(part):
                if isinstance(item, BadDocument):
                    bad[item.reason] = bad.get(item.reason, 0) + 1
                else:
                    texts += 1
        except UnreadableFileError as error:
            bad[str(error)] = bad.get(str(error), 0) + 1
print(peak() - before, texts, bad)
"""


def read(path: Path, documents: str = "file") -> tuple[int, int, dict[str, int]]:
    """Return the peak memory of reading in MiB, the number of texts, and the bad ones by their reasons."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", READ, str(path), documents]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    mib, texts, bad = done.stdout.split(" ", 2)
    print(f"{path.name} {documents}: {path.stat().st_size / 1e6:,.0f} MB, {mib} MiB, {texts} texts, {bad.strip()}")
    return int(mib), int(texts), json.loads(bad.replace("'", '"'))


def lines_of(texts: int) -> bytes:
    rng = random.Random(0)
    words = [str(rng.getrandbits(40)) for _ in range(1000)]
    return b"".join(json.dumps({"text": " ".join(rng.choices(words, k=100))}).encode() + b"\n" for _ in range(texts))


def a_line_of_zeros(path: Path, mib: int) -> None:
    """Write lines of which one has `mib` MiB, without space on the disk, and one has nearly 64 MiB."""
    some = lines_of(1000)
    with open(path, "wb") as file:
        file.write(some)
        file.seek(mib * 2**20, os.SEEK_CUR)
        file.write(b"\n" + some)
        file.write(json.dumps({"text": "x" * (64 * 2**20 - 100)}).encode() + b"\n" + some)


def a_bomb(path: Path, mib: int) -> None:
    with pa.CompressedOutputStream(str(path), {".zst": "zstd", ".gz": "gzip", ".bz2": "bz2"}[path.suffix]) as file:
        file.write(b'{"text": "one"}\n')
        for _ in range(mib):
            file.write(bytes(2**20))
        file.write(b'\n{"text": "two"}\n')


def one_row_group(path: Path, mib: int) -> None:
    """Write a row group of `mib` MiB of text that compresses only partly, with a value of nearly 64 MiB."""
    texts = [json.loads(line)["text"] for line in lines_of(1000).splitlines()]
    batch = pa.record_batch({"text": texts})
    large = pa.record_batch({"text": ["x" * (64 * 2**20 - 1)]})
    table = pa.Table.from_batches([batch] * (mib * 2**20 // batch.nbytes) + [large])  # one memory many times
    pq.write_table(table, path, row_group_size=len(table), compression="zstd", use_dictionary=False)
    assert pq.ParquetFile(path).num_row_groups == 1


def many_record_batches(path: Path, mib: int) -> None:
    batch = pa.record_batch({"text": [json.loads(line)["text"] for line in lines_of(1000).splitlines()] * 8})
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        for _ in range(mib * 2**20 // batch.nbytes):
            writer.write_batch(batch)


CASES = [
    ("a.jsonl", a_line_of_zeros, "file", 450, 3001, 1),
    ("a.txt", a_line_of_zeros, "block", 450, 0, 1),
    ("a.jsonl.zst", a_bomb, "file", 200, 2, 1),
    ("a.parquet", one_row_group, "file", 700, None, 0),
    ("a.txt", a_line_of_zeros, "line", 450, 3001, 1),
    ("a.txt", a_line_of_zeros, "file", 200, 0, 1),
    ("a.jsonl.gz", a_bomb, "file", 200, 2, 1),
    ("a.txt.bz2", a_bomb, "block", 200, 0, 1),
    ("a.arrow", many_record_batches, "file", 200, None, 0),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("mib", "name", "write", "documents", "most", "texts", "bad"),
    [
        *[pytest.param(200, *case, id=f"{case[0]}-{case[2]}") for case in CASES[:4]],
        *[pytest.param(4_500, *case, id=f"{case[0]}-{case[2]}-4.5GB", marks=pytest.mark.long) for case in CASES],
    ],
)
def test_memory_has_a_bound(
    tmp_path: Path,
    mib: int,
    name: str,
    write: Callable[[Path, int], None],
    documents: str,
    most: int,
    texts: int | None,
    bad: int,
) -> None:
    write(tmp_path / name, mib)
    needed, result, reasons = read(tmp_path / name, documents)
    assert needed < most
    assert sum(reasons.values()) == bad
    assert result == texts if texts is not None else result > mib * 100
    (tmp_path / name).unlink()
