"""Encoder layer and decoder of the recurrent family."""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn, zeros
from torch.nn import functional as F

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
    recur,
    recur_fused,
)
from multihop.pretrain.models.seq2seq.steps import Steps


class Direction(nn.Module):
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
        """What inputs (n, I') that are the first I' of the I add to the gates, biases included: (n, G * W)."""
        bias = self.input_bias + self.state_bias if self.cell == "lstm" else self.input_bias
        return F.linear(x, self.input_weight[:, : x.shape[1]], bias)

    def step(self, gates: Tensor, state: State) -> State:
        """One step from `gates`, to which all inputs have added."""
        if self.cell == "lstm":
            return lstm_step(torch.addmm(gates, state[0], self.state_weight.T), state[1])
        return gru_step(gates, F.linear(state[0], self.state_weight, self.state_bias), state[0])


def _recur(directions: list[Direction], x: Tensor, steps: Steps, states: list[State]) -> tuple[Tensor, list[State]]:
    """x (N, I) through one or both directions of a layer: (N, all widths), and the last state of each."""
    cell = directions[0].cell
    weights = [each.weights for each in directions]
    if x.device.type == "cuda":
        return recur_fused(cell, x, steps, states, weights)
    done = [
        recur(cell, x, steps, state, each, backwards=bool(number))
        for number, (state, each) in enumerate(zip(states, weights, strict=True))
    ]
    return torch.cat([out for out, _ in done], 1), [last for _, last in done]


class EncoderLayer(nn.Module):
    """A bidirectional layer: each direction is half as wide as the model."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        cell = config.cell
        self.forwards = Direction(cell, config.hidden, config.hidden // 2)
        self.backwards = Direction(cell, config.hidden, config.hidden // 2)

    @torch.compiler.disable
    def forward(self, x: Tensor, steps: Steps) -> tuple[Tensor, State]:
        """x: (Ns, H), in the order of `steps`; the result: (Ns, H), and the last state of both directions (S, H)."""
        cell, width = self.forwards.cell, self.forwards.width
        initial = (x.new_zeros(len(steps.rows), width),) * STATES[cell]
        out, last = _recur([self.forwards, self.backwards], x, steps, [initial, initial])
        return out, tuple(torch.cat(parts, 1) for parts in zip(*last, strict=True))


@dataclass(frozen=True)
class Memory:
    """The decoder's state before a step, for n hypotheses."""

    states: list[State]
    """The state of each layer, (n, H) per part."""
    fed: Tensor | None
    """(n, H): with input feeding, the attentional state of the step before."""


