"""Continues texts token by token with a causal model and a key-value cache; each token is sampled or the likeliest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from multihop.common.counter_rng import key_of, random_bits, uniform
from multihop.common.errors import UserError
from multihop.data_prep.rules.pairs import clean_side
from multihop.eval.inference.trained_model import TrainedModel
from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.objectives.completion import prompt_tokens
from multihop.pretrain.packed_tokens import PackedTokens, pack_sequences

MAX_TOKENS = 64
_MIN_TEMPERATURE = 1e-30
"""Logits divided by less overflow in fp32."""


@dataclass(frozen=True)
class Sampling:
    """Settings of the draw of a token. The draws of a text depend on the seed and on its number among the prompts."""

    temperature: float = 1.0
    """Logits are divided by it."""
    top_k: int | None = None
    """Only the k likeliest tokens (Fan et al. 2018, section 5.4); None: all."""
    top_p: float | None = None
    """Only the likeliest tokens that together have this probability (Holtzman et al. 2020, section 3.1), after `top_k`;
    None: all."""
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.temperature >= _MIN_TEMPERATURE:
            raise UserError(
                f"temperature={self.temperature} is less than {_MIN_TEMPERATURE:g}; omit it for greedy decoding"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} is less than 1; give the number of tokens to choose among")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is not a probability above 0; give one up to 1")


def sample(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Return one token for each row of logits.

    Args:
        logits: (S, V).
        uniform: (S,), from [0, 1): position in the probability mass, the likeliest tokens first.

    Returns:
        int64 (S,).
    """
    k = logits.shape[1] if sampling.top_k is None else min(sampling.top_k, logits.shape[1])
    best = (logits.float() / sampling.temperature).topk(k)
    probabilities = best.values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    if sampling.top_p is not None:
        # The first token stays, whatever its probability.
        probabilities = probabilities.where(before < sampling.top_p, 0.0)
    upto = probabilities.cumsum(-1)
    mass = upto[:, -1:] * uniform[:, None].to(upto)
    # Rounding must not choose behind the last token that is left.
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    rank = torch.minimum((upto <= mass).sum(-1, keepdim=True), last)
    return best.indices.gather(1, rank)[:, 0]


def generate(
    trained: TrainedModel, prompts: Sequence[str], max_tokens: int = MAX_TOKENS, sampling: Sampling | None = None
) -> list[str]:
    """Return the continuation of each prompt, as `generate_tokens` and `continuation` make it."""
    encoded = [encode_prompt(trained, prompt) for prompt in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    for tokens in generate_tokens(trained, encoded, max_tokens, sampling):
        for ids, token in zip(made, tokens, strict=True):
            ids += [] if token is None else [token]
    return [continuation(trained, prompt, ids) for prompt, ids in zip(encoded, made, strict=True)]


def encode_prompt(trained: TrainedModel, prompt: str) -> list[int]:
    """Return the tokens of a prompt; the end token if it has none, as before a document.

    For a model that completes, the prompt is a source.

    Raises:
        UserError: the model is not causal, or has no position left for a token after the prompt.
    """
    if not trained.family.causal:
        raise UserError(
            f"{trained.path} is a {trained.family.display_name}, which does not continue texts; use `multihop "
            f"{trained.command}`{' with a mask token in the text' if trained.command == 'fill-mask' else ''}"
        )
    ids: list[int] = trained.tokenizer.encode([clean_side(prompt) if trained.completes else prompt])[0].tolist()
    if trained.completes:
        ids = prompt_tokens(ids, trained.special_ids["end"])
    ids = ids or [trained.special_ids["end"]]
    limit = trained.model.config.max_positions
    if len(ids) >= limit:
        raise UserError(
            f"the prompt {prompt[:40]!r}… has {len(ids)} tokens, but the model has max_positions={limit}, which also "
            "have to hold what is generated; shorten it"
        )
    return ids


def continuation(trained: TrainedModel, prompt: Sequence[int], made: Sequence[int]) -> str:
    """Return the text that these tokens add to the prompt's."""
    return trained.tokenizer.decode([*prompt, *made])[len(trained.tokenizer.decode(prompt)) :]


@torch.inference_mode()
def generate_tokens(
    trained: TrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling | None = None
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, again and again until all have ended: at the end token, at `max_tokens` or
    when the model has no position left.

    Args:
        prompts: tokens of a causal model's prompts, of any lengths, each at least one and less than its positions.
        sampling: None: always the likeliest token.

    Yields:
        For each prompt its next token; None once it has ended.
    """
    trained.needs(trained.model.lm_head, "predicting tokens")
    model, end, device = trained.model, trained.special_ids["end"], trained.device
    lengths = [len(prompt) for prompt in prompts]
    left = [min(max_tokens, model.config.max_positions - length) for length in lengths]
    cache = model.new_cache(lengths, max(left), device)
    packed = packed_to_device(pack_sequences(prompts), device)
    hidden = model.encode(packed, token_indices=packed.cu_seqlens[1:] - 1, cache=cache)
    one_each = torch.arange(len(prompts) + 1, device=device)
    positions = torch.tensor(lengths, device=device)
    keys = np.array(
        [key_of("generate", sampling.seed, row) for row in range(len(prompts))] if sampling else [], np.uint64
    )
    for step in count():
        with trained.packed_weights:
            logits = model.lm_head(hidden)[:, : trained.tokenizer.vocab_size]
        if sampling is None:
            chosen = logits.argmax(-1)
        else:
            draws = uniform(random_bits(keys, np.array([step], np.uint64)))
            chosen = sample(logits, sampling, torch.from_numpy(draws).to(device))
        tokens = [
            None if token == end or not each else token for token, each in zip(chosen.tolist(), left, strict=True)
        ]
        left = [0 if token is None else each - 1 for token, each in zip(tokens, left, strict=True)]
        yield tokens
        if not any(left):
            return
        cache.advance()
        # A text that has ended is computed along, at a position that the model has.
        at = (positions + step).clamp(max=model.config.max_positions - 1)
        with trained.packed_weights:
            hidden = model.encode(PackedTokens(chosen, at, one_each, max_seqlen=1), cache=cache)


def stream(
    trained: TrainedModel, prompt: str, max_tokens: int = MAX_TOKENS, sampling: Sampling | None = None
) -> Iterator[str]:
    """Yield the continuation of a prompt in parts, each as soon as its characters are whole; together `generate`'s."""
    ids, made, shown = encode_prompt(trained, prompt), list[int](), ""
    for (token,) in generate_tokens(trained, [ids], max_tokens, sampling):
        made += [] if token is None else [token]
        text = continuation(trained, ids, made)
        # Some of the bytes of its last character may be missing.
        if token is None or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield continuation(trained, ids, made)[len(shown) :]
