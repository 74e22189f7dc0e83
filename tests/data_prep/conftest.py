"""Small made-up texts: every document is a few sentences of invented words, which depend on its number."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from multihop.data_prep.config import (
    C4,
    DataConfig,
    DecontaminateConfig,
    FilterConfig,
    NearDuplicatesConfig,
    Source,
    TokenizerConfig,
)

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
    """A function that returns the text of a document by its number; each number gives another text."""
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


@pytest.fixture
def planted(tmp_path: Path) -> tuple[DataConfig, dict[str, str]]:
    """The result of `planted_in` in a folder of the test's own."""
    return _planted(tmp_path)


@pytest.fixture(scope="session")
def planted_in() -> Callable[[Path], tuple[DataConfig, dict[str, str]]]:
    """The function `_planted`, which takes a folder and returns a recipe and texts by name."""
    return _planted


def _planted(folder: Path) -> tuple[DataConfig, dict[str, str]]:
    """Write a corpus of two sources; returns a recipe with all stages that drop documents, and the texts by name.

    There is a document for each outcome.
    """
    texts = {f"plain {n}": _text(range(10 * n, 10 * n + 10)) for n in range(30)}
    texts["copy"] = texts["plain 3"]
    texts["near"] = texts["plain 4"] + " Bamo."
    exam = _text(range(1_000, 1_004))
    texts["contaminated"] = _text(range(2_000, 2_030)) + " " + exam + " " + texts["plain 5"][:900].strip()
    texts["filtered"] = _text(range(3_000, 3_010)) + " Lorem ipsum."
    (folder / "exam.txt").write_text(exam + "\n")
    texts_folder = folder / "texts"
    texts_folder.mkdir()
    rows = [json.dumps({"text": text}) + "\n" for text in texts.values()]
    (texts_folder / "a.jsonl").write_text("".join(rows[:17]))
    (texts_folder / "b.jsonl").write_text("".join(rows[17:]))
    config = DataConfig(
        sources=[Source(path=str(texts_folder / "a.jsonl")), Source(path=str(texts_folder / "b.jsonl"))],
        heldout_fraction=0.1,
        filters=FilterConfig(c4=C4(terminal_punctuation=False)),
        near_duplicates=NearDuplicatesConfig(shingle_words=2, threshold=0.7),
        decontaminate=DecontaminateConfig(against=[str(folder / "exam.txt")], action="cut"),
    )
    return config, texts


def _text(numbers: Iterable[int]) -> str:
    """Return a text that is long enough for signatures and for pieces of 200 characters."""
    return " ".join(_document(number) for number in numbers)
