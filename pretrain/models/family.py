"""The declaration of a model family. Nothing here imports torch: recipes are validated with it."""

from dataclasses import dataclass, field
from typing import Any, Literal

from multihop.pretrain.models.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """The type of FAMILY in `pretrain/models/NAME/config.py`, where NAME is `model.family` in a recipe."""

    display_name: str
    config: type[ModelConfig]
    """The recipe's `model` section; its `family` is the literal NAME."""
    model_class: str
    """The class in `pretrain/models/NAME/model.py`, a subclass of `multihop.pretrain.models.layers.model.Model`."""
    causal: bool
    """Whether a token attends only to itself and the tokens before it."""
    pooling: Literal["pooler", "first", "last", "mean"]
    """A sequence's representation: its first token's state through `pool`, its first token's, its last token's, or the
    mean of all."""
    objectives: tuple[str, ...]
    """Supported values of `objective.name`, the default first: the model's `forward` takes the inputs of each."""
    auto_class: str | None
    """The transformers class that loads an exported model with its pretraining heads; None: there is none."""
    translates: bool = False
    """Whether it is trained on pairs of texts, and reads a source with an encoder; see `EncoderDecoder`."""
    uses_ctc: bool = False
    """Whether it has no decoder: each token of a source emits a token of the target or a blank, in order; see
    `CtcTranslator`. It also `translates`."""
    reads_backward: bool = False
    """Whether a token attends only to itself and the tokens after it."""
    has_token_types: bool = False
    """Whether it has embeddings of token types (BERT's segments)."""
    cls_last: bool = False
    """Whether the cls token ends a sequence instead of beginning it, as the only token of its type, 2."""
    pair_separators: int = 1
    """Number of separator tokens between the two texts of a pair in fine-tuning."""
    original_checkpoint_file: str | None = None
    """A file of the layout in which the family's authors published weights, by which a directory in it is known;
    `read_weights` in `pretrain/models/NAME/original_checkpoint.py` reads it. None: there is no such layout."""
    presets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Published sizes, as keys of the recipe's `model` section, without the vocabulary's, which the data decides."""

    @property
    def default_objective(self) -> str:
        """The objective if the recipe does not set `objective.name`."""
        return self.objectives[0]

    @property
    def reads_one_way(self) -> bool:
        """Whether a token attends to the tokens on one side of it only: before it, or after it."""
        return self.causal or self.reads_backward

    @property
    def predicts_masks(self) -> bool:
        """Whether it is trained to predict hidden tokens from those on both sides."""
        return any(name == "plm" or name.startswith("mlm") for name in self.objectives)


def sizes(layers: int, hidden: int, heads: int, max_positions: int, **others: Any) -> dict[str, Any]:
    """A preset."""
    return {"layers": layers, "hidden": hidden, "heads": heads, "max_positions": max_positions, **others}
