"""Wraps a SentencePiece model as a tokenizer, and caches encoded words where that provably changes no id.

A sentence's tokens are those of its words if no token has a space except at its beginning and no rule of normalization
looks past a space. For BPE and character models, which never cross a word boundary, that is enough. Unigram sums the
scores of a sentence from its beginning in 32 bits, so that rounding may decide between two segmentations of a word by
what comes before it, unless all scores are multiples of SCORE_STEP. Then every sum below 2^24 steps is exact, ties are
ties everywhere, and a word is segmented the same way wherever it occurs.
Models that `multihop prep` trains have such scores. A model without one of these properties encodes each sentence anew.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import sentencepiece as spm

from multihop.common.errors import UserError
from multihop.data_prep.rules.sentences import LANGUAGE, split_sentences
from multihop.data_prep.tokenizers.word_table import Ids, Lengths, WordTable, concatenate

BLANK = "\u2581"
_BLANK_BYTES = BLANK.encode()
SCORE_STEP = 2.0**-6
"""Step to whose multiples a unigram model's scores, natural logarithms of probabilities, are rounded."""

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_UNIGRAM, _BPE, _CHAR = 1, 2, 4
_UNKNOWN_PENALTY = 10.0  # SentencePiece gives a character without a token this much less than the lowest score


class SentencePiece:
    """Tokenizes by a SentencePiece model."""

    def __init__(self, model: bytes) -> None:
        """Load a model.

        Raises:
            UserError: `model` is not a SentencePiece model, or not a unigram, BPE or character one.
        """
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        try:
            self._processor = spm.SentencePieceProcessor(model_proto=model)
            proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
        except (RuntimeError, DecodeError) as error:
            raise UserError(f"it is not a SentencePiece model: {error}") from None
        if not all(isinstance(piece.piece, str) for piece in proto.pieces):  # protobuf returns invalid UTF-8 as bytes
            raise UserError("a token of the SentencePiece model is not UTF-8")
        self._model = model
        kinds: dict[int, Literal["unigram", "bpe", "char"]] = {_UNIGRAM: "unigram", _BPE: "bpe", _CHAR: "char"}
        if proto.trainer_spec.model_type not in kinds:
            raise UserError("the SentencePiece model is not a unigram, BPE or character model; use one of these")
        self.kind = kinds[proto.trainer_spec.model_type]
        self._tokens = [piece.piece for piece in proto.pieces]
        newline_separates = self._processor.normalize("a\nb") == self._processor.normalize("a b")
        # The longest text, in characters after normalization, whose words may be looked up; 0: never.
        self._max_chars = _max_chars(proto)
        self._growth = _growth(proto.normalizer_spec.precompiled_charsmap)
        self._words = WordTable(self._encode, b" \n" if newline_separates else b" ")

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def keeps_words(self) -> bool:
        """True if encoded words are cached; otherwise each sentence is encoded anew."""
        return self._max_chars > 0

    def split(self, document: str, language: str = LANGUAGE) -> list[str]:
        """Split into sentences; the whitespace between them has no token."""
        return split_sentences(document, language)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        if not self.keeps_words:
            return concatenate(self._encode(list(texts)))
        spelled = [text.encode() for text in texts]
        chars, sizes = (np.fromiter(map(len, each), np.int64, len(texts)) for each in (texts, spelled))
        # A character outside ASCII has at least two bytes and becomes at most `_growth` characters. A literal U+2581 is
        # not a space to normalization, but is one to the model.
        long = np.flatnonzero(chars + self._growth * (sizes - chars) > self._max_chars).tolist()
        blank = [i for i, text in enumerate(spelled) if _BLANK_BYTES in text]
        return self._words.encode(spelled, sorted({*long, *blank}))

    def encode_continuation(self, text: str) -> list[int]:
        return (self._processor if text[:1].isspace() else self._continuing).encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(i) for i in ids])

    def id_to_token(self, i: int) -> str:
        return self._tokens[i]

    def token_text(self, i: int) -> str:
        return self._tokens[i].replace(BLANK, " ")

    def begins_word(self, i: int) -> bool:
        return self._tokens[i].startswith(BLANK)

    @cached_property
    def _continuing(self) -> spm.SentencePieceProcessor:
        """The same model without the space that is put before a text."""
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto.FromString(self._model)  # type: ignore[attr-defined]
        proto.normalizer_spec.add_dummy_prefix = False
        return spm.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts, num_threads=1)


