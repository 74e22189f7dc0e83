"""A SentencePiece model is trained on sentences: the same bytes for the same sentences and settings."""

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import sentencepiece as spm

from data_prep.config import TokenizerConfig
from data_prep.tokenizers.memory import available_memory
from data_prep.tokenizers.sentence_piece import SCORE_STEP
from data_prep.tokenizers.special_pieces import TRAINED

# The trainer drops longer sentences without a word; text without stops has such, so they are cut.
_MAX_SENTENCE_CHARS = 2**14
_MAX_SENTENCE_BYTES = 4 * _MAX_SENTENCE_CHARS

# Bytes of memory while training, a little above what was measured (docs/tokenizers.md): how many at least, and how many
# for each byte of the sample.
_MEMORY = {"unigram": (100e6, 22.0), "bpe": (100e6, 5.0)}


def train(sentences: Iterable[str], config: TokenizerConfig, sample_bytes: int | None = None) -> bytes:
    """A SentencePiece model as the bytes of its .model file; no path or time stands in it.

    Scores of a unigram model are rounded to multiples of SCORE_STEP, which is below 1 % of a piece's probability.

    Args:
        sample_bytes: UTF-8 bytes of the sentences; given, it is refused to train when the memory will not do.

    Raises:
        ValueError: the sentences cannot fill, or do not fit into, `config.vocab_size` pieces, or the memory is too
            small.
    """
    if sample_bytes is not None:
        _check_memory(config, sample_bytes)
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=_cut(sentences),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            num_threads=config.threads,
            byte_fallback=config.byte_fallback,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            minloglevel=2,
            **_special_settings(config),
        )
    except RuntimeError as error:
        raise ValueError(_explain(str(error), config)) from error
    return _rounded(model.getvalue()) if config.kind == "unigram" else model.getvalue()


def training_memory(config: TokenizerConfig, sample_bytes: int) -> int:
    """Bytes of memory that training takes at its peak, fitted to measurements."""
    least, per_byte = _MEMORY[config.kind]
    return int(least + per_byte * sample_bytes)


def _check_memory(config: TokenizerConfig, sample_bytes: int) -> None:
    needed, available = training_memory(config, sample_bytes), available_memory()
    if needed > available:
        least, per_byte = _MEMORY[config.kind]
        fitting = int(max(available - least, 0) / per_byte / 1e6)
        raise ValueError(
            f"training a tokenizer on tokenizer.sample_mb={config.sample_mb:g} takes about {needed / 2**30:.1f} GiB of "
            f"memory, and {available / 2**30:.1f} GiB are free; "
            + (f"set it to {fitting} or less, or use a larger machine" if fitting else "use a larger machine")
        )


def _rounded(model: bytes) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    for piece in proto.pieces:
        piece.score = min(float(np.rint(piece.score / SCORE_STEP)) * SCORE_STEP, 0.0)
    return proto.SerializeToString(deterministic=True)


def _cut(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        for start in range(0, len(sentence), _MAX_SENTENCE_CHARS):
            yield sentence[start : start + _MAX_SENTENCE_CHARS]


def _special_settings(config: TokenizerConfig) -> dict[str, Any]:
    pieces = TRAINED[config.special_pieces]
    if config.special_pieces == "gpt2":
        return {
            "eos_id": 0, "eos_piece": pieces["end"], "unk_id": 1, "unk_piece": pieces["unk"],
            "bos_id": -1, "pad_id": -1,
        }  # fmt: skip
    return {
        "pad_id": 0, "pad_piece": pieces["pad"], "unk_id": 1, "unk_piece": pieces["unk"],
        "bos_id": 2, "bos_piece": pieces["cls"], "eos_id": 3, "eos_piece": pieces["sep"],
        "control_symbols": [pieces["mask"]],
    }  # fmt: skip


def _explain(error: str, config: TokenizerConfig) -> str:
    """SentencePiece's complaint as a sentence about the recipe."""
    given = f"tokenizer.vocab_size={config.vocab_size}"
    if most := re.search(r"value <= (\d+)", error):
        return f"{given} is more than the text can support; set it to {most[1]} or less, or add text"
    if least := re.search(r"required_chars\D*\d+ vs (\d+)", error):
        return f"{given} is too small for the characters of the text; set it to {least[1]} or more"
    return f"a tokenizer with {given} cannot be trained on this text: {error}"
