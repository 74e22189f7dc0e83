"""Encoder layer and decoder of the recurrent family."""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn, zeros
from torch.nn import functional as F

from multihop.pretrain.device_type import device_type
from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.cross_attention import PaddedSource, pad_source
from multihop.pretrain.models.seq2seq.attention import Attention, Score
from multihop.pretrain.models.seq2seq.config import Seq2SeqConfig
from multihop.pretrain.models.seq2seq.recurrence import (
    GATES,
    STATES,
    Cell,
    State,
    Weights,
    gru_step,
    lstm_step,
    run_recurrence,
    run_recurrence_cudnn,
)
from multihop.pretrain.models.seq2seq.time_steps import TimeSteps
from multihop.pretrain.uncompiled import uncompiled


class RecurrentCell(nn.Module):
    """The weights of one layer in one direction, as in torch.nn.LSTM and GRU."""

    def __init__(self, cell: Cell, inputs: int, width: int) -> None:
        super().__init__()
        self.cell, self.width = cell, width
        self.input_weight = nn.Parameter(torch.empty(GATES[cell] * width, inputs))
        self.state_weight = nn.Parameter(torch.empty(GATES[cell] * width, width))
        self.input_bias = nn.Parameter(zeros(GATES[cell] * width))
        self.state_bias = nn.Parameter(zeros(GATES[cell] * width))

    @property
    def weights(self) -> Weights:
        """The weights of inputs and states, and their biases."""
        return self.input_weight, self.state_weight, self.input_bias, self.state_bias

    def input_gates(self, x: Tensor) -> Tensor:
        """The contribution of the first I' of the I inputs, x (n, I'), to the gates, biases included: (n, G * W)."""
        bias = self.input_bias + self.state_bias if self.cell == "lstm" else self.input_bias
        return F.linear(x, self.input_weight[:, : x.shape[1]], bias)

    def step(self, gates: Tensor, state: State) -> State:
        """One step, from `gates` that have the contributions of all inputs."""
        if self.cell == "lstm":
            return lstm_step(torch.addmm(gates, state[0], self.state_weight.T), state[1])
        return gru_step(gates, F.linear(state[0], self.state_weight, self.state_bias), state[0])


def _run_directions(
    directions: list[RecurrentCell], x: Tensor, steps: TimeSteps, states: list[State]
) -> tuple[Tensor, list[State]]:
    """Run one or both directions of a layer on x (N, I); returns (N, all widths), and the last state of each."""
    cell = directions[0].cell
    weights = [each.weights for each in directions]
    if device_type(x.device) == "cuda":
        return run_recurrence_cudnn(cell, x, steps, states, weights)
    done = [
        run_recurrence(cell, x, steps, state, each, reverse=bool(number))
        for number, (state, each) in enumerate(zip(states, weights, strict=True))
    ]
    return torch.cat([out for out, _ in done], 1), [last for _, last in done]


class EncoderLayer(nn.Module):
    """A bidirectional layer: each direction is half as wide as the model."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        cell = config.cell
        self.forwards = RecurrentCell(cell, config.hidden, config.hidden // 2)
        self.backwards = RecurrentCell(cell, config.hidden, config.hidden // 2)

    @uncompiled
    def forward(self, x: Tensor, steps: TimeSteps) -> tuple[Tensor, State]:
        """x: (Ns, H), in the order of `steps`; the result: (Ns, H), and the last state of both directions (S, H)."""
        cell, width = self.forwards.cell, self.forwards.width
        initial = (x.new_zeros(len(steps.unsorted_indices), width),) * STATES[cell]
        out, last = _run_directions([self.forwards, self.backwards], x, steps, [initial, initial])
        return out, tuple(torch.cat(parts, 1) for parts in zip(*last, strict=True))


@dataclass(frozen=True)
class RecurrentState:
    """The decoder's state between two steps, for n hypotheses."""

    states: list[State]
    """The state of each layer, (n, H) per part."""
    input_feed: Tensor | None
    """(n, H): the previous step's attentional state; None without input feeding."""


