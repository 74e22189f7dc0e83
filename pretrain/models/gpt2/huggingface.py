"""GPT-2's names at Hugging Face."""

from multihop.pretrain.models.layers.huggingface_names import GPT_BLOCK, GPT_DROPOUT, GPT_SIZES, Blocks, Names

NAMES = Names(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    sizes={**GPT_SIZES, "intermediate": "n_inner"},
    null_sizes=("intermediate",),
    fixed={
        "activation_function": ("gelu_new", "gelu_new"),
        "layer_norm_epsilon": (1e-5, 1e-5),
        "scale_attn_weights": (True, True),
        "scale_attn_by_inverse_layer_idx": (False, False),
        "add_cross_attention": (False, False),
        "tie_word_embeddings": (True, True),
    },
    dropout=GPT_DROPOUT,
    modules={"word": "transformer.wte", "position": "transformer.wpe", "final_norm": "transformer.ln_f"},
    blocks={"layers": Blocks("transformer.h.{}.", GPT_BLOCK)},
    copies={"lm_head.weight": "transformer.wte.weight"},
    conv1d=True,
)
