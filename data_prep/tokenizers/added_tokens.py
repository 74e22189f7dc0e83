"""Adds whole tokens to an existing vocabulary, such as the relations of triples.

A text that has a token's characters gets that token, whatever is beside them. The added tokens have the last ids, and
no other id changes its meaning.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.info import AddedTokens
from multihop.data_prep.tokenizers.tokenizer import parse

_USER_DEFINED = 4
"""The type of a SentencePiece piece that is matched in texts before anything else."""


def add_tokens(content: bytes, tokens: Sequence[str], whose: str) -> tuple[bytes, AddedTokens]:
    """Add tokens to a tokenizer.

    Args:
        content: what `existing.import_tokenizer` returned.
        whose: the path of the tokenizer, for messages.

    Returns:
        The tokenizer's file with the tokens, and their description.

    Raises:
        UserError: a token is in the vocabulary already.
    """
    tokenizer = parse(content)
    vocabulary = {tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)}
    if known := [token for token in tokens if token in vocabulary]:
        raise UserError(
            f"tokenizer.added_tokens has {known[0]!r}, which is in the vocabulary of {whose} already; remove it from "
            "the list, or choose another spelling"
        )
    parts = [tokenizer.encode_continuation(token) for token in tokens]
    if missing := [token for token, ids in zip(tokens, parts, strict=True) if not ids]:
        raise UserError(
            f"tokenizer.added_tokens has {missing[0]!r}, for which the tokenizer of {whose} has no token, not even an "
            "unknown one, so that it has no initial embedding; choose another spelling"
        )
    added = AddedTokens(
        base_sha256=hashlib.sha256(content).hexdigest(),
        parts=[[int(i) for i in ids] for ids in parts],
        tokens_before=0,
        tokens_after=0,
    )
    add = _to_json if content.startswith(b"{") else _to_sentencepiece
    return add(content, tokens, tokenizer.vocab_size), added


def _to_json(content: bytes, tokens: Sequence[str], vocab_size: int) -> bytes:
    tree: dict[str, Any] = json.loads(content)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    new = [{"id": vocab_size + number, "content": token, **flags} for number, token in enumerate(tokens)]
    return (json.dumps({**tree, "added_tokens": [*tree["added_tokens"], *new]}, ensure_ascii=False) + "\n").encode()


def _to_sentencepiece(content: bytes, tokens: Sequence[str], vocab_size: int) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(content)  # type: ignore[attr-defined]
    for token in tokens:
        proto.pieces.add(piece=token, score=0.0, type=_USER_DEFINED)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    proto.DiscardUnknownFields()  # such as a self-test of the former tokens
    return bytes(proto.SerializeToString(deterministic=True))
