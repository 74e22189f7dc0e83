"""The recurrent family against torch's own cells, and against the papers' equations, written out."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pairs_of, translator
from torch import Tensor, nn

from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.seq2seq.attention import Attention
from multihop.pretrain.models.seq2seq.layers import Decoder, RecurrentCell
from multihop.pretrain.models.seq2seq.recurrence import STATES, Weights, run_recurrence, run_recurrence_cudnn
from multihop.pretrain.models.seq2seq.time_steps import TimeSteps, time_steps_of

Lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6)
CELLS: Any = ("lstm", "gru")


def sequences_of(lengths: list[int]) -> Sequences:
    return Sequences(torch.tensor([0, *lengths]).cumsum(0), max(lengths), sum(lengths))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def layer_of(cell: str, inputs: int, width: int) -> Any:
    torch.manual_seed(2)
    return (nn.LSTM if cell == "lstm" else nn.GRU)(inputs, width, bidirectional=True).double()


def weights_of(layer: Any) -> list[Weights]:
    """Return the weights of both directions."""
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    found: Any = [tuple(getattr(layer, f"{kind}_l0{end}") for kind in kinds) for end in ("", "_reverse")]
    return found


@settings(max_examples=30)
@given(lengths=Lengths)
def test_steps_hold_each_token_once_the_longest_sequences_first(lengths: list[int]) -> None:
    steps, ends = time_steps_of(sequences_of(lengths)), [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert steps.batch_sizes == tuple(sum(length > step for length in lengths) for step in range(max(lengths)))
    place = 0
    for step, size in enumerate(steps.batch_sizes):
        for row in range(size):
            sequence = int(steps.sorted_indices[row])
            assert steps.order[place] == ends[sequence] + step
            assert steps.unsorted_indices[sequence] == row
            assert steps.inverse_order[steps.order[place]] == place
            place += 1


@pytest.mark.parametrize("cell", CELLS)
@settings(max_examples=10)
@given(lengths=Lengths)
def test_states_and_gradients_are_those_of_torch(cell: Any, lengths: list[int]) -> None:
    layer, steps, width = layer_of(cell, 5, 3), time_steps_of(sequences_of(lengths)), 3
    x, initial = random(sum(lengths), 5), [random(2, len(lengths), width, seed=n) for n in range(STATES[cell])]
    packed = nn.utils.rnn.PackedSequence(x, torch.tensor(steps.batch_sizes))
    expected, last = layer(packed, tuple(initial) if cell == "lstm" else initial[0])
    wanted = [expected.data, *(last if cell == "lstm" else [last])]
    states = [tuple(part[side] for part in initial) for side in (0, 1)]
    done = [
        run_recurrence(cell, x, steps, state, weights, reverse=bool(side))
        for side, (state, weights) in enumerate(zip(states, weights_of(layer), strict=True))
    ]
    ours = [torch.cat([out for out, _ in done], 1), *map(torch.stack, zip(*[state for _, state in done], strict=True))]
    out, state = run_recurrence_cudnn(cell, x, steps, states, weights_of(layer))
    fused = [out, *map(torch.stack, zip(*state, strict=True))]
    given_to_all = [x, *initial, *layer.parameters()]
    upstream = [random(*part.shape, seed=9).detach() for part in wanted]
    grads = [torch.autograd.grad(each, given_to_all, upstream, retain_graph=True) for each in (wanted, ours, fused)]
    for found, gradient in ((ours, grads[1]), (fused, grads[2])):
        for one, other in zip((*found, *gradient), (*wanted, *grads[0]), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradient_of_a_recurrence(cell: Any, reverse: bool) -> None:
    steps: TimeSteps = time_steps_of(sequences_of([2, 1, 3]))
    (weights, _), states = weights_of(layer_of(cell, 2, 2)), [random(3, 2, seed=n) for n in range(STATES[cell])]

    def outputs(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        out, last = run_recurrence(cell, x, steps, rest[: len(states)], rest[len(states) :], reverse)  # type: ignore[arg-type]
        return (out, *last)

    assert torch.autograd.gradcheck(outputs, (random(6, 2), *states, *weights))


@pytest.mark.parametrize("cell", CELLS)
def test_a_step_is_that_of_torchs_cell(cell: Any) -> None:
    direction = RecurrentCell(cell, 5, 3).double()
    theirs: Any = (nn.LSTMCell if cell == "lstm" else nn.GRUCell)(5, 3).double()
    with torch.no_grad():
        for ours, parameter in zip(direction.weights, theirs.parameters(), strict=True):
            ours.copy_(parameter)
    x, state = random(4, 5), tuple(random(4, 3, seed=n) for n in range(STATES[cell]))
    expected = theirs(x, state if cell == "lstm" else state[0])
    for known in (3, 5):  # how much of the input comes with `given`
        rest = x[:, known:] @ direction.input_weight[:, known:].T
        found = direction.step(direction.input_gates(x[:, :known]) + rest, state)
        for one, other in zip(found, expected if cell == "lstm" else [expected], strict=True):
            torch.testing.assert_close(one, other)


def by_hand(attention: Attention, kind: str, query: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights (T,) and context (H,) of one query (H,) to one source (T, H), computed score by score."""
    scores = []
    for s in source:
        if kind == "dot":
            scores.append(query @ s)
        elif kind == "general":
            assert attention.key is not None
            scores.append(query @ attention.key.weight @ s)
        else:  # v . tanh(W [h; s]), W side by side
            assert attention.key is not None and attention.query is not None and attention.score is not None
            side_by_side = torch.cat([attention.query.weight, attention.key.weight], 1)
            scores.append(attention.score[0] @ (side_by_side @ torch.cat([query, s])).tanh())
    exponentials = torch.stack(scores).exp()
    weights = exponentials / exponentials.sum()
    return weights, sum((weight * s for weight, s in zip(weights, source, strict=True)), torch.zeros_like(query))


