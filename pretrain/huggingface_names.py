"""What Hugging Face calls our families, their sizes and their parameters.

The classes meant are BertForPreTraining, AlbertForPreTraining, RobertaForMaskedLM, OpenAIGPTLMHeadModel and
GPT2LMHeadModel of the library transformers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pretrain.config import ModelConfig
from pretrain.models import outline_model

_SEGMENTS = "roberta.embeddings.token_type_embeddings.weight"


@dataclass(frozen=True)
class Names:
    """How a family is called there."""

    model_type: str
    architecture: str
    prefix: str
    """Of all but the heads' names; files of the model without heads leave it out."""
    sizes: dict[str, str]
    fixed: dict[str, tuple[Any, Any]]
    """What config.json must say that the family's equations hold, and what an absent key means there."""
    dropout: tuple[str, ...]
    modules: dict[str, str]
    block: str
    """Where layer {} stands."""
    in_block: dict[str, str]
    heads: tuple[str, ...] = ()
    """How the names of the heads that a file may lack begin."""
    copies: dict[str, str] = field(default_factory=dict)
    """Tensors that are the same as another."""
    passed_over: tuple[str, ...] = ()
    conv1d: bool = False
    """Matrices are stored (in, out), and query, key and value side by side."""


def _bert_block(attention: str) -> dict[str, str]:
    return {
        "attention.query": f"{attention}.query",
        "attention.key": f"{attention}.key",
        "attention.value": f"{attention}.value",
        "attention.output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "feed_forward.up": "intermediate.dense",
        "feed_forward.down": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    }


_GPT_BLOCK = {
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "attention_norm": "ln_1",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
    "feed_forward_norm": "ln_2",
}
_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
_GPT_SIZES = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "max_positions": "n_positions"}
_ENCODER: dict[str, tuple[Any, Any]] = {
    "is_decoder": (False, False),
    "add_cross_attention": (False, False),
    "position_embedding_type": ("absolute", "absolute"),
    "tie_word_embeddings": (True, True),
}
_ENCODER_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_GPT_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def _embeddings(prefix: str) -> dict[str, str]:
    return {
        "word": f"{prefix}.embeddings.word_embeddings",
        "position": f"{prefix}.embeddings.position_embeddings",
        "segment": f"{prefix}.embeddings.token_type_embeddings",
        "embedding_norm": f"{prefix}.embeddings.LayerNorm",
    }


