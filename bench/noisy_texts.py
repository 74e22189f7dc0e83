"""Make texts with known near duplicates and noise, for recipes/experiments/data.yaml and the experiments on ModernBERT.

    python bench/noisy_texts.py texts/ noisy-texts/

`texts/` holds .jsonl or .jsonl.gz files with a field `text`. The script writes:

    clean.jsonl.gz         the documents
    noisy.jsonl.gz         the same with noise lines in some, near duplicates of some, and documents of noise
    unseen.jsonl           documents that are in neither, to measure perplexity on
    unseen-reviews.yaml    the task that measures it
    unseen-forty.jsonl     the first 40 of them, for masked models, which take a forward pass for each token
    unseen-forty.yaml      the task on these
    counts.json            number of documents of each kind: what a filter should find

    Random choices depend on the document's text and the seed alone, so that equal texts give equal files.
"""

import argparse
import gzip
import io
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from multihop.common.counter_rng import key_of

_UNSEEN = 0.01
_WITH_COPIES = 0.2
_MOST_COPIES = 4
_EDITED = 0.01
"""Share of a copy's words that are dropped, repeated or replaced by another word of the document: with shingles of 5
words the Jaccard similarity to the document is about 0.9, and to another copy 0.8."""
_WITH_LINES = 0.3
_NOISE_LINES = (
    "Home | Reviews | Forum | Log in",
    "Please enable JavaScript to view the comments",
    "We use cookies, see our privacy policy",
    "Was this review helpful? 12 of 17",
    "Share",
    "© 2005 - all rights reserved ...",
)
_NOISE_DOCUMENTS = 0.1
_TASKS = {"unseen-reviews.yaml": "unseen.jsonl", "unseen-forty.yaml": "unseen-forty.jsonl"}
_TASK = "kind: perplexity\ntest: {}\nfields: {{text: text}}\n"
_FEW = 40


def main() -> None:
    """Write the files and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=20_000, help="that are taken from the texts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    counts = write(options.texts, options.out, options.documents, options.seed)
    (options.out / "counts.json").write_text(json.dumps(counts, indent=1) + "\n")
    print(json.dumps(counts, indent=1))


def write(texts: Path, out: Path, documents: int, seed: int) -> dict[str, int]:
    """Write the files into `out`; returns the number of documents of each kind."""
    counts: Counter[str] = Counter()
    for task, file in _TASKS.items():
        (out / task).write_text(_TASK.format(file))
    with (
        zipped_lines(out / "clean.jsonl.gz") as clean,
        zipped_lines(out / "noisy.jsonl.gz") as noisy,
        open(out / "unseen.jsonl", "w", encoding="utf-8") as unseen,
        open(out / "unseen-forty.jsonl", "w", encoding="utf-8") as few,
    ):
        for text in read_texts(texts, documents):
            draw = random.Random(key_of("noisy texts", seed, text))
            if draw.random() < _UNSEEN:
                counts["unseen documents"] += 1
                unseen.write(_line(text))
                if counts["unseen documents"] <= _FEW:
                    few.write(_line(text))
                continue
            counts["clean documents"] += 1
            clean.write(_line(text))
            for kind, made in noisy_documents(text, draw):
                counts[kind] += 1
                noisy.write(_line(made))
    return dict(sorted(counts.items()))


def read_texts(folder: Path, documents: int) -> Iterator[str]:
    """Yield the first documents, each text once."""
    seen: set[str] = set()
    for path in sorted([*folder.glob("**/*.jsonl"), *folder.glob("**/*.jsonl.gz")]):
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
            for line in lines:
                text = json.loads(line)["text"]
                if text not in seen:
                    seen.add(text)
                    yield text
                if len(seen) == documents:
                    return


def noisy_documents(text: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of a document (unchanged or with noise lines), of its near duplicates, and perhaps of a
    document of noise."""
    if draw.random() < _WITH_LINES:
        lines = draw.sample(_NOISE_LINES, draw.randint(2, len(_NOISE_LINES)))
        above = draw.randint(0, len(lines))
        yield "documents with noise lines", "\n".join([*lines[:above], text, *lines[above:]])
    else:
        yield "documents as they were", text
    if draw.random() < _WITH_COPIES:
        for _ in range(draw.randint(1, _MOST_COPIES)):
            yield "near duplicates", edited(text, draw)
    if draw.random() < _NOISE_DOCUMENTS:
        yield "documents of noise", noise(text, draw)


def edited(text: str, draw: random.Random) -> str:
    """Return a copy with a few words dropped, repeated or replaced."""
    words = text.split()
    changed: list[str] = []
    for word in words:
        ways = ([], [word, word], [draw.choice(words)])
        changed += draw.choice(ways) if draw.random() < _EDITED else [word]
    return " ".join(changed)


def noise(text: str, draw: random.Random) -> str:
    """Return a document without content: a repeated phrase, or a list of symbols and numbers."""
    words = text.split()
    if draw.random() < 0.5:
        start = draw.randrange(len(words))
        return " ".join([" ".join(words[start : start + 5])] * draw.randint(20, 60))
    return "\n".join(
        " ".join(draw.choice(("#", "...", "404", "***", "|", str(draw.randrange(10**6)))) for _ in range(8))
        for _ in range(draw.randint(10, 40))
    )


def zipped_lines(path: Path) -> TextIO:
    """Open a gzip file to write lines to, without the time in its header."""
    return io.TextIOWrapper(cast(BinaryIO, gzip.GzipFile(path, "wb", mtime=0)), encoding="utf-8")


def _line(text: str) -> str:
    return json.dumps({"text": text}, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main()
