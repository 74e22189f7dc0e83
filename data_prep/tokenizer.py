"""The SentencePiece model: trained on sentences, the same bytes for the same sentences and settings."""

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece as spm

from data_prep.config import TokenizerConfig
from data_prep.manifest import TokenizerInfo, pack_flags

BERT_PIECES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
GPT2_PIECES = {"end": "<|endoftext|>", "unk": "<unk>"}

# The trainer drops longer sentences without a word; text without stops has such, so they are cut.
_MAX_SENTENCE_CHARS = 2**14
_MAX_SENTENCE_BYTES = 4 * _MAX_SENTENCE_CHARS


def train(sentences: Iterable[str], config: TokenizerConfig) -> bytes:
    """A SentencePiece model as the bytes of its .model file; no path or time stands in it.

    Raises ValueError when the sentences cannot fill, or do not fit into, `config.vocab_size` pieces.
    """
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=_cut(sentences),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            num_threads=config.threads,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            minloglevel=2,
            **_special_settings(config),
        )
    except RuntimeError as error:
        raise ValueError(_explain(str(error), config)) from error
    return model.getvalue()


def load(path: str | Path) -> spm.SentencePieceProcessor:
    """The model at `path`. Raises ValueError when it is not one."""
    try:
        return spm.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} is not a SentencePiece model ({error}); run `multihop prep` again") from None


def describe(model: bytes, sha256: str, config: TokenizerConfig) -> TokenizerInfo:
    """What training must know of the model without loading it."""
    processor = spm.SentencePieceProcessor(model_proto=model)
    pieces = BERT_PIECES if config.special_pieces == "bert" else GPT2_PIECES
    special_ids = {name: processor.piece_to_id(piece) for name, piece in pieces.items()}
    assert list(special_ids.values()) == list(range(len(pieces))), special_ids
    starts = [processor.id_to_piece(i).startswith("▁") for i in range(processor.vocab_size())]
    return TokenizerInfo(
        kind=config.kind,
        vocab_size=processor.vocab_size(),
        sha256=sha256,
        special_ids=special_ids,
        word_start=pack_flags(np.array(starts)),
    )


def _cut(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        for start in range(0, len(sentence), _MAX_SENTENCE_CHARS):
            yield sentence[start : start + _MAX_SENTENCE_CHARS]


def _special_settings(config: TokenizerConfig) -> dict[str, Any]:
    if config.special_pieces == "gpt2":
        return {
            "eos_id": 0, "eos_piece": GPT2_PIECES["end"], "unk_id": 1, "unk_piece": GPT2_PIECES["unk"],
            "bos_id": -1, "pad_id": -1,
        }  # fmt: skip
    return {
        "pad_id": 0, "pad_piece": BERT_PIECES["pad"], "unk_id": 1, "unk_piece": BERT_PIECES["unk"],
        "bos_id": 2, "bos_piece": BERT_PIECES["cls"], "eos_id": 3, "eos_piece": BERT_PIECES["sep"],
        "control_symbols": [BERT_PIECES["mask"]],
    }  # fmt: skip


def _explain(error: str, config: TokenizerConfig) -> str:
    """SentencePiece's complaint as a sentence about the recipe."""
    given = f"tokenizer.vocab_size={config.vocab_size}"
    if most := re.search(r"value <= (\d+)", error):
        return f"{given} is more than the text can support; set it to {most[1]} or less, or add text"
    if least := re.search(r"required_chars\D*\d+ vs (\d+)", error):
        return f"{given} is too small for the characters of the text; set it to {least[1]} or more"
    return f"a tokenizer with {given} cannot be trained on this text: {error}"
