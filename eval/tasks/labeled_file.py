"""A user's task: files of a common format, described by a YAML file after which the task is named.

    kind: classification            # regression, tagging or choice
    train: train.csv                # relative to the YAML file
    dev: dev.csv                    # without it, a part of train
    fields: {text: review, label: stars}

A pair has `text: [premise, hypothesis]`. A choice has `choices: [first, second]`, the fields with the continuations of
`text`, and a label that is the number of the right one, from 0, or its name in `labels`. Tagging reads column files:
`fields: {words: 0, labels: -1, scheme: IOB2}`.

    kind: perplexity
    test: novel.txt                 # or .jsonl, a document a line, with fields: {text: body}
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import yaml
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from multihop.common.config import Section
from multihop.common.errors import UserError
from multihop.common.files import read_user_text
from multihop.eval.tasks.columns import Scheme, Sentence, read_columns, tagged_examples
from multihop.eval.tasks.pair_files import PairFiles, read_pairs
from multihop.eval.tasks.task import Example, Task, split_of
from multihop.eval.tasks.text_files import (
    Rows,
    class_index,
    columns_of,
    csv_rows,
    finite_number,
    json_rows,
    text_lines,
    tsv_rows,
)

_Format = Literal["csv", "tsv", "jsonl", "conll"]
# YAML reads 0 as a number.
_Label = Annotated[str, BeforeValidator(lambda label: str(label) if type(label) is int else label)]

_FORMATS: dict[str, _Format] = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".conll": "conll", ".conllu": "conll", ".txt": "conll",
}  # fmt: skip
METRICS = {
    "classification": ("accuracy", "F1", "macro F1", "Matthews"),
    "regression": ("Pearson", "Spearman"),
    "tagging": ("entity F1", "accuracy"),
    "choice": ("accuracy",),
}


class _Fields(Section):
    """The fields or columns of a row."""

    text: str | Annotated[list[str], Field(min_length=1, max_length=2)] | None = None
    choices: Annotated[list[str], Field(min_length=2)] | None = None
    label: str | None = None
    words: int | None = None
    labels: int | None = None
    """Numbers of columns, from 0; negative ones count from the end."""
    scheme: Scheme = "IOB2"


class _LabeledFiles(Section):
    """The YAML file of labeled files."""

    kind: Literal["classification", "regression", "tagging", "choice"]
    format: _Format | None = None
    """The format of the files; None: by the extension of each."""
    train: str
    dev: str | None = None
    test: str | None = None
    fields: _Fields
    metric: str | None = None
    labels: Annotated[list[_Label], Field(min_length=2)] | None = None
    """The classes in their order; None: the labels of the training file, sorted."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        wanted = {"tagging": ["words", "labels"], "choice": ["text", "choices", "label"]}.get(
            self.kind, ["text", "label"]
        )
        fields = sorted(self.fields.model_fields_set - {"scheme"})
        if fields != sorted(wanted) or None in (getattr(self.fields, name) for name in wanted):
            raise UserError(
                f"fields of kind {self.kind} must be {', '.join(wanted)}, got {', '.join(fields) or 'none'}"
            )
        if self.fields.words is not None and self.fields.words == self.fields.labels:
            raise UserError("fields.words and fields.labels are the same column; give two different ones")
        if self.kind == "choice" and isinstance(self.fields.text, list):
            raise UserError("fields.text of kind choice must be one name: the context before each continuation")
        if self.labels and (self.kind == "regression" or len(set(self.labels)) != len(self.labels)):
            raise UserError(
                "labels must be different names of classes, and regression has none; correct or remove labels"
            )
        if self.kind == "choice" and self.labels and len(self.labels) != len(self.fields.choices or []):
            raise UserError("labels and fields.choices of kind choice must have the same length")
        if self.chosen_metric() not in self._metrics():
            raise UserError(
                f"metric={self.metric!r} is not for kind {self.kind}; choose from {', '.join(self._metrics())}"
            )
        return self

    def chosen_metric(self) -> str:
        return self.metric or self._metrics()[0]

    def _metrics(self) -> tuple[str, ...]:
        no_entities = self.kind == "tagging" and self.fields.scheme == "none"
        return ("accuracy",) if no_entities else METRICS[self.kind]


class _TextField(Section):
    """The field of a line that has the document."""

    text: str


class _TextFile(Section):
    """The YAML file of a text whose perplexity is measured."""

    kind: Literal["perplexity"]
    test: str
    fields: _TextField | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (Path(self.test).suffix == ".jsonl") != (self.fields is not None):
            raise UserError(
                "a .jsonl file needs fields, for instance {text: body}; a file of another extension is one plain "
                "text without fields"
            )
        return self


