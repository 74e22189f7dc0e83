"""LAMBADA (Paperno et al. 2016): the last word of a passage that people can only guess from all of it."""

from collections import defaultdict
from collections.abc import Sequence
from math import exp
from typing import Literal

import numpy as np

from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.tasks.detokenize import detokenize
from multihop.eval.zero_shot.scoring import (
    BATCH_TOKENS,
    Continuation,
    ZeroShotResult,
    accuracy_result,
    encode_continuations,
    encode_each,
    log_likelihoods,
)
from multihop.pretrain.models.layers.model import Model

LambadaVariant = Literal["plain", "no stop words"]
"""plain: the passage unchanged, any word may be predicted. no stop words: GPT-2's, the passage de-tokenized and with
straight quotes, and no stop word may be predicted: few of them end a sentence (Radford et al. 2019, section 3.3)."""

_STRAIGHT_QUOTES = str.maketrans("“”\u2018\u2019", "\"\"''")

# GPT-2's list was not published. These are English words of closed classes.
_STOP_WORDS = (
    "a an the this that these those all any both each either every few many more most much neither no none other "
    "several some such i me my myself we us our ours ourselves you your yours yourself yourselves he him his "
    "himself she her hers herself it its itself they them their theirs themselves one who whom whose which what "
    "about above across after against along among around as at before behind below beneath beside between beyond "
    "by down during except for from in inside into of off on onto out outside over since through throughout to "
    "toward towards under until up upon with within without and but or nor so yet because although though if "
    "unless while whereas than whether when where why how am is are was were be been being have has had having do "
    "does did doing can could may might must shall should will would not too very just only also then ever never "
    "even still"
)


def evaluate_lambada(
    model: Model,
    tokenizer: Tokenizer,
    special_ids: dict[str, int],
    passages: Sequence[str],
    variant: LambadaVariant = "plain",
    batch_tokens: int = BATCH_TOKENS,
) -> ZeroShotResult:
    """Return the fraction of passages whose last word greedy decoding produces, and the perplexity of the last words.

    All tokens of the word must be those of the highest probability. Without stop words a token is passed over where it
    would complete a stop word, so that a word which begins with such a token is never predicted.

    Args:
        passages: at least one passage, each of several words.

    Returns:
        The accuracy; other metrics: the accuracy with the variant's name, and the perplexity per last word, to which
        the filter is not applied.

    Raises:
        UserError: the model is not causal.
    """
    endings = _stop_words(tokenizer) if variant == "no stop words" else {}
    words = []
    for passage in passages:
        if variant == "no stop words":
            passage = detokenize(passage.translate(_STRAIGHT_QUOTES), "penn")
        *context, last = passage.rsplit(maxsplit=1)
        [word] = encode_continuations(tokenizer, special_ids, "".join(context), [f" {last}"])
        excluded = [endings.get(tuple(word.ids[:at]), ()) for at in range(len(word.ids))]
        words.append(Continuation(word.context, word.ids, excluded))
    scores = log_likelihoods(model, words, batch_tokens)
    correct = np.array([each.greedy for each in scores])
    mean = sum(each.value for each in scores) / len(scores)
    return accuracy_result(
        correct, {f"accuracy, {variant} variant": float(correct.mean()), "perplexity per last word": exp(-mean)}
    )


def _stop_words(tokenizer: Tokenizer) -> dict[tuple[int, ...], set[int]]:
    """Return the tokens that would complete a stop word, by the tokens that it begins with."""
    blank = " " if tokenizer.kind == "byte-bpe" else ""
    endings: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for ids in encode_each(tokenizer, [blank + word for word in _STOP_WORDS.split()]):
        endings[tuple(ids[:-1])].add(ids[-1])
    return dict(endings)
