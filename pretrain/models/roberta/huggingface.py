"""RoBERTa's names at Hugging Face."""

from multihop.pretrain.models.layers.huggingface_names import (
    BERT_BLOCK,
    BERT_DROPOUT,
    BERT_FIXED,
    BERT_SIZES,
    Blocks,
    Names,
    bert_embeddings,
)

NAMES = Names(
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    prefix="roberta.",
    sizes=BERT_SIZES,
    fixed={"hidden_act": ("gelu", "gelu"), "layer_norm_eps": (1e-5, 1e-12), "type_vocab_size": (1, 2), **BERT_FIXED},
    dropout=BERT_DROPOUT,
    modules={
        **bert_embeddings("roberta"),
        "transform": "lm_head.dense",
        "transform_norm": "lm_head.layer_norm",
        "word_bias": "lm_head.bias",
    },
    blocks={"layers": Blocks("roberta.encoder.layer.{}.", BERT_BLOCK)},
    heads=("lm_head.",),
    copies={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    ignored=("roberta.pooler.dense.weight", "roberta.pooler.dense.bias"),
    positions_after_pad=True,
    only_token_type="roberta.embeddings.token_type_embeddings.weight",
)