TaskFile = _LabeledFiles | _TextFile | PairFiles
"""The content of a task's YAML file."""
_KINDS = [kind for each in get_args(TaskFile) for kind in get_args(each.model_fields["kind"].annotation)]
_TASK_FILE: TypeAdapter[TaskFile] = TypeAdapter(Annotated[TaskFile, Field(discriminator="kind")])


def parse_task_file(path: Path) -> TaskFile:
    """Return the content of a task's YAML file. The files that it names exist, and are not read.

    Raises:
        UserError: it is missing or not valid, or one of its files is missing.
    """
    content = _parse(path)
    match content:
        case PairFiles():
            names = (*content.files, *([content.train] if content.train else []))
        case _TextFile():
            names = (content.test,)
        case _LabeledFiles():
            names = tuple(filter(None, (content.train, content.dev, content.test)))
    for name in names:
        if not (path.parent / name).is_file():
            raise UserError(f"{path} names {path.parent / name}, which is missing; give the path relative to {path}")
    return content


def read_task(path: Path, content: TaskFile) -> Task:
    """Return the task that a YAML file describes, with its examples.

    Where it names no development set, one is chosen by a hash of the text: a tenth of the training file, and two tenths
    as test set if that is not named either.

    Args:
        path: path of the YAML file.
        content: what `parse_task_file` returned.

    Raises:
        UserError: a file is missing, empty, not UTF-8 or not in its format, has a blank document, or has a label that
            the training file does not have. The message names the file and line.
    """
    if isinstance(content, _TextFile):
        return Task(
            name=path.stem,
            kind="zero-shot",
            metric="perplexity",
            higher_is_better=False,
            source=f"The text that {path.name} names.",
            test=_documents(path.parent / content.test, content),
        )
    if isinstance(content, PairFiles):
        return Task(
            name=path.stem,
            kind=content.kind,
            metric="perplexity" if content.train else content.metric,
            higher_is_better=not content.train,
            source=f"Pairs that {path.name} names.",
            train=read_pairs(path.parent, content, (content.train,)) if content.train else (),
            test=read_pairs(path.parent, content),
            settings={"beams": content.beams, "length_penalty": content.length_penalty},
        )
    train, labels = _read_training(path.parent / content.train, content)
    of_two = content.metric in ("F1", "Matthews")
    if content.kind == "classification" and (len(labels) < 2 or (of_two and len(labels) != 2)):
        raise UserError(
            f"{path}: expected {'two' if of_two else 'at least two'} labels, got "
            f"{', '.join(labels)[:200]}; correct fields.label, labels or metric"
        )
    dev, test = (
        _read_part(path.parent / part, content, labels) if part else () for part in (content.dev, content.test)
    )
    notes = ""
    if not content.dev:
        parts: dict[str, list[Example]] = {"train": [], "dev": [], "test": []}
        for example in train:
            part = split_of(_group(example, content))
            parts["train" if content.test and part == "test" else part].append(example)
        sizes = "/".join(str(len(part)) for part in parts.values())
        notes = f"{content.train} split {sizes} by a hash of each example's text"
        if not (parts["train"] and parts["dev"] and (content.test or parts["test"])):
            raise UserError(f"{path}: {len(train)} examples are too few to split ({notes}); set dev as well")
        train, dev = tuple(parts["train"]), tuple(parts["dev"])
        test = test if content.test else tuple(parts["test"])
    return Task(
        name=path.stem,
        kind=content.kind,
        metric=content.chosen_metric(),
        higher_is_better=True,
        source=f"Labeled files described by {path.name}.",
        labels=() if content.kind == "choice" else labels,
        train=train,
        dev=dev,
        test=test,
        notes=notes,
    )


def _parse(path: Path) -> TaskFile:
    text = read_user_text(path, str(path), "a task's YAML file")
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    try:
        return _TASK_FILE.validate_python(content)
    except ValidationError as error:
        mistakes = [_mistake(each) for each in error.errors()]
        raise UserError(f"{path}: {'; '.join(mistakes)}; correct the file") from None


def _mistake(error: ErrorDetails) -> str:
    if error["type"] == "model_attributes_type":
        return "the file has no keys; write at least kind, and the names of the task's files"
    if error["type"] == "union_tag_not_found":
        return f"kind is missing; write one of {', '.join(_KINDS)}"
    if error["type"] == "union_tag_invalid":
        return f"kind: Input should be {error['ctx']['expected_tags']}, got {error['ctx']['tag']!r}"
    # The first part of the location is the kind.
    key = ".".join(str(part) for part in error["loc"][1:])
    return f"{key}: {error['msg'].removeprefix('Value error, ')}".lstrip(": ")


