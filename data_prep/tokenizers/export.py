"""Export a tokenizer as the files that transformers' AutoTokenizer reads; the ids are the same.

A tokenizer.json only gets a post-processor, which adds special tokens around texts, and a mask token that replaces a
word and the space before it. A SentencePiece model is converted, with care for four of its properties:

- Its normalization table is applied to the longest match from left to right. The library's `Precompiled` applies it to
  a whole grapheme, drops what follows the first match in it, and leaves graphemes of six and more bytes unchanged. So
  graphemes are split by a control character that the table removes, each character is normalized alone, and NFC
  composes what the table would have composed.
- A space is prepended to the text and belongs to its first token; trailing spaces are removed. No space is prepended
  after a special token: in "[MASK]ing" and "[MASK]." the rest continues the masked word.
- BPE joins the pair whose result was learned first, however that is split: each split is a merge of its own.
- The token of a byte, such as <0x41>, represents a byte and never these letters: in unigram its score is very low.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihop.common.errors import UserError
from multihop.common.files import write_atomically
from multihop.data_prep.tokenizers.info import TokenizerInfo

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EXPORTED_MODEL = "sentencepiece.model"
"""Name of the exported SentencePiece model. No published model has it: files of other names may need preprocessing that
they do not describe."""
_BLANK = "\u2581"
# Characters that continue a grapheme: marks, joiners, and letters that count as marks.
_BREAKS = r"(?!\A)(?=[\p{M}\x{200C}\x{200D}\x{FF9E}\x{FF9F}\x{0E33}\x{0EB3}])"
_BREAK = "\x01"
# Characters that the table removes. At the beginning they break the library's offsets; a space there has no effect.
_REMOVED = r"\A[\x{1}-\x{8}\x{B}\x{E}-\x{1F}\x{7F}\x{8F}\x{9F}]+"
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_UNIGRAM = 1
_IMPROBABLE = -1e6

# Names of special tokens in transformers, by ours.
_ROLES = {
    "pad": ["pad_token"], "unk": ["unk_token"], "cls": ["cls_token"], "sep": ["sep_token"], "mask": ["mask_token"],
    "end": ["bos_token", "eos_token"],
}  # fmt: skip


def export_tokenizer(
    model: Path, info: TokenizerInfo, has_token_types: bool, max_positions: int, out: Path, cls_last: bool = False
) -> None:
    """Write OUT/tokenizer.json and OUT/tokenizer_config.json, and a SentencePiece model also as it is, for ourselves:
    OUT/sentencepiece.model.

    With the special tokens pad, unk, cls, sep and mask a text becomes `[CLS] text [SEP]` and a pair
    `[CLS] text [SEP] other [SEP]`, or with `cls_last` `text [SEP] [CLS]` and `text [SEP] other [SEP] [CLS]`; with end
    and unk nothing is added.

    Args:
        model: the file that `info` describes.
        has_token_types: whether the second text of a pair has token type 1; False: the model has no token types.
        max_positions: the model's maximum sequence length, in tokens.
        cls_last: whether [CLS] comes last, with token type 2.

    Raises:
        UserError: the model was not trained by `multihop prep` and splits or normalizes differently.
    """
    content = model.read_bytes()
    tokenizer = build_tokenizer(content, info.special_ids, has_token_types, cls_last)
    tokens = {name: tokenizer.id_to_token(number) for name, number in info.special_ids.items()}
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if has_token_types else ["input_ids", "attention_mask"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "model_input_names": inputs,
        "clean_up_tokenization_spaces": False,
        **{role: token for name, token in tokens.items() for role in _ROLES[name]},
    }
    write_atomically(out / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_atomically(out / "tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode())
    if not content.startswith(b"{"):
        write_atomically(out / EXPORTED_MODEL, content)


def build_tokenizer(
    model: bytes, special_ids: dict[str, int], has_token_types: bool, cls_last: bool = False
) -> "Tokenizer":
    """Build a library tokenizer from the bytes of a data set's tokenizer."""
    from tokenizers import Tokenizer, processors

    if model.startswith(b"{"):
        tokenizer = Tokenizer.from_str(json.dumps(_with_stripping_mask(json.loads(model), special_ids)))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    else:
        tokenizer = _from_sentencepiece(model, special_ids)
    names = {name: tokenizer.id_to_token(number) for name, number in special_ids.items()}
    if "cls" in special_ids:
        cls, sep = names["cls"], names["sep"]
        before, after = ("", f" {cls}:2") if cls_last else (f"{cls}:0 ", "")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A:0 {sep}:0{after}",
            pair=f"{before}$A:0 {sep}:0 $B:{int(has_token_types)} {sep}:{int(has_token_types)}{after}",
            special_tokens=[(cls, special_ids["cls"]), (sep, special_ids["sep"])],
        )
    return tokenizer


