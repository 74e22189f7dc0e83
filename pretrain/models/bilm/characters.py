"""Words as characters: their ids, and the encoder that ELMo reads them with (Kim et al. 2016; Peters et al. 2018).

The characters of a word are the bytes of its UTF-8 text. Ids begin at 1, as in the authors' code, where 0 is no
character: bytes have 1 to 256, and the markers of a sentence's beginning and end, of a word's beginning and end, and of
padding follow.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from multihop.common.errors import UserError
from multihop.pretrain.models.bilm.config import Characters

SENTENCE_BEGIN, SENTENCE_END, WORD_BEGIN, WORD_END, PADDING = range(257, 262)
CHARACTERS = PADDING + 1
"""Number of ids of characters."""
_MAX_SHOWN = 60
"""Characters of a long word in a message."""

log = logging.getLogger("multihop")


def character_ids(words: Sequence[str], max_characters: int) -> NDArray[np.int64]:
    """The characters of a sentence, between the markers of its beginning and end: int64 (words + 2, max_characters).

    A word with more bytes than fit between its marks is truncated, as in the authors' code, with a warning.

    Raises:
        UserError: The sentence has no word, or a word is empty.
    """
    if not words:
        raise UserError("the sentence has no words; remove it")
    texts, room = [word.encode("utf-8", "ignore") for word in words], max_characters - 2
    if longer := [number for number, text in enumerate(texts) if len(text) > room]:
        longest = max(longer, key=lambda number: len(texts[number]))
        log.warning(
            "%d of %d words are longer than %d bytes and are truncated to that, as in the authors' code; the longest "
            "has %d: %r; raise max_characters to read them whole",
            len(longer),
            len(words),
            room,
            len(texts[longest]),
            words[longest] if len(words[longest]) <= _MAX_SHOWN else f"{words[longest][:_MAX_SHOWN]}…",
        )
    ids = np.full((len(words) + 2, max_characters), PADDING, np.int64)
    ids[:, 0] = WORD_BEGIN
    ids[0, 1:3] = SENTENCE_BEGIN, WORD_END
    ids[-1, 1:3] = SENTENCE_END, WORD_END
    for number, text in enumerate(texts, start=1):
        if not text:
            raise UserError(f"word {number} of the sentence is empty; remove it")
        read = np.frombuffer(text[:room], np.uint8)
        ids[number, 1 : len(read) + 1] = read.astype(np.int64) + 1
        ids[number, len(read) + 1] = WORD_END
    return ids


class CharacterEncoder(nn.Module):
    """Convolutions with ReLU and a maximum over the word, highway layers, and a projection."""

    def __init__(self, config: Characters, width: int) -> None:
        """Create the layers.

        Args:
            width: size of the result.
        """
        super().__init__()
        total = sum(number for _, number in config.filters)
        self.convolutions = nn.ModuleList(nn.Conv1d(config.embedding, number, size) for size, number in config.filters)
        self.highways = nn.ModuleList(Highway(total) for _ in range(config.highways))
        self.projection = nn.Linear(total, width)

    def forward(self, x: Tensor) -> Tensor:
        """The embeddings of words, (N, P), of those of their characters, (N, max_characters, E)."""
        x = x.transpose(1, 2)
        x = torch.cat([convolution(x).amax(2).relu() for convolution in self.convolutions], 1)
        for highway in self.highways:
            x = highway(x)
        projected: Tensor = self.projection(x)
        return projected


class Highway(nn.Module):
    """A layer that carries a part of its input (Srivastava et al. 2015): s relu(W x + a) + (1 - s) x, where s =
    sigmoid(V x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result are (N, F)."""
        return torch.lerp(x, self.transform(x).relu(), self.gate(x).sigmoid())
