"""Sentences of a document, by the rules of sentencex."""

import re
from collections.abc import Iterator

import sentencex

LANGUAGE = "en"
PIECE = 65_536
"""Characters that sentencex is given at once."""
RUN = 500
"""Characters without a blank among them that sentencex is given at once."""

_PARTINGS = ("\n\n", ".\n", "\n", ". ", " ")
"""Where a long text is parted: only the first ends a sentence for sure, the next most probably, and so on."""
_PARAGRAPH_END = re.compile(r"\n(?<=[^\n]{100}[.!?:。！？]\n)(?!\n)")  # noqa: RUF001
"""A line this long that ends with a stop is a paragraph, also where no empty line follows: sentencex takes what
stands below an item of a list, up to the next empty line, for one sentence with it."""
_LAST_STOP = re.compile(r".*[!?。！？｡؟۔।॥၊။።][!?。！？\"'”’»）」』》]*", re.DOTALL)  # noqa: RUF001
_ODD_BLANKS = re.compile("[\t\x0b\x0c\r\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


def split_sentences(text: str, language: str = LANGUAGE) -> list[str]:
    """The sentences of a cleaned document, in order, none empty; paragraphs end sentences, single line ends do not."""
    return [text[start:stop] for start, stop in sentence_spans(text, language)]


def sentence_spans(text: str, language: str = LANGUAGE) -> list[tuple[int, int]]:
    """Start and stop, in characters, of each sentence of a cleaned document, without the blanks around it.

    Spans are in order, do not overlap, and hold every character that is no blank. `language` is an ISO 639 code; one
    that sentencex has no rules for gets those of a close language, or English ones.

    The time that sentencex takes grows with the square of the length where stops stand between no blanks, where
    quotation marks are not closed, and in lists. So it is given paragraphs of more than PIECE characters in pieces, and
    RUN characters without a blank end at a stop. Other paragraphs come out as sentencex has them.
    """
    if "\r" in text or not text.isascii():
        # sentencex 1.0 panics at a blank of several bytes before a stop, and loses count at "\n\r\n".
        text = _ODD_BLANKS.sub(" ", text)
    spans = []
    for first, last in _pieces(text):
        end = first
        for sentence in sentencex.segment(language, _PARAGRAPH_END.sub("\n\n", text[first:last])):
            bare = sentence.strip()
            start = text.find(bare, end, last)  # not where the last one ended: long texts come without empty lines
            if bare and start >= 0:
                if text[end:start].strip():
                    spans += _left_out(text, end, start)
                end = start + len(bare)
                spans.append((start, end))
        spans += _left_out(text, end, last)
    return spans


def _left_out(text: str, start: int, stop: int) -> list[tuple[int, int]]:
    """What sentencex leaves out is a sentence, unless it is blank."""
    bare = text[start:stop].lstrip()
    return [(stop - len(bare), start + len(text[start:stop].rstrip()))] if bare else []


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Start and stop of the parts of `text` that sentencex is given."""
    start = 0
    for stop in _run_ends(text):
        while stop - start > PIECE:
            cut = _parting(text, start)
            yield start, cut
            start = cut
        yield start, stop
        start = stop


def _parting(text: str, start: int) -> int:
    for parting in _PARTINGS:
        at = text.rfind(parting, start, start + PIECE)
        if at >= start:
            return at + len(parting)
    return start + PIECE


def _run_ends(text: str) -> Iterator[int]:
    """Where runs without a blank are cut, and the end of the text."""
    start = 0
    while len(text) - start > RUN:
        blank = max(text.rfind(" ", start, start + RUN), text.rfind("\n", start, start + RUN))
        if blank >= 0:
            start = blank + 1
        elif stop := _LAST_STOP.match(text, start, start + RUN):
            start = stop.end()
            yield start
        else:
            start += RUN
    if text:
        yield len(text)
