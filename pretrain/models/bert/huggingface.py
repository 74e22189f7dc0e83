"""BERT's names at Hugging Face."""

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
    model_type="bert",
    architecture="BertForPreTraining",
    prefix="bert.",
    sizes=BERT_SIZES,
    fixed={"hidden_act": ("gelu", "gelu"), "layer_norm_eps": (1e-12, 1e-12), "type_vocab_size": (2, 2), **BERT_FIXED},
    dropout=BERT_DROPOUT,
    modules={
        **bert_embeddings("bert"),
        "pooler": "bert.pooler.dense",
        "transform": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "word_bias": "cls.predictions.bias",
        "next_sentence": "cls.seq_relationship",
    },
    blocks={"layers": Blocks("bert.encoder.layer.{}.", BERT_BLOCK)},
    heads=("bert.pooler.", "cls.predictions.", "cls.seq_relationship."),
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)
