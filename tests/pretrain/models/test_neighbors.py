"""Initial attention to neighbors (`model.attention_init: neighbors`)."""

from typing import Any

import pytest
import torch
from kinds_of_families import TEXT_FAMILIES, model_section
from packed_texts import packed
from pydantic import ValidationError
from torch import Tensor

from multihop.pretrain.engine.capture import capture_activations
from multihop.pretrain.models.build import build_model, make_param_init
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.layers.attention import Sequences

BIDIRECTIONAL = [name for name, family in TEXT_FAMILIES.items() if "attention_init" in family.config.model_fields]
CPU = torch.device("cpu")


def first_model(config: ModelConfig, seed: int = 1) -> Any:
    model = build_model(config, 500)
    fill = make_param_init(model, seed)
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    return model.eval()


def mean_attention(model: Any, length: int) -> Tensor:
    """Return (heads, length, length), the attention of the first layer, averaged over random texts."""
    seen: list[Tensor] = []

    def see(
        query: Tensor, key: Tensor, relative: Tensor | None, sequences: Sequences, causal: bool, window: int | None
    ) -> None:
        q, k = (part.view(-1, length, *part.shape[1:]).transpose(1, 2) for part in (query, key))
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        seen.append(scores.softmax(-1).mean(0))

    ids = torch.randint(0, 500, (16 * length,), generator=torch.Generator().manual_seed(0))
    targets = {"masked_positions": torch.arange(3), "labels": torch.arange(3)}
    with torch.no_grad(), capture_activations(model, lambda hidden: None, see):
        model(packed(ids, [length] * 16), **targets)
    return seen[0]


@pytest.mark.parametrize("family", BIDIRECTIONAL)
@pytest.mark.parametrize("sizes", [(128, 128, 2, 512), (256, 64, 4, 128), (768, 768, 12, 512)])
def test_heads_of_the_first_layer_attend_to_the_tokens_at_their_distance(
    family: str, sizes: tuple[int, int, int, int]
) -> None:
    hidden, embedding, heads, max_positions = sizes
    described = {
        "family": family,
        "layers": 2,
        "hidden": hidden,
        **({"embedding": embedding} if "embedding" in TEXT_FAMILIES[family].config.model_fields else {}),
        "heads": heads,
        "max_positions": max_positions,
        "dropout": 0.0,
    }
    length = 100
    plain = mean_attention(first_model(parse_model_config(described)), length)
    local = mean_attention(first_model(parse_model_config({**described, "attention_init": "neighbors"})), length)
    rows = torch.arange(20, 80)
    for head, distance in zip(range(heads), [-1, 1, -2, 2], strict=False):
        weights = torch.stack([local[head][rows, rows + d] for d in range(-20, 20)])
        assert weights.mean(1).argmax() - 20 == distance
        assert local[head][rows, rows + distance].mean() > 8 * plain[head][rows, rows + distance].mean()


@pytest.mark.parametrize("family", BIDIRECTIONAL)
def test_any_sizes_will_do_and_the_rest_of_the_weights_are_the_same(family: str) -> None:
    for hidden, heads in ((5, 5), (6, 2), (32, 1)):
        described = {"family": family, "layers": 2, "hidden": hidden, "heads": heads, "max_positions": 7}
        plain = first_model(parse_model_config(described))
        local = first_model(parse_model_config({**described, "attention_init": "neighbors"}))
        differing = {
            name for name, value in plain.named_parameters() if not torch.equal(value, local.get_parameter(name))
        }
        first = {"position.weight", "layers.0.attention.query.weight", "layers.0.attention.key.weight"}
        assert differing <= first | {"widen.weight"}
        assert all(value.isfinite().all() for value in local.parameters())


@pytest.mark.parametrize("family", [name for name in TEXT_FAMILIES if name not in BIDIRECTIONAL])
def test_another_model_is_refused(family: str) -> None:
    described = model_section(family, layers=1, hidden=8, heads=2, max_positions=8)
    with pytest.raises(ValidationError, match=f"attention_init=neighbors: family={family} has no attention_init"):
        parse_model_config({**described, "attention_init": "neighbors"})
