"""Decoding of CTC against all paths of small cases."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multihop.eval.inference.ctc_search import best_path, collapse, ctc_search, prefix_beam_search
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.families import parse_model_config


def emissions(steps: int, vocabulary: int, seed: int) -> Any:
    logits = np.random.default_rng(seed).normal(size=(steps, vocabulary)) * 2
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def by_brute_force(log_probabilities: Any, blank: int) -> dict[tuple[int, ...], float]:
    """Return the log probability of every target: the sum over all of its paths."""
    steps, vocabulary = log_probabilities.shape
    totals: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(vocabulary), repeat=steps):
        target = tuple(collapse(path, blank))
        value = sum(log_probabilities[at, token] for at, token in enumerate(path))
        totals[target] = float(np.logaddexp(totals.get(target, -np.inf), value))
    return totals


def test_repetitions_are_merged_before_blanks_are_removed() -> None:
    assert collapse([1, 1, 0, 1, 2, 2, 0, 0], 0) == [1, 1, 2]
    assert collapse([0, 0], 0) == collapse([], 0) == []


@given(steps=st.integers(1, 5), vocabulary=st.integers(2, 4), seed=st.integers(0, 999), data=st.data())
def test_a_search_with_enough_beams_is_exact(steps: int, vocabulary: int, seed: int, data: st.DataObject) -> None:
    blank = data.draw(st.integers(0, vocabulary - 1), label="blank")
    log_probabilities = emissions(steps, vocabulary, seed)
    expected = by_brute_force(log_probabilities, blank)
    found = prefix_beam_search(log_probabilities, blank, beams=10**4)
    assert {tuple(each.tokens): pytest.approx(each.score) for each in found} == expected
    assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)


@given(steps=st.integers(1, 5), seed=st.integers(0, 999), beams=st.integers(2, 5))
def test_fewer_beams_never_overstate_a_target(steps: int, seed: int, beams: int) -> None:
    log_probabilities = emissions(steps, 4, seed)
    expected = by_brute_force(log_probabilities, 0)
    found = prefix_beam_search(log_probabilities, 0, beams)
    assert len(found) <= beams
    assert all(each.score <= expected[tuple(each.tokens)] + 1e-9 for each in found)


@given(steps=st.integers(1, 5), seed=st.integers(0, 999))
def test_the_best_path_is_the_likeliest_path(steps: int, seed: int) -> None:
    log_probabilities = emissions(steps, 3, seed)
    found = best_path(log_probabilities, 0)
    paths = itertools.product(range(3), repeat=steps)
    likeliest = max(paths, key=lambda path: sum(log_probabilities[at, token] for at, token in enumerate(path)))
    assert found.tokens == collapse(likeliest, 0)


def test_the_best_path_may_not_be_the_best_target() -> None:
    """Graves et al. 2006, figure 2: two paths of one token together are likelier than the path of blanks."""
    log_probabilities = np.log(np.array([[0.6, 0.4], [0.6, 0.4]]))
    assert best_path(log_probabilities, 0).tokens == []
    assert prefix_beam_search(log_probabilities, 0, 4)[0].tokens == [1]


def test_a_batch_is_its_sentences_alone() -> None:
    config = parse_model_config(
        {"family": "ctc-encoder", "layers": 1, "hidden": 16, "max_positions": 30, "dropout": 0.0, "encoder": "gru"}
    )
    model: Any = build_model(config, 12).eval()
    init_weights(model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    sources = [[3, 4, 5, 1], [6, 1], [7, 8, 9, 10, 11, 3, 3, 1]]
    for beams in (1, 5):
        together = ctc_search(model, sources, 0, beams)
        for source, hypotheses in zip(sources, together, strict=True):
            (alone,) = ctc_search(model, [source], 0, beams)
            assert [each.tokens for each in alone] == [each.tokens for each in hypotheses]
            assert [each.score for each in alone] == pytest.approx([each.score for each in hypotheses], abs=1e-5)
