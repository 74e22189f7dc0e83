"""Models of ours and of transformers with the same weights, and the outputs of both for the same sequences."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import saved_tensors
import torch
from kinds_of_families import AT_HUGGING_FACE
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.models.huggingface_weights import names_of
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.packed_tokens import cumulative_lengths, pack

ENCODERS = [name for name, family in AT_HUGGING_FACE.items() if not family.causal]
VOCABULARY = 211
SPECIALS = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
DECODER_SPECIALS = {"end": 0, "unk": 1}
CLASSES = {name: names_of(name).architecture for name in AT_HUGGING_FACE}


def config_of(family: str, layers: int, hidden: int, heads: int, max_positions: int, **changes: Any) -> ModelConfig:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "max_positions": max_positions, "dropout": 0.0}
    own: dict[str, Any] = {"albert": {"embedding": max(8, hidden // 6)}}.get(family, {})
    if family.startswith("modernbert"):  # so that there are local layers, and windows that are shorter than the texts
        own = {"local_attention": 16, "global_attn_every_n_layers": 2, "global_rope_theta": 500.0}
    return parse_model_config({"family": family, **sizes, **own, **changes})


@torch.no_grad()
def roughen(model: torch.nn.Module, seed: int = 0) -> None:
    """Set weights with which biases and norms matter and logits differ, unlike with published initial weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        norm = "norm" in name.lower() or "ln_" in name
        table = parameter.ndim > 1 and max(parameter.shape) > 4 * min(parameter.shape)
        deviation = 0.1 if parameter.ndim < 2 or table else min(0.1, 1.5 / max(parameter.shape) ** 0.5)
        parameter.copy_(values * deviation + (1.0 if norm and name.endswith("weight") else 0.0))


def rough_model(config: ModelConfig, seed: int = 0) -> Model:
    model = build_model(config, VOCABULARY)
    roughen(model, seed)
    return model.eval()


def model_with(config: ModelConfig, weights: dict[str, Tensor]) -> Model:
    model = build_model(config, VOCABULARY)
    model.load_state_dict(weights)
    return model.eval()


def specials_of(family: str) -> dict[str, int]:
    return SPECIALS if family in ENCODERS else DECODER_SPECIALS


