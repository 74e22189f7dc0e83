"""Which tokens sampling may choose, and how often it does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_scorers import causal_scorer
from torch import Tensor

from multihop.eval.inference.generate import Sampling, generate, sample, stream
from multihop.eval.inference.trained_model import TrainedModel
from multihop.pretrain.models.config import ModelConfig

SAMPLING = st.builds(
    Sampling,
    temperature=st.floats(0.05, 20),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.001, 1.0),
)


def allowed(logits: Tensor, sampling: Sampling) -> set[int]:
    """Return the tokens that are left by the definitions, in double precision, including those at the very edge."""
    probabilities = (logits.double() / sampling.temperature).softmax(-1)
    order = probabilities.argsort(descending=True)[: sampling.top_k]
    probabilities = probabilities[order] / probabilities[order].sum()
    if sampling.top_p is None:
        return set(order.tolist())
    before = probabilities.cumsum(0) - probabilities
    return set(order[(before < sampling.top_p + 1e-5) | (torch.arange(len(order)) == 0)].tolist())


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda each: each / 4), min_size=1, max_size=30, unique=True),
    sampling=SAMPLING,
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=9),
)
def test_no_token_outside_of_the_set_is_chosen(logits: list[float], sampling: Sampling, draws: list[float]) -> None:
    row = torch.tensor(logits)
    chosen = sample(row.expand(len(draws), -1), sampling, torch.tensor(draws, dtype=torch.float64))
    assert set(chosen.tolist()) <= allowed(row, sampling)


def test_tokens_are_chosen_by_their_probability() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000

    def counts(sampling: Sampling) -> list[int]:
        return sample(logits.expand(1000, -1), sampling, draws).bincount(minlength=4).tolist()

    assert counts(Sampling()) == pytest.approx([100, 400, 200, 300], abs=1)
    assert counts(Sampling(top_k=2)) == pytest.approx([0, 571, 0, 429], abs=1)
    assert counts(Sampling(top_p=0.7)) == pytest.approx([0, 571, 0, 429], abs=1)
    assert counts(Sampling(top_p=0.71)) == pytest.approx([0, 444, 222, 333], abs=1)
    assert counts(Sampling(temperature=0.5)) == pytest.approx([33, 533, 133, 300], abs=1)
    assert counts(Sampling(top_k=1)) == counts(Sampling(top_p=0.01)) == [0, 1000, 0, 0]


@pytest.fixture
def trained(gpt2: ModelConfig) -> TrainedModel:
    scorer = causal_scorer(gpt2)
    return TrainedModel("here", scorer.model, scorer.tokenizer, scorer.special_ids)


def test_the_same_seed_gives_the_same_text_whatever_stands_beside_it(trained: TrainedModel) -> None:
    prompts = [" the river", " her letter of", " stone"]
    sampling = Sampling(top_k=30, temperature=40.0, seed=5)
    together = generate(trained, prompts, 20, sampling)
    assert together == generate(trained, prompts, 20, sampling)
    assert together[0] == generate(trained, prompts[:1], 20, sampling)[0]
    assert together != generate(trained, prompts, 20, Sampling(top_k=30, temperature=40.0, seed=6))
    assert len(set(generate(trained, [" stone"] * 3, 20, sampling))) == 3


def test_a_stream_is_the_text_in_parts_of_whole_characters(trained: TrainedModel) -> None:
    """The vocabulary is bytes and a few words, so that most characters are several tokens, and many are broken."""
    for seed in range(5):
        sampling = Sampling(seed=seed, temperature=40.0)
        parts = list(stream(trained, " stone €", 40, sampling))
        assert "".join(parts) == generate(trained, [" stone €"], 40, sampling)[0]
        assert len(parts) > 5
