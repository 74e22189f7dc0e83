"""A linear-chain conditional random field over the labels of a sentence (Lafferty et al. 2001; Lample et al. 2016).

The score of a sentence's labels is the sum of the scores of each word's label, of each pair of adjacent labels, and of
the first and the last one. Their probability is the softmax of it over all sequences of labels.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


class Crf(nn.Module):
    """The scores of transitions between L labels, which begin at zero: as if each word were labeled alone."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(labels, labels))
        self.start_transitions = nn.Parameter(torch.zeros(labels))
        self.end_transitions = nn.Parameter(torch.zeros(labels))

    def loss(self, scores: Tensor, cu_words: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log-likelihood of the labels, in nats, per word.

        Args:
            scores: (W, L), of each word's labels.
            cu_words: int64 (S + 1,), cumulative numbers of words of the sentences, from 0 to W.
            labels: int64 (W,).
        """
        padded, lengths = _padded(scores, cu_words)
        of_words = scores.gather(1, labels[:, None]).sum()
        follows = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
        starts, stops = _present(cu_words)
        follows[starts] = False
        at = follows.nonzero().squeeze(1)
        of_pairs = self.transitions[labels[at - 1], labels[at]].sum()
        of_ends = (self.start_transitions[labels[starts]] + self.end_transitions[labels[stops - 1]]).sum()
        log_likelihood = of_words + of_pairs + of_ends - self.log_partition(padded, lengths).sum()
        return -log_likelihood / len(labels)

    def log_partition(self, padded: Tensor, lengths: Tensor) -> Tensor:
        """Return (S,): the log of the sum over all sequences of labels of the exponential of their scores, by the
        forward algorithm.

        Args:
            padded: (S, T, L), of each word's labels.
            lengths: int64 (S,), numbers of words, at least 1.
        """
        alpha = self.start_transitions + padded[:, 0]
        for step in range(1, padded.shape[1]):
            after = (alpha[:, :, None] + self.transitions).logsumexp(1) + padded[:, step]
            alpha = torch.where((step < lengths)[:, None], after, alpha)
        return (alpha + self.end_transitions).logsumexp(1)

    @torch.no_grad()
    def decode(self, scores: Tensor, cu_words: Tensor) -> Tensor:
        """Return int64 (W,): the most probable labels of each sentence, by Viterbi's algorithm.

        Args:
            scores, cu_words: as in `loss`.
        """
        if not len(scores):
            return torch.empty(0, dtype=torch.int64, device=scores.device)
        padded, lengths = _padded(scores, cu_words)
        best, stays = self.start_transitions + padded[:, 0], torch.arange(scores.shape[1], device=scores.device)
        backpointers: list[Tensor] = []
        for step in range(1, padded.shape[1]):
            after, origin = (best[:, :, None] + self.transitions).max(1)
            goes_on = (step < lengths)[:, None]
            best = torch.where(goes_on, after + padded[:, step], best)
            backpointers.append(torch.where(goes_on, origin, stays))  # beyond its end a sentence keeps its last label
        labels = [(best + self.end_transitions).argmax(1)]
        for origin in reversed(backpointers):
            labels.append(origin.gather(1, labels[-1][:, None]).squeeze(1))
        grid = torch.stack(labels[::-1], 1)
        mask = torch.arange(padded.shape[1], device=lengths.device) < lengths[:, None]
        return grid[mask]


def _present(cu_words: Tensor) -> tuple[Tensor, Tensor]:
    """Return int64 (S,) twice, the bounds of the sentences that have words."""
    starts, stops = cu_words[:-1], cu_words[1:]
    has_words = stops > starts
    return starts[has_words], stops[has_words]


def _padded(scores: Tensor, cu_words: Tensor) -> tuple[Tensor, Tensor]:
    """Return (S, T, L), scores of the sentences that have words; int64 (S,), their lengths."""
    starts, stops = _present(cu_words)
    lengths = stops - starts
    return pad_sequence(list(scores.split(lengths.tolist())), batch_first=True), lengths
