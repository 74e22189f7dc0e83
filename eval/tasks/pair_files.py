"""Pairs of a user's for translation or completion: a YAML file that names a test set, and the readers of its files."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from multihop.common.config import Section
from multihop.common.errors import UserError
from multihop.data_prep.config import PairFields
from multihop.data_prep.reading.raw import relation_token
from multihop.eval.tasks.task import Example
from multihop.eval.tasks.text_files import json_rows, text_lines, tsv_rows

_COLUMNS = PairFields(source=1, target=2)


class PairFiles(Section):
    """The YAML file of a test set for translation, or for a causal model that completes sources."""

    kind: Literal["translation", "completion"]
    test: str | Annotated[list[str], Field(min_length=2, max_length=2)]
    """A .jsonl or .tsv file with both sides, or two line files: the source's and the target's. Each may end in .gz."""
    train: str | None = None
    """completion: the pairs that the model was trained on, in a file with the same fields: what is not among them is
    novel."""
    metric: Literal["BLEU", "exact match"] = "BLEU"
    """translation: the metric by which trials are compared; exact match: the share of translations that are the
    reference."""
    fields: PairFields | None = None
    """The fields of the two sides, as in `data.sources[].fields`; None: columns 1 and 2 of a .tsv file."""
    beams: int = Field(default=4, ge=1)
    length_penalty: float = 0.6
    """The length penalty of `multihop translate`."""

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its files."""
        return (self.test,) if isinstance(self.test, str) else tuple(self.test)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "completion" and self.train is None:
            raise UserError(
                "kind completion needs train, the pairs that the model was trained on: what is not among them is novel"
            )
        if self.kind == "translation" and self.train is not None:
            raise UserError(f"train={self.train} is for kind completion, which counts what is novel; remove it")
        if self.kind == "completion" and self.metric != "BLEU":
            raise UserError(f"metric={self.metric} is for kind translation; remove it")
        if self.train is not None and (not isinstance(self.test, str) or _format(self.train) != _format(self.test)):
            raise UserError(
                f"train={self.train} and test={self.test} must be files of one format, with the same fields"
            )
        formats = [_format(name) for name in self.files]
        if len(formats) == 2:
            if self.fields is not None:
                raise UserError("fields are for one file with both sides, but test names two line files; remove fields")
            return self
        if formats[0] not in ("jsonl", "tsv"):
            raise UserError(f"test={self.test} is no .jsonl or .tsv file; give two line files as [SOURCE, TARGET]")
        example = "en, target: es" if formats[0] == "jsonl" else "1, target: 2"
        if (self.fields or _COLUMNS).are_columns != (formats[0] == "tsv"):
            raise UserError(f"test={self.test} needs fields such as {{source: {example}}}")
        return self


def read_pairs(folder: Path, content: PairFiles, files: tuple[str, ...] | None = None) -> tuple[Example, ...]:
    """Return the pairs of a test set: texts are source and reference. Of triples the source is "head <relation>".

    Args:
        files: the names of the files; None: those of the test set.

    Raises:
        UserError: a file is missing, empty, not UTF-8 or not in its format, two line files have different numbers of
            lines, or a side or relation is blank. The message names the file and line.
    """
    names = content.files if files is None else files
    paths = [folder / name for name in names]
    if len(paths) == 2:
        sides = [[line for _, line in text_lines(path)] for path in paths]
        if len(sides[0]) != len(sides[1]):
            raise UserError(
                f"{paths[0]} has {len(sides[0]):,} lines and {paths[1]} {len(sides[1]):,}; line i of the one must "
                "translate line i of the other"
            )
        rows = [(number, [*pair]) for number, pair in enumerate(zip(*sides, strict=True), start=1)]
    elif _format(names[0]) == "jsonl":
        assert content.fields is not None
        rows = list(json_rows(paths[0], [str(name) for name in content.fields.sides]))
    else:
        columns = [int(number) for number in (content.fields or _COLUMNS).sides]
        rows = []
        for number, row in tsv_rows(paths[0]):
            if len(row) < max(columns):
                raise UserError(f"{paths[0]}, line {number}: expected a column {max(columns)}, got {len(row)} columns")
            rows.append((number, [row[column - 1] for column in columns]))
    for number, pair in rows:
        if not all(side.strip() for side in pair):
            what = "a side of the pair" if len(pair) == 2 else "the head, the tail or the relation of the triple"
            raise UserError(f"{paths[0]}, line {number}: {what} is blank; remove it")
    if not rows:
        raise UserError(f"{paths[0]} has no pairs; write one a line")
    return tuple(Example(_sides(*pair)) for _, pair in rows)


def _sides(source: str, target: str, relation: str | None = None) -> tuple[str, str]:
    return (source if relation is None else f"{source} {relation_token(relation)}"), target


def _format(name: str) -> str:
    path = Path(name)
    return Path(path.stem).suffix[1:] if path.suffix == ".gz" else path.suffix[1:]
