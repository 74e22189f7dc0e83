"""Tiny random models with tokenizers of their own, and their scores computed one sequence at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from packed_texts import packed
from reference_tokenizers import gpt2_letters
from torch import Tensor

from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.tokenizers.tokenizer import Tokenizer, load, parse
from multihop.data_prep.tokenizers.tokenizer_json import byte_bpe_json
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.layers.model import Model

WORDS = ("the", "her", "of", "captain", "river", "stone", "garden", "letter", "winter", "silver")
"""Each of these with a space before it is one token of the causal model; everything else is bytes."""


class Scorer(NamedTuple):
    """The arguments of an evaluation."""

    model: Model
    tokenizer: Tokenizer
    special_ids: dict[str, int]

    def log_probabilities(self, ids: Sequence[int]) -> Tensor:
        """Return the log-probabilities of all tokens after each token of one sequence, float64 (T, V)."""
        with torch.no_grad():
            hidden = self.model.encode(packed(torch.tensor(ids), [len(ids)]))
            return self.model.lm_head(hidden).double().log_softmax(-1)

    def likelihood(self, context: str, continuation: str) -> float:
        """Return a continuation's log-likelihood under a causal model."""
        ids = [self.special_ids["end"], *self.tokenizer.encode([context + continuation])[0].tolist()]
        first = 1 + len(self.tokenizer.encode([context])[0])
        rows = self.log_probabilities(ids)
        return sum(float(rows[at - 1, ids[at]]) for at in range(first, len(ids)))


def causal_scorer(config: ModelConfig) -> Scorer:
    """Return a GPT-2 over bytes and a few words, with higher logits for these words."""
    tokens, merges = [*gpt2_letters().values()], []
    for word in WORDS:
        for end in range(1, len(word) + 1):
            merge = ["Ġ" + word[: end - 1], word[end - 1]]
            if merge not in merges:
                merges.append(merge)
                tokens.append("".join(merge))
    tokens.append("<|endoftext|>")
    tokenizer = parse(byte_bpe_json({token: number for number, token in enumerate(tokens)}, merges))
    model = _random(config, len(tokens))
    for word in WORDS:
        model.word.weight.data[tokens.index("Ġ" + word)] *= 4
    return Scorer(model, tokenizer, {"end": len(tokens) - 1})


def scorer_of(config: ModelConfig, data: Path) -> Scorer:
    """Return a random model with the tokenizer of a data set."""
    info = open_dataset(data).manifest.tokenizer
    return Scorer(_random(config, info.vocab_size), load(data / info.file), info.special_ids)


def _random(config: ModelConfig, vocab_size: int) -> Model:
    model = build_model(config, vocab_size)
    init_weights(model, 3)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 10  # so that the predictions are far from uniform
    return model.eval()