def save(model: Model, folder: Path, world_size: int = 2) -> str:
    """Save a checkpoint of a model as several ranks would; returns its location."""
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    parts: list[dict[str, Tensor]] = []
    for rank in range(world_size):
        part = {}
        for name, parameter in model.named_parameters():
            start, stop = (parameter.numel() * r // world_size for r in (rank, rank + 1))
            part[f"weight/{name}@{start}"] = parameter.detach().reshape(-1)[start:stop]
        parts.append(part)
    return saved_tensors.write(str(folder), parts, saved_tensors.manifest_of(1, world_size, shapes))


def theirs_of(
    config: ModelConfig, seed: int = 0, pad: int = 1, name: str | None = None, vocab_size: int = VOCABULARY
) -> Any:
    """Return a model of transformers with random weights, configured by hand as its documentation says."""
    transformers = pytest.importorskip("transformers")
    if config.family.startswith("modernbert"):
        of_family = {
            "modernbert": transformers.ModernBertConfig,
            "modernbert-decoder": transformers.ModernBertDecoderConfig,
        }[config.family]
        made = of_family(
            vocab_size=vocab_size, hidden_size=config.hidden, intermediate_size=config.intermediate,
            num_hidden_layers=config.layers, num_attention_heads=config.heads,
            max_position_embeddings=config.max_positions, local_attention=config.local_attention,
            global_attn_every_n_layers=config.global_attn_every_n_layers,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": config.global_rope_theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rope_theta},
            },
            pad_token_id=pad, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
        )  # fmt: skip
    elif config.family == "xlnet":
        made = transformers.XLNetConfig(
            vocab_size=vocab_size, d_model=config.hidden, n_layer=config.layers, n_head=config.heads,
            d_inner=config.intermediate, mem_len=None, dropout=0.0, pad_token_id=pad,
        )  # fmt: skip
        made.max_positions = config.max_positions  # of ours: theirs has no limit
    elif config.family in ("gpt", "gpt2"):
        made = {"gpt": transformers.OpenAIGPTConfig, "gpt2": transformers.GPT2Config}[config.family](
            vocab_size=vocab_size, n_embd=config.hidden, n_layer=config.layers, n_head=config.heads,
            n_positions=config.max_positions, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        if config.family == "gpt2":
            made.n_inner = config.intermediate
    else:
        sizes = dict(
            vocab_size=vocab_size, hidden_size=config.hidden, num_hidden_layers=config.layers,
            num_attention_heads=config.heads, intermediate_size=config.intermediate,
            max_position_embeddings=config.max_positions, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        if config.family == "bert":
            made = transformers.BertConfig(**sizes)
        elif config.family == "albert":
            made = transformers.AlbertConfig(**sizes, embedding_size=config.embedding, classifier_dropout_prob=0.0)
        else:
            sizes["max_position_embeddings"] += pad + 1
            made = transformers.RobertaConfig(**sizes, layer_norm_eps=1e-5, type_vocab_size=1, pad_token_id=pad)
    model = getattr(transformers, name or CLASSES[config.family])(made)
    roughen(model, seed)
    return model.eval()


@dataclass(frozen=True)
class Text:
    """Sequences with labels, packed for our models and padded for those of transformers."""

    inputs: dict[str, Any]
    """The keyword arguments of our forward."""
    padded: dict[str, Any]
    """The keyword arguments of theirs, labels left out."""
    real: Tensor
    """True for tokens, False for padding; bool (B, T)."""
    labels: Tensor
    """Labels, int64 (B, T); -100 where there is none."""


def some_text(family: str, lengths: list[int], pad: int, seed: int = 0) -> Text:
    """Return random tokens in sequences of these lengths, in two segments if the family has them."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    ids = rng.integers(5, VOCABULARY, tokens)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

    def padded(flat: Any, filling: int) -> Tensor:
        out = torch.full(real.shape, filling)
        out[real] = torch.as_tensor(flat)
        return out

    inputs: dict[str, Any] = {}
    token_type_ids = None
    theirs = {"input_ids": padded(ids, pad), "attention_mask": real.long()}
    if family in ENCODERS:
        candidates = np.arange(tokens)
        if family == "xlnet":  # a query that sees no token sees all in transformers, its own too
            candidates = np.setdiff1d(candidates, cumulative_lengths(lengths))
        asked = np.sort(rng.choice(candidates, max(1, tokens // 6), replace=False))
        inputs |= {"masked_positions": asked, "labels": rng.integers(5, VOCABULARY, len(asked))}
        labels = np.full(tokens, -100)
        labels[asked] = inputs["labels"]
    else:
        labels = inputs["labels"] = rng.integers(5, VOCABULARY, tokens)
    if AT_HUGGING_FACE[family].has_token_types:
        token_type_ids = np.concatenate([np.arange(n) >= max(1, n // 3) for n in lengths]).astype(np.int64)
        if family != "xlnet":
            inputs["is_random_next" if family == "bert" else "is_swapped"] = rng.integers(0, 2, len(lengths))
        theirs["token_type_ids"] = padded(token_type_ids, 0)
    inputs["packed"] = pack(ids, cumulative_lengths(lengths), token_type_ids)
    return Text(to_device(inputs, torch.device("cpu")), theirs, real, padded(labels, -100))


def on_device(text: Text, device: torch.device) -> Text:
    """Return the same sequences with their tensors on a device."""
    inputs: dict[str, Any] = {}
    for name, value in text.inputs.items():
        if isinstance(value, Tensor):
            inputs[name] = value.to(device)
        else:  # packed tokens
            parts = {field.name: getattr(value, field.name) for field in fields(value)}
            moved = {key: part.to(device) if isinstance(part, Tensor) else part for key, part in parts.items()}
            inputs[name] = type(value)(**moved)
    padded = {name: value.to(device) for name, value in text.padded.items()}
    return Text(inputs, padded, text.real.to(device), text.labels.to(device))


def our_answers(model: Any, text: Text) -> dict[str, Tensor]:
    """Return the logits of each head, and the mean losses."""
    hidden = model.encode(text.inputs["packed"])
    sums = model(**text.inputs)
    answers = {
        "words": model.lm_head(hidden),
        "word loss": sums[next(name for name in ("clm", "mlm", "plm") if name in sums)] / (text.labels >= 0).sum(),
    }
    first = hidden[text.inputs["packed"].cu_seqlens[:-1]]
    if model.config.family == "bert":
        answers |= {"pairs": model.next_sentence(model.pool(first)), "pair loss": sums["nsp"] / len(first)}
    elif model.config.family == "albert":
        answers |= {"pairs": model.sentence_order(model.pool(first)), "pair loss": sums["sop"] / len(first)}
    return answers


def their_answers(model: Any, text: Text) -> dict[str, Tensor]:
    """Return the same for a model of transformers; its own loss is the word loss if it computes just that."""
    family = {names: family for family, names in CLASSES.items()}[type(model).__name__]
    if AT_HUGGING_FACE[family].causal:  # it shifts its labels itself, and ours are random
        logits = model(**text.padded).logits
        words = logits[text.real]
        return {"words": words, "word loss": F.cross_entropy(words, text.labels[text.real])}
    if family in ("roberta", "modernbert"):
        out = model(**text.padded, labels=text.labels)
        return {"words": out.logits[text.real], "word loss": out.loss}
    if family == "xlnet":  # the logits are those of the content stream, the loss is that of the query stream
        length = text.labels.shape[1]
        hidden = (text.labels >= 0).to(model.dtype)[:, None].expand(-1, length, -1)
        each = torch.eye(length).to(hidden).expand(len(hidden), -1, -1)
        loss = model(**text.padded, perm_mask=hidden, target_mapping=each, labels=text.labels).loss
        return {"words": model(**text.padded).logits[text.real], "word loss": loss}
    key = "is_random_next" if family == "bert" else "is_swapped"
    pair_key = "next_sentence_label" if family == "bert" else "sentence_order_label"
    out = model(**text.padded, labels=text.labels, **{pair_key: text.inputs[key]})
    pairs = out.seq_relationship_logits if family == "bert" else out.sop_logits
    pair_loss = F.cross_entropy(pairs, text.inputs[key])
    words = out.prediction_logits[text.real]
    return {"words": words, "pairs": pairs, "word loss": out.loss - pair_loss, "pair loss": pair_loss}


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    """Return max |ours - theirs| / max |theirs|."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
