"""Reads and writes tokenizer.json, the format of Hugging Face's tokenizers, for BERT's and GPT-2's kinds."""

import json
from collections import Counter
from typing import Any

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.byte_bpe import LETTERS, ByteBPE
from multihop.data_prep.tokenizers.hf_tokenizers import load_hf_tokenizer
from multihop.data_prep.tokenizers.special_tokens import find_special_ids
from multihop.data_prep.tokenizers.wordpiece import CONTINUATION_PREFIX, UNKNOWN, WordPiece

_MAX_WORD_CHARS = 200
"""A longer word becomes one [UNK]: 200 in Google's program, 100 in most published tokenizer.json. A larger limit is
refused: the library's time for a WordPiece word grows faster than the square of its length."""
_WORDPIECE = {"type": "WordPiece", "unk_token": UNKNOWN, "continuing_subword_prefix": CONTINUATION_PREFIX}
_BERT_NORMALIZER = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
_BPE = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_REQUIRED_KEYS = ("type", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
"""Keys of a BPE model that must have GPT-2's values. The library honors the others, or they concern characters
without a token."""


def parse_json(content: bytes) -> WordPiece | ByteBPE:
    """Load the tokenizer in a tokenizer.json.

    Raises:
        UserError: it is neither of BERT's nor of GPT-2's kind.
    """
    try:
        tokenizer_class = _tokenizer_class(json.loads(content))
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise UserError(f"the tokenizer.json is malformed ({error!r}); give another") from None
    hf_tokenizer = load_hf_tokenizer(content)
    return tokenizer_class(hf_tokenizer, _tokens_by_id(hf_tokenizer.get_vocab(with_added_tokens=True)))


def _tokenizer_class(tree: dict[str, Any]) -> type[WordPiece] | type[ByteBPE]:
    """Return the class for a tokenizer.json.

    Raises:
        UserError: As for `parse_json`.
    """
    model, normalizer, cutter = (tree.get(key) or {} for key in ("model", "normalizer", "pre_tokenizer"))
    if model.get("type") == "Unigram":
        raise UserError(
            "the tokenizer.json is of SentencePiece's unigram kind; give the SentencePiece .model beside it instead "
            "(sentencepiece.model in an export of a run)"
        )
    tokens = _tokens_by_id(
        model.get("vocab", {}) | {each["content"]: each["id"] for each in tree.get("added_tokens", [])}
    )
    if (
        _has_settings(model, _WORDPIECE)
        and normalizer.get("type") == _BERT_NORMALIZER["type"]
        and cutter.get("type") == "BertPreTokenizer"
    ):
        _check_wordpiece(tokens, model["max_input_chars_per_word"])
        return WordPiece
    if (
        _has_settings(model, {key: _BPE[key] for key in _REQUIRED_KEYS})
        and normalizer.get("type") in (None, "NFC")
        and _has_settings({"use_regex": True} | cutter, _BYTE_LEVEL)
    ):
        # Newer versions of the library write a merge as a list, older ones as its parts separated by a space.
        merges = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
        _check_byte_bpe(tokens, merges)
        return ByteBPE
    raise UserError("the tokenizer.json is of neither BERT's nor GPT-2's kind; give another or the original files")


def wordpiece_json(tokens: list[str], lowercase: bool) -> bytes:
    """Return the tokenizer.json of a BERT vocabulary.

    Raises:
        UserError: it is not one.
    """
    _check_wordpiece(tokens, _MAX_WORD_CHARS)
    return _json(
        tokens,
        normalizer={**_BERT_NORMALIZER, "strip_accents": None, "lowercase": lowercase},
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": CONTINUATION_PREFIX, "cleanup": False},
        model={**_WORDPIECE, "max_input_chars_per_word": _MAX_WORD_CHARS, "vocab": _ids_by_token(tokens)},
    )


def byte_bpe_json(vocab: dict[str, int], merges: list[list[str]]) -> bytes:
    """Return the tokenizer.json of GPT-2's vocabulary and merges.

    Raises:
        UserError: they do not belong together.
    """
    tokens = _tokens_by_id(vocab)
    _check_byte_bpe(tokens, merges)
    return _json(
        tokens,
        normalizer=None,
        pre_tokenizer={**_BYTE_LEVEL, "trim_offsets": True},
        decoder={**_BYTE_LEVEL, "trim_offsets": True},
        model={**_BPE, "fuse_unk": False, "vocab": _ids_by_token(tokens), "merges": merges},
    )


def _has_settings(part: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether a part of a tokenizer.json has these settings; null, false and empty are equal."""
    return all((part.get(key) or None) == (value or None) for key, value in expected.items())


def _json(tokens: list[str], **parts: Any) -> bytes:
    """Return a tokenizer.json that declares the special tokens, as its readers expect; `parse_json` finds none in
    texts."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": i, "content": tokens[i], **flags} for i in sorted(find_special_ids(tokens).values())]
    tree = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "post_processor": None, **parts
    }  # fmt: skip
    return (json.dumps(tree, ensure_ascii=False) + "\n").encode()


def _check_wordpiece(tokens: list[str], max_word_chars: int) -> None:
    if UNKNOWN not in tokens:
        raise UserError(f"the vocabulary lacks {UNKNOWN}; give a BERT vocabulary")
    twice = [token for token, count in Counter(tokens).items() if count > 1]
    if twice:
        raise UserError(f"the vocabulary has the token {twice[0]!r} twice; remove one")
    if max_word_chars > _MAX_WORD_CHARS:
        raise UserError(
            f"max_input_chars_per_word={max_word_chars} of the tokenizer.json is more than {_MAX_WORD_CHARS}; lower it"
        )


def _check_byte_bpe(tokens: list[str], merges: list[list[str]]) -> None:
    known = set(tokens)
    if lacking := [letter for letter in LETTERS if letter not in known]:
        raise UserError(f"the vocabulary lacks {len(lacking)} of the 256 bytes, {lacking[0]!r} first; give GPT-2's")
    for number, merge in enumerate(merges, start=1):
        if len(merge) != 2 or "".join(merge) not in known:
            raise UserError(f"merge {number}, {' '.join(merge)!r}, does not join two tokens into one of the vocabulary")


def _tokens_by_id(vocab: dict[str, int]) -> list[str]:
    if not isinstance(vocab, dict) or {*vocab.values()} != {*range(len(vocab))} or not vocab:
        raise UserError(f"the ids of its {len(vocab):,} tokens are not 0, 1, 2, …")
    return sorted(vocab, key=lambda token: vocab[token])


def _ids_by_token(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}
