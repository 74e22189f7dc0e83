"""Multiple choice: SWAG (Zellers et al. 2018) and RACE (Lai et al. 2017), from their official files."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from multihop.common.config import Section
from multihop.common.errors import UserError
from multihop.common.files import read_json_object
from multihop.eval.tasks.task import Example, Task
from multihop.eval.tasks.text_files import class_index, columns_of, csv_rows, official_folder

NAMES: tuple[str, ...] = ("swag", "race", "race-middle", "race-high")

_SWAG = ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3")
_SWAG_LABELS = ("0", "1", "2", "3")
_LEVELS = ("middle", "high")
_WHERE = {
    "swag": "https://github.com/rowanz/swagaf/tree/master/data",
    "RACE": "https://www.cs.cmu.edu/~glai1/data/race/",
}


class _Passage(Section):
    """A file of RACE: an article with its questions."""

    article: str
    questions: list[str]
    options: list[Annotated[list[str], Field(min_length=4, max_length=4)]]
    answers: list[Literal["A", "B", "C", "D"]]
    id: str = ""


def find(name: str, data_dir: str | None) -> Path:
    """Return the directory of a task's files: `data_dir`/swag, or `data_dir`/RACE.

    Raises:
        UserError: the directory, or its training or development set, is missing.
    """
    root = official_folder(data_dir)
    if name == "swag":
        folder = root / "swag"
        missing = [file for file in ("train.csv", "val.csv") if not (folder / file).is_file()]
    else:
        folder = root / "RACE"
        inner = [f"{part}/{level}" for part in ("train", "dev") for level in _levels(name)]
        missing = [directory for directory in inner if not (folder / directory).is_dir()]
    if missing:
        raise UserError(
            f"task {name} reads {folder}, where these are missing: {', '.join(missing)}; get them from "
            f"{_WHERE[folder.name]} and set eval.data_dir to the directory that holds {folder.name}/"
        )
    return folder


def read(name: str, data_dir: str | None) -> Task:
    """Read a task, whose targets are the index of the right one of four continuations.

    SWAG's test set has no labels and is not read. RACE's has. Its continuations are the question with the option in
    place of its blank, or after it (as in Liu et al. 2019).

    Raises:
        UserError: a file is missing, empty, not UTF-8 or not in the official format; the message names it.
    """
    folder = find(name, data_dir)
    return _read_swag(folder) if name == "swag" else _read_race(name, folder)


def _read_swag(folder: Path) -> Task:
    return Task(
        name="swag",
        kind="choice",
        metric="accuracy",
        higher_is_better=True,
        source="SWAG, what happens next in a video's captions (Zellers et al. 2018), MIT license.",
        train=read_swag(folder / "train.csv"),
        dev=read_swag(folder / "val.csv"),
    )


def read_swag(path: Path) -> tuple[Example, ...]:
    """Return the examples of train.csv or val.csv; test.csv has no labels.

    Raises:
        UserError: the file is missing, empty, or not in the official format.
    """
    examples = []
    for line, row in columns_of(path, csv_rows(path), (*_SWAG, "label")):
        context, start, *endings = row[: len(_SWAG)]
        label = class_index(path, line, row[-1], _SWAG_LABELS)
        examples.append(Example((context, *(f"{start} {ending}" for ending in endings)), (label,)))
    if not examples:
        raise UserError(f"{path} has a header and no examples; get the file again")
    return tuple(examples)


def _read_race(name: str, folder: Path) -> Task:
    train, dev, test = (
        tuple(
            example
            for level in _levels(name)
            if part != "test" or (folder / part / level).is_dir()
            for example in _race_examples(folder / part / level)
        )
        for part in ("train", "dev", "test")
    )
    return Task(
        name=name,
        kind="choice",
        metric="accuracy",
        higher_is_better=True,
        source="RACE, reading comprehension of English exams in China (Lai et al. 2017), for research.",
        train=train,
        dev=dev,
        test=test,
    )


def _race_examples(folder: Path) -> list[Example]:
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise UserError(f"expected .txt files of RACE in {folder}, found none; unpack the archive again")
    return [example for path in paths for example in read_passage(path)]


def read_passage(path: Path) -> list[Example]:
    """Return the questions of a file of RACE as examples.

    Raises:
        UserError: the file is not in the official format.
    """
    content = read_json_object(path, advice="unpack RACE's archive again")
    try:
        passage = _Passage.model_validate(content)
        questions = list(zip(passage.questions, passage.options, passage.answers, strict=True))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path} is not a file of RACE ({where}: {first['msg']}); unpack the archive again") from None
    except ValueError:
        raise UserError(
            f"{path} has {len(passage.questions)} questions, {len(passage.options)} lists of options and "
            f"{len(passage.answers)} answers, expected as many of each; unpack RACE's archive again"
        ) from None
    return [
        Example((passage.article, *(_answered(question, option) for option in options)), ("ABCD".index(answer),))
        for question, options, answer in questions
    ]


def _answered(question: str, option: str) -> str:
    filled, blanks = re.subn("_+", lambda _: option, question)
    return filled if blanks else f"{question} {option}"


def _levels(name: str) -> tuple[str, ...]:
    level = name.removeprefix("race-")
    return (level,) if level in _LEVELS else _LEVELS
