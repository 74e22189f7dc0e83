"""Gopher's filters: Rae et al. 2021 (arXiv:2112.11446), section A.1.1 and table A1.

A word is what stands between white space. Texts are cleaned (`data_prep.clean`): lines end with "\\n", paragraphs with
an empty line; blank lines are none.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import islice
from operator import gt, lt
from typing import Any

from data_prep.config import GopherQuality, GopherRepetition

MOST = 1_000_000
"""So many words, lines and paragraphs are looked at, which bounds the memory; the paper drops longer documents."""
BULLETS = frozenset("•‣⁃◦▪●■-*")
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
    def repeated(self) -> "RepeatedNgrams":
        return RepeatedNgrams(self.words)


class RepeatedNgrams:
    """The runs of n words that occur more than once among `words`.

    A run of n + 1 words repeats only where a run of n does at its start and one a word further: each n looks only at
    what is left of the one before, which in most texts is little. Nothing is hashed to a number: the shares are exact.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._characters = max(sum(map(len, words)), 1)
        pairs = zip(words, islice(words, 1, None), strict=False)
        self._levels = {2: _repeated(range(max(len(words) - 1, 0)), pairs)}
        self._shares: dict[int, float] = {}

    def top(self, n: int) -> float:
        """The share of the words' characters in the most frequent run of n words; of several, in the longest.

        0 where none occurs twice. As in the paper, runs that overlap are all counted: it may exceed 1.
        """
        times = Counter(self._level(n).values())
        most = max(times.values(), default=0)
        longest = max((self._length(first, first + n) for first, number in times.items() if number == most), default=0)
        return most * longest / self._characters

    def duplicated(self, n: int) -> float:
        """The share of the words' characters in runs of n words that stood before, each character counted once."""
        covered = end = 0
        for start, first in self._level(n).items():
            if first != start:
                covered += self._length(max(start, end), start + n)
                end = start + n
        return covered / self._characters

    def duplicated_beyond(self, n: int, limit: float) -> bool:
        """Whether `duplicated(n)` is more than `limit`.

        The words in runs of n that stood before are in runs of n - 1 that stood before: a share that was found for a
        smaller n is an upper bound, and for most texts that of the smallest n settles all others.
        """
        if any(share <= limit for smaller, share in self._shares.items() if smaller <= n):
            return False
        self._shares[n] = self.duplicated(n)
        return self._shares[n] > limit

    def _level(self, n: int) -> dict[int, int]:
        """Where runs of n words start that occur more than once, ascending, and where the first of the kind does."""
        if n not in self._levels:
            firsts = self._level(n - 1)
            starts = [start for start in firsts if start + 1 in firsts]
            self._levels[n] = _repeated(starts, [(firsts[start], firsts[start + 1]) for start in starts])
        return self._levels[n]

    def _length(self, start: int, stop: int) -> int:
        return sum(map(len, self._words[start:stop]))


def _repeated(starts: Sequence[int], keys: Iterable[tuple[Any, Any]]) -> dict[int, int]:
    """Those of `starts` (ascending) whose key is also another's, each with the first of its key."""
    first_of: dict[tuple[Any, Any], int] = {}
    firsts = list(map(first_of.setdefault, keys, starts))
    if len(first_of) == len(firsts):
        return {}
    several = {first for start, first in zip(starts, firsts, strict=True) if first != start}
    return {start: first for start, first in zip(starts, firsts, strict=True) if first in several}


def word_count(document: Document) -> int:
    """All words of the document."""
    if len(document.words) < MOST:
        return len(document.words)
    return sum(1 for _ in re.finditer(r"\S+", document.text))


def mean_word_length(document: Document) -> float:
    """Characters a word."""
    return document.characters / max(len(document.words), 1)


def hashes(document: Document) -> float:
    """"#" for each word."""
    return document.text.count("#") / max(word_count(document), 1)


def ellipses(document: Document) -> float:
    """Ellipses for each word."""
    return sum(map(document.text.count, ELLIPSES)) / max(word_count(document), 1)


def bullet_lines(document: Document) -> float:
    """Share of the lines that start with a bullet point."""
    return sum(line.lstrip()[0] in BULLETS for line in document.lines) / max(len(document.lines), 1)


def ellipsis_lines(document: Document) -> float:
    """Share of the lines that end with an ellipsis."""
    return sum(line.rstrip().endswith(ELLIPSES) for line in document.lines) / max(len(document.lines), 1)


