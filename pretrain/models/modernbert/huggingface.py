"""ModernBERT's names at Hugging Face, and what the ModernBERT decoder shares with them."""

from typing import Any

from multihop.pretrain.models.layers.huggingface_names import BERT_SIZES, Blocks, Names

SIZES = {**BERT_SIZES, "local_attention": "local_attention"}
FIXED: dict[str, tuple[Any, Any]] = {
    "hidden_activation": ("gelu", "gelu"),
    "classifier_activation": ("gelu", "gelu"),
    "norm_eps": (1e-5, 1e-5),
    "norm_bias": (False, False),
    "attention_bias": (False, False),
    "mlp_bias": (False, False),
    "classifier_bias": (False, False),
    "decoder_bias": (True, True),
    "tie_word_embeddings": (True, True),
}
DROPOUT = ("attention_dropout", "embedding_dropout", "mlp_dropout")
THETAS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
MODULES = {
    "word": "model.embeddings.tok_embeddings",
    "embedding_norm": "model.embeddings.norm",
    "final_norm": "model.final_norm",
    "word_bias": "decoder.bias",
}
BLOCK = {
    "attention_norm": "attn_norm",
    "attention.output": "attn.Wo",
    "feed_forward_norm": "mlp_norm",
    "feed_forward.gate": "mlp.Wi",
    "feed_forward.up": "mlp.Wi",
    "feed_forward.down": "mlp.Wo",
}


def modern_names(model_type: str, architecture: str, head: str, query_key_value: tuple[str, str, str]) -> Names:
    """The names of ModernBERT or the ModernBERT decoder.

    Args:
        head: the module of the output's transform.
        query_key_value: the modules of the three projections in a block's attention, or one module three times.
    """
    query, key, value = query_key_value
    projections = {"attention.query": query, "attention.key": key, "attention.value": value}
    return Names(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        sizes=SIZES,
        windows={"local_attention": "sliding_window"},
        fixed=FIXED,
        dropout=DROPOUT,
        dropout_when_absent=0.0,
        modules={**MODULES, "transform": f"{head}.dense", "transform_norm": f"{head}.norm"},
        blocks={"layers": Blocks("model.layers.{}.", {**BLOCK, **projections})},
        heads=(f"{head}.", "decoder."),
        copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        thetas=THETAS,
        layer_types="global_attn_every_n_layers",
        options={"positions": "rotary", "feed_forward": "geglu", "norm": "pre"},
        special_ids=True,
    )


NAMES = modern_names("modernbert", "ModernBertForMaskedLM", "head", ("attn.Wqkv", "attn.Wqkv", "attn.Wqkv"))