def _with_stripping_mask(tree: dict[str, Any], special_ids: dict[str, int]) -> dict[str, Any]:
    """Let the mask token take the space before it, as RoBERTa's does: a byte-level token of a word has that space."""
    for token in tree.get("added_tokens", []):
        token["lstrip"] |= token["id"] == special_ids.get("mask")
    return tree


def _from_sentencepiece(model: bytes, special_ids: dict[str, int]) -> "Tokenizer":
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    _check_known(proto)
    tokenizer = Tokenizer(_unigram(proto) if proto.trainer_spec.model_type == _UNIGRAM else _bpe(proto))
    tokenizer.normalizer = _normalizer(proto.normalizer_spec.precompiled_charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_BLANK, prepend_scheme="first")
    blanks = decoders.Metaspace(replacement=_BLANK, prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([blanks, decoders.ByteFallback()]) if _has_bytes(proto) else blanks
    special = [proto.pieces[number].piece for number in special_ids.values()]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _check_known(proto: Any) -> None:
    normal, trained = proto.normalizer_spec, proto.trainer_spec
    as_prepared = (
        normal.name == "nmt_nfkc"
        and normal.add_dummy_prefix
        and normal.remove_extra_whitespaces
        and normal.escape_whitespaces
        and trained.split_by_whitespace
        and not trained.treat_whitespace_as_suffix
        and {piece.type for piece in proto.pieces} <= {_NORMAL, _UNKNOWN, _CONTROL, _BYTE}
    )
    if not as_prepared:
        raise UserError(
            "the SentencePiece model was not trained by `multihop prep` (its normalization, its treatment of spaces or "
            "its kinds of pieces differ); export a run whose tokenizer was"
        )


def _has_bytes(proto: Any) -> bool:
    return any(piece.type == _BYTE for piece in proto.pieces)


def _unigram(proto: Any) -> Any:
    from tokenizers.models import Unigram

    scored = [(piece.piece, _IMPROBABLE if piece.type == _BYTE else piece.score) for piece in proto.pieces]
    return Unigram(scored, proto.trainer_spec.unk_id, _has_bytes(proto))


def _bpe(proto: Any) -> Any:
    from tokenizers.models import BPE

    normal = {piece.piece for piece in proto.pieces if piece.type == _NORMAL}
    learned = sorted((piece for piece in proto.pieces if piece.type == _NORMAL), key=lambda piece: -piece.score)
    merges = [
        (piece.piece[:cut], piece.piece[cut:])
        for piece in learned
        for cut in range(1, len(piece.piece))
        if piece.piece[:cut] in normal and piece.piece[cut:] in normal
    ]
    vocabulary = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    return BPE(
        vocabulary, merges, unk_token=proto.trainer_spec.unk_piece, fuse_unk=True, byte_fallback=_has_bytes(proto)
    )


def _normalizer(table: bytes) -> Any:
    from tokenizers import Regex
    from tokenizers.normalizers import NFC, Precompiled, Replace, Sequence

    return Sequence(
        [
            Replace(Regex(_REMOVED), " "),
            Replace(Regex(_BREAKS), _BREAK),
            Precompiled(table),
            NFC(),
            Replace(Regex(" {2,}"), " "),
            Replace(Regex(r" \z"), ""),
        ]
    )
