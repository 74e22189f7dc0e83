"""Gopher's filters: Rae et al. 2021 (arXiv:2112.11446), section A.1.1 and table A1.

Words are separated by whitespace. Texts are cleaned (clean.py): lines end with "\\n", paragraphs with an empty line;
blank lines do not count.
"""

import re
from collections.abc import Callable
from functools import partial
from operator import gt, lt

from multihop.data_prep.config import GopherQuality, GopherRepetition
from multihop.data_prep.rules.rule import ELLIPSES, Document, Rule

_BULLET = re.compile(r"\s*(?:[•‣◦▪●■]|[-*] )")


def word_count(document: Document) -> int:
    """Return the number of words."""
    return document.word_count


def mean_word_length(document: Document) -> float:
    """Return the mean number of characters per word."""
    return document.characters / max(len(document.words), 1)


def hashes(document: Document) -> float:
    """Return the number signs per word."""
    return document.text.count("#") / max(document.word_count, 1)


def ellipses(document: Document) -> float:
    """Return the ellipses per word."""
    return sum(map(document.text.count, ELLIPSES)) / max(document.word_count, 1)


def bullet_lines(document: Document) -> float:
    """Return the share of the lines that start with a bullet point."""
    return sum(map(bool, map(_BULLET.match, document.lines))) / max(len(document.lines), 1)


def ellipsis_lines(document: Document) -> float:
    """Return the share of the lines that end with an ellipsis."""
    return sum(line.rstrip().endswith(ELLIPSES) for line in document.lines) / max(len(document.lines), 1)


def alphabetic_words(enough: float, document: Document) -> float:
    """Return the share of the words with an alphabetic character; of purely alphabetic words, if that is at least
    `enough`."""
    words = document.words
    of_letters = sum(map(str.isalpha, words))
    if of_letters < enough * len(words):
        of_letters += sum(any(map(str.isalpha, word)) for word in words if not word.isalpha())
    return of_letters / max(len(words), 1)


def stop_words(wanted: re.Pattern[str], enough: int, document: Document) -> int:
    """Return the number of different words that `wanted` finds, up to `enough`."""
    words: set[str] = set()
    for match in wanted.finditer(document.text):
        words.add(match[0].casefold())
        if len(words) >= enough:
            break
    return len(words)


def duplicate_share(items: list[str]) -> float:
    """Return the share of `items` that equal an earlier one."""
    return (len(items) - len(set(items))) / max(len(items), 1)


def duplicate_character_share(items: list[str]) -> float:
    """Return the share of the characters of `items` in those that equal an earlier one."""
    characters = sum(map(len, items))
    return (characters - sum(map(len, set(items)))) / max(characters, 1)


def quality_rules(config: GopherQuality) -> list[Rule]:
    """Return the enabled rules of "Quality filtering", in the paper's order."""
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
        (reason.format(limit), partial(_exceeds, measure, compare, limit))
        for limit, reason, measure, compare in table
        if limit is not None
    ]


def repetition_rules(config: GopherRepetition) -> list[Rule]:
    """Return the enabled rules of "Repetition removal", in the order of table A1."""
    duplicate_rules: list[tuple[float | None, str, Callable[[Document], float]]] = [
        (config.max_duplicate_lines, "more than {:g} of the lines repeat others",
         lambda document: duplicate_share(document.lines)),
        (config.max_duplicate_paragraphs, "more than {:g} of the paragraphs repeat others",
         lambda document: duplicate_share(document.paragraphs)),
        (config.max_duplicate_line_characters, "more than {:g} of the characters in lines that repeat others",
         lambda document: duplicate_character_share(document.lines)),
        (config.max_duplicate_paragraph_characters, "more than {:g} of the characters in paragraphs that repeat others",
         lambda document: duplicate_character_share(document.paragraphs)),
    ]  # fmt: skip
    rules: list[Rule] = [
        (reason.format(limit), partial(_exceeds, measure, gt, limit))
        for limit, reason, measure in duplicate_rules
        if limit is not None
    ]
    for n in (2, 3, 4):
        if (limit := getattr(config, f"max_top_{n}gram")) is not None:
            reason = f"more than {limit:g} of the characters in the most frequent {n} words"
            rules.append((reason, partial(_top_share_exceeds, n, limit)))
    for n in range(5, 11):
        if (limit := getattr(config, f"max_duplicate_{n}gram")) is not None:
            reason = f"more than {limit:g} of the characters in {n} words that occurred before"
            rules.append((reason, partial(_duplicate_share_exceeds, n, limit)))
    return rules


def _exceeds(
    measure: Callable[[Document], float], compare: Callable[[float, float], bool], limit: float, document: Document
) -> bool:
    return compare(measure(document), limit)


def _top_share_exceeds(n: int, limit: float, document: Document) -> bool:
    return document.repeated_ngrams.top_share(n) > limit


def _duplicate_share_exceeds(n: int, limit: float, document: Document) -> bool:
    return document.repeated_ngrams.duplicate_share_exceeds(n, limit)
