"""Adds words of a text to an existing vocabulary: those on which it spends the most tokens.

A word is one pre-token, the unit that the model tokenizes independently: for WordPiece a run without spaces and
punctuation, for byte-level BPE a word with the space before it; for SentencePiece, which has none, the letters and
digits after a space, with its leading U+2581. Adding a word saves its occurrences times its tokens less one. An added
word becomes one token, the last ids are the added words', and no other id changes its meaning. How longer words are
split may change where they begin with an added word, as in a vocabulary that had the word from the start:

- WordPiece takes the longest token at each place, so that an added word is found. What is left of a longer word must
  have tokens too: a word is not added if another one that was known would become unknown with it.
- Byte-level BPE would need new merges, and each intermediate merge would add a token. Instead `ignore_merges` is set,
  with which the library looks for the whole word first.
- A unigram model gets the word with the logarithm of its frequency as its score, or a higher one where its parts
  together would still be better.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.byte_bpe import BYTES
from multihop.data_prep.tokenizers.hf_tokenizers import load_hf_tokenizer
from multihop.data_prep.tokenizers.info import AddedTokens
from multihop.data_prep.tokenizers.sentence_piece import BLANK, SCORE_STEP

RULES = 1
"""Increased when other words are chosen than in earlier versions."""
LEAST_COUNT = 2
"""An added word occurs at least as often."""
LONGEST = 24
"""Characters of an added word, at most: without spaces between words, clauses would be added."""
_WORD = re.compile(r"[^\W_]\w*")
_NORMAL, _BYTE = 1, 6
_UNIGRAM = 1


class _Vocabulary(Protocol):
    @property
    def tokens(self) -> Collection[str]: ...

    def words(self, text: str) -> Iterable[str]:
        """Return the words of a text, as the vocabulary spells them."""

    def text(self, word: str) -> str:
        """Return a word as texts spell it."""

    def check(self) -> None:
        """Check that words can be added, before any text is read.

        Raises:
            UserError: they cannot.
        """

    def parts(self, word: str) -> list[int]:
        """Return the ids of a word's tokens; none if it has an unknown one."""

    def with_words(self, words: Sequence[str], counts: Counter[str]) -> bytes:
        """Return the tokenizer's file with these words as its last tokens."""


def add_words(content: bytes, texts: Iterable[str], number: int) -> tuple[bytes, AddedTokens]:
    """Add `number` words of the texts to a tokenizer.

    Args:
        content: what `existing.import_tokenizer` returned.

    Returns:
        The tokenizer's file with the words, and their description.

    Raises:
        UserError: the texts have fewer words that the vocabulary splits and that occur `LEAST_COUNT` times, or the
            tokenizer is of a kind to which words cannot be added.
    """
    vocabulary = _open(content)
    vocabulary.check()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(vocabulary.words(text))
    before = {word: vocabulary.parts(word) for word in counts}
    saved = {
        word: counts[word] * (len(parts) - 1)
        for word, parts in before.items()
        if len(parts) > 1 and counts[word] >= LEAST_COUNT and _is_word(vocabulary.text(word))
        # A unigram model may have a word whose parts are more probable.
        if word not in vocabulary.tokens
    }
    while True:
        if len(saved) < number:
            fewer = f"set {len(saved):,} or less" if saved else "remove the key"
            found = f"{len(saved):,} words" if len(saved) > 1 else "1 word" if saved else "no word"
            raise UserError(
                f"tokenizer.add_words={number:,}: the sample has {found} that the vocabulary splits into known tokens "
                f"and that occur at least {LEAST_COUNT} times; {fewer}, give more text, or raise tokenizer.sample_mb "
                "if the sample is smaller than the text"
            )
        words = sorted(saved, key=lambda word: (-saved[word], word))[:number]
        extended = vocabulary.with_words(words, counts)
        tokenizer = _open(extended)
        after = {word: tokenizer.parts(word) for word in counts}
        lost = [word for word in counts if before[word] and not after[word]]
        if not lost:
            break
        saved = {word: tokens for word, tokens in saved.items() if not any(each.startswith(word) for each in lost)}
    return extended, AddedTokens(
        base_sha256=hashlib.sha256(content).hexdigest(),
        parts=[before[word] for word in words],
        tokens_before=sum(count * len(before[word]) for word, count in counts.items()),
        tokens_after=sum(count * len(after[word]) for word, count in counts.items()),
    )


def check_extensible(content: bytes) -> None:
    """Check that words can be added to a tokenizer, before any text is read.

    Args:
        content: what `existing.import_tokenizer` returned.

    Raises:
        UserError: they cannot.
    """
    _open(content).check()


def _is_word(text: str) -> bool:
    return len(text.strip()) <= LONGEST and any(map(str.isalpha, text))


def _open(content: bytes) -> _Vocabulary:
    if not content.startswith(b"{"):
        return _Unigram(content)
    tree = json.loads(content)
    return _WordPiece(content, tree) if tree["model"]["type"] == "WordPiece" else _ByteBPE(content, tree)


