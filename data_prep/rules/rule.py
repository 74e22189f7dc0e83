"""Defines a filter's rule, a reason and a predicate on documents, and the document that it sees."""

import re
from collections.abc import Callable
from functools import cached_property

from multihop.data_prep.rules.languages import identify
from multihop.data_prep.rules.repetition import RepeatedNgrams

MAX_ITEMS = 1_000_000
"""Most words, lines and paragraphs that are used, to bound memory; Gopher drops longer documents."""
ELLIPSES = ("...", "…")


class Document:
    """Holds a text and derived values, which are computed once for all rules."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        """The first MAX_ITEMS words."""
        return self.text.split(None, MAX_ITEMS)[:MAX_ITEMS]

    @cached_property
    def word_count(self) -> int:
        """Number of all words."""
        return len(self.words) if len(self.words) < MAX_ITEMS else sum(1 for _ in re.finditer(r"\S+", self.text))

    @cached_property
    def characters(self) -> int:
        """Number of characters of `words`."""
        return sum(map(len, self.words))

    @cached_property
    def lines(self) -> list[str]:
        """The first MAX_ITEMS lines, without blank ones."""
        return [line for line in self.text.split("\n", MAX_ITEMS)[:MAX_ITEMS] if line and not line.isspace()]

    @cached_property
    def paragraphs(self) -> list[str]:
        """The first MAX_ITEMS paragraphs, without blank ones."""
        return [part for part in self.text.split("\n\n", MAX_ITEMS)[:MAX_ITEMS] if part and not part.isspace()]

    @cached_property
    def language(self) -> tuple[str, float]:
        """Language code and probability."""
        return identify(self.text)

    @cached_property
    def repeated_ngrams(self) -> RepeatedNgrams:
        return RepeatedNgrams(self.words)


Rule = tuple[str, Callable[[Document], bool]]
"""The reason, and whether it applies to a document, which is then dropped."""
