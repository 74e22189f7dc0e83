"""GLUE (Wang et al. 2018): nine tasks of single sentences and pairs, from the benchmark's own TSV files.

Test sets have no labels; their predictions are written by `multihop.eval.finetune.official_files`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from multihop.common.errors import UserError
from multihop.eval.tasks.task import Example, Task, unit_hash
from multihop.eval.tasks.text_files import (
    Rows,
    class_index,
    columns_of,
    finite_number,
    official_folder,
    text_lines,
    tsv_rows,
)

_TRAIN, _DEV = "train.tsv", "dev.tsv"
_MSR_TRAIN, _MSR_TEST = "msr_paraphrase_train.txt", "msr_paraphrase_test.txt"
_MSR_DEV_IDS = ("dev_ids.tsv", "mrpc_dev_ids.tsv")
_PAIR = ("sentence1", "sentence2")


@dataclass(frozen=True)
class Official:
    """The declaration of a task: its files, columns, classes and metrics."""

    folder: str
    """The directory within `glue`, as GLUE's archive names it."""
    source: str
    texts: tuple[str, ...]
    label: str
    """The columns of the labeled files."""
    labels: tuple[str, ...] = ()
    """The classes in GLUE's order; none: regression, scores from 0 to 5."""
    values: tuple[str, ...] = ()
    """The classes as the files and the leaderboard spell them."""
    metric: str = "accuracy"
    other_metrics: tuple[str, ...] = ()
    id: str | None = "index"
    """The column of the labeled files with the official index."""
    test_id: str = "index"
    dev: str = _DEV


_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")

TASKS: dict[str, Official] = {
    "glue/cola": Official(
        "CoLA", "Warstadt et al. 2019: acceptability of sentences from books on linguistics", ("sentence",), "label",
        ("unacceptable", "acceptable"), _BINARY, "Matthews", id=None,
    ),
    "glue/sst2": Official(
        "SST-2", "Socher et al. 2013: sentiment of phrases from film reviews", ("sentence",), "label",
        ("negative", "positive"), _BINARY, id=None,
    ),
    "glue/mrpc": Official(
        "MRPC", "Dolan and Brockett 2005: paraphrases in news", ("#1 String", "#2 String"), "Quality",
        ("not_equivalent", "equivalent"), _BINARY, "F1", ("accuracy",), id=None,
    ),
    "glue/qqp": Official(
        "QQP", "Iyer et al. 2017: duplicate questions of Quora", ("question1", "question2"), "is_duplicate",
        ("not_duplicate", "duplicate"), _BINARY, "F1", ("accuracy",), id="id", test_id="id",
    ),
    "glue/stsb": Official(
        "STS-B", "Cer et al. 2017: similarity of sentences, rated from 0 to 5", _PAIR, "score",
        metric="Spearman", other_metrics=("Pearson",),
    ),
    "glue/mnli": Official(
        "MNLI", "Williams et al. 2018: entailment over ten genres", _PAIR, "gold_label", _NLI, _NLI,
        dev="dev_matched.tsv",
    ),
    "glue/qnli": Official(
        "QNLI", "Rajpurkar et al. 2016, converted by Wang et al. 2018: does the sentence answer the question",
        ("question", "sentence"), "label", _ENTAILMENT, _ENTAILMENT,
    ),
    "glue/rte": Official(
        "RTE", "Dagan et al. 2006 to Bentivogli et al. 2009: entailment", _PAIR, "label", _ENTAILMENT, _ENTAILMENT
    ),
    "glue/wnli": Official(
        "WNLI", "Levesque et al. 2012, converted by Wang et al. 2018: pronouns", _PAIR, "label",
        ("not_entailment", "entailment"), _BINARY,
    ),
}  # fmt: skip

NAMES: tuple[str, ...] = tuple(TASKS)


class _Sets(NamedTuple):
    train: list[Example]
    dev: list[Example]
    test: list[Example]
    unlabeled: dict[str, list[Example]]
    notes: list[str]


def find(name: str, data_dir: str | None) -> Path:
    """Return the directory of a task's files: glue/CoLA, SST-2, MRPC, QQP, STS-B, MNLI, QNLI, RTE or WNLI in
    `data_dir`.

    Raises:
        UserError: the directory, or a file with the training or development set, is missing.
    """
    official = TASKS[name]
    folder = official_folder(data_dir) / "glue" / official.folder
    wanted = [_TRAIN, official.dev, *(["dev_mismatched.tsv"] if official.folder == "MNLI" else [])]
    missing = [file for file in wanted if not (folder / file).is_file()]
    if missing and not (name == "glue/mrpc" and (folder / _MSR_TRAIN).is_file()):
        what = " and ".join(missing) if folder.is_dir() else "the directory"
        either = f" (or {_MSR_TRAIN})" if name == "glue/mrpc" else ""
        raise UserError(
            f"task {name} reads {folder}, where {what}{either} is missing; get {official.folder} from "
            "https://gluebenchmark.com/tasks and set eval.data_dir to the directory that holds glue/"
        )
    return folder


