"""vader-reviews: how positive people find a sentence of a product review (Hutto and Gilbert 2014)."""

import io
import tarfile
import zlib
from pathlib import Path

from multihop.common.errors import UserError
from multihop.eval.tasks.task import Example, Task, split_of
from multihop.eval.tasks.text_files import official_folder

ARCHIVE = "vaderSentiment-3.3.2.tar.gz"

_INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
_FILE = "hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt"


def find(data_dir: str | None) -> Path:
    """Return the source archive in `data_dir`, or in the Python environment. Raises UserError when it is missing."""
    folder = official_folder(data_dir)
    path = folder / ARCHIVE
    if not path.is_file():
        raise UserError(f"task vader-reviews reads {path}, which is missing (eval.data_dir); {_how_to_get(folder)}")
    return path


def read(data_dir: str | None) -> Task:
    """Read the snippets, each once. Raises UserError when the archive is missing, broken or has other columns."""
    path = find(data_dir)
    parts: dict[str, list[Example]] = {"train": [], "dev": [], "test": []}
    seen: set[str] = set()
    duplicates = 0
    for number, line in enumerate(_member(path).decode("utf-8").splitlines(), start=1):
        columns = line.split("\t")
        try:
            name, score, text = columns[0], float(columns[1]), " ".join(columns[2].split())
        except (IndexError, ValueError):
            raise UserError(
                f"{_FILE} in {path}, line {number}: expected an id, the mean rating and the text between tabs, "
                f"got {line[:80]!r}"
            ) from None
        if text in seen:
            duplicates += 1
            continue
        seen.add(text)
        # An id is REVIEW_SENTENCE: the sentences of one review stay on one side of the split.
        parts[split_of(name.split("_")[0])].append(Example((text,), (score,)))
    return Task(
        name="vader-reviews",
        kind="regression",
        metric="Pearson",
        higher_is_better=True,
        source="Sentences of Amazon reviews, each rated by 20 people from -4 to 4 (Hutto and Gilbert 2014), MIT "
        "license; from vaderSentiment's source archive.",
        train=tuple(parts["train"]),
        dev=tuple(parts["dev"]),
        test=tuple(parts["test"]),
        notes=f"{duplicates} duplicate sentences dropped; split 70/10/20 by a hash of each review's id",
    )


def _member(path: Path) -> bytes:
    """Return the file in the inner archive; nothing is written to disk."""
    try:
        with tarfile.open(path, "r:gz") as outer:
            packed = io.BytesIO(_content(outer, _INNER))
        with tarfile.open(fileobj=packed, mode="r:gz") as inner:
            return _content(inner, _FILE)
    except (tarfile.TarError, zlib.error, KeyError, EOFError, OSError) as error:
        raise UserError(
            f"{path} is broken or is not vaderSentiment 3.3.2's source archive ({error}); delete it and "
            f"{_how_to_get(path.parent)}"
        ) from None


def _how_to_get(folder: Path) -> str:
    return f"get it with: pip download --no-deps --no-binary vaderSentiment -d {folder} vaderSentiment==3.3.2"


def _content(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    return file.read()
