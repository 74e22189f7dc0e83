"""Normalizes text, so that equal documents have equal bytes."""

import re
import unicodedata
from functools import cache
from types import ModuleType

from multihop.common.errors import UserError
from multihop.data_prep.config import CleanConfig

# U+000B, U+000C, U+0085, U+2028 and U+2029 are line breaks in Unicode (UAX 14); the byte order mark is dropped.
_LINE_ENDS = "\x0b\x0c\x85\u2028\u2029"
_BLANKS = "\t\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_CONTROLS = "".join(map(chr, (*range(0x09), *range(0x0E, 0x20), *range(0x7F, 0x85), *range(0x86, 0xA0), 0xFEFF)))
_REPLACEMENTS = dict.fromkeys(_LINE_ENDS, "\n") | dict.fromkeys(_BLANKS, " ") | dict.fromkeys(_CONTROLS, "")
_RARE = re.compile(f"[{re.escape(''.join(_REPLACEMENTS))}]")
_ASCII = bytes.maketrans(b"\x0b\x0c\t", b"\n\n ")
_ASCII_CONTROLS = _CONTROLS.encode("ascii", "ignore")
_EMPTY_LINES = re.compile(r"\n{3,}")
_MAX_REPAIRS = 8
_LONG_RUN = 1000
"""Number of combining marks from which a run is sorted by `_sort_marks`.

Python sorts that many in a millisecond; real text has a few per letter.
"""


def clean(text: str, fix_mojibake: bool = False) -> str:
    """Return `text` in Unicode NFC, without control characters, with single spaces and at most one empty line in a row.

    Line breaks become "\\n"; an empty line is kept, since it separates paragraphs. Idempotent.
    With `fix_mojibake`, ftfy first repairs text that was decoded with the wrong encoding.

    Raises:
        UserError: ftfy is needed and not installed.
    """
    if fix_mojibake and not text.isascii():
        return _repair(text)
    # Most documents need few changes: searching in C for what a step would change costs less than the step.
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():
        text = text.encode().translate(_ASCII, _ASCII_CONTROLS).decode("ascii")
    else:
        text = _to_nfc(_RARE.sub(lambda match: _REPLACEMENTS[match[0]], text))
    while "  " in text:
        text = text.replace("  ", " ")
    if "\n" in text:
        if " \n" in text:
            text = text.replace(" \n", "\n")
        if text.rfind("\n ") >= 0:  # rfind looks for line breaks, find would look for spaces, which are more frequent
            text = text.replace("\n ", "\n")
        if "\n\n\n" in text:
            text = _EMPTY_LINES.sub("\n\n", text)
    return text.strip()


def dependencies(config: CleanConfig) -> dict[str, str]:
    """Return what cleaning depends on besides `config` and Unicode's version: the version of ftfy.

    Raises:
        UserError: as `clean`.
    """
    return {"mojibake": f"ftfy {_ftfy().__version__}"} if config.fix_mojibake else {}


def _to_nfc(text: str) -> str:
    """Return the text in NFC. Python sorts the marks on a letter in quadratic time, so long runs are sorted first."""
    if any(map(unicodedata.combining, text[::_LONG_RUN])):  # a run of that length covers one of these positions
        text = _mark_run_pattern().sub(_sort_marks, text)
    return unicodedata.normalize("NFC", text)


@cache
def _mark_run_pattern() -> re.Pattern[str]:
    """Compile a pattern for long runs of the characters that canonical ordering (UAX 15) sorts, all below U+20000."""
    marks = "".join(character for character in map(chr, range(0x300, 0x20000)) if unicodedata.combining(character))
    return re.compile(f"[{marks}]{{{_LONG_RUN},}}")


def _sort_marks(run: re.Match[str]) -> str:
    decomposed = "".join(unicodedata.normalize("NFD", mark) for mark in run[0])
    return "".join(sorted(decomposed, key=unicodedata.combining))


def _ftfy() -> ModuleType:
    try:
        import ftfy
    except ImportError:
        raise UserError(
            "data.clean.fix_mojibake needs ftfy, which is not installed; pip install 'multihop[text]'"
        ) from None
    return ftfy


def _repair(text: str) -> str:
    """Repair and clean until nothing changes, since one repair can enable the next."""
    fix_encoding = _ftfy().fix_encoding
    for _ in range(_MAX_REPAIRS):
        before, text = text, clean(fix_encoding(text))
        if text == before:
            break
    return text
