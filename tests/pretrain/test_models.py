"""The model families."""

import pytest
import torch

from pretrain.config import ModelConfig
from pretrain.models import build_model, initialise

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "max_positions": 40, "dropout": 0.0}


def model_of(family: str, seed: int = 1) -> torch.nn.Module:
    model = build_model(ModelConfig.model_validate({"family": family, **SIZES}), 100)
    initialise(model, seed)
    return model.eval()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_initial_weights_depend_on_seed_and_name_alone(family: str) -> None:
    one, same, other = model_of(family), model_of(family), model_of(family, seed=2)
    deeper = build_model(ModelConfig.model_validate({"family": family, **SIZES, "layers": 3}), 100)
    initialise(deeper, 1)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        if parameter.ndim > 1:
            assert not torch.equal(parameter, other.get_parameter(name))
            if family == "bert":  # GPT-2's projections into the residual stream depend on the depth
                assert torch.equal(parameter, deeper.get_parameter(name))
    assert abs(one.get_parameter("word.weight").std().item() - 0.02) < 0.003


def test_padding_changes_nothing() -> None:
    model, ids = model_of("bert"), torch.randint(5, 100, (1, 12))
    alone = model.encode(ids, None, torch.tensor([12]))
    padded = torch.nn.functional.pad(ids, (0, 20))
    beside = model.encode(padded.repeat(2, 1), None, torch.tensor([12, 32]))
    torch.testing.assert_close(beside[0, :12], alone[0], rtol=1e-4, atol=1e-5)


def test_gpt2_does_not_see_the_future() -> None:
    model, ids = model_of("gpt2"), torch.randint(0, 100, (1, 20))
    changed = ids.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 100
    one, other = (model.encode(x, None, torch.tensor([20])) for x in (ids, changed))
    torch.testing.assert_close(one[0, :10], other[0, :10])
    assert not torch.allclose(one[0, 10:], other[0, 10:])


def test_bert_sees_both_ways_and_its_loss_is_that_of_all_logits() -> None:
    model = model_of("bert")
    ids, lengths = torch.randint(5, 100, (3, 16)), torch.tensor([16, 16, 10])
    segments = torch.zeros_like(ids)
    at, targets = torch.tensor([2, 18, 40]), torch.tensor([7, 8, 9])
    sums = model(ids, segments, lengths, at, targets, torch.tensor([0, 1, 1]))
    hidden = model.encode(ids, segments, lengths)
    states = model.transform_norm(torch.nn.functional.gelu(model.transform(hidden)))
    logits = (states @ model.word.weight.T + model.word_bias).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits[at], targets, reduction="sum")
    torch.testing.assert_close(sums["token"], expected)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"preset": "bert-huge"}, "not known; there are: bert-tiny"),
        ({"preset": "bert-tiny", "heads": 3}, "not a multiple of heads=3"),
        ({"preset": "bert-tiny", "hidden": "wide"}, "valid integer"),
    ],
)
def test_impossible_models_are_refused(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ModelConfig.model_validate(given)
