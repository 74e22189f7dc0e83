"""The names of a family's parts in transformers: the dataclass `Names`, and values that families share."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Blocks:
    """The names of a list of blocks, such as `layers`."""

    prefix: str
    """A block's prefix in transformers, with {} for its number; without {}, all layers share one block."""
    modules: dict[str, str]
    """Module or parameter in a block -> its name in transformers."""


@dataclass(frozen=True)
class Stored:
    """How transformers stores a parameter that has another shape there."""

    shape: tuple[int | Literal["hidden", "heads", "width"], ...]
    """Its sizes there, as numbers or as those of the model; width is that of a head."""
    transposed: bool = False
    """Whether our matrix is transposed first."""

    def sizes(self, hidden: int, heads: int) -> list[int]:
        """The shape for a model."""
        of_model = {"hidden": hidden, "heads": heads, "width": hidden // heads}
        return [size if isinstance(size, int) else of_model[size] for size in self.shape]


@dataclass(frozen=True)
class Names:
    """A family's counterpart in transformers, declared in `pretrain/models/NAME/huggingface.py`."""

    model_type: str
    architecture: str
    """The class with all pretraining heads."""
    prefix: str
    """The prefix of all tensors except those of the heads; files of the bare model omit it."""
    sizes: dict[str, str]
    """Field of `model` -> key in config.json. Without `intermediate`, transformers fixes it at 4 * hidden."""
    fixed: dict[str, tuple[Any, Any]]
    """Key in config.json -> the value that this family requires, and the default in transformers."""
    dropout: tuple[str, ...]
    """The keys of the dropout rates; the first one is read."""
    modules: dict[str, str]
    """Module or parameter outside the blocks -> its name in transformers."""
    blocks: dict[str, Blocks]
    """The lists of blocks, by their names in our model."""
    heads: tuple[str, ...] = ()
    """Prefixes of heads that a file may lack."""
    copies: dict[str, str] = field(default_factory=dict)
    """Tied tensors that a file may repeat: name -> the original's name."""
    ignored: tuple[str, ...] = ()
    """Tensors without a counterpart in our model."""
    conv1d: bool = False
    """Whether the matrices of the blocks are stored (in, out), with query, key and value concatenated."""
    null_sizes: tuple[str, ...] = ()
    """Fields of `model` that may be null in config.json, which means the default of `model`."""
    windows: dict[str, str] = field(default_factory=dict)
    """Fields of `model` with the width of a window, and the key in config.json of half of it, which transformers uses
    if it is there. config.json may lack both, which means the default of `model`; half of an odd width is rounded
    down."""
    dropout_when_absent: float = 0.1
    positions_after_pad: bool = False
    """Whether positions start at pad_token_id + 1, as in fairseq, so that the rows before are unused."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `model` -> the values that the transformers class supports."""
    repeated: dict[str, str] = field(default_factory=dict)
    """Key in config.json -> another key that must have the same value."""
    stored: dict[str, Stored] = field(default_factory=dict)
    """Parameter, by its name in a block or outside of them -> its shape in transformers, where that is another."""
    row_vectors: tuple[str, ...] = ()
    """Our vectors that are stored as matrices with one row."""
    sinusoids: tuple[str, ...] = ()
    """Fixed tensors that files may have: sinusoids, which our model computes."""
    separate_modules: dict[str, str] = field(default_factory=dict)
    """Entries that replace those of `modules` if source and target have separate vocabularies."""
    separate_copies: dict[str, str] = field(default_factory=dict)
    """The value that replaces `copies` if source and target have separate vocabularies."""
    thetas: dict[str, str] = field(default_factory=dict)
    """Type of layer in `rope_parameters` of config.json -> field of `model` with the base of its rotary positions,
    which files of transformers 4 have under the same name."""
    layer_types: str | None = None
    """The field of `model` that says which layers are global. Files of transformers 4 have it under the same name,
    those of transformers 5 as the list `layer_types`."""
    special_ids: bool = False
    """config.json has cls_token_id and sep_token_id too, and none of the special ids may be null."""
    only_token_type: str | None = None
    """The embedding of the only token type; our model has none, so that import adds it to the positions."""

    def with_two_vocabularies(self) -> "Names":
        """The names for a model whose source and target have separate vocabularies."""
        return replace(self, modules={**self.modules, **self.separate_modules}, copies=self.separate_copies)

    @property
    def concatenation_dim(self) -> int:
        """The dimension along which tensors of ours that are one in transformers are concatenated: the outputs'."""
        return -1 if self.conv1d else 0

    def unused_positions(self, pad: int) -> int:
        """Number of rows of the stored position embedding before that of the first position."""
        return pad + 1 if self.positions_after_pad else 0


def bert_embeddings(prefix: str) -> dict[str, str]:
    """The names of the embeddings of BERT and its successors."""
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
CLASSIFIER_DROPOUT = "classifier_dropout_prob"
"""The rate before a head, which no model has here."""
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
