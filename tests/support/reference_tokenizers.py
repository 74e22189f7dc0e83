"""BERT's and GPT-2's tokenizers as they were published, step by step and character by character: slow and simple.

BERT: BasicTokenizer and WordpieceTokenizer of tokenization.py in google-research/bert. GPT-2: src/encoder.py in
openai/gpt-2, with the package regex for the categories of Unicode.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise


def bert_ids(text: str, vocabulary: Mapping[str, int], lowercase: bool) -> list[int]:
    tokens = [token for word in _bert_words(text, lowercase) for token in _longest_first(word, vocabulary)]
    return [vocabulary[token] for token in tokens]


def _bert_words(text: str, lowercase: bool) -> list[str]:
    cleaned = ""
    for each in text:
        category = unicodedata.category(each)
        if each in "\t\n\r" or category == "Zs":
            cleaned += " "
        elif ord(each) in (0, 0xFFFD) or category in ("Cc", "Cf"):
            continue
        elif _is_ideograph(ord(each)):
            cleaned += " " + each + " "
        else:
            cleaned += each
    words = []
    for token in cleaned.split():
        if lowercase:
            decomposed = unicodedata.normalize("NFD", token.lower())
            token = "".join(each for each in decomposed if unicodedata.category(each) != "Mn")
        words.append("")
        for each in token:
            if _is_mark(each):
                words += [each, ""]
            else:
                words[-1] += each
    return " ".join(words).split()


def _is_ideograph(code: int) -> bool:
    return (
        0x4E00 <= code <= 0x9FFF
        or 0x3400 <= code <= 0x4DBF
        or 0x20000 <= code <= 0x2A6DF
        or 0x2A700 <= code <= 0x2B73F
        or 0x2B740 <= code <= 0x2B81F
        or 0x2B820 <= code <= 0x2CEAF
        or 0xF900 <= code <= 0xFAFF
        or 0x2F800 <= code <= 0x2FA1F
    )


def _is_mark(each: str) -> bool:
    code = ord(each)
    ascii_sign = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return ascii_sign or unicodedata.category(each).startswith("P")


def _longest_first(word: str, vocabulary: Mapping[str, int]) -> list[str]:
    if len(word) > 200:
        return ["[UNK]"]
    tokens, start = [], 0
    while start < len(word):
        end = len(word)
        while end > start and ("##" if start else "") + word[start:end] not in vocabulary:
            end -= 1
        if end == start:
            return ["[UNK]"]
        tokens.append(("##" if start else "") + word[start:end])
        start = end
    return tokens


def gpt2_ids(text: str, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> list[int]:
    import regex

    pattern = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    letters = gpt2_letters()
    ids = []
    for token in regex.findall(pattern, text):
        word = [letters[byte] for byte in token.encode()]
        while len(word) > 1:
            pair = min(pairwise(word), key=lambda pair: ranks.get(pair, len(ranks)))
            if pair not in ranks:
                break
            joined, at = [], 0
            while at < len(word):
                step = 2 if tuple(word[at : at + 2]) == pair else 1
                joined.append("".join(word[at : at + step]))
                at += step
            word = joined
        ids += [vocabulary[token] for token in word]
    return ids


def gpt2_letters() -> dict[int, str]:
    """Return the letter of each byte: itself if it is printable, else one from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + number) for number, byte in enumerate(unseen)}
