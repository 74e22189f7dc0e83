"""AWD-LSTM against a plain loop over its equations, with dropout and without, and its layers' groups and widths."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds_of_families import TEXT_FAMILIES, model_section
from packed_texts import packed
from torch import Tensor
from torch.nn import functional as F

from multihop.common.errors import UserError
from multihop.pretrain.models.awd_lstm.layers import segment_bounds
from multihop.pretrain.models.build import build_model, build_model_on_meta, init_weights
from multihop.pretrain.models.cpu.dropout import keep_mask, keep_probability
from multihop.pretrain.models.families import FAMILIES, parse_model_config

VOCABULARY = 60
RATES = {"dropout": 0.1, "input_dropout": 0.25, "hidden_dropout": 0.15, "embedding_dropout": 0.1, "weight_dropout": 0.2}
SIZES = {"layers": 3, "hidden": 14, "embedding": 6, "max_positions": 40}
Lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def model_of(**keys: Any) -> Any:
    model = build_model(parse_model_config({"family": "awd-lstm", **SIZES, **keys}), VOCABULARY)
    init_weights(model, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model.double()


def mask(rate: float, *shape: int) -> Tensor:
    return keep_mask(torch.Size(shape), rate).double() / keep_probability(rate)


class Reference:
    """The paper's equations, sequence by sequence and step by step, with the masks that the seed gives."""

    def __init__(
        self, model: Any, lengths: list[int], rates: dict[str, float] | None, bounds: tuple[int, ...] = ()
    ) -> None:
        """Draw the masks in the model's order; a mask has a row for each sequence, the longest first.

        Args:
            bounds: time steps at which gradients end.
        """
        self.bounds = bounds
        config = model.config
        by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        self.row = {sequence: row for row, sequence in enumerate(by_length)}
        self.model, self.lengths, self.rates = model, lengths, rates
        ones = torch.ones((), dtype=torch.float64)
        self.of_words: Any = ones.expand(VOCABULARY, 1)
        self.between: list[Any] = [ones.expand(len(lengths), 1)] * config.layers
        self.of_weights: list[Any] = [ones] * config.layers
        self.at_output: Any = ones.expand(len(lengths), 1)
        if rates is None:
            return
        self.of_words = mask(rates["embedding_dropout"], VOCABULARY, 1)
        inputs = mask(rates["input_dropout"], len(lengths), config.embedding)
        self.between, self.of_weights = [inputs], []
        for number, layer in enumerate(model.layers):
            if number:
                self.between.append(mask(rates["hidden_dropout"], len(lengths), config.hidden))
            self.of_weights.append(mask(rates["weight_dropout"], *layer.state_weight.shape))
        self.at_output = mask(rates["dropout"], len(lengths), config.embedding)

    def states(self, ids: Tensor) -> list[Tensor]:
        """The last layer's states (T, E) of each sequence."""
        return [self._states(text, self.row[number]) for number, text in enumerate(ids.split(self.lengths))]

    def _states(self, text: Tensor, row: int) -> Tensor:
        inputs = list((self.model.word.weight * self.of_words)[text] * self.between[0][row])
        for number, layer in enumerate(self.model.layers):
            h, c = (torch.zeros(layer.width, dtype=torch.float64) for _ in range(2))
            outputs = []
            for time, x in enumerate(inputs):
                if time in self.bounds:
                    h, c = h.detach(), c.detach()
                recurrent = layer.state_weight * self.of_weights[number]
                gates = layer.input_weight @ x + layer.input_bias + recurrent @ h + layer.state_bias
                i, f, g, o = gates.chunk(4)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                outputs.append(h)
            following = self.between[number + 1][row] if number + 1 < len(self.between) else 1.0
            inputs = [output * following for output in outputs]
        return torch.stack(outputs)

    def loss(self, states: list[Tensor], labels: Tensor, alpha: float, beta: float) -> Tensor:
        """The cross-entropies, and in training both penalties."""
        total: Any = 0.0
        for number, (each, wanted) in enumerate(zip(states, labels.split(self.lengths), strict=True)):
            # The output's masks are in the order of the sequences.
            output = each * self.at_output[number]
            logits = output @ self.model.word.weight.T + self.model.word_bias
            total = total + F.cross_entropy(logits, wanted, reduction="sum")
            if self.rates is not None:
                total = total + alpha * (output**2).mean(1).sum() + beta * ((each[1:] - each[:-1]) ** 2).mean(1).sum()
        return total


