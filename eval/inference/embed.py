"""Texts as vectors: the last hidden states of their tokens, pooled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from multihop.common.errors import UserError
from multihop.eval.inference.trained_model import TrainedModel
from multihop.eval.model.pooling import mean_pool
from multihop.eval.model.token_types import with_token_types
from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.packed_tokens import pack_sequences

EmbedPooling = Literal["family", "mean"]


@dataclass(frozen=True)
class Embedding:
    """A text as a vector."""

    vector: list[float]
    """(H,)."""
    tokens: int
    """The number of tokens that were read, special tokens included."""
    is_truncated: bool
    """Whether the text had more tokens than the model has positions: the last ones were not read."""


class NoTokensError(UserError):
    """A text has no tokens, so that it has no embedding."""

    def __init__(self, number: int, text: str) -> None:
        """Build the message for the text with this 1-based number."""
        super().__init__(f"text {number}, {text!r}, has no tokens; remove it")
        self.number = number


@torch.inference_mode()
def embed(trained: TrainedModel, texts: Sequence[str], pooling: EmbedPooling = "mean") -> list[Embedding]:
    """Return the vector of each text, computed in one batch.

    Args:
        pooling: mean: the mean over all tokens, special tokens included; family: as in fine-tuning, the pooler's
            output, the first or last token's state, or the mean.

    Raises:
        UserError: the model translates, or the model's files lack the pooler's weights.
        NoTokensError: a text has no tokens.
    """
    if trained.family.translates:
        raise UserError(
            f"{trained.path} is a {trained.family.display_name}, which embeds no texts; use `multihop translate`"
        )
    model, by_family = trained.model, trained.family.pooling
    if pooling == "family" and by_family == "pooler":
        trained.needs(model.pool, "its pooler; use mean pooling")
    limit = model.config.max_positions - len(trained.add_special_tokens([]))
    encoded = [trained.tokenizer.encode([text])[0].tolist() for text in texts]
    for number, (text, ids) in enumerate(zip(texts, encoded, strict=True), start=1):
        if not ids:
            raise NoTokensError(number, text)
    sequences = [trained.add_special_tokens(ids[:limit]) for ids in encoded]
    lengths = [len(ids) for ids in sequences]
    packed = with_token_types(trained.family, packed_to_device(pack_sequences(sequences), trained.device))
    cu_seqlens = packed.cu_seqlens
    if pooling == "mean" or by_family == "mean":
        vectors = mean_pool(model.encode(packed), cu_seqlens)
    else:
        at = cu_seqlens[1:] - 1 if by_family == "last" else cu_seqlens[:-1]
        states = model.encode(packed, token_indices=at)
        vectors = model.pool(states) if by_family == "pooler" else states
    return [
        Embedding(vector, length, len(ids) > limit)
        for vector, length, ids in zip(vectors.tolist(), lengths, encoded, strict=True)
    ]
