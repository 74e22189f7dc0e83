"""The conditional random field against all sequences of labels, written out."""

from itertools import pairwise, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihop.eval.finetune.crf import Crf


def _crf(labels: int, seed: int) -> Crf:
    crf, generator = Crf(labels).double(), torch.Generator().manual_seed(seed)
    for parameter in crf.parameters():
        parameter.data.normal_(generator=generator)
    return crf


def _score(crf: Crf, scores: Tensor, labels: tuple[int, ...]) -> Tensor:
    """Return the score of one sentence's labels by the definition."""
    total = crf.start_transitions[labels[0]] + crf.end_transitions[labels[-1]]
    for row, label in zip(scores, labels, strict=True):
        total = total + row[label]
    for before, after in pairwise(labels):
        total = total + crf.transitions[before, after]
    return total


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), seed=st.integers(0, 99))
def test_loss_and_labels_are_those_of_all_sequences(lengths: list[int], seed: int) -> None:
    """A sentence of no words, all of which were cut off, changes nothing."""
    crf, words = _crf(3, seed), sum(lengths)
    generator = torch.Generator().manual_seed(seed + 1)
    scores = torch.randn(words, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 3, (words,), generator=generator)
    cu_words = torch.tensor([0, *lengths]).cumsum(0)
    expected, best = 0 * crf.transitions.sum(), list[int]()  # which sentences of one word do not have
    for start, stop in pairwise(cu_words.tolist()):
        if start == stop:
            continue
        every = list(product(range(3), repeat=stop - start))
        totals = torch.stack([_score(crf, scores[start:stop], each) for each in every])
        own = every.index(tuple(labels[start:stop].tolist()))
        expected = expected + totals.logsumexp(0) - totals[own]
        best += every[int(totals.argmax())]
    loss = crf.loss(scores, cu_words, labels)
    torch.testing.assert_close(loss, expected / words)
    assert crf.decode(scores, cu_words).tolist() == best
    weights = [scores, *crf.parameters()]
    for one, other in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(expected / words, weights), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_without_transitions_each_word_is_labeled_alone() -> None:
    crf, scores = Crf(4), torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    cu_words, labels = torch.tensor([0, 5, 9]), torch.arange(9) % 4
    torch.testing.assert_close(crf.loss(scores, cu_words, labels), torch.nn.functional.cross_entropy(scores, labels))
    assert torch.equal(crf.decode(scores, cu_words), scores.argmax(1))