def is_exact(scores: np.ndarray) -> bool:
    """Return whether scores, float32, are multiples of SCORE_STEP and <= 0, so that their sums are exact."""
    return bool((scores <= 0).all() and (scores % SCORE_STEP == 0).all())


def _max_chars(proto: Any) -> int:
    normal = proto.normalizer_spec
    pieces = [piece.piece for piece in proto.pieces if piece.type == _NORMAL]
    by_words = (
        normal.add_dummy_prefix
        and normal.remove_extra_whitespaces
        and normal.escape_whitespaces
        and not proto.trainer_spec.treat_whitespace_as_suffix
        and {piece.type for piece in proto.pieces} <= {_NORMAL, _UNKNOWN, _CONTROL, _BYTE}
        and BLANK in pieces
        and not any(BLANK in piece[1:] for piece in pieces)
        and _blanks_stand_alone(normal.precompiled_charsmap)
    )
    if not by_words:
        return 0
    if proto.trainer_spec.model_type in (_BPE, _CHAR):
        return 2**40
    scores = np.array([piece.score for piece in proto.pieces if piece.type == _NORMAL], np.float32)
    if not is_exact(scores):
        return 0
    # The best segmentation is no worse than unknown characters throughout, one for each character and space.
    return int(2**24 * SCORE_STEP / (2 * (_UNKNOWN_PENALTY - float(scores.min()))))


def _table(charsmap: bytes) -> tuple[np.ndarray, bytes]:
    """Return the rules of normalization: the units of their trie, uint32, and the replacements, each NUL-terminated."""
    size = int.from_bytes(charsmap[:4], "little")
    return np.frombuffer(charsmap, "<u4", size // 4, 4), charsmap[4 + size :]


def _growth(charsmap: bytes) -> int:
    """Return the largest number of characters that one character becomes."""
    return max((len(text.decode()) for text in _table(charsmap)[1].split(b"\0")), default=1) if charsmap else 1


def _blanks_stand_alone(charsmap: bytes) -> bool:
    """Return whether no rule matches a space, none a line break with something else, and none produces two spaces.

    The rules are a double-array trie in the layout of darts-clone: a unit has its label in the low byte and an offset
    from bit 10 on; its index XOR the offset is the index of its child with label 0, and that XOR a label the index of
    the child with that label.
    """
    if not charsmap:
        return True
    units, texts = _table(charsmap)
    labels, first = units & 0x800000FF, np.arange(len(units)) ^ ((units >> 10) << ((units & 0x200) >> 6))
    line_end = first[0] ^ ord("\n")
    inside = [i for i in np.flatnonzero((labels == ord(" ")) | (labels == ord("\n"))) if i != line_end]
    if line_end < len(units) and labels[line_end] == ord("\n"):
        behind = first[line_end] ^ np.arange(1, 0x100)
        inside += behind[(labels[behind % len(units)] == np.arange(1, 0x100)) & (behind < len(units))].tolist()
    # Unused units have labels too: a unit is in use if the way up from it leads to the root, unit 0.
    seen, above = set(), np.array(inside, np.int64)
    while len(above):
        seen |= {*above.tolist()}
        above = np.flatnonzero(np.isin(first, above ^ (labels[above] & 0xFF)))
        above = np.array([i for i in above if i not in seen], np.int64)
    return 0 not in seen and b"  " not in texts
