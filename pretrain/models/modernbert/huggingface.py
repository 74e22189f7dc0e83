"""ModernBERT's names at Hugging Face, and what its causal twin shares with them."""

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
LAYER_TYPES = "global_attn_every_n_layers"
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
COPIES = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}

NAMES = Names(
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    prefix="model.",
    sizes=SIZES,
    fixed=FIXED,
    dropout=DROPOUT,
    dropout_when_absent=0.0,
    modules={**MODULES, "transform": "head.dense", "transform_norm": "head.norm"},
    blocks={
        "layers": Blocks(
            "model.layers.{}.",
            {**BLOCK, "attention.query": "attn.Wqkv", "attention.key": "attn.Wqkv", "attention.value": "attn.Wqkv"},
        )
    },
    heads=("head.", "decoder."),
    copies=COPIES,
    null_sizes=("local_attention",),
    thetas=THETAS,
    layer_types=LAYER_TYPES,
    special_ids=True,
)
