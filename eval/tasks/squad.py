"""squad1 and squad2: the span of a Wikipedia paragraph that answers a question (Rajpurkar et al. 2016 and 2018)."""

from itertools import chain
from pathlib import Path
from typing import Any, Literal

from multihop.common.errors import UserError
from multihop.common.files import read_json_object
from multihop.eval.tasks.task import Example, Task
from multihop.eval.tasks.text_files import official_folder

Name = Literal["squad1", "squad2"]

_VERSIONS: dict[Name, str] = {"squad1": "v1.1", "squad2": "v2.0"}
NAMES = tuple(_VERSIONS)
_SITE = "https://rajpurkar.github.io/SQuAD-explorer"
_MOST_BYTES = 256 * 2**20
"""The largest official file has 42 MB."""


def find(name: Name, data_dir: str | None) -> tuple[Path, Path]:
    """Return the official training and development files, in the directory `squad` of `data_dir`.

    Raises:
        UserError: one is missing.
    """
    folder = official_folder(data_dir) / "squad"
    train, dev = (folder / f"{part}-{_VERSIONS[name]}.json" for part in ("train", "dev"))
    for path in (train, dev):
        if not path.is_file():
            raise UserError(
                f"task {name} reads {path}, which is missing (eval.data_dir); "
                f"download {_SITE}/dataset/{path.name} into {folder}"
            )
    return train, dev


def read(name: Name, data_dir: str | None) -> Task:
    """Read the official training and development sets. Raises UserError as `find` and `read_file`."""
    train, dev = find(name, data_dir)
    authors = "Rajpurkar et al. 2016" if name == "squad1" else "Rajpurkar et al. 2018"
    return Task(
        name=name,
        kind="spans",
        metric="SQuAD F1",
        higher_is_better=True,
        source=f"SQuAD {_VERSIONS[name]} ({authors}) over Wikipedia, CC BY-SA 4.0; from {_SITE}.",
        train=read_file(name, train),
        dev=read_file(name, dev),
        other_metrics=("exact match",),
    )


def read_file(name: Name, path: Path) -> tuple[Example, ...]:
    """Read the questions of one official file, in its order.

    Raises:
        UserError: the file is not in the official format; a context is blank; an answer is not at its offset, which
            counts Unicode code points; a question has no answer, except where SQuAD 2.0 marks it as impossible; two
            questions have the same id.
    """
    content = read_json_object(path, advice=f"download it again from {_SITE}", max_bytes=_MOST_BYTES)
    examples = []
    try:
        for paragraph in chain.from_iterable(article["paragraphs"] for article in content["data"]):
            context = _text(paragraph, "context")
            for question in paragraph["qas"]:
                location = f"{path}, question {question['id']}"
                if not context.strip():
                    raise UserError(f"{location}: its context is blank; download the file again from {_SITE}")
                targets = _spans(question["answers"], context, location)
                impossible = name == "squad2" and question["is_impossible"]
                if impossible != (not targets):
                    expected = "no answer, since it is impossible," if impossible else "an answer"
                    raise UserError(
                        f"{location}: expected {expected} and found {len(targets) // 2}; "
                        f"task {name} reads the files of SQuAD {_VERSIONS[name]}"
                    )
                examples.append(Example((_text(question, "question"), context), targets, str(question["id"])))
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not in the format of SQuAD {_VERSIONS[name]} ({error!r}); download it again from {_SITE}"
        ) from None
    if not examples:
        raise UserError(f"{path} has no questions; download it again from {_SITE}")
    ids = [example.id for example in examples]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise UserError(f"{path} has two questions with the id {twice}; download it again from {_SITE}")
    return tuple(examples)


def _text(part: dict[str, Any], name: str) -> str:
    """Return a text field of the file.

    Raises:
        TypeError: The value is not a string, for example null.
    """
    if not isinstance(text := part[name], str):
        raise TypeError(f"{name} is {text!r}")
    return text


def _spans(answers: list[dict[str, Any]], context: str, location: str) -> tuple[float, ...]:
    """Return the start and the end of each answer in characters of the context."""
    targets: list[float] = []
    for answer in answers:
        text, start = _text(answer, "text"), answer["answer_start"]
        if not text:
            raise UserError(f"{location}: one of its answers is empty; download the file again from {_SITE}")
        end = start + len(text)
        if start < 0 or context[start:end] != text:
            raise UserError(
                f"{location}: expected its answer {text!r} at character {start} of the context, where "
                f"{context[max(0, start) : max(0, end)]!r} is; offsets count Unicode code points, not bytes"
            )
        targets += [start, end]
    return tuple(targets)