def read(name: str, data_dir: str | None) -> Task:
    """Read a task with its official training and development sets, and its test sets if their files exist.

    The training and development sets of CoLA, SST-2 and MRPC have no ids.

    Raises:
        UserError: a file is missing, empty, not UTF-8 or not of this task; the message names the file and line.
    """
    folder, official = find(name, data_dir), TASKS[name]
    has_own = all((folder / file).is_file() for file in (_TRAIN, official.dev))
    sets = _read_tsv(folder, official) if has_own else _read_msr(folder, official)
    others = {}
    if official.folder == "MNLI":
        others["mismatched"] = tuple(_labeled(folder / "dev_mismatched.tsv", official, sets.notes))
    return Task(
        name=name,
        kind="classification" if official.labels else "regression",
        metric=official.metric,
        higher_is_better=True,
        source=f"{official.source}; as distributed by GLUE (Wang et al. 2018), for research.",
        labels=official.labels,
        train=tuple(sets.train),
        dev=tuple(sets.dev),
        test=tuple(sets.test),
        symmetric=official.folder in ("MRPC", "QQP", "STS-B"),
        other_metrics=official.other_metrics,
        other_sets=others,
        unlabeled={file: tuple(examples) for file, examples in sets.unlabeled.items()},
        notes="; ".join(sets.notes),
    )


def _read_tsv(folder: Path, official: Official) -> _Sets:
    notes: list[str] = []
    train = _labeled(folder / _TRAIN, official, notes)
    dev = _labeled(folder / official.dev, official, notes)
    tests = (
        {"MNLI-m.tsv": "test_matched.tsv", "MNLI-mm.tsv": "test_mismatched.tsv"}
        if official.folder == "MNLI"
        else {f"{official.folder}.tsv": "test.tsv"}
    )
    unlabeled = {name: _unlabeled(folder / file, official) for name, file in tests.items() if (folder / file).is_file()}
    return _Sets(train, dev, [], unlabeled, notes)


def _read_msr(folder: Path, official: Official) -> _Sets:
    """Return the files of the Microsoft Research Paraphrase Corpus, of which GLUE makes its own.

    GLUE's development set is a part of the training file, listed in a file of its own by the pairs of sentence ids.
    """
    notes: list[str] = []
    path, columns = folder / _MSR_TRAIN, ("#1 ID", "#2 ID", official.label, *official.texts)
    rows = [
        ((first, second), Example(tuple(texts), (_target(path, line, label, official),)))
        for line, (first, second, label, *texts) in columns_of(path, tsv_rows(path), columns)
    ]
    lists = [folder / file for file in _MSR_DEV_IDS if (folder / file).is_file()]
    if lists:
        ids = {tuple(line.split("\t")) for _, line in text_lines(lists[0])}
        is_dev = [pair in ids for pair, _ in rows]
        if not any(is_dev):
            raise UserError(f"{lists[0]}: expected pairs of ids of {_MSR_TRAIN} between tabs, found none of its pairs")
    else:
        is_dev = [unit_hash("\t".join(pair)) < 0.1 for pair, _ in rows]
        notes.append(
            f"{_MSR_DEV_IDS[0]} is missing: {sum(is_dev)} of the {len(rows)} training pairs, chosen by a hash of their "
            "ids, are the development set"
        )
    train = _some(path, [example for (_, example), held in zip(rows, is_dev, strict=True) if not held])
    dev = [example for (_, example), held in zip(rows, is_dev, strict=True) if held]
    test = _labeled(folder / _MSR_TEST, official, notes) if (folder / _MSR_TEST).is_file() else []
    # GLUE's test.tsv has the same pairs in the same order, numbered and without labels.
    unlabeled = [Example(example.texts, id=str(number)) for number, example in enumerate(test)]
    return _Sets(train, dev, test, {"MRPC.tsv": unlabeled} if unlabeled else {}, notes)


def _labeled(path: Path, official: Official, notes: list[str]) -> list[Example]:
    """Return a labeled set; appends what was skipped to `notes`."""
    too_few: list[int] | None = [] if official.folder == "QQP" else None
    ids = [official.id] if official.id else []
    rows = (
        _cola_rows(path)
        if official.folder == "CoLA"
        else columns_of(path, tsv_rows(path), (*ids, official.label, *official.texts), too_few)
    )
    examples = []
    for line, row in rows:
        label, *texts = row[len(ids) :]
        examples.append(Example(tuple(texts), (_target(path, line, label, official),), row[0] if ids else ""))
    if too_few:
        notes.append(f"{path.name}: {len(too_few)} lines with too few columns skipped")
    return _some(path, examples)


def _unlabeled(path: Path, official: Official) -> list[Example]:
    rows = columns_of(path, tsv_rows(path), (official.test_id, *official.texts))
    return _some(path, [Example(tuple(texts), id=index) for _, (index, *texts) in rows])


def _cola_rows(path: Path) -> Rows:
    """Yield label and sentence; CoLA's labeled files have no header."""
    for line, row in tsv_rows(path):
        if len(row) != 4 or row[1] not in _BINARY:
            raise UserError(
                f"{path}, line {line}: expected the four columns of CoLA (source, 0 or 1, the author's mark, sentence) "
                f"and no header, got {' | '.join(row)[:120]!r}"
            )
        yield line, [row[1], row[3]]


def _target(path: Path, line: int, label: str, official: Official) -> float:
    if official.values:
        return class_index(path, line, label, official.values)
    return finite_number(path, line, label, 0.0, 5.0)


def _some(path: Path, examples: Sequence[Example]) -> list[Example]:
    if not examples:
        raise UserError(f"{path} has a header and no examples; get the file again")
    return list(examples)
