"""Imports existing tokenizers: converts their files to the one file that a data set keeps.

A SentencePiece model is copied. A BERT vocab.txt, and GPT-2's vocab.json with its merges.txt, become a tokenizer.json,
which holds everything that decides the tokens.
"""

import json
import logging
from collections.abc import Set
from io import TextIOWrapper
from pathlib import Path

from multihop.common.errors import UserError
from multihop.common.files import open_regular, read_json_object
from multihop.data_prep.tokenizers.export import EXPORTED_MODEL
from multihop.data_prep.tokenizers.tokenizer import describe, parse
from multihop.data_prep.tokenizers.tokenizer_json import byte_bpe_json, wordpiece_json

_FORMATS = (
    "a SentencePiece .model, a BERT vocab.txt, a directory with GPT-2's vocab.json and merges.txt, or a tokenizer.json"
)
HUGGINGFACE_FILES = (EXPORTED_MODEL, "tokenizer.json", "spiece.model", "vocab.txt", "vocab.json")
"""Files of a tokenizer in a Hugging Face model's directory; the first one that exists is used."""
_PROBE = "The QUICK brown fox, naïve cafe\u0301s; 3.14 (x_1)  \uff21\uff22 \ufb01ne 漢字かな don't\n\tit's"
"""A text that two tokenizers of the same tokens usually encode differently if they normalize or split differently."""
log = logging.getLogger("multihop")


def import_tokenizer(path: str | Path, lowercase: bool = True, pairs: bool = False) -> bytes:
    """Convert the tokenizer at `path` to the bytes that `tokenizer.parse` reads; equal files give equal bytes.

    Args:
        path: a .model, a vocab.txt (or another .txt with one token per line), a tokenizer.json, a directory with
            vocab.json and merges.txt, or one of these two.
        lowercase: whether a vocab.txt is of an uncased model.
        pairs: whether it is for pairs, which need end, and pad if an encoder reads the source.

    Raises:
        UserError: the file does not exist, is not what its name says, or lacks special tokens.
    """
    path = Path(path)
    try:
        content = _convert(path, lowercase)
        describe(content, "", pairs)
    except FileNotFoundError as error:
        raise UserError(f"tokenizer.path={path}: {error.filename} does not exist; give {_FORMATS}") from None
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"tokenizer.path={path} cannot be used: {error}") from None
    return content


def find_huggingface_tokenizer(folder: Path) -> Path | None:
    """Return the file of the tokenizer of a Hugging Face model; None if there is none.

    Raises:
        UserError: it is of a model that changes texts before the tokenizer sees them.
    """
    tokenizer = next((folder / name for name in HUGGINGFACE_FILES if (folder / name).exists()), None)
    if tokenizer is not None and tokenizer.name == "spiece.model" and _lowercases(tokenizer):
        raise UserError(
            f"{folder}: spiece.model is of a model that lower-cases texts and removes accents before "
            "SentencePiece sees them (do_lower_case), which is not supported; use a cased model"
        )
    return tokenizer


def _lowercases(tokenizer: Path) -> bool:
    """Return whether transformers lower-cases texts before this tokenizer: it does unless tokenizer_config.json says
    no."""
    config = tokenizer.with_name("tokenizer_config.json")
    return not config.exists() or bool(
        read_json_object(config, advice="copy the model again").get("do_lower_case", True)
    )


def import_huggingface_tokenizer(path: Path, pairs: bool = False) -> bytes:
    """Return the bytes of `import_tokenizer` for a file of a Hugging Face model's directory.

    Raises:
        UserError: As for `import_tokenizer`.
    """
    return import_tokenizer(path, path.suffix != ".txt" or _lowercases(path), pairs)


