"""Natural text from the tokenized text of official files, as a model without such a vocabulary has read it.

GPT-2 was evaluated on de-tokenized text (Radford et al. 2019, section 3.1); its rules were described but not published
with the model. These are rules of that kind, close to those by which its results are commonly reproduced. Each undoes
what the official tokenization did to the text between two words. They are applied line by line, in their order.
"""

import re
from typing import Literal

Style = Literal["wikitext", "ptb", "penn"]
"""wikitext: WikiText-2 and WikiText-103. ptb: Mikolov's Penn Treebank, lowercase, without punctuation, with N for
numbers and <unk> for rare words. penn: the Penn Treebank's tokenization of other text, as in CBT and LAMBADA."""

_CONTRACTION = (r" (n't|'(?:s|t|re|ve|m|ll|d))(?=\s|$)", r"\1")
_POSSESSIVE = (r"s '(?=\s|$)", "s'")
_CURRENCY = (r"([$£€#]) (?=\d)", r"\1")
_PUNCTUATION = (r" ([,.:;!?%])(?=\s|$)", r"\1")
_BRACKETS = ((r"([(\[{]) ", r"\1"), (r" ([)\]}])", r"\1"))

_RULES: dict[Style, tuple[tuple[str, str], ...]] = {
    "wikitext": (
        _POSSESSIVE,
        _CONTRACTION,
        (r" @([-,.])@ ", r"\1"),
        _PUNCTUATION,
        *_BRACKETS,
        (r'" ([^"]*) "', r'"\1"'),
        (r"(?<=\s)' ([^']*) '(?=\s|$)", r"'\1'"),
        (r"(?<==) (?==)", ""),  # the marks of a heading
        (r" ° ", "°"),
        _CURRENCY,
    ),
    "ptb": (
        _CONTRACTION,
        _POSSESSIVE,
        (r"\\/", "/"),
        (r"(?<!\S)N(?!\S)", "1"),
        _CURRENCY,
        ("<unk>", "?"),
    ),
    "penn": (
        (r"-(?:LRB|lrb)-", "("),
        (r"-(?:RRB|rrb)-", ")"),
        _CONTRACTION,
        _POSSESSIVE,
        _PUNCTUATION,
        *_BRACKETS,
        (r"(?<!\S)`` ", '"'),
        (r" ''(?!\S)", '"'),
        (r"(?<!\S)` ", "'"),
        _CURRENCY,
    ),
}
_COMPILED = {
    style: [(re.compile(pattern), replacement) for pattern, replacement in rules] for style, rules in _RULES.items()
}


def detokenize(line: str, style: Style) -> str:
    """Return one line of an official file as natural text, without spaces around it."""
    for pattern, replacement in _COMPILED[style]:
        line = pattern.sub(replacement, line)
    return line.strip()
