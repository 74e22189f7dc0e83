"""How transformers names the parts of a family: the fields of `Names`, and the values that families share."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Blocks:
    """A list of blocks, such as `layers`."""

    prefix: str
    """A block's name in transformers, with {} for its number; without {} all layers share one block."""
    modules: dict[str, str]
    """Module in a block -> its name in transformers."""


@dataclass(frozen=True)
class Names:
    """The counterpart of a family in the library transformers, as `pretrain/models/NAME/huggingface.py` declares it."""

    model_type: str
    architecture: str
    """The class with all pretraining heads."""
    prefix: str
    """The beginning of all tensors' names but the heads'; files of the bare model leave it out."""
    sizes: dict[str, str]
    """Field of `model` -> key in config.json. Without `intermediate`, transformers fixes it at 4 * hidden."""
    fixed: dict[str, tuple[Any, Any]]
    """Key in config.json -> the value that this family's equations need, and the default of transformers."""
    dropout: tuple[str, ...]
    """The keys of the dropout rates; the first one is read."""
    modules: dict[str, str]
    """Module or parameter outside the blocks -> its name in transformers."""
    blocks: dict[str, Blocks]
    """The lists of blocks, by their names here."""
    heads: tuple[str, ...] = ()
    """Prefixes of the heads that may be missing from a file."""
    copies: dict[str, str] = field(default_factory=dict)
    """Tied tensors that a file may repeat: name -> the original's name."""
    ignored: tuple[str, ...] = ()
    """Tensors that have no counterpart here."""
    conv1d: bool = False
    """Matrices of the blocks are stored (in, out), and query, key and value concatenated along the outputs."""
    null_sizes: tuple[str, ...] = ()
    """Fields of `model` that may be null in config.json, for the default of `model`."""
    dropout_when_absent: float = 0.1
    positions_after_pad: bool = False
    """Positions start at pad_token_id + 1, as in fairseq: the rows before are unused."""
    options: dict[str, Any] = field(default_factory=dict)
    """The values that `model`'s fields must have for the class of transformers."""
    repeated: dict[str, str] = field(default_factory=dict)
    """Keys in config.json that must have the value of another key of it."""
    rows: tuple[str, ...] = ()
    """Vectors of ours that are stored as matrices of one row."""
    sinusoids: tuple[str, ...] = ()
    """Fixed tensors that files may have: the sinusoids that our model computes."""
    separate: dict[str, str] = field(default_factory=dict)
    """Entries of `modules` that are others where source and target have vocabularies of their own."""
    separate_copies: dict[str, str] = field(default_factory=dict)
    """`copies` of such a model."""
    thetas: dict[str, str] = field(default_factory=dict)
    """Type of layer in `rope_parameters` of config.json -> field of `model` with the base of its rotary positions,
    which files of transformers 4 have under the same name."""
    layer_types: str | None = None
    """The field of `model` that says which layers are global, which files of transformers 4 have under the same name
    and those of transformers 5 as the list `layer_types`."""
    special_ids: bool = False
    """config.json has cls_token_id and sep_token_id too, and none of the special ids may be null."""
    only_segment: str | None = None
    """The embedding of the only token type, which our model does not have: added to the positions on import."""

    def with_two_vocabularies(self) -> "Names":
        """The names where source and target have vocabularies of their own."""
        return replace(self, modules={**self.modules, **self.separate}, copies=self.separate_copies)

    @property
    def concatenated_along(self) -> int:
        """The dimension along which several of our tensors are one in transformers: that of the outputs."""
        return -1 if self.conv1d else 0

    def unused_positions(self, pad: int) -> int:
        """How many rows of the stored position embedding come before the first position."""
        return pad + 1 if self.positions_after_pad else 0


def bert_embeddings(prefix: str) -> dict[str, str]:
    """The embeddings of BERT and the families after it."""
    return {
        "word": f"{prefix}.embeddings.word_embeddings",
        "position": f"{prefix}.embeddings.position_embeddings",
        "segment": f"{prefix}.embeddings.token_type_embeddings",
        "embedding_norm": f"{prefix}.embeddings.LayerNorm",
    }


BERT_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
BERT_FIXED: dict[str, tuple[Any, Any]] = {
    "is_decoder": (False, False),
    "add_cross_attention": (False, False),
    "position_embedding_type": ("absolute", "absolute"),
    "tie_word_embeddings": (True, True),
}
BERT_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
BERT_BLOCK = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}

GPT_SIZES = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "max_positions": "n_positions"}
GPT_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
GPT_BLOCK = {
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "attention_norm": "ln_1",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
    "feed_forward_norm": "ln_2",
}