class Decoder(nn.Module):
    """Recurrent layers, attention and what the output projection is applied to."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        cell, hidden = config.cell, config.hidden
        self.additive, self.feeds = config.attention == "additive", bool(config.input_feeding)
        first = 2 * hidden if self.additive or self.feeds else hidden
        self.cells = nn.ModuleList(Direction(cell, hidden if n else first, hidden) for n in range(config.layers))
        attends = config.attention != "none"
        self.attention = Attention(cast(Score, config.attention), hidden) if attends else None
        # Bahdanau et al. 2015, A.2.2: two candidates for each output; Luong et al. 2015, equation 5.
        shape = (3 * hidden, 2 * hidden) if self.additive else (2 * hidden, hidden)
        self.readout = nn.Linear(*shape, bias=False) if attends else None
        self.dropout = Dropout(config.dropout)

    @torch.compiler.disable
    def forward(
        self,
        x: Tensor,
        steps: Steps,
        states: list[State],
        source: Tensor,
        targets: Sequences,
        sources: Sequences,
    ) -> Tensor:
        """All tokens of some targets.

        Args:
            x: (Nt, H), their embeddings in the order of `steps`.
            states: of each layer, (S, H) each, in the order of the sequences.
            source: (Ns, H), the encoder's states.

        Returns:
            (Nt, H), packed as the targets are.
        """
        states = [tuple(part.index_select(0, steps.longest_first) for part in state) for state in states]
        if self.additive or self.feeds:
            return self._step_by_step(x, steps, states, source, sources).index_select(0, steps.back)
        for cell, state in zip(self._cells, states, strict=True):
            x, _ = _recur([cell], self.dropout(x), steps, [state])
        x = x.index_select(0, steps.back)
        if self.attention is not None:
            x = self._attentional(x, self.attention.across(x, source, targets, sources))
        return self.dropout(x)

    @property
    def _cells(self) -> list[Direction]:
        return [cell for cell in self.cells if isinstance(cell, Direction)]

    def _step_by_step(self, x: Tensor, steps: Steps, states: list[State], source: Tensor, sources: Sequences) -> Tensor:
        """(Nt, H) in the order of `steps`. A sequence that ends leaves the rows."""
        padded = self.keep(source, sources).select(steps.longest_first)
        x = self.dropout(x)
        memory = Memory(states, self._nothing_fed(x, len(steps.rows)))
        outs, contexts = [], []
        weight = self._fed_weight
        for gates in self._cells[0].input_gates(x).split(list(steps.sizes)):
            if len(gates) < len(memory.states[0][0]):
                memory, padded = _first(memory, padded, len(gates))
            out, context, memory = self._step(gates, weight, memory, padded)
            outs.append(out)
            contexts.append(context)
        if self.additive:
            return self.dropout(self._maxout(torch.cat(outs), x, torch.cat(contexts)))
        return torch.cat(outs)

    @property
    def _fed_weight(self) -> Tensor:
        """(G * W, H): the input weights of the context beside the token; no columns where there is none."""
        first = self._cells[0]
        return first.input_weight[:, first.width :]

    def _nothing_fed(self, x: Tensor, sequences: int) -> Tensor | None:
        return x.new_zeros(sequences, x.shape[1]) if self.feeds else None

    def keep(self, source: Tensor, sources: Sequences) -> PaddedSource:
        """What attention needs of the encoder's states (Ns, H), for `step`."""
        if self.attention is None:
            return PaddedSource((), None)
        return pad_source((self.attention.keys(source), source), sources)

    def begin(self, states: list[State]) -> Memory:
        """Before the first step."""
        return Memory(states, self._nothing_fed(states[0][0], len(states[0][0])))

    def step(self, x: Tensor, memory: Memory, source: PaddedSource) -> tuple[Tensor, Memory]:
        """One token of each hypothesis: x and the result (S * beams, H)."""
        x = self.dropout(x)
        out, context, memory = self._step(self._cells[0].input_gates(x), self._fed_weight, memory, source)
        return (self.dropout(self._maxout(out, x, context)) if self.additive else out), memory

    def _step(
        self, gates: Tensor, weight: Tensor, memory: Memory, source: PaddedSource
    ) -> tuple[Tensor, Tensor, Memory]:
        """The output (n, H), or for additive attention the last layer's state before the step, with the context, from
        which it will follow; the context (n, H); and what is known after the step."""
        query = memory.states[-1][0]
        context = self._context(query, source) if self.additive else query
        fed = context if self.additive else memory.fed
        if fed is not None:
            gates = torch.addmm(gates, fed, weight.T)
        states: list[State] = []
        for cell, state in zip(self._cells, memory.states, strict=True):
            if states:
                gates = cell.input_gates(self.dropout(states[-1][0]))
            states.append(cell.step(gates, state))
        x = states[-1][0]
        if self.additive:
            return query, context, Memory(states, None)
        if self.attention is not None:
            context = self._context(x, source)
            x = self._attentional(x, context)
        out = self.dropout(x)
        return out, context, Memory(states, out if self.feeds else None)

    def _context(self, query: Tensor, source: PaddedSource) -> Tensor:
        """(n, H), of n = S * beams queries (n, H), those of a source side by side."""
        assert self.attention is not None
        key, value = source.parts
        rows = query.view(len(key), -1, query.shape[1])
        context: Tensor = self.attention(rows, key, value, source.real)
        return context.reshape(query.shape)

    def _attentional(self, h: Tensor, context: Tensor) -> Tensor:
        """tanh(W [c; h]) (Luong et al. 2015, equation 5)."""
        assert self.readout is not None
        return self.readout(torch.cat([context, h], 1)).tanh()

    def _maxout(self, before: Tensor, x: Tensor, context: Tensor) -> Tensor:
        """From the state before the step, the last token's embedding and the context (Bahdanau et al. 2015, A.2.2)."""
        assert self.readout is not None
        return self.readout(torch.cat([before, x, context], 1)).unflatten(1, (-1, 2)).amax(2)


def _first(memory: Memory, source: PaddedSource, count: int) -> tuple[Memory, PaddedSource]:
    """The rows of the first `count` sequences."""
    states = [tuple(part[:count] for part in state) for state in memory.states]
    parts = tuple(part[:count] for part in source.parts)
    kept = replace(source, parts=parts, real=None if source.real is None else source.real[:count])
    return Memory(states, None if memory.fed is None else memory.fed[:count]), kept
