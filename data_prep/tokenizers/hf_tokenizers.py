"""Opens and runs Hugging Face tokenizers; no other module encodes with that library.

Texts are encoded one at a time, so that the library starts no threads and the process can be forked afterwards. Time
grows as n log n in the length n of a word.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from multihop.common.errors import UserError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


def load_hf_tokenizer(content: bytes) -> "Tokenizer":
    """Load a tokenizer.json, set to match no special tokens in texts, without padding and truncation.

    Raises:
        UserError: The library cannot read it.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"the package tokenizers cannot read the tokenizer.json ({error}); give another file") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def encode_each(tokenizer: "Tokenizer", texts: Iterable[str]) -> Iterator[list[int]]:
    """Yield the ids of each text, without special tokens around it."""
    return (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)


def matched_added_tokens(tokenizer: "Tokenizer") -> "list[AddedToken]":
    """Return the added tokens that the library looks for in texts; none if all are special.

    Special tokens are included: they are not matched, but neither is another token within their text.
    """
    added = list(tokenizer.get_added_tokens_decoder().values())
    return [] if all(token.special for token in added) else added
