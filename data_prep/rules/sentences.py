"""Splits documents into sentences, by sentencex."""

import re
from collections.abc import Iterator

import sentencex

LANGUAGE = "en"
CHUNK = 65_536
"""Maximum characters to pass to sentencex at once."""
RUN = 500
"""Maximum characters without whitespace to pass to sentencex at once."""

_SEPARATORS = ("\n\n", ".\n", "\n", ". ", " ")
"""Separators after which a long text is cut, in order of preference; only the first certainly ends a sentence."""
_PARAGRAPH_END = re.compile(r"\n(?<=[^\n]{100}[.!?:。！？]\n)(?!\n)")  # noqa: RUF001
"""A line this long that ends with a full stop is a paragraph, even if no empty line follows: sentencex joins a list
item and the text below it, up to the next empty line, to one sentence."""
_LAST_STOP = re.compile(r".*[!?。！？｡؟۔।॥၊။።][!?。！？\"'”’»）」』》]*", re.DOTALL)  # noqa: RUF001
_ODD_BLANKS = re.compile("[\t\x0b\x0c\r\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


def split_sentences(text: str, language: str = LANGUAGE) -> list[str]:
    """Return the non-empty sentences of a cleaned document; ends of paragraphs end sentences, single line breaks do
    not."""
    return [text[start:stop] for start, stop in sentence_spans(text, language)]


def sentence_spans(text: str, language: str = LANGUAGE) -> list[tuple[int, int]]:
    """Return start and stop, in characters, of each sentence of a cleaned document, without surrounding whitespace.

    Spans are in order, do not overlap, and cover every non-whitespace character. `language` is an ISO 639 code; a
    language without rules in sentencex gets those of a close one, or of English.

    sentencex takes quadratic time where full stops have no spaces around them, where quotation marks are not closed,
    and in lists. So paragraphs of more than CHUNK characters are passed in chunks, and RUN characters without
    whitespace are cut at a full stop. Other paragraphs are split exactly as by sentencex.
    """
    if "\r" in text or not text.isascii():
        # sentencex 1.0 panics at whitespace of several bytes before a full stop, and loses offsets at "\n\r\n".
        text = _ODD_BLANKS.sub(" ", text)
    spans = []
    for first, last in _chunks(text):
        end = first
        for sentence in sentencex.segment(language, _PARAGRAPH_END.sub("\n\n", text[first:last])):
            bare = sentence.strip()
            start = text.find(bare, end, last)  # not at the last end: sentencex drops empty lines of long texts
            if bare and start >= 0:
                if text[end:start].strip():
                    spans += _left_out(text, end, start)
                end = start + len(bare)
                spans.append((start, end))
        spans += _left_out(text, end, last)
    return spans


def _left_out(text: str, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the span that sentencex left out, as a sentence, unless it is blank."""
    bare = text[start:stop].lstrip()
    return [(stop - len(bare), start + len(text[start:stop].rstrip()))] if bare else []


def _chunks(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the chunks of `text` that are passed to sentencex."""
    start = 0
    for stop in _run_ends(text):
        while stop - start > CHUNK:
            cut = _cut_after(text, start)
            yield start, cut
            start = cut
        yield start, stop
        start = stop


def _cut_after(text: str, start: int) -> int:
    for separator in _SEPARATORS:
        at = text.rfind(separator, start, start + CHUNK)
        if at >= start:
            return at + len(separator)
    return start + CHUNK


def _run_ends(text: str) -> Iterator[int]:
    """Yield the offsets at which runs without whitespace are cut, and the end of the text."""
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
