"""AWD-LSTM (Merity et al. 2018): weight-dropped LSTM layers whose output matrix is their input embedding.

Each sequence starts from a zero state: samples are permuted, so that no sample continues the one before.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn, zeros
from torch.nn import functional as F

from multihop.pretrain.models.awd_lstm.config import AwdConfig
from multihop.pretrain.models.awd_lstm.layers import WeightDropLstm, scaled_mask, segment_bounds, variational_dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import embed
from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.models.seq2seq.recurrence import State
from multihop.pretrain.models.seq2seq.time_steps import TimeSteps, time_steps_of
from multihop.pretrain.packed_tokens import PackedTokens

_EMBEDDING_RANGE = 0.1


class RecurrentCache:
    """The state of each layer after the tokens so far, for `encode` to go on from."""

    def __init__(self) -> None:
        self.states: list[State] | None = None
        """h and c of each layer, (S, W) each, in the order of the sequences; None before the first tokens."""

    def advance(self) -> None:
        """Do nothing: a recurrent state does not grow."""


class AwdLstm(Model):
    """The language model. E is the width of the embeddings and of the last layer."""

    config: AwdConfig
    recurrent = True
    reads_backward: ClassVar[bool] = False
    """Whether each sequence is read from its last token to its first."""

    def __init__(self, config: AwdConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.embedding)
        self.layers = nn.ModuleList(
            WeightDropLstm(inputs, width, config.weight_dropout) for inputs, width in pairwise(config.state_widths)
        )
        self.word_bias = nn.Parameter(zeros(vocab_size))

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Uniform within 0.1 for the embedding, and within hidden**-0.5 for the layers (section 5)."""
        bound = _EMBEDDING_RANGE if name == "word.weight" else self.config.hidden**-0.5
        nn.init.uniform_(parameter, -bound, bound, generator=generator)

    def new_cache(
        self, lengths: Sequence[int], new_tokens: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> RecurrentCache:
        """An empty cache; see `Model.new_cache`."""
        return RecurrentCache()

    def encode(
        self,
        packed: PackedTokens[Tensor],
        sparse_lookup_grad: bool = False,
        token_indices: Tensor | None = None,
        cache: RecurrentCache | None = None,
        bptt: int | None = None,
    ) -> Tensor:
        """Hidden states (N, E), or (M, E), of packed sequences; see `Model.encode`, and `AwdConfig.bptt`."""
        assert packed.token_type_ids is None, "AWD-LSTM has no token types"
        steps = time_steps_of(Sequences.of(packed), self.reads_backward)
        sequences = len(steps.sorted_indices)
        rows = _rows_of(steps)
        x = self._embed(packed.input_ids.index_select(0, steps.order), sparse_lookup_grad)
        if self.training and self.config.input_dropout:
            x = variational_dropout(x, self.config.input_dropout, rows, sequences)
        bounds = segment_bounds(len(steps.batch_sizes), bptt) if bptt else None
        before = cache.states if cache is not None else None
        after: list[State] = []
        for number, layer in enumerate(self.layers):
            if number and self.training and self.config.hidden_dropout:
                x = variational_dropout(x, self.config.hidden_dropout, rows, sequences)
            state = None
            if before is not None:
                state = tuple(part.index_select(0, steps.sorted_indices) for part in before[number])
            x, last = layer(x, steps, state, bounds)
            after.append(tuple(part.index_select(0, steps.unsorted_indices) for part in last))
        if cache is not None:
            cache.states = after
        order = steps.inverse_order
        return x.index_select(0, order if token_indices is None else order.index_select(0, token_indices))

    def _embed(self, ids: Tensor, sparse_lookup_grad: bool) -> Tensor:
        """Embeddings (N, E), of which all of some words are zero in training (section 4.3)."""
        x = embed(self.word, ids, sparse_lookup_grad)
        if not self.training or not self.config.embedding_dropout:
            return x
        mask = scaled_mask((self.word.num_embeddings, 1), self.config.embedding_dropout, x)
        return x * mask.index_select(0, ids)

    def hidden_states(self, packed: PackedTokens[Tensor]) -> list[Tensor]:
        """The states between the layers in the order of the tokens, of `ModelConfig.state_widths`; see
        `Model.hidden_states`."""
        *between, last = super().hidden_states(packed)
        order = time_steps_of(Sequences.of(packed), self.reads_backward).inverse_order
        return [*(states.index_select(0, order) for states in between), last]

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, E)."""
        return F.linear(hidden, self.word.weight, self.word_bias)

    def forward(self, packed: PackedTokens[Tensor], labels: Tensor) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats of predicting labels, int64 (N,), the token after each; in training with
        the terms of `alpha` and `beta`, each the sum over the tokens of a mean square (section 4.6). A model that reads
        backward predicts each token from its label instead."""
        if self.reads_backward:
            packed, labels = replace(packed, input_ids=labels), packed.input_ids
        hidden = self.encode(packed, sparse_lookup_grad=True, bptt=self.config.bptt if self.training else None)
        output = hidden
        if self.training and self.config.dropout:
            lengths = packed.cu_seqlens.diff()
            rows = torch.repeat_interleave(lengths, output_size=len(hidden))
            output = variational_dropout(hidden, self.config.dropout, rows, len(lengths))
        loss = fused_linear_cross_entropy(output, self.word.weight, self.word_bias, labels)
        if self.training and self.config.alpha:
            loss = loss + self.config.alpha * output.float().square().mean(1).sum()
        if self.training and self.config.beta:
            adjacent = (packed.positions[1:] > 0)[:, None]
            loss = loss + self.config.beta * hidden.float().diff(dim=0).where(adjacent, 0.0).square().mean(1).sum()
        return {"clm": loss}


def _rows_of(steps: TimeSteps) -> Tensor:
    """int64 (N,): the row of each position of `steps`."""
    sizes = torch.tensor(steps.batch_sizes, device=steps.order.device)
    starts = sizes.cumsum(0) - sizes
    return torch.arange(len(steps.order), device=steps.order.device) - starts.repeat_interleave(sizes)
