"""A pretrained encoder with a new head for a task, and the layers between a frozen encoder and its head."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from multihop.common.counter_rng import key_of
from multihop.eval.config import Features, Hops, Pooling
from multihop.eval.finetune.crf import Crf
from multihop.eval.finetune.templates import DELIMITERS
from multihop.eval.model.pooling import HopPooling, concat_pool, max_pool, mean_pool
from multihop.eval.model.token_types import with_token_types
from multihop.eval.tasks.task import Task
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.packed_tokens import PackedTokens

LSTM_DEPTH = 2
"""Layers of the BiLSTM (Devlin et al. 2018, section 5.3)."""


class FeatureReader(nn.Module):
    """The layers that are trained between a frozen model and a task's linear layer: a combination of hidden states,
    with or without a BiLSTM over them (Devlin et al. 2018, section 5.3 and table 7), or beside its first layer's output
    (Peters et al. 2017).

    Attributes:
        width: size of the vectors that it returns.
    """

    def __init__(self, features: Features, state_widths: list[int], generator: torch.Generator) -> None:
        """Create the layers.

        Args:
            state_widths: the width of each hidden state of the model.
        """
        super().__init__()
        self.indexes, self.combine = features.indexes(len(state_widths) - 1), features.combine
        first, *others = (state_widths[index] for index in self.indexes)
        self.width = first + sum(others) if self.combine == "concat" else first
        if self.combine in ("mix", "mix_both"):
            self.mix = nn.Parameter(torch.zeros(len(self.indexes)))
            self.scale = nn.Parameter(torch.ones(()))
        self.lstm: nn.LSTM | None = None
        self.upper_lstm: nn.LSTM | None = None
        if features.head != "linear":
            units = features.lstm_width
            depth = 1 if self.combine == "taglm" else LSTM_DEPTH
            self.lstm = nn.LSTM(self.width, units, depth, bidirectional=True)
            self.width = 2 * units
            lstms = [self.lstm]
            if self.combine == "taglm":
                self.upper_lstm = nn.LSTM(self.width + sum(others), units, LSTM_DEPTH - 1, bidirectional=True)
                lstms.append(self.upper_lstm)
            for parameter in (each for lstm in lstms for each in lstm.parameters()):
                # torch's own bound, drawn with the trial's seed.
                nn.init.uniform_(parameter, -(units**-0.5), units**-0.5, generator=generator)
        if self.combine == "mix_both":
            self.mix_above = nn.Parameter(torch.zeros(len(self.indexes)))
            self.scale_above = nn.Parameter(torch.ones(()))
            self.width += first

    def layer_weights(self) -> dict[str, dict[str, float]]:
        """Return the learned shares of the hidden states, which sum to 1, by their indexes: of the sum below the
        BiLSTM, and of the one above; empty if none are learned."""
        mixes = {"mix": ["mix"], "mix_both": ["mix", "mix_above"]}.get(self.combine, [])
        names = dict(zip(mixes, ("below", "above"), strict=False))
        shares = {names[name]: self.get_parameter(name).detach().softmax(0).tolist() for name in mixes}
        return {
            name: {str(index): share for index, share in zip(self.indexes, each, strict=True)}
            for name, each in shares.items()
        }

    def forward(self, states: list[Tensor], cu_seqlens: Tensor) -> Tensor:
        """Return (N, width), the linear layer's input for each token of packed sequences.

        Args:
            states: the model's hidden states, (N, H) each.
            cu_seqlens: int64 (S + 1,), cumulative sequence lengths, from 0 to N.
        """
        chosen = [states[i] for i in self.indexes]
        x = self._combined(chosen)
        if self.lstm is None:
            return x
        lengths = cu_seqlens.diff().tolist()
        read = _run_lstm(self.lstm, x, lengths)
        if self.upper_lstm is not None:
            return _run_lstm(self.upper_lstm, torch.cat([read, *chosen[1:]], 1), lengths)
        if self.combine != "mix_both":
            return read
        return torch.cat([read, _mixed(torch.stack(chosen), self.mix_above, self.scale_above)], 1)

    def _combined(self, chosen: list[Tensor]) -> Tensor:
        if self.combine == "concat":
            return torch.cat(chosen, 1)
        if self.combine == "taglm":
            return chosen[0]
        stacked = torch.stack(chosen)
        if self.combine == "sum":
            return stacked.sum(0)
        return _mixed(stacked, self.mix, self.scale)


def _run_lstm(lstm: nn.LSTM, x: Tensor, lengths: list[int]) -> Tensor:
    """Map (N, H) to (N, 2 * units), each sequence by itself."""
    packed = pack_sequence(x.split(lengths), enforce_sorted=False)
    return torch.cat(unpack_sequence(lstm(packed)[0]))


def _mixed(stacked: Tensor, mix: Tensor, scale: Tensor) -> Tensor:
    """Map (layers, N, H) to (N, H) by equation 1 of Peters et al. 2018."""
    return scale * torch.einsum("l,lnh->nh", mix.softmax(0), stacked)


class TaskModel(nn.Module):
    """The encoder, dropout and one linear layer (Devlin et al. 2018, section 4; Radford et al. 2018, section 3.2).

    With `features` the encoder is frozen: it gets no gradient and has no dropout, and what is on top reads its hidden
    states (Devlin et al. 2018, section 5.3). One vector of a sequence is then the mean over its tokens: the
    position that is pooled is meaningful only after fine-tuning. Causal models get no new tokens (see
    `multihop.eval.finetune.templates`).
    """

    def __init__(
        self,
        encoder: Model,
        task: Task,
        seed: int,
        dropout: float | None = None,
        features: Features | None = None,
        pooling: Pooling = "family",
    ) -> None:
        """Create the head.

        Args:
            dropout: rate before the linear layer; None: the encoder's.
        """
        super().__init__()
        family = FAMILIES[encoder.config.family]
        generator = torch.Generator().manual_seed(key_of("head", seed) >> 1)
        self.features: FeatureReader | None = None
        if features is not None:
            encoder.requires_grad_(False).eval()
            self.features = FeatureReader(features, encoder.config.state_widths, generator)
        elif family.reads_one_way:
            encoder.word = _with_delimiters(encoder.word, generator)
        self.encoder = encoder
        self.kind, self.family = task.kind, family
        self.pooling = family.pooling if pooling == "family" else pooling
        self.hop_pooling = HopPooling(encoder.config.state_width, pooling.hops) if isinstance(pooling, Hops) else None
        self.dropout = nn.Dropout(encoder.config.dropout if dropout is None else dropout)
        outputs = {"choice": 1, "spans": 2}.get(task.kind, len(task.labels) or 1)
        width = self.features.width if self.features else encoder.config.state_width
        pooled = self.features is None and task.kind not in ("spans", "tagging")
        self.head = nn.Linear(3 * width if pooled and pooling == "concat" else width, outputs)
        nn.init.normal_(self.head.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.head.bias)
        self.crf: Crf | None = None
        if features is not None and features.head == "bilstm_crf":
            assert task.kind == "tagging", "check_settings refuses other kinds"
            self.crf = Crf(outputs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.features is not None:
            self.encoder.eval()
        return self

    def layer_groups(self) -> list[list[nn.Parameter]]:
        """Return the parameters in groups from input to output: as `Model.layer_groups`, with the new head in the
        last."""
        *lower, last = self.encoder.layer_groups()
        children = (child for child in self.children() if child is not self.encoder)
        above = [parameter for child in children for parameter in child.parameters()]
        return [*lower, [*last, *above]]

    def forward(self, packed: PackedTokens[Tensor], words: Tensor, cu_examples: Tensor) -> Tensor:
        """Return the head's outputs.

        Args:
            packed, words, cu_examples: as `multihop.eval.finetune.inputs.Encoded.collate` returns them.

        Returns:
            float (E, classes), (E, 1) for regression, (W, labels) for tagging, (N, 2) for spans: start and end; for a
            choice (E, choices), -inf where an example has fewer.
        """
        packed = with_token_types(self.family, packed)
        if self.features is not None:
            state = self._read(self.features, packed, words)
        else:
            state = self.encoder.encode(packed, token_indices=self._read_tokens(packed.cu_seqlens, words))
        if self.kind in ("spans", "tagging"):
            return self._scored(state)
        if self.features is None:
            state = self._pooled(state, packed.cu_seqlens)
        if self.kind == "choice":
            return _by_example(self._scored(state).squeeze(-1), cu_examples)
        if len(cu_examples) - 1 < len(state):
            # Both orders of a pair are added before the head (Radford et al. 2018, section 3.3).
            owners = torch.repeat_interleave(cu_examples.diff())
            state = state.new_zeros(len(cu_examples) - 1, state.shape[1]).index_add(0, owners, state)
        return self._scored(state)

    def _read(self, features: FeatureReader, packed: PackedTokens[Tensor], words: Tensor) -> Tensor:
        """Return the input of the linear layer from a frozen encoder: every token, each first token of a word, or each
        sequence's mean."""
        with torch.no_grad():
            states = self.encoder.hidden_states(packed)
        read: Tensor = features(states, packed.cu_seqlens)
        if self.kind == "spans":
            return read
        return read.index_select(0, words) if self.kind == "tagging" else mean_pool(read, packed.cu_seqlens)

    def _read_tokens(self, cu_seqlens: Tensor, words: Tensor) -> Tensor | None:
        """Return int64: the tokens that the head reads; None: all."""
        if self.kind == "tagging":
            return words
        if self.kind == "spans" or self.pooling not in ("pooler", "first", "last"):
            return None
        return cu_seqlens[1:] - 1 if self.pooling == "last" else cu_seqlens[:-1]

    def _pooled(self, state: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return (S, H): one vector of each sequence from the states at `_read_tokens`."""
        if self.hop_pooling is not None:
            pooled: Tensor = self.hop_pooling(state, cu_seqlens)
            return pooled
        match self.pooling:
            case "pooler":
                return self.encoder.pool(state)
            case "mean":
                return mean_pool(state, cu_seqlens)
            case "max":
                return max_pool(state, cu_seqlens)
            case "concat":
                return concat_pool(state, cu_seqlens, self.family.reads_backward)
        return state

    def _scored(self, state: Tensor) -> Tensor:
        scores: Tensor = self.head(self.dropout(state))
        return scores


def _by_example(scores: Tensor, cu_examples: Tensor) -> Tensor:
    """Map (S,) to (E, most sequences of an example), with -inf where there are fewer."""
    counts = cu_examples.diff()
    owners = torch.repeat_interleave(counts)
    columns = torch.arange(len(scores), device=scores.device) - cu_examples[owners]
    return scores.new_full((len(counts), int(counts.max())), -torch.inf).index_put((owners, columns), scores)


def _with_delimiters(word: nn.Embedding, generator: torch.Generator) -> nn.Embedding:
    """Return the embedding with rows for the tokens that `templates.template_of` adds, after its own."""
    new = torch.empty(DELIMITERS, word.embedding_dim).normal_(std=0.02, generator=generator)
    return nn.Embedding.from_pretrained(torch.cat([word.weight.detach(), new]), freeze=False)
