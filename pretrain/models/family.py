"""What a model family declares about itself. Nothing here imports torch: a recipe is validated with it."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """The declaration in `pretrain/models/NAME/__init__.py`, of which NAME is `model.family` in a recipe."""

    display_name: str
    model_class: str
    """The class in `pretrain/models/NAME/model.py`, a subclass of `multihop.pretrain.models.common.model.Model`."""
    causal: bool
    """Whether a token attends to itself and the tokens before it only."""
    pooling: Literal["pooler", "first", "last"]
    """A sequence's representation: its first token's state through `pool`, its first token's, or its last token's."""
    objectives: tuple[str, ...]
    """What `objective.name` may be, the default first: the model's `forward` takes the inputs of each."""
    auto_class: str | None
    """The class of transformers that loads an exported model with its pretraining heads; None: it has no such class."""
    translates: bool = False
    """An encoder and a decoder, trained on pairs of texts; see `multihop.pretrain.models.common.encoder_decoder`."""
    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of the recipe's `model` section that not all families have, with the values that this one has, its default
    first; None: as published, and not written down."""
    lacks: tuple[str, ...] = ()
    """Sizes of the recipe's `model` section that have no meaning in it; they are 1."""
    has_segments: bool = False
    """Whether it has segment embeddings (token types)."""
    pair_separators: int = 1
    """Separator tokens between the two texts of a pair that it is fine-tuned on."""
    has_output_bias: bool = False
    """Whether the output layer over the vocabulary has a bias, which is named `word_bias`."""
    factorized_embedding: bool = False
    """Whether `model.embedding` may differ from `model.hidden`: a projection lies between the two."""
    truncated_normal: bool = False
    """Initial weights are cut off at two standard deviations."""
    scaled_residual: bool = False
    """Initial weights of the projections into the residual stream are divided by sqrt(2 * layers)."""
    gathers_layers: bool = False
    """Whether a layer's weights must be gathered together where they are partitioned over the ranks (ZeRO stage 3): how
    often its forward pass reads them depends on a rank's batch, and all ranks must gather alike."""
    xavier: bool = False
    """Initial matrices are uniform within sqrt(6 / (rows + columns)) (Glorot and Bengio 2010, equation 16), and
    embeddings normal with a standard deviation of hidden**-0.5."""
    uniform: float | None = None
    """Initial matrices and embeddings are uniform between minus this and this."""
    position_std: float = 0.02
    """Standard deviation of the initial position embeddings; 0.02 everywhere else."""
    presets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Published sizes, as fields of the recipe's `model` section. The vocabulary is the data's."""

    @property
    def default_objective(self) -> str:
        """What it is trained with where the recipe does not set `objective.name`."""
        return self.objectives[0]


def sizes(layers: int, hidden: int, heads: int, max_positions: int, **others: Any) -> dict[str, Any]:
    """A preset."""
    return {"layers": layers, "hidden": hidden, "heads": heads, "max_positions": max_positions, **others}
