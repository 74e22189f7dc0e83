"""The recurrent encoder-decoder (Sutskever et al. 2014), with attention (Bahdanau et al. 2015; Luong et al. 2015)."""

from multihop.pretrain.models.family import Family, sizes

FAMILY = Family(
    display_name="seq2seq",
    model_class="Seq2Seq",
    causal=False,
    pooling="last",
    objectives=("translation",),
    auto_class=None,
    translates=True,
    options={
        "cell": ("lstm", "gru"),
        "attention": ("general", "dot", "concat", "additive", "none"),
        "input_feeding": (False, True),
    },
    lacks=("heads", "intermediate"),
    gathers_layers=True,
    has_output_bias=True,
    uniform=0.1,  # Luong et al. 2015, section 4.1
    presets={
        "seq2seq-mini": sizes(2, 256, 1, 512, dropout=0.2),
        # Luong et al. 2015, section 4.1; their encoder reads in one direction, and its width is that of both here.
        "seq2seq-luong": sizes(4, 1000, 1, 512, dropout=0.2, attention="general", input_feeding=True),
        # Bahdanau et al. 2015, A.2.1: each direction of their encoder is as wide as the decoder, which is half of it
        # here, and their embeddings have 620.
        "seq2seq-bahdanau": sizes(1, 1000, 1, 512, dropout=0.0, cell="gru", attention="additive"),
        # Sutskever et al. 2014, section 3.4; their encoder reads the reversed source in one direction.
        "seq2seq-sutskever": sizes(4, 1000, 1, 512, dropout=0.0, attention="none"),
    },
)
