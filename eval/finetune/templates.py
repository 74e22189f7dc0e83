"""Templates: the special tokens around a text or a pair of texts, as each family is fine-tuned with them."""

from dataclasses import dataclass

from multihop.common.errors import UserError
from multihop.eval.config import TrialSettings
from multihop.pretrain.models.families import FAMILIES

DELIMITERS = 3
"""Tokens that fine-tuning adds to a causal model's vocabulary: start, delimiter, extract (Radford et al. 2018, 3.3)."""


@dataclass(frozen=True)
class Template:
    """Token ids before the first text, between the two texts, and after the last text."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    unknown: int
    """The token of a word of which the tokenizer leaves nothing."""
    reads_last: bool = False
    """Tagging: a word is labeled at its last token, the first one that has seen the whole word in a causal model;
    else at its first (Devlin et al. 2018, section 5.3), which has seen all of it in a model that reads backward."""

    def size(self, texts: int) -> int:
        """Return the number of tokens around one text or two."""
        return len(self.before) + (texts - 1) * len(self.between) + len(self.after)


def keeps_embeddings(settings: TrialSettings) -> bool:
    """Return whether the embeddings are frozen, or, with gradual unfreezing, until the last epochs."""
    return settings.features is not None or settings.gradual_unfreezing


def template_of(family: str, special_ids: dict[str, int], vocab_size: int, frozen: bool = False) -> Template:
    """Return the template of a family (`model.family`), as tokenizers' TemplateProcessing has them.

    BERT and ALBERT: [CLS] a [SEP] b [SEP] (Devlin et al. 2018, section 3). RoBERTa: <s> a </s></s> b </s>.
    XLNet: a <sep> b <sep> <cls> (Yang et al. 2019, in the published code). Causal
    models: start a delimiter b extract, three tokens that pretraining has not seen (Radford et al. 2018, section 3.3),
    with ids from `vocab_size` on. In a model that reads backward, start and extract change places. They have to be
    learned, so a model of these kinds whose embeddings stay as they are, at least for most of the training (see
    `keeps_embeddings`), reads its end-of-text token instead, which pretraining has seen.

    Args:
        frozen: whether the embeddings stay as they are.

    Raises:
        UserError: the tokenizer is not one for this kind of model.
    """
    declared = FAMILIES[family]
    if declared.reads_one_way:
        added = [special_ids["end"]] * DELIMITERS if frozen else list(range(vocab_size, vocab_size + DELIMITERS))
        start, delimiter, extract = added
        first, last = (extract, start) if declared.reads_backward else (start, extract)
        return Template((first,), (delimiter,), (last,), special_ids.get("unk", delimiter), reads_last=declared.causal)
    if "cls" not in special_ids:
        raise UserError(
            f"model.family={family} needs a tokenizer with the special tokens cls and sep of a masked model, but this "
            f"one has {', '.join(sorted(special_ids))}; give the tokenizer that the model was trained with"
        )
    separator = special_ids["sep"]
    cls, between = special_ids["cls"], (separator,) * declared.pair_separators
    before, after = ((), (separator, cls)) if declared.cls_last else ((cls,), (separator,))
    return Template(before, between, after, special_ids.get("unk", separator))
