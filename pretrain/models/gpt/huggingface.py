"""GPT's names at Hugging Face."""

from multihop.pretrain.models.layers.huggingface_names import GPT_BLOCK, GPT_DROPOUT, GPT_SIZES, Blocks, Names

NAMES = Names(
    model_type="openai-gpt",
    architecture="OpenAIGPTLMHeadModel",
    prefix="transformer.",
    sizes=GPT_SIZES,
    fixed={
        "afn": ("gelu", "gelu"),  # what this class calls gelu is the tanh approximation
        "layer_norm_epsilon": (1e-5, 1e-5),
        "tie_word_embeddings": (True, True),
    },
    dropout=GPT_DROPOUT,
    modules={"word": "transformer.tokens_embed", "position": "transformer.positions_embed"},
    blocks={"layers": Blocks("transformer.h.{}.", GPT_BLOCK)},
    copies={"lm_head.weight": "transformer.tokens_embed.weight"},
    conv1d=True,
)
