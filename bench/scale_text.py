"""Measure each stage of the preparation of text by the size of the text and the number of workers, and extrapolate to a
terabyte: `python bench/scale_text.py --texts FOLDER`.

FOLDER holds `.jsonl.gz` files, at any depth, with a `text` in each line. Documents are made of its sentences, drawn at
random, so that few are near duplicates; one word in two hundred gets another letter, because larger texts have words
that smaller ones lack. The files are `.jsonl.gz`, as those of Common Crawl's descendants are. A worker is a process.
Exact and near duplicates are dropped, and a vocabulary is trained.

Each stage's growth is its exponent between the two largest sizes, where they take long enough to tell. A terabyte is
extrapolated from the largest size with that exponent, or with 1 where it is less, unless the stage reads only a bounded
sample. Sizes are of uncompressed text.
"""

import argparse
import gzip
import json
import math
import multiprocessing
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from prepare_text import read_texts

from multihop.data_prep.config import DataConfig, NearDuplicatesConfig, Source, TokenizerConfig
from multihop.data_prep.pipeline.prepare import prepare

TERABYTE = 1e12
FILE_BYTES = 25e6
"""Bytes of text per file."""
NEW_WORD = 1 / 200
SAMPLED = ("tokenizer",)
"""Stages that read only a bounded sample of the text."""
SHORT_S = 0.2
"""Of a stage that takes less, the exponent would be noise."""


@dataclass
class Stages:
    """Wall seconds of each stage, and CPU seconds of all workers in it."""

    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    now: str = ""
    since: float = field(default_factory=time.perf_counter)

    def report(self, stage: str, done: int, total: int) -> None:
        """`prepare`'s progress callback: charges the time between two stages to the earlier one."""
        if stage != self.now:
            self.end()
            self.now = stage

    def end(self) -> None:
        """Charge the time since the stage began to it."""
        now = time.perf_counter()
        self.wall_s[self.now] = self.wall_s.get(self.now, 0.0) + now - self.since
        self.since = now


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", default=["0.1:1", "1:1", "1:2", "4:2"], help="gigabytes:workers")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--json", type=Path, default=Path("bench/results/scale_text.json"))
    options = parser.parse_args()
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="scale-text-", dir=options.folder) as folder:
        texts = Path(folder) / "texts"
        for gigabytes, workers in sorted(
            (float(size), int(n)) for size, n in (each.split(":") for each in options.runs)
        ):
            size = write_texts(options.texts, texts, int(gigabytes * 1e9))
            out = Path(folder) / "prepared"
            stages = run(texts, out, workers)
            written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            shutil.rmtree(out)
            row = {"bytes": size, "workers": workers, "wall_s": stages.wall_s, "cpu_s": stages.cpu_s}
            measured.append({**row, "written": written})
            print(f"{size / 1e9:.2f} GB, {workers}: {sum(stages.wall_s.values()):.0f} s", file=sys.stderr)
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "measured": measured,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(measured)


def write_texts(source: Path, out: Path, size: int) -> int:
    """Write files with at least so many bytes of text in all, in addition to those that are there; returns the sum."""
    out.mkdir(exist_ok=True)
    sentences = [each for text in read_texts(source) for each in re.findall(r"[^.!?]+[.!?]+", text)]
    total = sum(int(path.name.split("-")[1]) for path in out.iterdir())
    while total < size:
        rng, number, written = random.Random(total), len(list(out.iterdir())), 0
        with gzip.open(out / "partial", "wt", encoding="utf-8", compresslevel=1) as file:
            while written < min(FILE_BYTES, size - total):
                words = " ".join(rng.choices(sentences, k=rng.randint(5, 60))).split()
                for at in range(int(len(words) * NEW_WORD * rng.random() * 2 + 0.5)):
                    at = rng.randrange(len(words))
                    words[at] = words[at][:2] + rng.choice("abcdefghijklmnopqrstuvwxyz") + words[at][3:]
                text = " ".join(words)
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
        (out / "partial").rename(out / f"{number:05d}-{written}-.jsonl.gz")
        total += written
    return total


def run(texts: Path, out: Path, workers: int) -> Stages:
    """Prepare the texts; returns what each stage took."""
    data = DataConfig(sources=[Source(path=str(texts))], near_duplicates=NearDuplicatesConfig(), heldout_fraction=0.001)
    stages = Stages()
    with multiprocessing.get_context("forkserver").Pool(workers) as pool:

        def map_items(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
            stage = stages.now
            for seconds, result in pool.imap_unordered(_Timed(function), items):
                stages.cpu_s[stage] = stages.cpu_s.get(stage, 0.0) + seconds
                yield result

        pool.map(abs, range(workers))  # they have started
        stages.since = time.perf_counter()
        prepare(data, TokenizerConfig(vocab_size=16_000), out, map_items, stages.report)
        stages.end()
    return stages


@dataclass(frozen=True)
class _Timed:
    """A function that also returns the seconds of the processor that a call took."""

    function: Callable[[Any], Any]

    def __call__(self, item: Any) -> tuple[float, Any]:
        before = time.process_time()
        result = self.function(item)
        return time.process_time() - before, result


def show(measured: list[dict[str, Any]]) -> None:
    """Print a row for each stage: CPU seconds per gigabyte of text, how they grow, and core-hours for a terabyte."""
    by_size = {row["bytes"]: row for row in measured}  # of several with other numbers of workers, the last
    sizes = sorted(by_size)
    names = " | ".join(f"CPU s/GB, {size / 1e9:.1f} GB" for size in sizes)
    print(f"| stage | {names} | exponent | core-hours for a TB |")
    print("|---" + "|---:" * (len(sizes) + 2) + "|")
    total = 0.0
    for stage in by_size[sizes[-1]]["wall_s"]:
        cost = {size: _cost(by_size[size], stage) for size in sizes}
        exponent = least = 0.0 if stage in SAMPLED else 1.0
        if stage not in SAMPLED and len(sizes) > 1 and cost[sizes[-2]] > SHORT_S:
            exponent = math.log(cost[sizes[-1]] / cost[sizes[-2]]) / math.log(sizes[-1] / sizes[-2])
        grown = (TERABYTE / sizes[-1]) ** max(least, exponent)
        hours = cost[sizes[-1]] * grown / 3600
        total += hours
        each = " | ".join(f"{cost[size] / size * 1e9:.2f}" for size in sizes)
        print(f"| {stage or 'list'} | {each} | {exponent:.2f} | {hours:.2f} |")
    print(f"| all | {' | ' * len(sizes)} | {total:.1f} |")
    for row in measured:
        seconds = sum(row["wall_s"].values())
        idle = sum(
            wall - row["cpu_s"].get(stage, 0.0) / row["workers"]
            for stage, wall in row["wall_s"].items()
            if stage not in SAMPLED  # trained by several threads of one worker
        )
        print(
            f"{row['bytes'] / 1e9:.2f} GB, {row['workers']} workers: {seconds:.0f} s, "
            f"{row['bytes'] / 1e6 / seconds:.1f} MB/s; {idle:.1f} s of it in the driver or waiting for the last "
            f"worker; {row['written'] / row['bytes']:.2f} bytes on the disk for one of text"
        )


def _cost(row: dict[str, Any], stage: str) -> float:
    """CPU seconds, or wall seconds if no worker ran."""
    seconds: float = row["cpu_s"].get(stage, row["wall_s"].get(stage, 0.0))
    return max(seconds, 1e-3)


if __name__ == "__main__":
    main()