@pytest.mark.parametrize("kind", ["dot", "general", "concat", "additive"])
def test_attention_is_the_papers(kind: Any) -> None:
    torch.manual_seed(1)
    attention = Attention(kind, 4).double()
    if attention.score is not None:
        nn.init.normal_(attention.score)
    targets, sources = [3, 1, 2], [4, 7, 1]
    query, source = random(6, 4), random(12, 4, seed=1)
    found = attention.cross_attend(query, source, sequences_of(targets), sequences_of(sources))
    expected = []
    for part, there in zip(query.split(targets), source.split(sources), strict=True):
        expected += [by_hand(attention, kind, each, there)[1] for each in part]
        rows = attention.weights(part[None], attention.keys(there)[None], None)[0]
        torch.testing.assert_close(rows, torch.stack([by_hand(attention, kind, each, there)[0] for each in part]))
    torch.testing.assert_close(found, torch.stack(expected))
    ours, theirs = (
        torch.autograd.grad((each**3).sum(), [query, source, *attention.parameters()])
        for each in (found, torch.stack(expected))
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def decoder_by_hand(model: Any, x: Tensor, source: Tensor, states: list[tuple[Tensor, ...]]) -> Tensor:
    """Return the decoder's outputs (T, H) for one target with embeddings x (T, H).

    They are computed with nn.LSTMCell or GRUCell and the papers' equations.
    """
    decoder: Decoder = model.decoder[0]
    kind, hidden = model.config.attention, x.shape[1]
    cells: list[Any] = []
    for direction in decoder.cells:
        assert isinstance(direction, RecurrentCell)
        cell: Any = (nn.LSTMCell if model.config.cell == "lstm" else nn.GRUCell)(
            direction.input_weight.shape[1], hidden
        )
        for theirs, ours in zip(cell.parameters(), direction.weights, strict=True):
            theirs.data = ours.data
        cells.append(cell)
    before, fed, outputs = [tuple(part[None] for part in state) for state in states], torch.zeros_like(x[0]), []
    for embedding in x:
        top, given = before[-1][0][0], embedding
        context = torch.zeros_like(x[0])
        if kind == "additive":  # c_i of s_{i-1}, and an input of the cell
            assert decoder.attention is not None
            context = by_hand(decoder.attention, kind, top, source)[1]
            given = torch.cat([embedding, context])
        elif model.config.input_feeding:
            given = torch.cat([embedding, fed])
        for number, cell in enumerate(cells):
            new = cell(given[None], before[number] if model.config.cell == "lstm" else before[number][0])
            before[number] = new if model.config.cell == "lstm" else (new,)
            given = before[number][0][0]
        if kind == "none":
            outputs.append(given)
            continue
        assert decoder.attention is not None and decoder.readout is not None
        if kind == "additive":  # t_i = max of two of U s_{i-1} + V E y_{i-1} + C c_i
            candidates = decoder.readout.weight @ torch.cat([top, embedding, context])
            outputs.append(torch.stack([torch.maximum(a, b) for a, b in candidates.view(-1, 2)]))
        else:
            context = by_hand(decoder.attention, kind, given, source)[1]
            fed = (decoder.readout.weight @ torch.cat([context, given])).tanh()
            outputs.append(fed)
    return torch.stack(outputs)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("attention", "input_feeding"),
    [("none", False), ("additive", False), ("dot", False), ("general", False), ("concat", False), ("concat", True)],
)
def test_the_decoder_is_the_papers(cell: str, attention: str, input_feeding: bool) -> None:
    described = {"family": "seq2seq", "cell": cell, "attention": attention, "input_feeding": input_feeding}
    model: Any = translator(described)
    sources, targets = [5, 2], [3, 4]
    pairs = pairs_of(sources, targets)
    with torch.no_grad():
        found = model.decode_targets(pairs["source"], pairs["target"]).split(targets)
        states, last = model._encode_source(pairs["source"], sequences_of(sources))
        x = model.word(pairs["target"].input_ids).split(targets)
        for number, source in enumerate(states.split(sources)):
            mine = [tuple(part[number] for part in state) for state in last]
            # The last layer's last states are its outputs, forward at the end, in reverse at the start.
            torch.testing.assert_close(mine[-1][0], torch.cat([source[-1, :8], source[0, 8:]]))
            torch.testing.assert_close(found[number], decoder_by_hand(model, x[number], source, mine))


