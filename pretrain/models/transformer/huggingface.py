"""The Transformer's names at Hugging Face, which calls this model Marian (Junczys-Dowmunt et al. 2018)."""

from multihop.pretrain.models.layers.huggingface_names import Blocks, Names

_ENCODER_BLOCK = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
_DECODER_BLOCK = {
    **_ENCODER_BLOCK,
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.key": "encoder_attn.k_proj",
    "cross_attention.value": "encoder_attn.v_proj",
    "cross_attention.output": "encoder_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
}

NAMES = Names(
    model_type="marian",
    architecture="MarianMTModel",
    prefix="model.",
    sizes={
        "layers": "encoder_layers",
        "hidden": "d_model",
        "heads": "encoder_attention_heads",
        "intermediate": "encoder_ffn_dim",
        "max_positions": "max_position_embeddings",
    },
    repeated={
        "decoder_layers": "encoder_layers",
        "decoder_attention_heads": "encoder_attention_heads",
        "decoder_ffn_dim": "encoder_ffn_dim",
    },
    options={"norm": "post", "positions": "sinusoidal"},
    fixed={
        "activation_function": ("relu", "gelu"),
        "scale_embedding": (True, False),
        "is_encoder_decoder": (True, True),
        "tie_word_embeddings": (True, True),
    },
    dropout=("dropout",),
    modules={"word": "model.shared", "word_bias": "final_logits_bias"},
    separate_modules={"word": "model.decoder.embed_tokens", "source_word": "model.encoder.embed_tokens"},
    blocks={
        "encoder": Blocks("model.encoder.layers.{}.", _ENCODER_BLOCK),
        "decoder": Blocks("model.decoder.layers.{}.", _DECODER_BLOCK),
    },
    heads=("final_logits_bias",),
    row_vectors=("word_bias",),
    copies={
        "lm_head.weight": "model.shared.weight",
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
    },
    separate_copies={"lm_head.weight": "model.decoder.embed_tokens.weight"},
    sinusoids=("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"),
)