class Decoder(nn.Module):
    """Recurrent layers, attention, and the layer before the output projection."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        cell, hidden = config.cell, config.hidden
        self.additive, self.input_feeding = config.attention == "additive", bool(config.input_feeding)
        first = 2 * hidden if self.additive or self.input_feeding else hidden
        self.cells = nn.ModuleList(RecurrentCell(cell, hidden if n else first, hidden) for n in range(config.layers))
        attends = config.attention != "none"
        self.attention = Attention(cast(Score, config.attention), hidden) if attends else None
        # Bahdanau et al. 2015, A.2.2: two candidates for each output; Luong et al. 2015, equation 5.
        shape = (3 * hidden, 2 * hidden) if self.additive else (2 * hidden, hidden)
        self.readout = nn.Linear(*shape, bias=False) if attends else None
        self.dropout = Dropout(config.dropout)

    @uncompiled
    def forward(
        self,
        x: Tensor,
        steps: TimeSteps,
        states: list[State],
        source: Tensor,
        targets: Sequences,
        sources: Sequences,
    ) -> Tensor:
        """The decoder's outputs for all tokens of known targets (teacher forcing).

        Args:
            x: (Nt, H), the embeddings of the targets' tokens in the order of `steps`.
            states: the initial state of each layer, (S, H) per part, in the order of the sequences.
            source: (Ns, H), the encoder's outputs.

        Returns:
            (Nt, H), packed as the targets are.
        """
        states = [tuple(part.index_select(0, steps.sorted_indices) for part in state) for state in states]
        if self.additive or self.input_feeding:
            return self._step_by_step(x, steps, states, source, sources).index_select(0, steps.inverse_order)
        for cell, state in zip(self._cells, states, strict=True):
            x, _ = _run_directions([cell], self.dropout(x), steps, [state])
        x = x.index_select(0, steps.inverse_order)
        if self.attention is not None:
            x = self._attentional(x, self.attention.cross_attend(x, source, targets, sources))
        return self.dropout(x)

    @property
    def _cells(self) -> list[RecurrentCell]:
        return [cell for cell in self.cells if isinstance(cell, RecurrentCell)]

    def _step_by_step(
        self, x: Tensor, steps: TimeSteps, states: list[State], source: Tensor, sources: Sequences
    ) -> Tensor:
        """The outputs (Nt, H) in the order of `steps`, for decoders whose attention is part of the recurrence."""
        padded = self.project_source(source, sources).select(steps.sorted_indices)
        x = self.dropout(x)
        state = RecurrentState(states, self._initial_input_feed(x, len(steps.unsorted_indices)))
        outs, contexts = [], []
        weight = self._input_feed_weight
        for gates in self._cells[0].input_gates(x).split(list(steps.batch_sizes)):
            if len(gates) < len(state.states[0][0]):  # the shortest sequences have ended
                state, padded = _first_rows(state, padded, len(gates))
            out, context, state = self._step(gates, weight, state, padded)
            outs.append(out)
            contexts.append(context)
        if self.additive:
            return self.dropout(self._maxout(torch.cat(outs), x, torch.cat(contexts)))
        return torch.cat(outs)

    @property
    def _input_feed_weight(self) -> Tensor:
        """(G * W, H): the first layer's input weights beside those of the token: of the input feed, or with additive
        attention of the context; without either, it has no columns."""
        first = self._cells[0]
        return first.input_weight[:, first.width :]

    def _initial_input_feed(self, x: Tensor, sequences: int) -> Tensor | None:
        return x.new_zeros(sequences, x.shape[1]) if self.input_feeding else None

    def project_source(self, source: Tensor, sources: Sequences) -> PaddedSource:
        """The keys and values of attention, for `step`, from the encoder's outputs (Ns, H)."""
        if self.attention is None:
            return PaddedSource((), None)
        return pad_source((self.attention.keys(source), source), sources)

    def init_state(self, states: list[State]) -> RecurrentState:
        """The state before the first step, from the initial state of each layer."""
        return RecurrentState(states, self._initial_input_feed(states[0][0], len(states[0][0])))

    def step(self, x: Tensor, state: RecurrentState, source: PaddedSource) -> tuple[Tensor, RecurrentState]:
        """Decode one token of each hypothesis: x and the output are (S * beams, H); also returns the next state."""
        x = self.dropout(x)
        out, context, state = self._step(self._cells[0].input_gates(x), self._input_feed_weight, state, source)
        return (self.dropout(self._maxout(out, x, context)) if self.additive else out), state

    def _step(
        self, gates: Tensor, weight: Tensor, state: RecurrentState, source: PaddedSource
    ) -> tuple[Tensor, Tensor, RecurrentState]:
        """One step; `_maxout` computes the outputs of additive attention from those of all steps at once.

        Returns:
            (n, H), the output, or with additive attention the last layer's state before the step; the context (n, H);
            the next state.
        """
        query = state.states[-1][0]
        context = self._context(query, source) if self.additive else query
        input_feed = context if self.additive else state.input_feed
        if input_feed is not None:
            gates = torch.addmm(gates, input_feed, weight.T)
        states: list[State] = []
        for cell, layer_state in zip(self._cells, state.states, strict=True):
            if states:
                gates = cell.input_gates(self.dropout(states[-1][0]))
            states.append(cell.step(gates, layer_state))
        x = states[-1][0]
        if self.additive:
            return query, context, RecurrentState(states, None)
        if self.attention is not None:
            context = self._context(x, source)
            x = self._attentional(x, context)
        out = self.dropout(x)
        return out, context, RecurrentState(states, out if self.input_feeding else None)

    def _context(self, query: Tensor, source: PaddedSource) -> Tensor:
        """The contexts (n, H) of n = S * beams queries (n, H), those of a source next to each other."""
        assert self.attention is not None
        key, value = source.parts
        rows = query.view(len(key), -1, query.shape[1])
        context: Tensor = self.attention(rows, key, value, source.mask)
        return context.reshape(query.shape)

    def _attentional(self, h: Tensor, context: Tensor) -> Tensor:
        """tanh(W [c; h]) (Luong et al. 2015, equation 5)."""
        assert self.readout is not None
        return self.readout(torch.cat([context, h], 1)).tanh()

    def _maxout(self, before: Tensor, x: Tensor, context: Tensor) -> Tensor:
        """The output from the state before the step, the last token's embedding and the context (Bahdanau et al. 2015,
        A.2.2)."""
        assert self.readout is not None
        return self.readout(torch.cat([before, x, context], 1)).unflatten(1, (-1, 2)).amax(2)


def _first_rows(state: RecurrentState, source: PaddedSource, count: int) -> tuple[RecurrentState, PaddedSource]:
    """The states and sources of the first `count` sequences."""
    states = [tuple(part[:count] for part in layer) for layer in state.states]
    parts = tuple(part[:count] for part in source.parts)
    shorter = replace(source, parts=parts, mask=None if source.mask is None else source.mask[:count])
    return RecurrentState(states, None if state.input_feed is None else state.input_feed[:count]), shorter