@pytest.mark.parametrize("rates", [None, RATES], ids=["evaluation", "training"])
@settings(max_examples=10)
@given(lengths=Lengths)
def test_states_loss_and_gradients_are_those_of_the_equations(
    rates: dict[str, float] | None, lengths: list[int]
) -> None:
    model = model_of(**(rates or {}), alpha=2.0, beta=1.0).train(rates is not None)
    generator = torch.Generator().manual_seed(sum(lengths))
    ids, labels = torch.randint(0, VOCABULARY, (2, sum(lengths)), generator=generator)
    torch.manual_seed(5)
    states = model.encode(packed(ids, lengths))
    torch.manual_seed(5)
    reference = Reference(model, lengths, rates)
    expected = reference.states(ids)
    torch.testing.assert_close(states, torch.cat(expected), rtol=1e-10, atol=1e-12)
    torch.manual_seed(5)
    found = model(packed(ids, lengths), labels)["clm"]
    wanted = reference.loss(expected, labels, 2.0, 1.0)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(wanted, parameters)
    for one, other in zip(torch.autograd.grad(found, parameters), gradients, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), bptt=st.integers(5, 12))
def test_gradients_end_at_the_bounds_of_segments_and_states_go_on(lengths: list[int], bptt: int) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids, labels = torch.randint(0, VOCABULARY, (2, sum(lengths)), generator=generator)
    without = dict.fromkeys(RATES, 0.0)
    model, whole = (model_of(**without, alpha=0.0, beta=0.0, bptt=each) for each in (bptt, None))
    torch.manual_seed(5)
    bounds = tuple(segment_bounds(max(lengths), bptt).tolist())
    reference = Reference(model, lengths, None, bounds)
    wanted = reference.loss(reference.states(ids), labels, 0.0, 0.0)
    torch.manual_seed(5)
    found = model.train()(packed(ids, lengths), labels)["clm"]
    torch.testing.assert_close(found, whole.train()(packed(ids, lengths), labels)["clm"])
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(wanted, parameters)
    for one, other in zip(torch.autograd.grad(found, parameters), gradients, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()
    torch.testing.assert_close(model.eval()(packed(ids, lengths), labels)["clm"], found)


def test_the_lengths_of_segments_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    drawn = [segment_bounds(5000, 70) for _ in range(40)]
    lengths = torch.cat([bounds.diff(prepend=torch.tensor([0])) for bounds in drawn]).double()
    about_half = (lengths < 52).double().mean()
    assert 0.03 < about_half < 0.07 and abs(lengths.mean() - (0.95 * 70 + 0.05 * 35)) < 1
    assert abs(lengths[lengths > 52].std() - 5) < 0.5
    assert lengths.min() >= 5 and segment_bounds(5, 70).tolist() == []
    torch.manual_seed(0)
    assert torch.equal(segment_bounds(5000, 70), drawn[0]) and not torch.equal(drawn[0], drawn[1])


def test_a_mask_is_one_for_all_tokens_of_a_sequence_and_another_for_the_next() -> None:
    model = model_of(layers=1, embedding=64, input_dropout=0.5, embedding_dropout=0.0, weight_dropout=0.0).train()
    inputs: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    torch.manual_seed(0)
    model.encode(packed(torch.arange(12) + 1, [6, 6]))
    dropped = (inputs[0] == 0).view(6, 2, 64)  # in the order of time
    assert (dropped == dropped[:1]).all()
    assert not torch.equal(dropped[0, 0], dropped[0, 1])
    assert 0.25 < dropped[0].double().mean() < 0.75


def test_states_between_the_layers_have_the_declared_widths_in_the_order_of_the_tokens() -> None:
    model = model_of().eval()
    ids, lengths = torch.arange(9) * 3, [2, 4, 3]
    states = model.hidden_states(packed(ids, lengths))
    assert [tuple(each.shape) for each in states] == [(9, width) for width in model.config.state_widths]
    assert model.config.state_widths == [6, 14, 14, 6]
    assert torch.equal(states[0], model.word(ids))
    alone = model.hidden_states(packed(ids[2:6], [4]))
    for one, other in zip(states, alone, strict=True):
        torch.testing.assert_close(one[2:6], other)


@given(lengths=Lengths, data=st.data())
@settings(max_examples=25)
def test_a_backward_model_reads_and_predicts_as_a_forward_one_does_with_reversed_sequences(
    lengths: list[int], data: st.DataObject
) -> None:
    forward, backward = model_of(**RATES).eval(), model_of(family="awd-lstm-backward", **RATES).eval()
    assert forward.state_dict().keys() == backward.state_dict().keys()
    backward.load_state_dict(forward.state_dict())
    tokens = st.integers(0, VOCABULARY - 1)
    texts = [torch.tensor(data.draw(st.lists(tokens, min_size=n + 1, max_size=n + 1))) for n in lengths]
    ids, labels = torch.cat([text[:-1] for text in texts]), torch.cat([text[1:] for text in texts])
    ids_of_reversed, labels_of_reversed = (
        torch.cat([text.flip(0)[part] for text in texts]) for part in (slice(None, -1), slice(1, None))
    )
    end_of_each = torch.cat(
        [torch.arange(n).flip(0) + start for n, start in zip(lengths, starts(lengths), strict=True)]
    )
    expected = forward(packed(ids_of_reversed, lengths), labels_of_reversed)["clm"]
    torch.testing.assert_close(backward(packed(ids, lengths), labels)["clm"], expected)

    states = backward.hidden_states(packed(ids, lengths))
    reversed_ids = ids[end_of_each]
    for one, other in zip(states, forward.hidden_states(packed(reversed_ids, lengths)), strict=True):
        torch.testing.assert_close(one, other[end_of_each])
    at = torch.tensor([0])
    torch.testing.assert_close(backward.encode(packed(ids, lengths), token_indices=at), states[-1][:1])


def starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:number]) for number in range(len(lengths))]


