"""Measure encoding text with an existing tokenizer: ours with cached words, against Hugging Face tokenizers alone.

    python bench/encode_text.py --texts texts/ --tokenizers gpt2=vocabularies/gpt2 bert=vocabularies/bert/vocab.txt

`texts/` holds .jsonl.gz files with a field `text`. Inputs are that text, Python's standard library as code, and
three synthetic texts: Chinese, proteins, and documents of one word. Implementations alternate, each in its own process:

    ours        documents to sentences to ids, as `multihop prep` does
    library     the same by the library's `encode_batch_fast` in one thread; byte-level BPE gets whole documents
    before      ours at an earlier commit: `git archive COMMIT | tar x -C before/` and --before before/

The ids of `ours` and `library` are compared. Finally each encodes one word of 10^3 to 10^6 letters (`before` only up to
--most-before), and the exponent of the time in the length is fitted. With a SentencePiece model the library is
SentencePiece.
"""

import argparse
import gzip
import hashlib
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multihop.data_prep.tokenizers.tokenizer import Tokenizer

_Encode = Callable[[list[str]], list[int]]
"""Encodes documents to token ids."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    """Print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--tokenizers", nargs="+", required=True, metavar="NAME=PATH", help="as tokenizer.path")
    parser.add_argument("--before", type=Path, help="a folder with an earlier commit's files")
    parser.add_argument("--mb", type=float, default=20.0, help="of each kind of text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-before", type=int, default=10_000, help="letters of the longest word for `before`")
    parser.add_argument("--json", type=Path, default=Path("bench/results/encode_text.json"))
    parser.add_argument("--child", nargs=3, metavar=("WAY", "TOKENIZER", "TEXTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)))
        return
    rows: list[dict[str, Any]] = []
    given = dict(each.split("=", 1) for each in options.tokenizers)
    ways = {"ours": Path.cwd(), "library": Path.cwd()} | ({"before": options.before} if options.before else {})
    with tempfile.TemporaryDirectory(prefix="encode-text-") as scratch:
        files = write_texts(options.texts, options.mb, Path(scratch))
        for name, path in given.items():
            for kind, file in files.items():
                size = int(kind.removeprefix("word ")) if kind.startswith("word ") else 0
                for repeat in range(options.repeats):
                    for way, root in ways.items():
                        if way == "before" and size > options.most_before:
                            continue
                        row = run(root, way, path, file)
                        rows.append({"tokenizer": name, "texts": kind, "way": way, "repeat": repeat, **row})
                print(f"{name} {kind}", file=sys.stderr, flush=True)
                same = [row for row in rows if (row["tokenizer"], row["texts"]) == (name, kind)]
                assert len({row["ids"] for row in same if row["way"] != "before"}) == 1, "the ids differ"
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "measured": rows,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(rows)


def write_texts(texts: Path, mb: float, folder: Path) -> dict[str, Path]:
    """Write a JSON file with a list of documents for each kind of text; returns the paths by kind."""
    draw = random.Random(0)
    one_word = ["".join(draw.choices(_LETTERS, k=draw.randint(200, 2000))) for _ in range(int(mb * 1e6 / 8 / 1100) + 1)]
    common = [chr(0x4E00 + int(3000 * draw.random() ** 3)) for _ in range(2000)]
    ends = [*[""] * 9, "\u3002"]
    kinds: dict[str, Iterator[str]] = {
        "texts": _texts(texts),
        "code": (path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))),
        "Chinese": ("".join(draw.choice(common) + draw.choice(ends) for _ in range(600)) for _ in range(10**6)),
        "protein": ("".join(draw.choices("ACDEFGHIKLMNPQRSTVWY", k=draw.randint(50, 600))) for _ in range(10**6)),
        "one word": iter(one_word),
        **{f"word {size}": iter(["".join(draw.choices(_LETTERS, k=size))]) for size in (10**3, 10**4, 10**5, 10**6)},
    }
    files = {}
    for kind, documents in kinds.items():
        chosen, size = [], 0.0
        for document in documents:
            chosen.append(document)
            size += len(document.encode()) / 1e6
            if size > (mb if kind in ("texts", "code") else mb / 8):
                break
        files[kind] = folder / f"{kind}.json"
        files[kind].write_text(json.dumps(chosen))
    return files


