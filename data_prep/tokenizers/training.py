"""Trains a SentencePiece model; the same sentences and settings give the same bytes."""

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import sentencepiece as spm

from multihop.common.errors import UserError
from multihop.common.machine import available_memory
from multihop.data_prep.config import LEAST_VOCABULARY, TokenizerConfig
from multihop.data_prep.tokenizers.sentence_piece import SCORE_STEP
from multihop.data_prep.tokenizers.special_tokens import SPECIAL_TOKENS

# The trainer silently drops longer sentences, which text without full stops has, so they are cut.
_MAX_SENTENCE_CHARS = 2**14
_MAX_SENTENCE_BYTES = 4 * _MAX_SENTENCE_CHARS

# Peak memory of training in bytes, a little above what was measured (docs/tokenizers.md): a constant, and per byte of
# the sample.
_MEMORY = {"unigram": (100e6, 22.0), "bpe": (100e6, 5.0), "char": (100e6, 5.0)}


def train(sentences: Iterable[str], config: TokenizerConfig, sample_bytes: int | None = None) -> bytes:
    """Train a SentencePiece model; returns the bytes of its .model file, which hold no path or time.

    Scores of a unigram model are rounded to multiples of SCORE_STEP, which changes a token's probability by less than
    1 %.

    Args:
        sample_bytes: UTF-8 bytes of the sentences; if given, available memory is checked before training.

    Raises:
        UserError: `config.vocab_size` is too large for the sentences or too small for their characters, or there is
            too little memory.
    """
    if sample_bytes is not None:
        _check_memory(config, sample_bytes)
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=_cut_long(sentences),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            num_threads=config.threads,
            byte_fallback=config.byte_fallback,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            minloglevel=2,
            **_special_settings(config),
            **_further_settings(config),
        )
    except RuntimeError as error:
        raise UserError(_explain(str(error), config)) from error
    return _round_scores(model.getvalue()) if config.kind == "unigram" else model.getvalue()


def training_memory(config: TokenizerConfig, sample_bytes: int) -> int:
    """Peak memory of training in bytes, fitted to measurements."""
    least, per_byte = _MEMORY[config.kind]
    return int(least + per_byte * sample_bytes)


def _check_memory(config: TokenizerConfig, sample_bytes: int) -> None:
    needed, available = training_memory(config, sample_bytes), available_memory()
    if needed > available:
        least, per_byte = _MEMORY[config.kind]
        max_sample_mb = int(max(available - least, 0) / per_byte / 1e6)
        raise UserError(
            f"training a tokenizer on tokenizer.sample_mb={config.sample_mb:g} needs about {needed / 2**30:.1f} GiB of "
            f"memory, {available / 2**30:.1f} GiB are free; "
            + (
                f"set it to {max_sample_mb} or less, or use a larger machine"
                if max_sample_mb
                else "use a larger machine"
            )
        )


def _round_scores(model: bytes) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    for piece in proto.pieces:
        piece.score = min(float(np.rint(piece.score / SCORE_STEP)) * SCORE_STEP, 0.0)
    return proto.SerializeToString(deterministic=True)


def _cut_long(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        for start in range(0, len(sentence), _MAX_SENTENCE_CHARS):
            yield sentence[start : start + _MAX_SENTENCE_CHARS]


def _special_settings(config: TokenizerConfig) -> dict[str, Any]:
    tokens = SPECIAL_TOKENS[config.special_tokens]
    if config.special_tokens == "gpt2":
        return {
            "eos_id": 0, "eos_piece": tokens["end"], "unk_id": 1, "unk_piece": tokens["unk"],
            "bos_id": -1, "pad_id": -1,
        }  # fmt: skip
    if config.special_tokens == "t5":
        return {
            "pad_id": 0, "pad_piece": tokens["pad"], "eos_id": 1, "eos_piece": tokens["end"],
            "unk_id": 2, "unk_piece": tokens["unk"], "bos_id": -1,
        }  # fmt: skip
    return {
        "pad_id": 0, "pad_piece": tokens["pad"], "unk_id": 1, "unk_piece": tokens["unk"],
        "bos_id": 2, "bos_piece": tokens["cls"], "eos_id": 3, "eos_piece": tokens["sep"],
        "control_symbols": [tokens["mask"]],
    }  # fmt: skip


def _further_settings(config: TokenizerConfig) -> dict[str, Any]:
    """Settings that are given only where they differ from the trainer's defaults, which a model's file then lacks.

    Raises:
        UserError: an added token is a special token.
    """
    special = SPECIAL_TOKENS[config.special_tokens].values()
    if known := [token for token in config.added_tokens if token in special]:
        raise UserError(
            f"tokenizer.added_tokens has {known[0]!r}, which is a special token of tokenizer.special_tokens="
            f"{config.special_tokens} already; remove it from the list"
        )
    settings: dict[str, Any] = {}
    if config.added_tokens:
        settings["user_defined_symbols"] = config.added_tokens
    if config.kind == "char":
        settings["hard_vocab_limit"] = False  # texts may have fewer characters
    return settings


def _explain(error: str, config: TokenizerConfig) -> str:
    """Explain SentencePiece's error message in terms of the recipe."""
    setting = f"tokenizer.vocab_size={config.vocab_size}"
    if most := re.search(r"value <= (\d+)", error):
        fewer = f"set it to {most[1]} or less, or " if int(most[1]) >= LEAST_VOCABULARY else ""
        return f"{setting} is more than the text can support; {fewer}add text"
    if least := re.search(r"required_chars\D*\d+ vs (\d+)", error):
        return f"{setting} is too small for the characters of the text; set it to {least[1]} or more"
    return f"a tokenizer with {setting} cannot be trained on this text: {error}"
