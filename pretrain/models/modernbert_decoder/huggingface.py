"""The names of the ModernBERT decoder at Hugging Face."""

from multihop.pretrain.models.modernbert.huggingface import modern_names

NAMES = modern_names(
    "modernbert-decoder",
    "ModernBertDecoderForCausalLM",
    "lm_head",
    ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
)