def check_same_tokenizer(path: str | Path, lowercase: bool, model: Path) -> None:
    """Refuse a tokenizer that is not that of a Hugging Face model, whose weights are for the model's own ids.

    A model without a tokenizer, or with one of a kind that is not read, is not checked.

    Args:
        path, lowercase: as in `import_tokenizer`.
        model: the model's directory.

    Raises:
        UserError: the tokenizers differ.
    """
    ours = parse(import_tokenizer(path, lowercase))
    try:
        of_model = find_huggingface_tokenizer(model)
        theirs = None if of_model is None else parse(import_huggingface_tokenizer(of_model))
    except UserError as error:
        log.warning("the tokenizer of %s is not compared with tokenizer.path: %s", model, error)
        return
    if theirs is None:
        return
    assert of_model is not None
    begin = f"tokenizer.path={path} is not the tokenizer of model.init_from={model}: "
    instead = f"the same ids would mean other tokens; set tokenizer.path={of_model}"
    if of_model.suffix == ".txt":
        instead += ", and tokenizer.lowercase as do_lower_case in tokenizer_config.json"
    if theirs.vocab_size != ours.vocab_size:
        raise UserError(
            f"{begin}it has {ours.vocab_size:,} tokens, but the model's has {theirs.vocab_size:,}; {instead}; "
            "tokenizer.added_tokens adds tokens, and tokenizer.add_words words of your documents"
        )
    for i in range(ours.vocab_size):
        if theirs.id_to_token(i) != ours.id_to_token(i):
            raise UserError(
                f"{begin}token {i} is {ours.id_to_token(i)!r}, but {theirs.id_to_token(i)!r} in the model's; {instead}"
            )
    if theirs.encode([_PROBE])[0].tolist() != ours.encode([_PROBE])[0].tolist():
        raise UserError(
            f"{begin}it has the same tokens but encodes {_PROBE!r} otherwise, for example because only one of the two "
            f"lower-cases; {instead}"
        )


def has_matched_tokens(content: bytes) -> bool:
    """Return whether a tokenizer has added tokens that are matched in texts: those that are not special.

    Args:
        content: what `import_tokenizer` returned.
    """
    if not content.startswith(b"{"):
        return False
    return not all(token["special"] for token in json.loads(content).get("added_tokens", []))


def check_objective(path: str | Path, lowercase: bool, objective: str, special_tokens: Set[str]) -> None:
    """Refuse a tokenizer that lacks special tokens which the training objective needs.

    Args:
        path, lowercase: as in `import_tokenizer`.
        objective: its name, for the message.
        special_tokens: the names of those that it needs.

    Raises:
        UserError: The tokenizer lacks some, or cannot be used at all.
    """
    if {"pad", "end"} <= special_tokens:
        special_ids = describe(import_tokenizer(path, lowercase, pairs=True), "", pairs=True).special_ids
        if "pad" not in special_ids:
            raise UserError(
                f"tokenizer.path={path} has the special tokens of a decoder alone, but objective.name={objective} "
                "needs <pad> too; choose another tokenizer or objective"
            )
        return
    special_ids = describe(import_tokenizer(path, lowercase), "").special_ids
    if ("end" in special_ids) != ("end" in special_tokens):
        has = "a decoder" if "end" in special_ids else "a masked model"
        raise UserError(
            f"tokenizer.path={path} has the special tokens of {has}, but objective.name={objective} needs others; "
            "choose another tokenizer or objective"
        )


def _files_of(path: Path) -> list[Path]:
    if path.is_dir() or path.name in ("vocab.json", "merges.txt"):
        folder = path if path.is_dir() else path.parent
        return [folder / "vocab.json", folder / "merges.txt"]
    return [path]


def _convert(path: Path, lowercase: bool) -> bytes:
    if path.suffix == ".txt" and path.name != "merges.txt":
        return wordpiece_json(_lines(path), lowercase)
    if not lowercase:
        raise UserError("tokenizer.lowercase=false applies to a vocab.txt only; remove it")
    files = _files_of(path)
    if len(files) == 2:
        return byte_bpe_json(json.loads(_text(files[0])), _merges(files[1]))
    with open_regular(path) as file:
        content = file.read()
    if path.suffix not in (".model", ".json") or content.startswith(b"{") != (path.suffix == ".json"):
        raise UserError(f"unknown kind of file; give {_FORMATS}")
    return content


def _text(path: Path) -> str:
    with TextIOWrapper(open_regular(path), "utf-8") as file:
        return file.read()


def _lines(path: Path) -> list[str]:
    """Read one token per line; the line's number is the token's id."""
    return [line.strip() for line in _text(path).removesuffix("\n").split("\n")]


def _merges(path: Path) -> list[list[str]]:
    lines = _text(path).split("\n")
    return [line.split() for line in lines[lines[0].startswith("#version") :] if line]
