"""XLNet's names at Hugging Face."""

from multihop.pretrain.models.layers.huggingface_names import Blocks, Names, Stored

_PROJECTION = Stored(("hidden", "heads", "width"), transposed=True)
_BIAS = Stored(("heads", "width"))
_BLOCK = {
    "attention.query.weight": "rel_attn.q",
    "attention.key.weight": "rel_attn.k",
    "attention.value.weight": "rel_attn.v",
    "attention.position.weight": "rel_attn.r",
    "attention.output.weight": "rel_attn.o",
    "attention.content_bias": "rel_attn.r_w_bias",
    "attention.position_bias": "rel_attn.r_r_bias",
    "attention.segment_bias": "rel_attn.r_s_bias",
    "attention.segment.weight": "rel_attn.seg_embed",
    "attention_norm": "rel_attn.layer_norm",
    "feed_forward.up": "ff.layer_1",
    "feed_forward.down": "ff.layer_2",
    "feed_forward_norm": "ff.layer_norm",
}

NAMES = Names(
    model_type="xlnet",
    architecture="XLNetLMHeadModel",
    prefix="transformer.",
    sizes={
        "layers": "n_layer",
        "hidden": "d_model",
        "heads": "n_head",
        "intermediate": "d_inner",
        # Its positions are relative, and transformers' configuration has no such key.
        "max_positions": "max_positions",
    },
    null_sizes=("max_positions",),
    fixed={
        "ff_activation": ("gelu", "gelu"),
        "layer_norm_eps": (1e-12, 1e-12),
        "attn_type": ("bi", "bi"),
        "bi_data": (False, False),
        "clamp_len": (-1, -1),
        "same_length": (False, False),
        "mem_len": (None, 512),
        "untie_r": (True, True),
        "tie_word_embeddings": (True, True),
    },
    dropout=("dropout",),
    modules={
        "word": "transformer.word_embedding",
        "mask_embedding": "transformer.mask_emb",
        "word_bias": "lm_loss.bias",
    },
    blocks={"layers": Blocks("transformer.layer.{}.", _BLOCK)},
    heads=("lm_loss.",),
    copies={"lm_loss.weight": "transformer.word_embedding.weight"},
    stored={
        "mask_embedding": Stored((1, 1, "hidden")),
        "attention.query.weight": _PROJECTION,
        "attention.key.weight": _PROJECTION,
        "attention.value.weight": _PROJECTION,
        "attention.position.weight": _PROJECTION,
        "attention.output.weight": Stored(("hidden", "heads", "width")),
        "attention.content_bias": _BIAS,
        "attention.position_bias": _BIAS,
        "attention.segment_bias": _BIAS,
        "attention.segment.weight": Stored((2, "heads", "width")),
    },
)