def _documents(path: Path, content: _TextFile) -> tuple[Example, ...]:
    r"""Return the documents of a text file, with line ends as \n, or of the lines of a .jsonl file."""
    if content.fields is None:
        text = "\n".join(line for _, line in text_lines(path))
        if not text.strip():
            raise UserError(f"{path} has no text; write some")
        return (Example((text,)),)
    documents = []
    for number, (text,) in json_rows(path, [content.fields.text]):
        if not text.strip():
            raise UserError(f"{path}, line {number}: {content.fields.text} has no text; remove the line")
        documents.append(Example((text,)))
    if not documents:
        raise UserError(f"{path} has no documents; write one a line")
    return tuple(documents)


def _read_training(path: Path, content: _LabeledFiles) -> tuple[tuple[Example, ...], tuple[str, ...]]:
    """Return the examples, and the labels."""
    if content.kind == "regression":
        return _read_part(path, content, ()), ()
    if content.labels:
        return _read_part(path, content, content.labels), tuple(content.labels)
    if content.kind == "choice":
        labels = tuple(str(number) for number in range(len(content.fields.choices or [])))
        return _read_part(path, content, labels), labels
    if content.kind == "tagging":
        sentences = _sentences(path, content, None)
        used = {label for _, line, _ in sentences for label in line}
        if content.fields.scheme != "none":
            types = sorted({label[2:] for label in used if label != "O"})
            labels = ("O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI"))
        else:
            labels = tuple(sorted(used))
        return tagged_examples(sentences, labels), labels
    rows = list(_rows(path, content))
    labels = tuple(sorted({row[-1] for _, row in rows}))
    return _examples(path, rows, content, labels), labels


def _read_part(path: Path, content: _LabeledFiles, labels: Sequence[str]) -> tuple[Example, ...]:
    if content.kind == "tagging":
        return tagged_examples(_sentences(path, content, labels), labels)
    return _examples(path, _rows(path, content), content, labels)


def _sentences(path: Path, content: _LabeledFiles, labels: Sequence[str] | None) -> tuple[Sentence, ...]:
    if _format(path, content) != "conll":
        raise UserError(f"{path}: tagging reads column files; write one word a line with its label (format: conll)")
    assert content.fields.words is not None and content.fields.labels is not None
    return read_columns(path, content.fields.words, content.fields.labels, content.fields.scheme, labels)


def _examples(
    path: Path, rows: Rows | Sequence[tuple[int, list[str]]], content: _LabeledFiles, labels: Sequence[str]
) -> tuple[Example, ...]:
    examples = []
    for line, (*texts, label) in rows:
        target = (
            finite_number(path, line, label) if content.kind == "regression" else class_index(path, line, label, labels)
        )
        examples.append(Example(tuple(texts), (target,)))
    if not examples:
        raise UserError(f"{path} has no examples; write one a row")
    return tuple(examples)


def _rows(path: Path, content: _LabeledFiles) -> Rows:
    """Return each row's texts, then its label without surrounding whitespace: "good " and "good" are one label."""
    texts = [content.fields.text] if isinstance(content.fields.text, str) else content.fields.text
    assert texts and content.fields.label
    names = [*texts, *(content.fields.choices or []), content.fields.label]
    match _format(path, content):
        case "csv":
            rows = columns_of(path, csv_rows(path), names)
        case "tsv":
            rows = columns_of(path, tsv_rows(path), names)
        case "jsonl":
            rows = json_rows(path, names)
        case "conll":
            raise UserError(
                f"{path}: a column file is for tagging, but kind is {content.kind}; set format: csv, tsv or jsonl"
            )
    return ((number, [*row, label.strip()]) for number, (*row, label) in rows)


def _format(path: Path, content: _LabeledFiles) -> _Format:
    if content.format:
        return content.format
    if path.suffix not in _FORMATS:
        raise UserError(f"{path} has none of the extensions {', '.join(_FORMATS)}; set format")
    return _FORMATS[path.suffix]


def _group(example: Example, content: _LabeledFiles) -> str:
    """Return the key of examples that a split keeps together: a document, or all examples of one text."""
    if content.kind == "tagging":
        return f"document {example.document}" if example.document else " ".join(example.texts)
    return example.texts[0]
