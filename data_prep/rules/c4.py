"""C4's filters: Raffel et al. 2020 (arXiv:1910.10683), section 2.2. Removes lines first, then drops documents."""

import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from multihop.common.errors import UserError
from multihop.data_prep.config import C4
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.rules.rule import ELLIPSES, Document, Rule
from multihop.data_prep.rules.sentences import split_sentences

TERMINAL = (".", "?", "!", '"', "”", "“", "»")
"""C4 names . ? ! and the end quotation mark; typographic ones are the same mark in other fonts."""
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Thai, Lao, Burmese, Khmer, Japanese and Chinese, which have no spaces between words."""


def make_editor(config: C4) -> Callable[[str], str]:
    """Make a function that removes citation markers and then lines from a cleaned text, and cleans the rest.

    Empty lines are kept, since they separate paragraphs.
    """

    def edit(text: str) -> str:
        uncited = _CITATION.sub("", text) if config.citations and "[" in text else text
        lines = uncited.split("\n")
        kept = [line for line in lines if not line or _keeps_line(line, config)]
        return text if len(kept) == len(lines) and uncited == text else clean("\n".join(kept))

    return edit


def _keeps_line(line: str, config: C4) -> bool:
    if config.terminal_punctuation and not ends_a_sentence(line):
        return False
    if config.min_line_words is not None and len(line.split(None, config.min_line_words)) < config.min_line_words:
        return False
    lower = line.lower()
    if config.javascript and "javascript" in lower:
        return False
    return not (config.policy and any(phrase in lower for phrase in POLICY))


def ends_a_sentence(line: str) -> bool:
    """Return whether the line ends in a terminal punctuation mark that is not part of an ellipsis."""
    line = line.rstrip()
    return line.endswith(TERMINAL) and not line.endswith(ELLIPSES)


def make_rules(config: C4) -> list[Rule]:
    """Make the enabled rules that drop documents.

    Raises:
        UserError: the list of bad words cannot be read.
    """
    enabled: list[Rule] = [("no line is left", lambda document: not document.text)]
    if config.lorem_ipsum:
        enabled.append(("holds lorem ipsum", lambda document: "lorem ipsum" in document.text.lower()))
    if config.curly_bracket:
        enabled.append(("holds a curly bracket", lambda document: "{" in document.text))
    if config.min_sentences is not None:
        reason = f"fewer than {config.min_sentences:,} sentences"
        enabled.append((reason, partial(_fewer_sentences, config.min_sentences)))
    if config.bad_words is not None:
        enabled.append(("holds a bad word", make_bad_word_check(_read_words(config.bad_words))))
    return enabled


def _fewer_sentences(limit: int, document: Document) -> bool:
    sentences = 0
    for line in document.lines:
        sentences += len(split_sentences(line))
        if sentences >= limit:
            return False
    return True


def make_bad_word_check(words: list[str]) -> Callable[[Document], bool]:
    """Make a function that returns whether a document contains one of `words` as a whole word, ignoring case.

    Words of scripts without spaces between words match anywhere.
    """
    wanted = {word.lower() for word in words}
    anywhere = sorted(filter(_UNSPACED.search, wanted))
    # A pattern of hundreds of words is slow: single words are looked up, and only phrases searched for.
    simple = {word for word in wanted.difference(anywhere) if re.fullmatch(r"\w+", word)}
    phrases = sorted(wanted - simple - set(anywhere))
    patterns = [(phrase, re.compile(rf"(?<!\w){re.escape(phrase)}(?!\w)")) for phrase in phrases]

    def holds(document: Document) -> bool:
        text = document.text.lower()
        return (
            not simple.isdisjoint(re.findall(r"\w+", text))
            or any(word in text for word in anywhere)
            or any(phrase in text and pattern.search(text) is not None for phrase, pattern in patterns)
        )

    return holds


def bad_words_hash(path: str) -> str:
    """Return the SHA-256 of the list, in hex.

    Raises:
        UserError: it cannot be read.
    """
    return hashlib.sha256("\n".join(_read_words(path)).encode()).hexdigest()


def _read_words(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.filters.c4.bad_words={path} cannot be read ({error}); give a UTF-8 text file with one word per line"
        ) from None
    words = [clean(line) for line in lines]
    if not any(words):
        raise UserError(f"data.filters.c4.bad_words={path} has no word; give a UTF-8 text file with one word per line")
    return [word for word in words if word]