def test_the_encoder_is_torchs() -> None:
    """The reference is nn.LSTM with two layers."""
    model: Any = translator({"family": "seq2seq", "cell": "lstm"})
    theirs = nn.LSTM(16, 8, num_layers=2, bidirectional=True).double()
    with torch.no_grad():
        for number, layer in enumerate(model.encoder):
            for end, direction in (("", layer.forwards), ("_reverse", layer.backwards)):
                for kind, ours in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), direction.weights, strict=True):
                    getattr(theirs, f"{kind}_l{number}{end}").copy_(ours)
        lengths = [6, 1, 4]
        pairs = pairs_of(lengths, [1, 1, 1])
        texts = list(model.word(pairs["source"].input_ids).split(lengths))
        expected, (h, c) = theirs(nn.utils.rnn.pack_sequence(texts, enforce_sorted=False))
        rows, _ = nn.utils.rnn.pad_packed_sequence(expected, batch_first=True)
        states, last = model._encode_source(pairs["source"], sequences_of(lengths))
    for number, part in enumerate(states.split(lengths)):
        torch.testing.assert_close(part, rows[number, : len(part)])
    for number, (ours_h, ours_c) in enumerate(last):
        torch.testing.assert_close(ours_h, torch.cat([h[2 * number], h[2 * number + 1]], 1))
        torch.testing.assert_close(ours_c, torch.cat([c[2 * number], c[2 * number + 1]], 1))
