"""Texts in which a mask token is spelled out, such as "The river [MASK] stone."."""

from multihop.data_prep.tokenizers.tokenizer import Tokenizer


def encode_masked(tokenizer: Tokenizer, mask: int, text: str) -> list[int]:
    """Token ids of a text, with `mask` where the mask token is spelled out; without other special tokens.

    A mask token stands for a word and the space before it: in "[MASK]." and "[MASK]ing" the rest continues that word.
    """
    first, *rest = text.split(tokenizer.id_to_token(mask))
    ids: list[int] = tokenizer.encode([first.rstrip() if rest else first])[0].tolist()
    for number, part in enumerate(rest, start=1):
        ids += [mask, *tokenizer.encode_continuation(part.rstrip() if number < len(rest) else part)]
    return ids
