"""CoNLL column files: one word a line with its labels, blank lines between sentences."""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Literal

from multihop.common.errors import UserError
from multihop.eval.tasks.task import Example
from multihop.eval.tasks.text_files import text_lines

Scheme = Literal["IOB1", "IOB2", "IOBES", "none"]
Sentence = tuple[tuple[str, ...], tuple[str, ...], int]
"""The words, their labels, and the number of the document in the file."""
_Line = tuple[int, str, list[str]]
"""The line's number, its text, and its columns."""

_PREFIXES = {"IOB1": "IB", "IOB2": "IB", "IOBES": "IBES"}
_COMMENT = re.compile(r"#\s*(new(doc|par)\b|\S+ = ).*")
_NO_WORD = re.compile(r"\d+[-.]\d+")
"""Ids of CoNLL-U that are not words: a multiword token (3-4) or an empty node (8.1)."""


def read_columns(
    path: Path, word_column: int, label_column: int, scheme: Scheme, known: Collection[str] | None = None
) -> tuple[Sentence, ...]:
    """Read the sentences of a column file.

    Columns are between tabs, or between blanks in lines without tabs. A line -DOCSTART- or a comment `# newdoc` starts
    a document; documents are numbered from 1, and sentences before any such line belong to document 0. Other comments
    of CoNLL-U before a sentence are skipped. So are its multiword tokens (3-4) and empty nodes (8.1), but only if
    the first columns of the sentence's other lines count 1, 2, 3, …: elsewhere it is a word, a score or a price.

    Args:
        word_column: number of the column, from 0; negative ones count from the end.
        label_column: as `word_column`.
        scheme: the labels' scheme for entities. IOB1 (Ramshaw and Marcus 1995), IOB2 and IOBES (Ratinov and Roth 2009)
            become IOB2; "none": labels are taken as they are.
        known: the labels, as returned, that may occur; None: all of the scheme.

    Raises:
        UserError: a line has too few columns or not as many as the sentence's others, or its label is not of the
            scheme or not known; or the file is missing, not UTF-8 or has no sentence.
    """
    sentences: list[Sentence] = []
    lines: list[_Line] = []
    document = 0
    needed = max(at + 1 if at >= 0 else -at for at in (word_column, label_column))
    needed += word_column % needed == label_column % needed  # one column would be both

    def end_sentence() -> None:
        if not lines:
            return
        kept = _words_of(lines)
        _check_columns(path, kept, needed)
        labels: list[str] = []
        for number, _, columns in kept:
            labels.append(columns[label_column])
            _check(path, number, labels, scheme, known)
        words = tuple(columns[word_column] for _, _, columns in kept)
        sentences.append((words, tuple(labels) if scheme == "none" else as_iob2(labels), document))
        lines.clear()

    for number, line in text_lines(path):
        columns = [part.strip() for part in line.split("\t")] if "\t" in line else re.findall(r"[^ ]+", line)
        is_comment = not lines and _COMMENT.fullmatch(line)
        if not line.strip() or columns[0] == "-DOCSTART-" or is_comment:
            end_sentence()
            document += columns[:1] == ["-DOCSTART-"] or bool(is_comment and is_comment[2] == "doc")
            continue
        lines.append((number, line, columns))
    end_sentence()
    if not sentences:
        raise UserError(f"{path} has no sentences; expected a word and its labels on each line")
    return tuple(sentences)


def _words_of(lines: list[_Line]) -> list[_Line]:
    """Return the lines of a sentence without CoNLL-U's multiword tokens and empty nodes."""
    kept = [line for line in lines if not _NO_WORD.fullmatch(line[2][0])]
    numbered = [columns[0] for _, _, columns in kept] == [str(at) for at in range(1, len(kept) + 1)]
    return kept if kept and numbered else list(lines)


def _check_columns(path: Path, lines: list[_Line], needed: int) -> None:
    before = len(lines[0][2])
    for number, line, columns in lines:
        if len(columns) < needed or len(columns) != before:
            expected = f"at least {needed} columns" if before < needed else f"{before} columns as in the line before"
            raise UserError(f"{path}, line {number}: expected {expected}, got {len(columns)}: {line[:80]!r}")


def as_iob2(labels: list[str]) -> tuple[str, ...]:
    """Return the labels of a sentence in IOB1, IOB2 or IOBES, in IOB2: the entities are those that `conlleval` counts.

    An entity begins at B and S, and wherever I or E has no entity of its type before it to go on with.
    """
    converted = []
    open_type = ""
    for label in labels:
        prefix, _, kind = label.partition("-")
        if kind:
            converted.append(f"I-{kind}" if prefix in "IE" and kind == open_type else f"B-{kind}")
        else:
            converted.append("O")
        open_type = "" if prefix in "ES" else kind
    return tuple(converted)


def tagged_examples(sentences: Sequence[Sentence], labels: Sequence[str]) -> tuple[Example, ...]:
    """Return sentences as examples whose targets are indexes in `labels`."""
    index = {label: at for at, label in enumerate(labels)}
    next_sentence: dict[int, count[int]] = defaultdict(count)
    return tuple(
        Example(words, tuple(index[label] for label in line), document=document, sentence=next(next_sentence[document]))
        for words, line, document in sentences
    )


def _check(path: Path, number: int, labels: list[str], scheme: Scheme, known: Collection[str] | None) -> None:
    """Refuse the newest label of a sentence if it is not of the scheme, or not known once it is converted."""
    label = labels[-1]
    if scheme != "none" and not re.fullmatch(rf"O|[{_PREFIXES[scheme]}]-.+", label):
        prefixes = ", ".join(f"{prefix}-TYPE" for prefix in _PREFIXES[scheme])
        raise UserError(f"{path}, line {number}: expected a label of {scheme} (O, {prefixes}), got {label[:80]!r}")
    if known is not None and (label if scheme == "none" else as_iob2(labels[-2:])[-1]) not in known:
        raise UserError(
            f"{path}, line {number}: expected one of the labels {', '.join(known)[:200]}, got {label[:80]!r}"
        )
