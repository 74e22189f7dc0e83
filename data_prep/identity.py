"""What names a data set: the settings and the content that it was made from."""

import hashlib
from typing import Any

from data_prep.config import DataConfig, TokenizerConfig
from data_prep.duplicates.decontaminate import evaluation_sets
from data_prep.files import sha256_file, sha256_json
from data_prep.reading.sources import InputFile
from data_prep.rules import clean, filters
from data_prep.tokenizers.existing import adopt


def settings_of(data: DataConfig, tok: TokenizerConfig) -> dict[str, Any]:
    """What a prepared data set depends on. Weights are not part of it: they choose among samples when training."""
    without_weights = data.model_dump(mode="json", exclude={"sources": {"__all__": {"weight"}}})
    return {"data": without_weights, "tokenizer": tok.model_dump(mode="json")}


def sources_key(data: DataConfig) -> str:
    """16 hex digits that name the sources: preparations of the same ones share what they have read."""
    return sha256_json(settings_of(data, TokenizerConfig())["data"]["sources"])[:16]


def inputs_key(data: DataConfig, tok: TokenizerConfig, files: list[InputFile], hashes: dict[str, str]) -> str:
    """64 hex digits; `hashes` are the identities of `files` by path. Raises ValueError as `filters.make_filter`."""
    told_files = [[file.source, file.name, hashes[file.path]] for file in files]
    return sha256_json(
        [settings_of(data, tok), rules_depend_on(data), _evaluation_texts(data), existing(tok), told_files]
    )


def rules_depend_on(data: DataConfig) -> dict[str, str]:
    """What cleaning and filters depend on besides the settings."""
    return {**clean.depends_on(data.clean), **filters.depends_on(data.filters)}


def _evaluation_texts(data: DataConfig) -> dict[str, str]:
    """The hashes of the files that documents are compared with."""
    if data.decontaminate is None:
        return {}
    return {name: sha256_file(path) for name, path in evaluation_sets(data.decontaminate).items()}


def existing(tok: TokenizerConfig) -> str | None:
    """The hash of a tokenizer that is not trained here. Raises ValueError as `adopt`."""
    return None if tok.path is None else hashlib.sha256(adopt(tok.path, tok.lowercase)).hexdigest()
