"""How a model is evaluated on each zero-shot task with official files."""

from typing import Any

from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.tasks.running_text import Text
from multihop.eval.zero_shot.choice import evaluate_choices
from multihop.eval.zero_shot.lambada import Protocol, evaluate_lambada
from multihop.eval.zero_shot.minimal_pairs import evaluate_pairs
from multihop.eval.zero_shot.perplexity import evaluate_perplexity
from multihop.eval.zero_shot.scoring import ZeroShotResult
from multihop.pretrain.models.common.model import Model

_PROTOCOLS: dict[str, Protocol] = {"lambada": "plain", "lambada-gpt2": "no stop words"}


def evaluate_set(
    name: str, model: Model, tokenizer: Tokenizer, special_ids: dict[str, int], content: Any, seq_len: int
) -> ZeroShotResult:
    """The result of a model on a set.

    Args:
        name: a key of `ZERO_SHOT_SETS`.
        content: what the reader of the set returned.
        seq_len: the tokens of a window over running text.
    """
    if isinstance(content, Text):
        return evaluate_perplexity(model, tokenizer, special_ids, content, seq_len)
    if name in _PROTOCOLS:
        return evaluate_lambada(model, tokenizer, special_ids, content, _PROTOCOLS[name])
    if name == "blimp":
        return evaluate_pairs(model, tokenizer, special_ids, content)
    return evaluate_choices(model, tokenizer, special_ids, content)