def test_the_rates_of_fine_tuning_are_to_one_another_as_those_of_the_papers_classifier() -> None:
    config = parse_model_config({"family": "awd-lstm", **SIZES})
    rates = config.with_dropout(0.4).model_dump(include={*RATES})
    published = {"dropout": 0.4, "hidden_dropout": 0.3, "input_dropout": 0.4, "embedding_dropout": 0.05}
    assert rates == {**published, "weight_dropout": 0.5}
    assert set(config.with_dropout(0.0).model_dump(include={*RATES}).values()) == {0.0}
    with pytest.raises(UserError, match=r"dropout=0\.9: weight_dropout, .* would be 1\.125, .* less than 0\.8"):
        config.with_dropout(0.9)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_with_groups_of_layers_from_input_to_output(family: str) -> None:
    sizes = {"layers": 3, "hidden": 8, "heads": 2, "embedding": 4, "max_positions": 16}
    if FAMILIES[family].config.model_fields["layers"].annotation is not int:
        sizes["layers"] = 0  # a bag has none
    config = parse_model_config(model_section(family, **sizes, encoder="transformer"))
    model = build_model_on_meta(config, 20)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group] for group in model.layer_groups()]
    assert sorted(name for group in groups for name in group) == sorted(names.values())
    assert len(groups) == len(model.layers) + 2
    assert "word.weight" in groups[0] and not any("layers." in name for name in groups[0] + groups[-1])
    embeddings = {"embedding_norm.weight", "position.weight", "segment.weight", "widen.weight", "mask_embedding"}
    assert embeddings & set(names.values()) <= set(groups[0])
    assert {"word_bias", "pooler.weight", "final_norm.weight"} & set(names.values()) <= set(groups[-1])
    if family in TEXT_FAMILIES:
        assert len(groups) == config.num_layer_groups
        assert all(name.startswith(f"layers.{i}.") for i, group in enumerate(groups[1:-1]) for name in group)


def test_operations_are_two_for_each_weight_that_a_token_meets_and_three_times_that_in_training() -> None:
    model = model_of()
    matrices = sum(parameter.numel() for parameter in model.layers.parameters() if parameter.ndim == 2)
    counted = model.config.train_flops(VOCABULARY, np.array([5, 4]), 7)
    assert counted == 3 * 2 * (9 * matrices + 7 * model.word.weight.numel())
