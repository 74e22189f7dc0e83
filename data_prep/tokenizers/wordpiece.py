"""BERT's WordPiece, by Hugging Face tokenizers.

Devlin et al. 2018, section 3: text is split at whitespace and punctuation, and each word greedily into its longest
tokens. Normalization and splitting look at one character at a time, or at the text between two spaces, so that encoded
words can be cached.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from multihop.data_prep.rules.sentences import LANGUAGE, split_sentences
from multihop.data_prep.tokenizers.hf_tokenizers import encode_each, matched_added_tokens
from multihop.data_prep.tokenizers.word_table import Ids, Lengths, WordTable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTINUATION_PREFIX = "##"
UNKNOWN = "[UNK]"


class WordPiece:
    """Tokenizes by a BERT vocabulary."""

    kind: Literal["wordpiece"] = "wordpiece"

    def __init__(self, hf_tokenizer: "Tokenizer", tokens: list[str]) -> None:
        """Wrap a library tokenizer.

        Args:
            tokens: the vocabulary in the order of the ids, with [UNK].
        """
        self._tokens = tokens
        added = [token.content for token in matched_added_tokens(hf_tokenizer)]
        spelled = [*added, *map(hf_tokenizer.normalizer.normalize_str, added)]
        # An added token with whitespace in it spans several words: texts are then encoded whole.
        by_words = not any(map(str.isspace, "".join(spelled)))
        self._words = WordTable(partial(encode_each, hf_tokenizer), separators=b" \n" if by_words else b"")

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def split(self, document: str, language: str = LANGUAGE) -> list[str]:
        """Split into sentences; the whitespace between them has no token."""
        return split_sentences(document, language)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return self._words.encode([text.encode() for text in texts])

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._tokens[i] for i in ids).replace(" " + CONTINUATION_PREFIX, "")

    def id_to_token(self, i: int) -> str:
        return self._tokens[i]

    def token_text(self, i: int) -> str:
        token = self._tokens[i]
        return token.removeprefix(CONTINUATION_PREFIX) if token.startswith(CONTINUATION_PREFIX) else " " + token

    def begins_word(self, i: int) -> bool:
        return not self._tokens[i].startswith(CONTINUATION_PREFIX)
