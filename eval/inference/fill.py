"""The tokens that a masked model predicts for mask tokens (Devlin et al. 2018, section 3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.tokenizer import encode_masked
from multihop.eval.inference.trained_model import TrainedModel
from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.packed_tokens import pack_sequences


@dataclass(frozen=True)
class Candidate:
    """A token for a mask."""

    token: str
    """The token as text, with a space before it if it begins a word."""
    id: int
    probability: float


Filled = list[list[Candidate]]
"""The candidates for each mask token of a text, the likeliest first."""


@torch.inference_mode()
def fill(trained: TrainedModel, texts: Sequence[str], candidates: int = 5) -> list[Filled]:
    """Return the likeliest tokens for each mask token of each text, all masks of a text at once.

    Args:
        texts: texts with the mask token as the model's tokenizer spells it, such as "The river [MASK] stone.".
        candidates: number of candidates for each mask token.

    Raises:
        UserError: the model is no masked one or lacks the head for masked tokens, or a text has no mask token or more
            tokens than the model has positions.
    """
    if trained.command != "fill-mask":
        raise UserError(
            f"{trained.path} is a {trained.family.display_name}, which fills no masks; use `multihop {trained.command}`"
        )
    trained.needs(trained.model.lm_head, "predicting masked tokens")
    encoded = [_encode(trained, text) for text in texts]
    ids = np.concatenate(encoded)
    at = torch.from_numpy(np.flatnonzero(ids == trained.special_ids["mask"])).to(trained.device)
    packed = packed_to_device(pack_sequences(encoded), trained.device)
    probabilities = trained.model.lm_head(trained.model.encode(packed, token_indices=at)).softmax(-1)
    known = probabilities[:, : trained.tokenizer.vocab_size]  # a published model may have rows without a token
    best = known.topk(min(candidates, known.shape[1]))
    rows = iter(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return [
        [_candidates(trained, *next(rows)) for _ in range(int((each == trained.special_ids["mask"]).sum()))]
        for each in encoded
    ]


def _candidates(trained: TrainedModel, ids: list[int], probabilities: list[float]) -> list[Candidate]:
    return [Candidate(trained.tokenizer.token_text(i), i, p) for i, p in zip(ids, probabilities, strict=True)]


def _encode(trained: TrainedModel, text: str) -> np.ndarray:
    mask, limit = trained.special_ids["mask"], trained.model.config.max_positions
    ids = trained.add_special_tokens(encode_masked(trained.tokenizer, mask, text))
    if mask not in ids:
        raise UserError(
            f"{text!r} has no mask token; write {trained.tokenizer.id_to_token(mask)} where a token is to be filled in"
        )
    if len(ids) > limit:
        raise UserError(
            f"{text[:40]!r}… has {len(ids)} tokens with its special tokens, but the model has max_positions={limit}; "
            "shorten it"
        )
    return np.array(ids, np.int64)
