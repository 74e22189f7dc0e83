"""One spelling of the same text, so that equal documents have equal bytes."""

import re
import unicodedata

# U+000B, U+000C, U+0085, U+2028 and U+2029 end a line in Unicode (UAX 14); the byte order mark is no text.
_TABLE: dict[int, str | None] = {code: None for code in (*range(0x20), *range(0x7F, 0xA0), 0xFEFF)}
_TABLE |= {code: "\n" for code in (0x0A, 0x0B, 0x0C, 0x85, 0x2028, 0x2029)} | {0x09: " "}
_BLANKS = re.compile(r"[^\S\n]+")
_LINE_EDGES = re.compile(r" ?\n ?")
_EMPTY_LINES = re.compile(r"\n{3,}")


def clean(text: str) -> str:
    """`text` in Unicode NFC, without control characters, one blank between words, at most one empty line.

    Line ends become "\\n"; an empty line stays, because it parts paragraphs. Cleaning twice changes nothing.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_TABLE)
    text = unicodedata.normalize("NFC", text)
    text = _LINE_EDGES.sub("\n", _BLANKS.sub(" ", text))
    return _EMPTY_LINES.sub("\n\n", text).strip()
