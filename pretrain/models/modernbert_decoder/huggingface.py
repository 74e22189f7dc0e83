"""The names of ModernBERT's causal twin at Hugging Face."""

from multihop.pretrain.models.layers.huggingface_names import Blocks, Names
from multihop.pretrain.models.modernbert.huggingface import (
    BLOCK,
    COPIES,
    DROPOUT,
    FIXED,
    LAYER_TYPES,
    MODULES,
    SIZES,
    THETAS,
)

NAMES = Names(
    model_type="modernbert-decoder",
    architecture="ModernBertDecoderForCausalLM",
    prefix="model.",
    sizes=SIZES,
    fixed=FIXED,
    dropout=DROPOUT,
    dropout_when_absent=0.0,
    modules={**MODULES, "transform": "lm_head.dense", "transform_norm": "lm_head.norm"},
    blocks={
        "layers": Blocks(
            "model.layers.{}.",
            {
                **BLOCK,
                "attention.query": "attn.q_proj",
                "attention.key": "attn.k_proj",
                "attention.value": "attn.v_proj",
            },
        )
    },
    heads=("lm_head.", "decoder."),
    copies=COPIES,
    null_sizes=("local_attention",),
    thetas=THETAS,
    layer_types=LAYER_TYPES,
    special_ids=True,
)
