"""The perplexity of held-out documents counts every token once and agrees with the definition."""

from pathlib import Path

import numpy as np
import pytest
import torch
from packed_texts import packed

from multihop.data_prep.dataset.shards import open_dataset
from multihop.eval.zero_shot.perplexity import cross_entropy, unigram_cross_entropy
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.layers.model import Model


def _gpt2(config: ModelConfig, data: Path) -> Model:
    model = build_model(config, open_dataset(data).manifest.tokenizer.vocab_size)
    init_weights(model, 5)
    return model


def test_it_is_the_mean_over_all_tokens_given_those_before_them(gpt2: ModelConfig, gpt2_data: Path) -> None:
    data = open_dataset(gpt2_data)
    model = _gpt2(gpt2, gpt2_data).eval()
    end = data.manifest.tokenizer.special_ids["end"]
    longest = int(data.heldout.lengths.max()) + 1
    if longest > gpt2.max_positions:
        model = _gpt2(gpt2.model_copy(update={"max_positions": longest}), gpt2_data).eval()
    total, predicted = 0.0, 0
    for number in range(len(data.heldout)):
        tokens = torch.tensor([[end, *data.heldout.tokens(number).tolist()]])
        with torch.no_grad():
            length = tokens.shape[1] - 1
            hidden = model.encode(packed(tokens[0, :-1], [length]))
            log_probabilities = model.lm_head(hidden).double().log_softmax(-1)
        total -= float(log_probabilities.gather(1, tokens[0, 1:, None]).sum())
        predicted += tokens.shape[1] - 1
    loss, counted = cross_entropy(model, data.heldout, end, longest)
    assert counted == predicted == int(data.heldout.lengths.sum())
    assert loss == pytest.approx(total / predicted, rel=1e-5)


def test_the_unigram_reference_by_hand(gpt2_data: Path) -> None:
    data = open_dataset(gpt2_data)
    counts = np.load(gpt2_data / "token_counts.npy")
    tokens = np.concatenate([data.heldout.tokens(i) for i in range(len(data.heldout))])
    wanted = -sum(np.log((counts[t] + 1) / (counts.sum() + len(counts))) for t in tokens) / len(tokens)
    assert unigram_cross_entropy(data.heldout, counts) == pytest.approx(wanted)
