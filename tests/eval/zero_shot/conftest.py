"""A causal and a masked model to evaluate."""

from pathlib import Path

import pytest
from tiny_scorers import Scorer, causal_scorer, scorer_of

from multihop.pretrain.models.config import ModelConfig


@pytest.fixture
def causal(gpt2: ModelConfig) -> Scorer:
    """A GPT-2 with 160 positions and a byte-bpe tokenizer."""
    return causal_scorer(gpt2.model_copy(update={"max_positions": 160}))


@pytest.fixture
def masked(bert: ModelConfig, bert_data: Path) -> Scorer:
    """A BERT with 64 positions and a unigram tokenizer."""
    return scorer_of(bert, bert_data)
