"""ALBERT's names at Hugging Face."""

from multihop.pretrain.models.layers.huggingface_names import (
    BERT_DROPOUT,
    BERT_FIXED,
    BERT_SIZES,
    CLASSIFIER_DROPOUT,
    Blocks,
    Names,
    bert_embeddings,
)

NAMES = Names(
    model_type="albert",
    architecture="AlbertForPreTraining",
    prefix="albert.",
    sizes={**BERT_SIZES, "embedding": "embedding_size"},
    fixed={
        "hidden_act": ("gelu_new", "gelu_new"),
        "layer_norm_eps": (1e-12, 1e-12),
        "type_vocab_size": (2, 2),
        "num_hidden_groups": (1, 1),
        "inner_group_num": (1, 1),
        **BERT_FIXED,
    },
    dropout=(*BERT_DROPOUT, CLASSIFIER_DROPOUT),
    dropout_when_absent=0.0,
    modules={
        **bert_embeddings("albert"),
        "widen": "albert.encoder.embedding_hidden_mapping_in",
        "pooler": "albert.pooler",
        "transform": "predictions.dense",
        "transform_norm": "predictions.LayerNorm",
        "word_bias": "predictions.bias",
        "sentence_order": "sop_classifier.classifier",
    },
    blocks={
        "layers": Blocks(
            "albert.encoder.albert_layer_groups.0.albert_layers.0.",
            {
                "attention.query": "attention.query",
                "attention.key": "attention.key",
                "attention.value": "attention.value",
                "attention.output": "attention.dense",
                "attention_norm": "attention.LayerNorm",
                "feed_forward.up": "ffn",
                "feed_forward.down": "ffn_output",
                "feed_forward_norm": "full_layer_layer_norm",
            },
        )
    },
    heads=("albert.pooler.", "predictions.", "sop_classifier."),
    copies={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
)
