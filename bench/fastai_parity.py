"""Holds our AWD-LSTM against fastai's: states, loss and gradients with the same weights and the same dropout masks.

fastai is not among our packages, because it needs torchvision, spaCy and others for what is not used here. Its part
that is used works without them, and must be on PYTHONPATH:

    pip install --no-deps --target DIR fastai fastcore 'fastprogress<1.1' fasttransform 'plum-dispatch<2.10' \
        fastdownload beartype
    PYTHONPATH=DIR python bench/fastai_parity.py
"""

from typing import Any
from unittest import mock

import torch
import typer
from fastai.text.models import awdlstm
from fastai.text.models.core import LinearDecoder
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.models.awd_lstm.layers import scaled_mask
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.packed_tokens import cumulative_lengths, pack

VOCABULARY, SEQUENCES, TOKENS, SEED = 211, 5, 17, 3
SIZES = {"layers": 3, "hidden": 36, "embedding": 20, "max_positions": 64}
ALPHA, BETA, BOUND = 2.0, 1.0, 1e-6
RATES = {"dropout": 0.1, "input_dropout": 0.25, "hidden_dropout": 0.15, "embedding_dropout": 0.1, "weight_dropout": 0.2}


def ours_of(rates: dict[str, float]) -> Any:
    """Our model, in float64."""
    keys = {"family": "awd-lstm", **SIZES, **rates, "alpha": ALPHA, "beta": BETA}
    model = build_model(parse_model_config(keys), VOCABULARY)
    init_weights(model, 1)
    return model.double()


def theirs_of(ours: Any, rates: dict[str, float]) -> Any:
    """fastai's model with our weights, and its output layer."""
    widths = {"emb_sz": SIZES["embedding"], "n_hid": SIZES["hidden"], "n_layers": SIZES["layers"]}
    names = {"hidden_p": "hidden", "input_p": "input", "embed_p": "embedding", "weight_p": "weight"}
    dropout = {name: rates.get(f"{key}_dropout", 0.0) for name, key in names.items()}
    encoder = awdlstm.AWD_LSTM(VOCABULARY, **widths, **dropout).double()
    head = LinearDecoder(
        VOCABULARY, SIZES["embedding"], rates.get("dropout", 0.0), tie_encoder=encoder.encoder
    ).double()
    with torch.no_grad():
        encoder.encoder.weight.copy_(ours.word.weight)
        head.decoder.bias.copy_(ours.word_bias)
        for layer, copy in zip(ours.layers, encoder.rnns, strict=True):
            copy.weight_hh_l0_raw.copy_(layer.state_weight)
            copy.module.weight_ih_l0.copy_(layer.input_weight)
            copy.module.bias_ih_l0.copy_(layer.input_bias)
            copy.module.bias_hh_l0.copy_(layer.state_bias)
    encoder.reset()
    return torch.nn.Sequential(encoder, head)


def our_mask(x: Tensor, size: Any, rate: float) -> Tensor:
    """In place of fastai's `dropout_mask`: a mask as ours are drawn, from the same random state."""
    return scaled_mask(tuple(size), rate, x)


def our_dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """In place of torch's function, which fastai calls for the recurrent weights."""
    return x * scaled_mask(x.shape, p, x) if training and p else x


def compare(rates: dict[str, float]) -> dict[str, float]:
    """The largest relative differences, of each tensor to the largest of its values."""
    ours = ours_of(rates).train(bool(rates))
    theirs = theirs_of(ours, rates).train(bool(rates))
    generator = torch.Generator().manual_seed(SEED)
    ids, labels = torch.randint(2, VOCABULARY, (2, SEQUENCES, TOKENS), generator=generator)  # 1 is fastai's padding
    packed = packed_to_device(pack(ids.flatten().numpy(), cumulative_lengths([TOKENS] * SEQUENCES)), ids.device)

    torch.manual_seed(SEED)
    states = ours.encode(packed)
    torch.manual_seed(SEED)
    loss = ours(packed, labels.flatten())["clm"] / labels.numel()

    torch.manual_seed(SEED)
    with mock.patch.object(awdlstm, "dropout_mask", our_mask), mock.patch.object(awdlstm.F, "dropout", our_dropout):
        raw = theirs[0](ids)
        logits, _, dropped = theirs[1](raw)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    if rates:  # fastai's callback RNNRegularizer; the last term is a mean over T - 1 differences, ours over T tokens
        expected = expected + ALPHA * dropped.pow(2).mean()
        expected = expected + BETA * (raw[:, 1:] - raw[:, :-1]).pow(2).mean() * (TOKENS - 1) / TOKENS
    loss.backward()
    expected.backward()

    encoder, head = theirs
    pairs = {"states": (states.view(SEQUENCES, TOKENS, -1), raw), "loss": (loss.double(), expected)}
    pairs["gradient of the embeddings"] = (dense(ours.word.weight.grad), encoder.encoder.weight.grad)
    pairs["gradient of the output's bias"] = (ours.word_bias.grad, head.decoder.bias.grad)
    for number, (layer, copy) in enumerate(zip(ours.layers, encoder.rnns, strict=True)):
        pairs[f"gradient of layer {number}'s recurrent weights"] = (layer.state_weight.grad, copy.weight_hh_l0_raw.grad)
        pairs[f"gradient of layer {number}'s input weights"] = (layer.input_weight.grad, copy.module.weight_ih_l0.grad)
        pairs[f"gradient of layer {number}'s biases"] = (layer.state_bias.grad, copy.module.bias_hh_l0.grad)
    with torch.no_grad():
        return {name: float((one - other).abs().max() / other.abs().max()) for name, (one, other) in pairs.items()}


def dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def main() -> None:
    """Print the differences without dropout and with it; exit with 1 if not all are within 1e-6."""
    is_within = True
    for title, rates in (("without dropout", {}), ("with the same masks", RATES)):
        differences = compare(rates)
        print(title)
        for name, difference in differences.items():
            print(f"  {name}: {difference:.1e}")
        is_within &= all(difference <= BOUND for difference in differences.values())  # false of NaN
    raise typer.Exit(0 if is_within else 1)


if __name__ == "__main__":
    typer.run(main)