class _Json:
    """What WordPiece and byte-level BPE have in common: a tokenizer.json with a vocabulary."""

    def __init__(self, content: bytes, tree: dict[str, Any]) -> None:
        self._tree, self._tokenizer = tree, load_hf_tokenizer(content)
        self._model = self._tokenizer.model
        self.tokens = self._tokenizer.get_vocab(with_added_tokens=True)

    def words(self, text: str) -> Iterator[str]:
        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        text = text if normalizer is None else normalizer.normalize_str(text)
        return (word for word, _ in splitter.pre_tokenize_str(text))

    def _with_vocabulary(self, words: Sequence[str], **settings: Any) -> bytes:
        """Return the file with more tokens.

        The library numbers added tokens, special ones for instance, after the vocabulary unless they are in it, so
        that they must be in it before it grows.
        """
        ids = self.tokens | {word: number for number, word in enumerate(words, start=len(self.tokens))}
        model = {**self._tree["model"], **settings, "vocab": dict(sorted(ids.items(), key=lambda each: each[1]))}
        return (json.dumps({**self._tree, "model": model}, ensure_ascii=False) + "\n").encode()

    def check(self) -> None:
        """Check that no added token becomes a word of texts when it is put into the vocabulary; see `_with_vocabulary`.

        Raises:
            UserError: one would.
        """
        for token in self.tokens.keys() - self._tree["model"]["vocab"].keys():
            if [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(token)] == [token]:
                raise UserError(
                    f"words cannot be added to this tokenizer.json: its added token {token!r} is a word, which texts "
                    "could then contain; set tokenizer.add_words=0"
                )


class _WordPiece(_Json):
    def text(self, word: str) -> str:
        return word

    def parts(self, word: str) -> list[int]:
        tokens = self._model.tokenize(word)
        unknown = self._tree["model"]["unk_token"]
        return [] if any(token.value == unknown for token in tokens) else [token.id for token in tokens]

    def with_words(self, words: Sequence[str], counts: Counter[str]) -> bytes:
        return self._with_vocabulary(words)


class _ByteBPE(_Json):
    def text(self, word: str) -> str:
        return bytes(BYTES[letter] for letter in word).decode(errors="replace")

    def parts(self, word: str) -> list[int]:
        return [token.id for token in self._model.tokenize(word)]

    def check(self) -> None:
        """Check also that looking for whole words first changes the ids of no word.

        Raises:
            UserError: a word is a token of the vocabulary, but its merges do not lead there.
        """
        super().check()
        if self._tree["model"].get("ignore_merges"):
            return
        splitter = self._tokenizer.pre_tokenizer
        for token, number in self._tree["model"]["vocab"].items():
            text = self.text(token) if BYTES.keys() >= set(token) else token
            is_word = [word for word, _ in splitter.pre_tokenize_str(text)] == [token]
            if is_word and self.parts(token) != [number]:
                raise UserError(
                    f"words cannot be added to this tokenizer.json: its token {token!r} ({number}) is a word that its "
                    "merges encode otherwise, and it would change; set tokenizer.add_words=0"
                )

    def with_words(self, words: Sequence[str], counts: Counter[str]) -> bytes:
        return self._with_vocabulary(words, ignore_merges=True)


class _Unigram:
    def __init__(self, content: bytes) -> None:
        import sentencepiece as spm
        from sentencepiece import sentencepiece_model_pb2

        self._proto = sentencepiece_model_pb2.ModelProto.FromString(content)  # type: ignore[attr-defined]
        self._processor = spm.SentencePieceProcessor(model_proto=content)
        self.tokens = {piece.piece for piece in self._proto.pieces}
        self._kinds = [piece.type for piece in self._proto.pieces]
        self._scores = [piece.score for piece in self._proto.pieces]

    def words(self, text: str) -> Iterator[str]:
        runs = (_WORD.match(word) for word in self._processor.normalize(text).split(BLANK))
        return (BLANK + run[0] for run in runs if run)

    def text(self, word: str) -> str:
        return word.removeprefix(BLANK)

    def check(self) -> None:
        """Check that the model is a unigram one and marks the beginnings of words.

        Raises:
            UserError: it is not.
        """
        normal = self._proto.normalizer_spec
        if self._proto.trainer_spec.model_type != _UNIGRAM or not (
            normal.add_dummy_prefix
            and normal.escape_whitespaces
            and not self._proto.trainer_spec.treat_whitespace_as_suffix
        ):
            raise UserError(
                "words can be added to WordPiece, byte-level BPE and SentencePiece's unigram models that put a space "
                "before each word, and tokenizer.path is none of these; set tokenizer.add_words=0"
            )

    def parts(self, word: str) -> list[int]:
        text = self.text(word)
        if self._processor.normalize(text) != word:  # its normalization is not its own normalization
            return []
        ids: list[int] = self._processor.encode(text)
        return ids if all(self._kinds[i] in (_NORMAL, _BYTE) for i in ids) else []

    def with_words(self, words: Sequence[str], counts: Counter[str]) -> bytes:
        total = sum(counts[word] * max(1, len(self.parts(word))) for word in counts)
        least = min(score for score, kind in zip(self._scores, self._kinds, strict=True) if kind == _NORMAL)
        scores = {word: max(least, math.log(counts[word] / total)) for word in words}
        for _ in range(len(words) + 1):
            content = self._with_pieces(scores)
            extended = _Unigram(content)
            cut = {word: ids for word in words if len(ids := extended.parts(word)) > 1}
            if not cut:
                return content
            # Each is now worth more than its parts, of which one may be an added word: the next pass sees to those
            # that are longer.
            scores |= {word: sum(extended._scores[i] for i in ids) + SCORE_STEP for word, ids in cut.items()}
        raise UserError(
            f"{cut.popitem()[0]!r} cannot be added to this SentencePiece model, whose scores are not logarithms of "
            "probabilities; set tokenizer.add_words=0"
        )

    def _with_pieces(self, scores: dict[str, float]) -> bytes:
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        proto.CopyFrom(self._proto)
        for word, score in scores.items():
            rounded = min(math.ceil(score / SCORE_STEP) * SCORE_STEP, 0.0)
            proto.pieces.add(piece=word, score=rounded, type=_NORMAL)
        proto.trainer_spec.vocab_size = len(proto.pieces)
        proto.DiscardUnknownFields()  # such as a self-test of the former tokens
        return bytes(proto.SerializeToString(deterministic=True))
