"""Perplexity counts every held-out piece once and agrees with the definition."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_prep.shards import open_dataset
from eval.perplexity import cross_entropy, unigram_cross_entropy, windows
from pretrain.config import ModelConfig
from pretrain.models import build_model, initialise
from pretrain.models.gpt2 import GPT2


@given(st.integers(1, 400), st.integers(8, 70))
def test_windows_predict_each_piece_once_from_half_a_window_or_more(length: int, seq_len: int) -> None:
    predicted = []
    for window, first in windows(np.arange(length), seq_len):
        assert len(window) <= seq_len + 1 and 0 <= first < len(window) - 1
        for place in range(first, len(window) - 1):
            target = int(window[place + 1])
            assert place + 1 >= min(target, seq_len // 2)  # pieces seen before it
            predicted.append(target)
    assert predicted == list(range(1, length))


def _gpt2(config: ModelConfig, data: Path) -> GPT2:
    model = build_model(config, open_dataset(data).manifest.tokenizer.vocab_size)
    assert isinstance(model, GPT2)
    initialise(model, 5)
    return model


def test_it_is_the_mean_over_all_pieces_given_what_stands_before_them(gpt2: ModelConfig, gpt2_data: Path) -> None:
    data = open_dataset(gpt2_data)
    model = _gpt2(gpt2, gpt2_data).eval()
    end = data.manifest.tokenizer.special_ids["end"]
    longest = int(data.heldout.lengths.max()) + 1
    if longest > gpt2.max_positions:
        model = _gpt2(gpt2.model_copy(update={"max_positions": longest}), gpt2_data).eval()
    total, pieces = 0.0, 0
    for number in range(len(data.heldout)):
        tokens = torch.tensor([[end, *data.heldout.tokens(number).tolist()]])
        with torch.no_grad():
            length = tokens.shape[1] - 1
            bounds = torch.tensor([0, length])
            hidden = model.encode(tokens[0, :-1], torch.arange(length), bounds, length)
            log_probabilities = model.word_logits(hidden).double().log_softmax(-1)
        total -= float(log_probabilities.gather(1, tokens[0, 1:, None]).sum())
        pieces += tokens.shape[1] - 1
    loss, counted = cross_entropy(model, data.heldout, end, longest)
    assert counted == pieces == int(data.heldout.lengths.sum())
    assert loss == pytest.approx(total / pieces, rel=1e-5)


def test_the_unigram_reference_by_hand(gpt2_data: Path) -> None:
    data = open_dataset(gpt2_data)
    counts = np.load(gpt2_data / "token_counts.npy")
    tokens = np.concatenate([data.heldout.tokens(i) for i in range(len(data.heldout))])
    wanted = -sum(np.log((counts[t] + 1) / (counts.sum() + len(counts))) for t in tokens) / len(tokens)
    assert unigram_cross_entropy(data.heldout, counts) == pytest.approx(wanted)