FAMILIES: dict[str, Names] = {
    "bert": Names(
        "bert",
        "BertForPreTraining",
        "bert.",
        _SIZES,
        {"hidden_act": ("gelu", "gelu"), "layer_norm_eps": (1e-12, 1e-12), "type_vocab_size": (2, 2), **_ENCODER},
        _ENCODER_DROPOUT,
        {
            **_embeddings("bert"),
            "pooler": "bert.pooler.dense",
            "transform": "cls.predictions.transform.dense",
            "transform_norm": "cls.predictions.transform.LayerNorm",
            "word_bias": "cls.predictions.bias",
            "next_sentence": "cls.seq_relationship",
        },
        "bert.encoder.layer.{}.",
        _bert_block("attention.self"),
        ("bert.pooler.", "cls.predictions.", "cls.seq_relationship."),
        {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
    ),
    "albert": Names(
        "albert",
        "AlbertForPreTraining",
        "albert.",
        {**_SIZES, "embedding": "embedding_size"},
        {
            "hidden_act": ("gelu_new", "gelu_new"),
            "layer_norm_eps": (1e-12, 1e-12),
            "type_vocab_size": (2, 2),
            "num_hidden_groups": (1, 1),
            "inner_group_num": (1, 1),
            **_ENCODER,
        },
        (*_ENCODER_DROPOUT, "classifier_dropout_prob"),
        {
            **_embeddings("albert"),
            "widen": "albert.encoder.embedding_hidden_mapping_in",
            "pooler": "albert.pooler",
            "transform": "predictions.dense",
            "transform_norm": "predictions.LayerNorm",
            "word_bias": "predictions.bias",
            "sentence_order": "sop_classifier.classifier",
        },
        "albert.encoder.albert_layer_groups.{}.albert_layers.0.",
        {
            **_bert_block("attention"),
            "attention.output": "attention.dense",
            "attention_norm": "attention.LayerNorm",
            "feed_forward.up": "ffn",
            "feed_forward.down": "ffn_output",
            "feed_forward_norm": "full_layer_layer_norm",
        },
        ("albert.pooler.", "predictions.", "sop_classifier."),
        {
            "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
            "predictions.decoder.bias": "predictions.bias",
        },
    ),
    "roberta": Names(
        "roberta",
        "RobertaForMaskedLM",
        "roberta.",
        _SIZES,
        {"hidden_act": ("gelu", "gelu"), "layer_norm_eps": (1e-5, 1e-12), "type_vocab_size": (1, 2), **_ENCODER},
        _ENCODER_DROPOUT,
        {
            **_embeddings("roberta"),
            "transform": "lm_head.dense",
            "transform_norm": "lm_head.layer_norm",
            "word_bias": "lm_head.bias",
        },
        "roberta.encoder.layer.{}.",
        _bert_block("attention.self"),
        ("lm_head.",),
        {
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        passed_over=("roberta.pooler.dense.weight", "roberta.pooler.dense.bias"),
    ),
    "gpt": Names(
        "openai-gpt",
        "OpenAIGPTLMHeadModel",
        "transformer.",
        _GPT_SIZES,
        {  # what is called gelu in this class of theirs is the tanh approximation
            "afn": ("gelu", "gelu"),
            "layer_norm_epsilon": (1e-5, 1e-5),
            "tie_word_embeddings": (True, True),
        },
        _GPT_DROPOUT,
        {"word": "transformer.tokens_embed", "position": "transformer.positions_embed"},
        "transformer.h.{}.",
        _GPT_BLOCK,
        copies={"lm_head.weight": "transformer.tokens_embed.weight"},
        conv1d=True,
    ),
    "gpt2": Names(
        "gpt2",
        "GPT2LMHeadModel",
        "transformer.",
        {**_GPT_SIZES, "intermediate": "n_inner"},
        {
            "activation_function": ("gelu_new", "gelu_new"),
            "layer_norm_epsilon": (1e-5, 1e-5),
            "scale_attn_weights": (True, True),
            "scale_attn_by_inverse_layer_idx": (False, False),
            "add_cross_attention": (False, False),
            "tie_word_embeddings": (True, True),
        },
        _GPT_DROPOUT,
        {"word": "transformer.wte", "position": "transformer.wpe", "final_norm": "transformer.ln_f"},
        "transformer.h.{}.",
        _GPT_BLOCK,
        copies={"lm_head.weight": "transformer.wte.weight"},
        conv1d=True,
    ),
}


def to_huggingface(model: ModelConfig, offset: int, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor there for each of ours in `weights`, one after the other, in the model's order.

    Args:
        offset: RoBERTa's first row of positions there, pad_token_id + 1; nothing in other families.
        weights: all of them, by our names.
    """
    names = FAMILIES[model.family]
    for theirs, ours in _pairs(model).items():
        parts = [weights[name] for name in ours]
        if names.conv1d and ours[0].startswith("layers."):
            parts = [part.T if part.ndim == 2 else part for part in parts]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if model.family == "roberta" and ours == ["position.weight"]:
            tensor = torch.cat([tensor.new_zeros(offset, tensor.shape[1]), tensor])
            yield _SEGMENTS, tensor.new_zeros(1, tensor.shape[1])
        yield theirs, tensor


def from_huggingface(model: ModelConfig, offset: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_huggingface`: float32 by our names; views of `weights` where they are float32.

    RoBERTa's one segment is added to its positions, where it has the same effect: the word embedding, which is the
    output matrix too, stays as it is.
    """
    names = FAMILIES[model.family]
    found = {}
    for theirs, ours in _pairs(model).items():
        if theirs not in weights:
            continue
        tensor = weights[theirs].float()
        if model.family == "roberta" and ours == ["position.weight"]:
            tensor = tensor[offset:] + weights[_SEGMENTS].float()
        parts = tensor.chunk(len(ours), -1)
        for name, part in zip(ours, parts, strict=True):
            turned = names.conv1d and name.startswith("layers.") and part.ndim == 2
            found[name] = part.T if turned else part
    return found


def _pairs(model: ModelConfig) -> dict[str, list[str]]:
    """For each name there, the parameters of ours that it holds, in the order in which it holds them."""
    names, pairs = FAMILIES[model.family], dict[str, list[str]]()
    for name, _ in outline_model(model, 1).named_parameters():
        module, _, leaf = name.rpartition(".")
        if name == "word_bias":
            theirs = names.modules[name]
        elif module.startswith("layers."):
            _, layer, part = module.split(".", 2)
            theirs = f"{names.block.format(layer)}{names.in_block[part]}.{leaf}"
        else:
            theirs = f"{names.modules[module]}.{leaf}"
        pairs.setdefault(theirs, []).append(name)
    return pairs


def config_json(model: ModelConfig, vocab_size: int, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """What stands in config.json.

    Args:
        special_ids: pad, cls and sep of an encoder, end of a decoder.

    Raises:
        ValueError: the class there cannot be so, or a special piece is not among `special_ids`.
    """
    names = FAMILIES[model.family]
    if model.family == "gpt" and model.intermediate != 4 * model.hidden:
        raise ValueError(
            f"{names.architecture} is always 4 * hidden = {4 * model.hidden} wide between its projections, and this "
            f"model has intermediate={model.intermediate}; it cannot be exported"
        )
    wanted = {"end"} if names.conv1d else {"pad", "cls", "sep"}
    if lacking := sorted(wanted - set(special_ids)):
        raise ValueError(
            f"a {names.model_type} model has the special pieces {sorted(wanted)}, and {lacking} are not among the "
            f"tokenizer's {sorted(special_ids)}; export it with the tokenizer that it was trained with"
        )
    sizes = {theirs: getattr(model, ours) for ours, theirs in names.sizes.items()}
    if names.conv1d:
        ids = {"bos_token_id": special_ids["end"], "eos_token_id": special_ids["end"], "pad_token_id": None}
    else:
        pieces = {"bos_token_id": "cls", "eos_token_id": "sep", "pad_token_id": "pad"}
        ids = {key: special_ids[piece] for key, piece in pieces.items()}
    if model.family == "roberta":
        sizes["max_position_embeddings"] += special_ids["pad"] + 1
    return {
        "architectures": [names.architecture],
        "model_type": names.model_type,
        "vocab_size": vocab_size,
        **sizes,
        **{key: value for key, (value, _) in names.fixed.items()},
        **dict.fromkeys(names.dropout, model.dropout),
        **ids,
        "initializer_range": 0.02,
    }
