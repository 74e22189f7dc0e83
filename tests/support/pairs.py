"""Made-up pairs as the inputs of a translating model."""

from typing import Any

import torch
from packed_texts import packed
from torch import Tensor

from multihop.pretrain.models.build import build_model
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.layers.encoder_decoder import EncoderDecoder

VOCABULARY = 60
SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "max_positions": 40, "dropout": 0.0}
VARIANTS: list[dict[str, Any]] = [
    {"family": "transformer", "heads": 2, "intermediate": 24},
    {"family": "transformer", "heads": 4, "norm": "pre", "positions": "learned"},
    *(
        {"family": "seq2seq", "cell": cell, "attention": attention, "input_feeding": feeding}
        for cell in ("lstm", "gru")
        for attention, feeding in (
            ("none", False),
            ("additive", False),
            ("dot", False),
            ("general", True),
            ("concat", False),
            ("concat", True),
        )
    ),
]
"""All variants of the translating families."""
NAMES = ["-".join(str(value) for value in each.values()) for each in VARIANTS]


def pairs_of(sources: list[int], targets: list[int], vocabulary: int = VOCABULARY, seed: int = 0) -> dict[str, Any]:
    """Return the keyword arguments of `forward`: random tokens in sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, vocabulary, (sum(each),), generator=generator) for each in (sources, targets, targets)]
    return {
        "source": packed(ids[0], sources),
        "target": packed(ids[1], targets),
        "labels": ids[2],
        "label_smoothing": 0.1,
    }


def padded(flat: Tensor, lengths: list[int], filling: int = 0) -> Tensor:
    """Return flat values, (N,), as padded sequences, (S, T)."""
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    out = flat.new_full(real.shape, filling)
    out[real] = flat
    return out


def translator(
    variant: dict[str, Any], seed: int = 4, two_vocabularies: bool = False, **changes: Any
) -> EncoderDecoder:
    """Return a model in float64 with weights under which tokens influence one another."""
    config = parse_model_config({**SIZES, **variant, **changes})
    model = build_model(config, VOCABULARY, VOCABULARY + 5 if two_vocabularies else None).double()
    assert isinstance(model, EncoderDecoder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4
            parameter.copy_(values + 1 if name.endswith("norm.weight") else values)
    return model.eval()
