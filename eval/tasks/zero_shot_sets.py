"""The zero-shot tasks with official files: the files' names, their readers, and the metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from multihop.common.errors import UserError
from multihop.common.files import sha256_file, sha256_json
from multihop.eval.tasks.cbt import read_cbt
from multihop.eval.tasks.multiple_choice import read_passage, read_swag
from multihop.eval.tasks.running_text import Convention, read_perplexity_text
from multihop.eval.tasks.task import Example, Task
from multihop.eval.tasks.text_files import official_folder, read_objects, read_text

_FIELDS = ("sentence_good", "sentence_bad", "field", "linguistics_term", "UID")


@dataclass(frozen=True)
class Pair:
    """Two sentences that differ in what makes one of them unacceptable."""

    good: str
    bad: str
    field: str
    """The field of linguistics: morphology, syntax, semantics, or syntax/semantics."""
    term: str
    """The phenomenon, one of 12."""
    paradigm: str
    """The kind of contrast, one of 67: the UID, a file of its own."""


def read_minimal_pairs(paths: Sequence[Path]) -> tuple[Pair, ...]:
    """Return the pairs of official files, data/*.jsonl.

    Raises:
        UserError: a line is not in the official format.
    """
    return tuple(Pair(*(row[name] for name in _FIELDS)) for path in paths for _, row in read_objects(path, _FIELDS))


def read_lambada(path: Path) -> tuple[str, ...]:
    """Return the passages of lambada_test.jsonl, a JSON object with the field text a line, or of the plain text of the
    official release, a passage a line (any other suffix).

    Raises:
        UserError: the file is missing, empty, or a line is not in the format, or has a single word.
    """
    if path.suffix == ".jsonl":
        numbered = [(number, row["text"]) for number, row in read_objects(path, ("text",))]
    else:
        lines = enumerate(read_text(path).split("\n"), start=1)
        numbered = [(number, line) for number, line in lines if line.strip()]
    for number, text in numbered:
        if len(text.split()) < 2:
            raise UserError(f"{path}, line {number}: expected a passage of several words, got {text!r}")
    return tuple(text.strip() for _, text in numbered)


@dataclass(frozen=True)
class ZeroShotSet:
    """The declaration of a task: its files, their reader, and the metric."""

    files: tuple[str, ...]
    """Glob patterns of its files in `eval.data_dir`; the first that matches a file is taken."""
    read: Callable[[Sequence[Path]], Any]
    """Takes the matching files, sorted."""
    source: str
    metric: str = "accuracy"
    higher_is_better: bool = True
    causal_only: bool = True


def _text(files: tuple[str, ...], convention: Convention, natural: bool, source: str) -> ZeroShotSet:
    read = partial(read_perplexity_text, convention=convention, detokenized=natural)
    return ZeroShotSet(
        files, _of_one_file(read), source, metric="perplexity", higher_is_better=False, causal_only=False
    )


def _of_one_file(read: Callable[[Path], Any]) -> Callable[[Sequence[Path]], Any]:
    return lambda paths: read(paths[0])


def _read_race(paths: Sequence[Path]) -> tuple[Example, ...]:
    return tuple(example for path in paths for example in read_passage(path))


_WIKITEXT_2 = ("wikitext-2-raw/wiki.test.raw", "wikitext-2/wiki.test.tokens")
_WIKITEXT_103 = ("wikitext-103-raw/wiki.test.raw", "wikitext-103/wiki.test.tokens")
_WIKITEXT = "WikiText (Merity et al. 2016), verified good and featured articles of Wikipedia, CC BY-SA 3.0."
_PTB = "Penn Treebank (Marcus et al. 1993; Mikolov et al. 2010), news of the Wall Street Journal."
_CBT = "Children's Book Test (Hill et al. 2015): a word of a sentence in a book, of ten of one kind."
_LAMBADA = ZeroShotSet(
    ("lambada/lambada_test.jsonl", "lambada/lambada_test_plain_text.txt"),
    _of_one_file(read_lambada),
    "LAMBADA (Paperno et al. 2016): the last word of a passage from a novel.",
)

ZERO_SHOT_SETS: dict[str, ZeroShotSet] = {
    "wikitext2": _text(_WIKITEXT_2, "wikitext", False, _WIKITEXT),
    "wikitext2-natural": _text(_WIKITEXT_2, "wikitext", True, _WIKITEXT),
    "wikitext103": _text(_WIKITEXT_103, "wikitext", False, _WIKITEXT),
    "wikitext103-natural": _text(_WIKITEXT_103, "wikitext", True, _WIKITEXT),
    "ptb": _text(("ptb/ptb.test.txt",), "ptb", False, _PTB),
    "ptb-natural": _text(("ptb/ptb.test.txt",), "ptb", True, _PTB),
    "lambada": _LAMBADA,
    "lambada-gpt2": _LAMBADA,
    "cbt-cn": ZeroShotSet(("cbt/cbtest_CN_test_2500ex.txt",), _of_one_file(read_cbt), _CBT),
    "cbt-ne": ZeroShotSet(("cbt/cbtest_NE_test_2500ex.txt",), _of_one_file(read_cbt), _CBT),
    "swag-likelihood": ZeroShotSet(
        ("swag/val.csv",), _of_one_file(read_swag), "SWAG (Zellers et al. 2018): how a described scene goes on."
    ),
    "race-likelihood": ZeroShotSet(
        ("RACE/test/*/*.txt",), _read_race, "RACE (Lai et al. 2017): questions of English examinations in China."
    ),
    "blimp": ZeroShotSet(
        ("blimp/*.jsonl",),
        read_minimal_pairs,
        "BLiMP (Warstadt et al. 2020): minimal pairs of English sentences, CC BY 4.0.",
        causal_only=False,
    ),
}


def find(name: str, data_dir: str | None) -> list[Path]:
    """Return the task's files, sorted.

    Raises:
        UserError: they are missing.
    """
    folder, patterns = official_folder(data_dir), ZERO_SHOT_SETS[name].files
    found = next((paths for pattern in patterns if (paths := sorted(folder.glob(pattern)))), [])
    if not found:
        wanted = " or ".join(str(folder / pattern) for pattern in patterns)
        raise UserError(
            f"task {name} reads {wanted}, which is missing; copy the official file to it, or set eval.data_dir"
        )
    return found


def read(name: str, data_dir: str | None) -> Any:
    """Return the content of the task's files: running text, passages, pairs or examples.

    Raises:
        UserError: the files are missing, or not in their official format.
    """
    return ZERO_SHOT_SETS[name].read(find(name, data_dir))


def load(name: str, data_dir: str | None) -> Task:
    """Return the task with the hashes of its files. Its examples are read where it is evaluated.

    Raises:
        UserError: the files are missing.
    """
    files, declared = find(name, data_dir), ZERO_SHOT_SETS[name]
    return Task(
        name=name,
        kind="zero-shot",
        metric=declared.metric,
        higher_is_better=declared.higher_is_better,
        source=declared.source,
        files_sha256=sha256_json([[file.name, sha256_file(file)] for file in files]),
    )
