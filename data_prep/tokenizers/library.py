"""The one place where texts are given to tokenizers, Hugging Face's library in Rust.

One text is encoded at a time, so that the library starts no threads: the ids do not depend on their number, and a
process that has encoded can be forked. Time is proportional to n log n in the length n of a word.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


def open_library(content: bytes) -> "Tokenizer":
    """The tokenizer in a tokenizer.json, which finds no special token in a text, pads nothing and cuts nothing off.

    Raises ValueError when the library cannot read it.
    """
    from tokenizers import Tokenizer

    try:
        library = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"the package tokenizers does not read the tokenizer.json ({error}); give another") from None
    library.encode_special_tokens = True
    library.no_padding()
    library.no_truncation()
    return library


def encode_each(library: "Tokenizer", texts: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each text, without special tokens around it."""
    return (library.encode(text, add_special_tokens=False).ids for text in texts)


def searched_tokens(library: "Tokenizer") -> "list[AddedToken]":
    """The added tokens that texts are searched for; none if all are special.

    Special ones are among them: they are not found, but a token within their letters is not found either.
    """
    added = list(library.get_added_tokens_decoder().values())
    return [] if all(token.special for token in added) else added
