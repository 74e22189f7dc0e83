"""Measure what grows with the size of the data and of a checkpoint: `python bench/scale_data.py SUBCOMMAND`.

    shards       open, read and verify a data set of very many shards; copy it to S3 and fetch it

Each figure is of one call in a process of its own: seconds of the processor and of the clock, and by how much the
resident memory grew at its peak, mapped pages included. An exponent of 1 is linear growth. Sizes are those of a small
machine; what stands in for what is larger is said where it is made.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
"""What was measured of one thing at one size."""
_LINKS = 30_000
"""Names of one file; ext4 allows 65,000."""


Subcommands = dict[str, tuple[Callable[[Path, int], Iterator[Row]], list[int]]]
"""Name -> the function that measures one size in a folder, and the sizes."""


def main(description: str | None, subcommands: Subcommands) -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=subcommands)
    parser.add_argument("--sizes", type=lambda text: int(float(text)), nargs="+", default=None)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--json", type=Path, default=None, help="default: bench/results/scale_WHAT.json")
    options = parser.parse_args()
    run, sizes = subcommands[options.what]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="scale-", dir=options.folder) as folder:
        for size in options.sizes or sizes:
            for row in run(Path(folder), size):
                rows.append({"size": size, **row})
                print(f"{size:,} {row['what']}: {row['cpu_s']:.3g} s", file=sys.stderr)
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "rows": rows,
    }
    path = options.json or Path("bench/results") / f"scale_{options.what}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    show(rows)


def show(rows: list[Row]) -> None:
    """Print a Markdown table, with the growth of the processor's seconds since the size before."""
    print("| what | size | CPU s | wall s | peak MB | exponent | |")
    print("|---|---:|---:|---:|---:|---:|---|")
    fixed = ("what", "size", "cpu_s", "wall_s", "peak_mb")
    for what in dict.fromkeys(row["what"] for row in rows):
        same = [row for row in rows if row["what"] == what]
        exponents = ["", *(f"{growth(before, row):.2f}" for before, row in itertools.pairwise(same))]
        for row, exponent in zip(same, exponents, strict=True):
            rest = ", ".join(f"{key} {value:,}" for key, value in row.items() if key not in fixed)
            print(
                f"| {what} | {row['size']:,} | {row['cpu_s']:.3g} | {row['wall_s']:.3g} | {row['peak_mb']:.0f} | "
                f"{exponent} | {rest} |"
            )


def growth(before: Row, row: Row) -> float:
    """Return the exponent of the size with which the processor's seconds grew."""
    return math.log(row["cpu_s"] / before["cpu_s"]) / math.log(row["size"] / before["size"])


def measure(what: str, function: Callable[..., dict[str, Any] | None], *arguments: Any) -> Row:
    """Call a function in a forked process; returns the figures, and what it returned."""
    receive, send = multiprocessing.Pipe(duplex=False)

    def call() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cpu, wall = time.process_time(), time.perf_counter()
        facts = function(*arguments) or {}
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6
        send.send({"what": what, "cpu_s": cpu, "wall_s": wall, "peak_mb": peak, **facts})

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    send.close()
    try:
        row: Row = receive.recv()
    except EOFError:
        raise SystemExit(f"{what} failed; its traceback is above") from None
    finally:
        process.join()
    return row


def shards(folder: Path, size: int) -> Iterator[Row]:
    """Measure a data set of `size` shards of 86 documents. They are names of a few equal files, on S3 copies."""
    from multihop.data_prep.dataset.manifest import read_data_manifest
    from multihop.data_prep.dataset.shards import open_dataset
    from multihop.data_prep.dataset.verify import is_verified, verify_dataset

    data = make_dataset(folder / f"shards-{size}", size)

    def read_documents() -> dict[str, Any]:
        train = open_dataset(data).train
        rng = np.random.default_rng(0)
        return {"tokens": sum(len(train.tokens(i)) for i in rng.integers(0, len(train), 10_000).tolist())}

    yield measure("read the manifest", lambda: {"shards": len(read_data_manifest(data).shards)})
    yield measure("open", lambda: {"documents": len(open_dataset(data).train)})
    yield measure("open, and read 10,000 documents at random", read_documents)
    yield measure("verify: hash all files", lambda: {"bad": len(verify_dataset(data))})
    yield measure("start again: compare sizes and times", lambda: {"good": is_verified(data, read_data_manifest(data))})
    if size <= 1_000:  # the endpoint takes 40 ms for a request
        yield from s3_copies(data, folder / f"fetched-{size}")


def make_dataset(folder: Path, shards: int) -> Path:
    """Prepare a small text, and give it that many training shards."""
    from multihop.common.files import sha256_file
    from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
    from multihop.data_prep.dataset.manifest import Shard, data_fingerprint, write_manifest
    from multihop.data_prep.pipeline.prepare import prepare

    folder.mkdir()
    lines = [" ".join(f"word{(7 * i * j) % 997}" for j in range(1, 40)) + "." for i in range(1, 101)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    data = folder / "data"
    manifest = prepare(
        DataConfig(sources=[Source(path=str(folder / "text.jsonl"))], heldout_fraction=0.1),
        TokenizerConfig.model_validate({"vocab_size": 80, "threads": 1}),
        data,
    )
    (first,) = manifest.of_split("train")
    (data / first.file).rename(folder / "shard")
    names = [f"train-{number:05d}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        if number % _LINKS == 0:
            source = data / name
            source.write_bytes((folder / "shard").read_bytes())
        else:
            os.link(source, data / name)
    entries: list[Shard] = [first.model_copy(update={"file": name}) for name in names]
    assert all(sha256_file(data / entry.file) == entry.sha256 for entry in entries[:: max(1, shards // 10)])
    entries += manifest.of_split("heldout")
    fingerprint = data_fingerprint(manifest.tokenizer.sha256, manifest.token_dtype, entries)
    write_manifest(data, manifest.model_copy(update={"shards": entries, "fingerprint": fingerprint}))
    return data


def s3_copies(data: Path, fetched: Path) -> Iterator[Row]:
    """Copy a data set to an S3 endpoint on this machine, list it there and fetch it. The endpoint's time is not counted
    as the processor's, but it is in the clock's."""
    from multihop.common import mirror
    from multihop.common.storage import open_folder

    with s3_endpoint() as server:
        location = f"s3://{server.make_bucket()}/data"

        def requests_of(what: str, function: Callable[[], dict[str, Any] | None]) -> Row:
            return with_requests(server, what, function)

        yield requests_of("S3: copy a data set to it", lambda: mirror.push(data, open_folder(location)))
        yield requests_of("S3: list its files", lambda: {"names": len(open_folder(location).names())})
        yield requests_of("S3: fetch it", lambda: mirror.fetch(open_folder(location), fetched))
        yield requests_of("S3: fetch it again", lambda: mirror.fetch(open_folder(location), fetched))
        yield requests_of(
            "S3: fetch one more shard", lambda: mirror.fetch(open_folder(location), fetched, "train-00000.arrow".__eq__)
        )


def with_requests(server: Any, what: str, function: Callable[[], dict[str, Any] | None]) -> Row:
    """Return the figures of a call, and the number of its requests to an S3 endpoint."""
    before = len(server.requests)
    row = measure(what, function)
    return {**row, "requests": len(server.requests) - before}


@contextmanager
def s3_endpoint() -> Iterator[Any]:
    """Serve the tests' S3 endpoint from a thread of this process."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    from s3_endpoint import S3, serving

    with serving(S3()) as server:
        os.environ |= {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        yield server


if __name__ == "__main__":
    main(__doc__, {"shards": (shards, [1_000, 10_000, 100_000])})
