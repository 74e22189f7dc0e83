"""Texts whose perplexity is measured: WikiText, the Penn Treebank, or any other, in blocks with their words counted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

from multihop.eval.tasks.detokenize import detokenize
from multihop.eval.tasks.text_files import read_text

Convention = Literal["wikitext", "ptb", "text"]
"""The counting of words. wikitext (Merity et al. 2017), ptb (Mikolov et al. 2010): runs of characters without
whitespace, and the end of each line, blank ones included. text: runs of characters without whitespace."""

UNIT_WORDS = 128
"""Words that are resampled as one: neighboring words are hard together, so single lines would seem too certain."""

PSEUDO = "pseudo-"
"""Prefix of the names of a masked model's metrics, which cannot be compared with a causal model's."""


@dataclass(frozen=True)
class Text:
    """Documents in blocks: each line that is not blank, with the line ends before it; by convention text, long lines
    are cut."""

    blocks: tuple[str, ...]
    """The text as the model reads it: together the blocks are the text, and their tokens are its tokens, since blocks
    end before whitespace."""
    documents: tuple[int, ...]
    """The number of blocks of each document."""
    words: tuple[int, ...]
    """The number of words of the official text in each block, by the convention."""
    bytes: int
    """The size of the official text in UTF-8."""
    convention: Convention
    detokenized: bool


def read_perplexity_text(path: Path, convention: Convention, detokenized: bool) -> Text:
    """Read a set's file, such as wiki.test.raw, wiki.test.tokens or ptb.test.txt.

    Args:
        detokenized: whether the model reads the natural text instead of the official one, as GPT-2 did. Words and bytes
            are those of the official text all the same. Not for convention text.

    Raises:
        UserError: the file is missing, empty or not UTF-8.
    """
    return text_of([read_text(path)], convention, detokenized)


def text_of(documents: Sequence[str], convention: Convention, detokenized: bool) -> Text:
    """Return the text of documents, none of which is blank. See `read_perplexity_text`."""
    parts = [_blocks(document, convention, detokenized) for document in documents]
    return Text(
        blocks=tuple(chain.from_iterable(blocks for blocks, _ in parts)),
        documents=tuple(len(blocks) for blocks, _ in parts),
        words=tuple(chain.from_iterable(words for _, words in parts)),
        bytes=sum(len(document.encode()) for document in documents),
        convention=convention,
        detokenized=detokenized,
    )


def _blocks(text: str, convention: Convention, detokenized: bool) -> tuple[list[str], list[int]]:
    """Return the blocks of a document, and the words of each."""
    blocks: list[str] = []
    words: list[int] = []
    gap, gap_words = "", 0
    line_end = 0 if convention == "text" else 1
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        natural = detokenize(line, convention) if detokenized and convention != "text" else line
        body = natural.rstrip(" \t\r")
        if body:
            pieces = _pieces(body) if convention == "text" else [body]
            blocks += [gap + pieces[0], *pieces[1:]]
            words += [gap_words + len(line.split())] if len(pieces) == 1 else [len(piece.split()) for piece in pieces]
            gap, gap_words = "", 0
        gap += natural[len(body) :]
        if number < len(lines):
            gap += "\n"
            gap_words += line_end
    blocks[-1] += gap
    words[-1] += gap_words
    return blocks, words


def _pieces(line: str) -> list[str]:
    """Return a line, split before the whitespace after every `UNIT_WORDS` words: some texts are one line, such as
    text8."""
    ends = [word.end() for word in re.finditer(r"\S+", line)]
    return [line[start:stop] for start, stop in pairwise([0, *ends[UNIT_WORDS - 1 : -1 : UNIT_WORDS], len(line)])]
