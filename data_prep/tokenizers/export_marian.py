"""Export the tokenizers of pairs as the files that transformers' MarianTokenizer reads; the ids are the same."""

import json
from pathlib import Path
from typing import Any

from multihop.common.errors import UserError
from multihop.common.files import write_atomically
from multihop.data_prep.tokenizers.info import TokenizerInfo

_ROLES = {"pad": "pad_token", "end": "eos_token", "unk": "unk_token"}
"""Names of special tokens in transformers, by ours."""


def export_marian_tokenizers(
    source: tuple[Path, TokenizerInfo], target: tuple[Path, TokenizerInfo] | None, max_positions: int, out: Path
) -> None:
    """Write source.spm, target.spm, vocab.json, with two vocabularies target_vocab.json, and tokenizer_config.json to
    `out`.

    A source becomes its tokens and an end token, as in training.

    Args:
        source: the file of the source's tokenizer, and what describes it.
        target: those of the target; None: both sides have one vocabulary.
        max_positions: the model's maximum sequence length, in tokens.

    Raises:
        UserError: a tokenizer is no SentencePiece model, lacks a padding, end or unknown token, or has them under
            other ids than that of the other side.
    """
    sides = [source] if target is None else [source, target]
    vocabularies = [_vocabulary(*side) for side in sides]
    specials = [
        {vocabulary[info.special_ids[role]]: info.special_ids[role] for role in _ROLES}
        for vocabulary, (_, info) in zip(vocabularies, sides, strict=True)
    ]
    if specials[0] != specials[-1]:
        raise UserError(
            f"the vocabularies of source and target have special tokens under other ids, {specials[0]} and "
            f"{specials[-1]}, but MarianTokenizer has one set of them; train both with tokenizer.special_tokens=t5"
        )
    config = {
        "tokenizer_class": "MarianTokenizer",
        "model_max_length": max_positions,
        "separate_vocabs": target is not None,
        "clean_up_tokenization_spaces": False,
        **dict(zip(_ROLES.values(), specials[0], strict=True)),
    }
    write_atomically(out / "source.spm", sides[0][0].read_bytes())
    write_atomically(out / "target.spm", sides[-1][0].read_bytes())
    for name, vocabulary in zip(("vocab.json", "target_vocab.json"), vocabularies, strict=False):
        write_atomically(out / name, _json({token: number for number, token in enumerate(vocabulary)}))
    write_atomically(out / "tokenizer_config.json", _json(config))


def _vocabulary(model: Path, info: TokenizerInfo) -> list[str]:
    """Return the tokens of a SentencePiece file in the order of their ids."""
    from sentencepiece import sentencepiece_model_pb2

    content = model.read_bytes()
    if content.startswith(b"{"):
        raise UserError(
            f"MarianTokenizer reads SentencePiece models, but {model} is not one; train one with "
            "tokenizer.kind=unigram or bpe"
        )
    if missing := sorted(set(_ROLES) - set(info.special_ids)):
        raise UserError(f"{model} lacks the special tokens {missing}; train it with tokenizer.special_tokens=t5")
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(content)  # type: ignore[attr-defined]
    return [piece.piece for piece in proto.pieces]


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
