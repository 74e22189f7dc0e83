"""Sentences of a document, by the rules of sentencex."""

import sentencex

LANGUAGE = "en"
"""Rules of abbreviations and quotes; sentencex ends sentences of other languages by the same punctuation marks."""


def split_sentences(text: str, language: str = LANGUAGE) -> list[str]:
    """The sentences of a cleaned document, in order, none empty; paragraphs end sentences, single line ends do not."""
    return [sentence for piece in sentencex.segment(language, text) if (sentence := piece.strip())]
