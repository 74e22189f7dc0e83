"""Small made-up text: every document is a few sentences of invented words, decided by its number."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_endpoint import bucket, s3, s3_server

from data_prep.config import DataConfig, Source, TokenizerConfig

__all__ = ["bucket", "s3", "s3_server"]

SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


def _document(number: int) -> str:
    rng = random.Random(number)

    def word() -> str:
        return "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3)))

    def sentence() -> str:
        return " ".join(word() for _ in range(rng.randint(3, 9))).capitalize() + "."

    return " ".join(sentence() for _ in range(rng.randint(1, 6)))


@pytest.fixture(scope="session")
def document() -> Callable[[int], str]:
    """number -> text of a document; other numbers, other texts."""
    return _document


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with 120 documents: 40 in .txt files, 40 lines in each of two .jsonl files."""
    folder = tmp_path / "texts"
    (folder / "books").mkdir(parents=True)
    for number in range(40):
        (folder / "books" / f"{number:02d}.txt").write_text(_document(number))
    for name, numbers in (("a", range(40, 80)), ("b", range(80, 120))):
        lines = [json.dumps({"text": _document(number)}) + "\n" for number in numbers]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def data(corpus: Path) -> DataConfig:
    return DataConfig(sources=[Source(path=str(corpus))], heldout_fraction=0.1)


@pytest.fixture
def tok() -> TokenizerConfig:
    return TokenizerConfig(vocab_size=150, threads=1)
