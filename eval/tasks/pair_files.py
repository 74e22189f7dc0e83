"""Pairs of a user's for translation: a YAML file that names a test set, and the readers of its files."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from multihop.common.config import Section
from multihop.common.errors import UserError
from multihop.eval.tasks.task import Example
from multihop.eval.tasks.text_files import json_rows, text_lines, tsv_rows


class _Sides(Section):
    """The fields or columns of a row that have the two sides."""

    source: str | int
    """The name of a field of a .jsonl file, or the number of a column of a .tsv file, from 1."""
    target: str | int


class PairFiles(Section):
    """The YAML file of a test set for translation."""

    kind: Literal["translation"]
    test: str | Annotated[list[str], Field(min_length=2, max_length=2)]
    """A .jsonl or .tsv file with both sides, or two line files: the source's and the target's. Each may end in .gz."""
    fields: _Sides | None = None
    """The fields of the two sides; None: columns 1 and 2 of a .tsv file."""
    beams: int = Field(default=4, ge=1)
    length_penalty: float = 0.6
    """The length penalty of `multihop translate`."""

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its files."""
        return (self.test,) if isinstance(self.test, str) else tuple(self.test)

    @model_validator(mode="after")
    def _check(self) -> Self:
        formats = [_format(name) for name in self.files]
        if len(formats) == 2:
            if self.fields is not None:
                raise UserError("fields are for one file with both sides, but test names two line files; remove fields")
            return self
        if formats[0] not in ("jsonl", "tsv"):
            raise UserError(f"test={self.test} is no .jsonl or .tsv file; give two line files as [SOURCE, TARGET]")
        wanted, example = (str, "en, target: es") if formats[0] == "jsonl" else (int, "1, target: 2")
        sides = self.fields or _Sides(source=1, target=2)
        if not (isinstance(sides.source, wanted) and isinstance(sides.target, wanted)):
            raise UserError(f"test={self.test} needs fields such as {{source: {example}}}")
        return self


def read_pairs(folder: Path, content: PairFiles) -> tuple[Example, ...]:
    """Return the pairs of a test set: texts are source and reference.

    Raises:
        UserError: a file is missing, empty, not UTF-8 or not in its format, two line files have different numbers of
            lines, or a side is blank. The message names the file and line.
    """
    paths = [folder / name for name in content.files]
    if len(paths) == 2:
        sides = [[line for _, line in text_lines(path)] for path in paths]
        if len(sides[0]) != len(sides[1]):
            raise UserError(
                f"{paths[0]} has {len(sides[0]):,} lines and {paths[1]} {len(sides[1]):,}; line i of the one must "
                "translate line i of the other"
            )
        rows = [(number, [*pair]) for number, pair in enumerate(zip(*sides, strict=True), start=1)]
    elif _format(content.files[0]) == "jsonl":
        assert content.fields is not None
        rows = list(json_rows(paths[0], [str(content.fields.source), str(content.fields.target)]))
    else:
        sides_of = content.fields or _Sides(source=1, target=2)
        columns = int(sides_of.source), int(sides_of.target)
        rows = []
        for number, row in tsv_rows(paths[0]):
            if len(row) < max(columns):
                raise UserError(f"{paths[0]}, line {number}: expected a column {max(columns)}, got {len(row)} columns")
            rows.append((number, [row[column - 1] for column in columns]))
    for number, pair in rows:
        if not all(side.strip() for side in pair):
            raise UserError(f"{paths[0]}, line {number}: a side of the pair is blank; remove the pair")
    if not rows:
        raise UserError(f"{paths[0]} has no pairs; write one a line")
    return tuple(Example((source, target)) for _, (source, target) in rows)


def _format(name: str) -> str:
    path = Path(name)
    return Path(path.stem).suffix[1:] if path.suffix == ".gz" else path.suffix[1:]
