"""What a filter's rule is: a reason, and a question to a document."""

import re
from collections.abc import Callable
from functools import cached_property

from data_prep.rules.languages import identify
from data_prep.rules.repetition import RepeatedNgrams

MOST = 1_000_000
"""So many words, lines and paragraphs are looked at, which bounds the memory; Gopher drops longer documents."""
ELLIPSES = ("...", "…")


class Document:
    """A text and what several rules need of it, computed once."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        """The first MOST words."""
        return self.text.split(None, MOST)[:MOST]

    @cached_property
    def word_count(self) -> int:
        """All words."""
        return len(self.words) if len(self.words) < MOST else sum(1 for _ in re.finditer(r"\S+", self.text))

    @cached_property
    def characters(self) -> int:
        """Characters of `words`."""
        return sum(map(len, self.words))

    @cached_property
    def lines(self) -> list[str]:
        """The first MOST lines, less the blank ones."""
        return [line for line in self.text.split("\n", MOST)[:MOST] if line and not line.isspace()]

    @cached_property
    def paragraphs(self) -> list[str]:
        """The first MOST paragraphs, less the blank ones."""
        return [part for part in self.text.split("\n\n", MOST)[:MOST] if part and not part.isspace()]

    @cached_property
    def language(self) -> tuple[str, float]:
        """Code and probability."""
        return identify(self.text)

    @cached_property
    def repeated(self) -> RepeatedNgrams:
        return RepeatedNgrams(self.words)


Rule = tuple[str, Callable[[Document], bool]]
"""The reason, and whether a document is dropped for it."""