def _texts(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def run(root: Path, way: str, tokenizer: str, texts: Path) -> dict[str, Any]:
    """Run `measure` in a new process with the packages in `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    options = ["--texts", ".", "--tokenizers", ".", "--child", way, str(Path(tokenizer).absolute()), str(texts)]
    command = [sys.executable, "-P", str(Path(__file__).absolute()), *options]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(way: str, path: str, texts: str) -> dict[str, Any]:
    """Return processor seconds and memory of encoding the documents of a file; runs in a process of its own."""
    from multihop.data_prep.rules.clean import clean
    from multihop.data_prep.tokenizers.existing import import_tokenizer
    from multihop.data_prep.tokenizers.tokenizer import parse

    documents = list(map(clean, json.loads(Path(texts).read_text())))
    content = import_tokenizer(path)
    digest, tokens, seconds = hashlib.sha256(), 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    encode = _library(content) if way == "library" else _ours(parse(content))
    loaded = time.process_time() - start
    for batch in _batches(documents):
        start = time.process_time()
        ids = encode(batch)
        seconds += time.process_time() - start
        tokens += len(ids)
        digest.update(json.dumps(ids).encode())
    return {
        "seconds": seconds,
        "load_seconds": loaded,
        "text_bytes": sum(len(document.encode()) for document in documents),
        "tokens": tokens,
        "ids": digest.hexdigest(),
        "memory_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
    }


def _batches(documents: list[str]) -> Iterator[list[str]]:
    """Yield batches of about a megabyte each."""
    batch: list[str] = []
    for document in documents:
        batch.append(document)
        if sum(map(len, batch)) > 1_000_000:
            yield batch
            batch = []
    if batch:
        yield batch


def _ours(tokenizer: "Tokenizer") -> _Encode:
    def encode(batch: list[str]) -> list[int]:
        return tokenizer.encode([part for document in batch for part in tokenizer.split(document)])[0].tolist()

    return encode


def _library(content: bytes) -> _Encode:
    """Return the library's own encoding: of whole documents for byte-level BPE, of sentences for the others."""
    from multihop.data_prep.rules.sentences import split_sentences

    def sentences(batch: list[str]) -> list[str]:
        return [part for document in batch for part in split_sentences(document)]

    if not content.startswith(b"{"):
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_proto=content)
        return lambda batch: [i for ids in processor.encode(sentences(batch), num_threads=1) for i in ids]
    from tokenizers import Tokenizer, pre_tokenizers

    tokenizer = Tokenizer.from_str(content.decode())
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    by_bytes = isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)

    def encode(batch: list[str]) -> list[int]:
        texts = batch if by_bytes else sentences(batch)
        return [i for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False) for i in each.ids]

    return encode


def show(rows: list[dict[str, Any]]) -> None:
    """Print megabytes per second of processor time and ratios, then the exponents in a word's length."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    print(f"{'':12}{'':12}" + "".join(f"{way + ' MB/s':>16}{'MB':>8}" for way in ways) + "   ours beside each")
    seconds: dict[tuple[str, int, str], float] = {}
    for name, kind in dict.fromkeys((row["tokenizer"], row["texts"]) for row in rows):
        of_kind = [row for row in rows if (row["tokenizer"], row["texts"]) == (name, kind)]
        times = {way: [row["seconds"] for row in of_kind if row["way"] == way] for way in ways}
        if kind.startswith("word "):
            for way in ways:
                if times[way]:
                    seconds[name, int(kind.removeprefix("word ")), way] = statistics.median(times[way])
            continue
        size = of_kind[0]["text_bytes"] / 1e6
        line = f"{name:12}{kind:12}"
        for way in ways:
            memory = statistics.median(row["memory_bytes"] for row in of_kind if row["way"] == way) / 1e6
            line += f"{size / statistics.median(times[way]):>16.2f}{memory:>8.0f}"
        for way in ways[1:]:
            ratios = [peer / ours for peer, ours in zip(times[way], times["ours"], strict=True)]
            line += f"   {way} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(line)
    for name, way in dict.fromkeys((name, way) for name, _, way in seconds):
        points = {size: value for (of, size, by), value in seconds.items() if (of, by) == (name, way)}
        told = ", ".join(f"{size:,} {value:.3f} s" for size, value in points.items())
        most = max(points)
        least = min((size for size in points if 10_000 <= size < most), default=min(points))  # overhead dominates below
        fitted = math.log(points[most] / points[least]) / math.log(most / least) if most > least else math.nan
        print(f"one word, {name}, {way}: {told}; exponent {fitted:.2f} from {least:,}")


if __name__ == "__main__":
    main()
