"""Batched scores are those of one sequence at a time, whatever the batches."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_texts import packed
from tiny_scorers import Scorer, causal_scorer, scorer_of

from multihop.common.errors import UserError
from multihop.eval.zero_shot.scoring import Continuation, log_likelihoods, pseudo_log_likelihoods
from multihop.pretrain.models.config import ModelConfig


@pytest.fixture(params=["gpt2", "modernbert_decoder"])
def causal(request: pytest.FixtureRequest) -> Scorer:
    model: ModelConfig = request.getfixturevalue(request.param)
    return causal_scorer(model.model_copy(update={"max_positions": 160}))


@pytest.fixture(params=["bert", "modernbert"])
def masked(request: pytest.FixtureRequest, bert_data: Path) -> Scorer:
    return scorer_of(request.getfixturevalue(request.param), bert_data)


def _continuations(vocab_size: int) -> list[Continuation]:
    rng = random.Random(1)

    def draw(most: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(1, most))]

    return [Continuation(draw(60), draw(12)) for _ in range(25)]


@pytest.mark.parametrize("batch_tokens", [1, 100, 8192])
def test_log_likelihoods_are_those_of_the_definition(causal: Scorer, batch_tokens: int) -> None:
    continuations = _continuations(causal.tokenizer.vocab_size)
    scores = log_likelihoods(causal.model, continuations, batch_tokens)
    for each, score in zip(continuations, scores, strict=True):
        ids = [*each.context, *each.ids]
        rows = causal.log_probabilities(ids)[len(each.context) - 1 : -1]
        assert score.value == pytest.approx(float(rows[range(len(each.ids)), list(each.ids)].sum()), rel=1e-4)
        assert score.greedy == (rows.argmax(-1).tolist() == list(each.ids))
        assert score.tokens == len(each.ids)


def test_greedy_is_what_decoding_produces_and_passes_over_excluded_tokens(causal: Scorer) -> None:
    for seed in range(5):
        context = torch.randint(0, 256, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
        decoded: list[int] = []
        for _ in range(3):
            decoded.append(int(causal.log_probabilities(context + decoded)[-1].argmax()))
        second = int(causal.log_probabilities(context + decoded[:1])[-1].topk(2).indices[1])
        given = [
            Continuation(context, decoded),
            Continuation(context, [*decoded[:2], (decoded[2] + 1) % 256]),
            Continuation(context, decoded, [(), {decoded[1]}, ()]),
            Continuation(context, [decoded[0], second], [(), {decoded[1]}]),
        ]
        assert [each.greedy for each in log_likelihoods(causal.model, given)] == [True, False, False, True]
        values = [each.value for each in log_likelihoods(causal.model, given)]
        assert values[0] == pytest.approx(values[2])  # the filter is of the choice, not of the probabilities


def test_a_long_context_is_cut_at_its_beginning(causal: Scorer) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 300).tolist()
    [score] = log_likelihoods(causal.model, [Continuation(ids[:-3], ids[-3:])])
    rows = causal.log_probabilities(ids[-161:-1])
    assert score.value == pytest.approx(float(rows[[-3, -2, -1], ids[-3:]].sum()), rel=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 60, 8192])
def test_pseudo_log_likelihoods_mask_each_token_once(masked: Scorer, batch_tokens: int) -> None:
    rng = random.Random(2)
    size, special = masked.tokenizer.vocab_size, masked.special_ids
    sentences = [[rng.randrange(5, size) for _ in range(rng.randint(1, 15))] for _ in range(12)]
    scores = pseudo_log_likelihoods(masked.model, sentences, special, batch_tokens)
    for sentence, score in zip(sentences, scores, strict=True):
        total = 0.0
        for at in range(len(sentence)):
            ids = [special["cls"], *sentence, special["sep"]]
            ids[at + 1] = special["mask"]
            total += float(masked.log_probabilities(ids)[at + 1, sentence[at]])
        assert score == pytest.approx(total, rel=1e-4)


def test_a_query_stream_scores_each_token_without_a_mask_token(xlnet: ModelConfig, bert_data: Path) -> None:
    scorer = scorer_of(xlnet, bert_data)
    rng, special = random.Random(3), scorer.special_ids
    sentences = [[rng.randrange(5, scorer.tokenizer.vocab_size) for _ in range(length)] for length in (1, 7, 12)]
    for sentence, score in zip(
        sentences, pseudo_log_likelihoods(scorer.model, sentences, special, batch_tokens=40), strict=True
    ):
        ids, total = torch.tensor([*sentence, special["sep"], special["cls"]]), 0.0
        types = torch.tensor([0] * (len(ids) - 1) + [2])
        for at, token in enumerate(sentence):
            order = torch.full((len(ids),), -1)
            order[at] = 0  # the last one: it sees all others, and they do not see it
            text = packed(ids, [len(ids)], types)
            with torch.no_grad():
                encode: Any = scorer.model.encode
                state = encode(text, token_indices=torch.tensor([at]), factorization_order=order)
                total += float(scorer.model.lm_head(state).double().log_softmax(-1)[0, token])
        assert score == pytest.approx(total, rel=1e-4)


def test_what_a_model_cannot_score_is_refused(causal: Scorer, masked: Scorer) -> None:
    with pytest.raises(UserError, match=rf"needs a causal model, but model\.family={masked.model.config.family}"):
        log_likelihoods(masked.model, [Continuation([1], [2])])
    with pytest.raises(UserError, match=rf"need a masked model, but model\.family={causal.model.config.family}"):
        pseudo_log_likelihoods(causal.model, [[1]], causal.special_ids)
    with pytest.raises(UserError, match=r"continuation 2 has 161 tokens, but the model has max_positions=160"):
        log_likelihoods(causal.model, [Continuation([1], [2]), Continuation([1], [2] * 161)])
    with pytest.raises(UserError, match=r"sentence 1 has 63 tokens, but the model has max_positions=64"):
        pseudo_log_likelihoods(masked.model, [[7] * 63], masked.special_ids)
