"""The recipe's `objective` section, and each objective's requirements for the rest of a recipe.

Nothing in this file imports NumPy or torch: recipes are validated with it.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from multihop.common.config import COMPATIBILITY, MEMORY, ORDER, UPDATES, Section
from multihop.common.errors import UserError


@dataclass(frozen=True)
class ObjectiveNeeds:
    """An objective's requirements for a recipe, and the keys that it reads."""

    predicts: str
    """The name of the loss of its predicted tokens: `{predicts}_loss`."""
    special_tokens: Set[str]
    """The names of the special tokens that its tokenizer must have."""
    keys: Set[str]
    """The keys of `ObjectiveConfig` that have an effect, apart from `name`."""
    reads_pairs: bool = False
    """Whether its samples are pairs of texts, and the batch size may be in tokens."""
    target_fits_source: bool = False
    """Whether a target can have only as many tokens as its source."""
    reads_all_shards: str | None = None
    """Why it cannot take its samples from some shards at a time (`data.shuffle_window_shards`); None: it can."""


_MASKED = frozenset({"pad", "unk", "cls", "sep", "mask"})
_CAUSAL = frozenset({"end", "unk"})
_PAIRS = frozenset({"pad", "end", "unk"})
_MASKING = frozenset({"mask_rate", "max_predictions", "masking", "static_masks"})

OBJECTIVES = {
    "mlm+nsp": ObjectiveNeeds("mlm", _MASKED, _MASKING, reads_all_shards="draws second segments from all documents"),
    "mlm+sop": ObjectiveNeeds("mlm", _MASKED, _MASKING),
    "mlm": ObjectiveNeeds("mlm", _MASKED, _MASKING | {"isolate_documents"}),
    "plm": ObjectiveNeeds(
        "plm",
        _MASKED,
        frozenset({"mask_rate", "max_predictions", "static_masks", "isolate_documents", "mem_len"}),
    ),
    "clm": ObjectiveNeeds("clm", _CAUSAL, frozenset({"isolate_documents"})),
    "bilm": ObjectiveNeeds("bilm", _MASKED, frozenset({"mem_len"})),
    "translation": ObjectiveNeeds(
        "translation",
        _PAIRS,
        frozenset({"label_smoothing"}),
        reads_pairs=True,
        reads_all_shards="sorts all pairs",
    ),
    "completion": ObjectiveNeeds(
        "completion", _CAUSAL, frozenset(), reads_pairs=True, reads_all_shards="sorts all pairs"
    ),
    "ctc": ObjectiveNeeds(
        "ctc", _PAIRS, frozenset(), reads_pairs=True, target_fits_source=True, reads_all_shards="sorts all pairs"
    ),
}
"""The objectives by the value of `objective.name`."""


TOKEN_LOSSES = tuple(dict.fromkeys(f"{needs.predicts}_loss" for needs in OBJECTIVES.values()))
"""The names of the losses of predicted tokens, in nats per token; each run has one of these."""


def objectives_with(key: str) -> list[str]:
    """The names of the objectives that read a key of `ObjectiveConfig`."""
    return [name for name, needs in OBJECTIVES.items() if key in needs.keys]


class ObjectiveConfig(Section):
    """The training objective: what the model learns to predict."""

    name: Annotated[
        Literal["mlm+nsp", "mlm+sop", "mlm", "plm", "clm", "bilm", "translation", "completion", "ctc"],
        COMPATIBILITY | ORDER | MEMORY,
    ] = "mlm+nsp"
    """mlm+nsp: masked tokens and next-sentence prediction; mlm+sop: masked tokens and sentence-order prediction; mlm:
    masked tokens of full sentences; plm: tokens of full sentences in a random order (Yang et al. 2019); clm: the next
    token; bilm: the next token and the previous one; translation: the target of each pair; completion: the target
    given the source, by a causal model; ctc: the target, by an encoder alone. The default depends on model.family."""
    mask_rate: Annotated[float, ORDER | MEMORY] = Field(default=0.15, gt=0.0, lt=1.0)
    """Share of a sequence's tokens that are predicted under mlm and plm; default under plm 1/6, as published."""
    max_predictions: Annotated[int | None, ORDER | MEMORY] = Field(default=None, ge=1)
    """Maximum number of predicted tokens per sequence; null: as many as mask_rate gives."""
    masking: Annotated[Literal["tokens", "words", "spans", "ngrams"], ORDER | MEMORY] = "tokens"
    """The unit of masking: tokens (Devlin et al. 2018), whole words, spans of words of geometric length (Joshi et al.
    2020), or n-grams of up to three words (Lan et al. 2020)."""
    static_masks: Annotated[int | None, ORDER] = Field(default=None, ge=1)
    """Number of different masks per sample, which the epochs use in turn (10 in the original BERT); null: a new mask in
    each epoch."""
    isolate_documents: Annotated[bool, ORDER | MEMORY] = False
    """mlm, plm, clm: tokens attend only to tokens of the same document. Short documents still share a sample."""
    mem_len: Annotated[int, ORDER | MEMORY] = Field(default=0, ge=0)
    """plm, bilm: number of the document's tokens before a sample that the model reads first, without a gradient. Under
    plm, the sample's tokens attend to them (Yang et al. 2019, section 2.4; 384 in the published command). Under bilm,
    the forward model's state is carried from them, and the backward model's from as many tokens after the sample."""
    label_smoothing: Annotated[float, UPDATES] = Field(default=0.1, ge=0.0, lt=1.0)
    """translation: share of the target distribution that is spread evenly over the vocabulary (Szegedy et al. 2016,
    section 7; 0.1 in Vaswani et al. 2017). Held-out losses are measured without it."""

    @model_validator(mode="before")
    @classmethod
    def _fill_mask_rate(cls, content: Any) -> Any:
        is_permuted = isinstance(content, dict) and content.get("name") == "plm"
        return {"mask_rate": 1 / 6, **content} if is_permuted else content

    @model_validator(mode="after")
    def _check_isolate_documents(self) -> "ObjectiveConfig":
        if self.isolate_documents and "isolate_documents" not in self.needs.keys:
            raise UserError(
                f"isolate_documents has no effect with name={self.name}, only with "
                f"{' or '.join(objectives_with('isolate_documents'))}; remove it"
            )
        return self

    @property
    def needs(self) -> ObjectiveNeeds:
        """This objective's requirements for the rest of the recipe."""
        return OBJECTIVES[self.name]