def alphabetic_words(enough: float, document: Document) -> float:
    """Share of the words that hold an alphabetic character, or of those that hold no other, if that is `enough`."""
    words = document.words
    of_letters = sum(map(str.isalpha, words))
    if of_letters < enough * len(words):
        of_letters += sum(any(map(str.isalpha, word)) for word in words if not word.isalpha())
    return of_letters / max(len(words), 1)


def stop_words(wanted: re.Pattern[str], enough: int, document: Document) -> int:
    """How many different words `wanted` finds, up to `enough`."""
    found: set[str] = set()
    for match in wanted.finditer(document.text):
        found.add(match[0].casefold())
        if len(found) >= enough:
            break
    return len(found)


def duplicate_share(parts: list[str]) -> float:
    """Share of `parts` that stood before among them."""
    return (len(parts) - len(set(parts))) / max(len(parts), 1)


def duplicate_character_share(parts: list[str]) -> float:
    """Share of the characters of `parts` in those that stood before among them."""
    characters = sum(map(len, parts))
    return (characters - sum(map(len, set(parts)))) / max(characters, 1)


Rule = tuple[str, Callable[[Document], bool]]
"""The reason, and whether a document is dropped for it."""


def quality_rules(config: GopherQuality) -> list[Rule]:
    """The rules of "Quality filtering" that are on, in the paper's order."""
    wanted = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, config.stop_words))})(?!\w)", re.IGNORECASE)
    letters, enough = config.min_alphabetic_words, config.min_stop_words
    table: list[tuple[float | None, str, Callable[[Document], float], Callable[[float, float], bool]]] = [
        (config.min_words, "fewer than {:,} words", word_count, lt),
        (config.max_words, "more than {:,} words", word_count, gt),
        (config.min_mean_word_length, "words shorter than {:g} characters on average", mean_word_length, lt),
        (config.max_mean_word_length, "words longer than {:g} characters on average", mean_word_length, gt),
        (config.max_hashes, "more than {:g} number signs a word", hashes, gt),
        (config.max_ellipses, "more than {:g} ellipses a word", ellipses, gt),
        (config.max_bullet_lines, "more than {:g} of the lines start with a bullet point", bullet_lines, gt),
        (config.max_ellipsis_lines, "more than {:g} of the lines end with an ellipsis", ellipsis_lines, gt),
        (letters, "fewer than {:g} of the words hold a letter", partial(alphabetic_words, letters or 0), lt),
        (enough, "fewer than {:,} of the stop words", partial(stop_words, wanted, enough or 0), lt),
    ]
    return [
        (reason.format(limit), partial(_beyond, measure, compare, limit))
        for limit, reason, measure, compare in table
        if limit is not None
    ]


def repetition_rules(config: GopherRepetition) -> list[Rule]:
    """The rules of "Repetition removal" that are on, in the order of table A1."""
    of_parts: list[tuple[float | None, str, Callable[[Document], float]]] = [
        (config.max_duplicate_lines, "more than {:g} of the lines repeat others",
         lambda document: duplicate_share(document.lines)),
        (config.max_duplicate_paragraphs, "more than {:g} of the paragraphs repeat others",
         lambda document: duplicate_share(document.paragraphs)),
        (config.max_duplicate_line_characters, "more than {:g} of the characters in lines that repeat others",
         lambda document: duplicate_character_share(document.lines)),
        (config.max_duplicate_paragraph_characters, "more than {:g} of the characters in paragraphs that repeat others",
         lambda document: duplicate_character_share(document.paragraphs)),
    ]  # fmt: skip
    rules = [
        (reason.format(limit), partial(_beyond, measure, gt, limit))
        for limit, reason, measure in of_parts
        if limit is not None
    ]
    for n in (2, 3, 4):
        if (limit := getattr(config, f"max_top_{n}gram")) is not None:
            reason = f"more than {limit:g} of the characters in the most frequent {n} words"
            rules.append((reason, partial(_beyond, partial(_top, n), gt, limit)))
    for n in range(5, 11):
        if (limit := getattr(config, f"max_duplicate_{n}gram")) is not None:
            reason = f"more than {limit:g} of the characters in {n} words that stood before"
            rules.append((reason, partial(_duplicated_beyond, n, limit)))
    return rules


def _beyond(
    measure: Callable[[Document], float], compare: Callable[[float, float], bool], limit: float, document: Document
) -> bool:
    return compare(measure(document), limit)


def _top(n: int, document: Document) -> float:
    return document.repeated.top(n)


def _duplicated_beyond(n: int, limit: float, document: Document) -> bool:
    return document.repeated.duplicated_beyond(n, limit)
