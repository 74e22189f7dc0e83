"""The identity of a data set: the settings and the input that it is made from, resolved once per start."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multihop.common.config import DATA, select_by_effect
from multihop.common.files import make_folder, remove_temporaries, sha256_file, sha256_json
from multihop.data_prep.config import DataConfig, TokenizerConfig, check_tokenizer
from multihop.data_prep.duplicates.decontaminate import RULES, evaluation_sets
from multihop.data_prep.reading import identities
from multihop.data_prep.reading.sources import InputFile, reader_revisions, with_targets
from multihop.data_prep.rules import clean, filters
from multihop.data_prep.stages.runner import MapItems, ReportProgress, map_in_process, no_report, with_progress
from multihop.data_prep.tokenizers.add_words import RULES as RULES_OF_WORDS
from multihop.data_prep.tokenizers.add_words import check_extensible
from multihop.data_prep.tokenizers.added_tokens import add_tokens
from multihop.data_prep.tokenizers.existing import has_matched_tokens, import_tokenizer

_HASHES = "inputs.json"
"""File in the stages' directory with the identities of the input files, their sizes and modification times."""


@dataclass(frozen=True)
class ResolvedInputs:
    """Holds a data set's input, which is listed and identified once per start and then handed on."""

    files: tuple[InputFile, ...]
    """The files, each with the identity of its content."""
    identity: str
    """64 hex digits: SHA-256 over the settings and the names and contents of the input; `Manifest.inputs`."""


def resolve_inputs(
    data: DataConfig,
    tok: TokenizerConfig,
    files: Sequence[InputFile],
    work: Path,
    map_items: MapItems = map_in_process,
    report: ReportProgress = no_report,
) -> ResolvedInputs:
    """Identify the content of the input files, which `list_files` listed.

    Files whose size or modification time changed since the last time are hashed by `map_items` as the stage "hash";
    `work` remembers the result. Only one caller at a time may.

    Raises:
        UserError: as `make_filter`, `evaluation_sets`, `import_tokenizer` and `check_tokenizer`; ReadFailed when a
    server does not answer.
    """
    check_tokenizer(data, tok)
    make_work_folder(work)
    hashes = identities.load_identities(work / _HASHES, files)
    unknown = identities.group_files([file for file in with_targets(files) if file.path not in hashes])
    for group_hashes in with_progress(map_items, report)("hash", identities.hash_files, unknown):
        hashes |= group_hashes
    identities.save_identities(work / _HASHES, files, hashes)
    return _resolve(data, tok, files, hashes)


def resolve_known_inputs(
    data: DataConfig, tok: TokenizerConfig, files: Sequence[InputFile], work: Path
) -> ResolvedInputs | None:
    """Resolve the inputs as `resolve_inputs`, but only if `work` remembers all files as they are now; else return None.

    No input file is read and nothing is written.

    Raises:
        UserError: as `resolve_inputs`.
    """
    check_tokenizer(data, tok)
    hashes = known_identities(files, work)
    known = all(file.path in hashes for file in with_targets(files))
    return _resolve(data, tok, files, hashes) if known else None


def known_identities(files: Sequence[InputFile], work: Path) -> dict[str, str]:
    """Load the identities, by path, of those files that `work` remembers as they are now."""
    return identities.load_identities(work / _HASHES, files)


def make_work_folder(work: Path) -> None:
    """Make the folder of the stages' outputs, and remove what killed processes left, which may be what fills a disk."""
    make_folder(work)
    for folder in (work, *work.glob("*/")):
        remove_temporaries(folder)


def dataset_settings(data: DataConfig, tok: TokenizerConfig) -> dict[str, Any]:
    """Return the settings that a prepared data set depends on, so without weights, which training uses to choose
    samples."""
    return {"data": select_by_effect(data, DATA), "tokenizer": select_by_effect(tok, DATA)}


def sources_key(data: DataConfig) -> str:
    """Return 16 hex digits for the sources; preparations of the same sources share stage outputs."""
    return sha256_json(dataset_settings(data, TokenizerConfig())["data"]["sources"])[:16]


def rule_dependencies(data: DataConfig) -> dict[str, str]:
    """Return the versions and hashes of files on which cleaning and filters depend besides the settings."""
    return {**clean.dependencies(data.clean), **filters.dependencies(data.filters)}


def _resolve(
    data: DataConfig, tok: TokenizerConfig, files: Sequence[InputFile], hashes: dict[str, str]
) -> ResolvedInputs:
    contents = [[file.source, file.name, hashes[file.path], *reader_revisions(file)] for file in with_targets(files)]
    depends_on = [
        dataset_settings(data, tok),
        rule_dependencies(data),
        _evaluation_texts(data),
        existing_tokenizer_sha256(data, tok),
        contents,
    ]
    if len({file.path for file in files}) < len(files):
        # Earlier versions left a file out of all sources if one of them could not read it.
        depends_on.append("each source is read alone")
    if tok.path is not None and has_matched_tokens(import_tokenizer(tok.path, tok.lowercase, data.holds_pairs)):
        depends_on.append("added tokens are matched")  # earlier versions ignored those that are not special
    if tok.path is not None and tok.added_tokens:
        add_tokens(import_tokenizer(tok.path, tok.lowercase, data.holds_pairs), tok.added_tokens, tok.path)
    if tok.path is not None and tok.add_words:
        check_extensible(import_tokenizer(tok.path, tok.lowercase))
        depends_on.append(f"added words, rules {RULES_OF_WORDS}")
    identity = sha256_json(depends_on)
    return ResolvedInputs(tuple(identities.with_identities(files, hashes)), identity)


def _evaluation_texts(data: DataConfig) -> dict[str, Any]:
    """Return the SHA-256 of the evaluation files, by name, and the version of the decontamination rules."""
    if data.decontaminate is None:
        return {}
    sets = evaluation_sets(data.decontaminate)
    return {"rules": RULES, "texts": {name: sha256_file(path) for name, path in sets.items()}}


def existing_tokenizer_sha256(data: DataConfig, tok: TokenizerConfig) -> str | None:
    """Return the SHA-256 of the existing tokenizer; None if one is trained.

    Raises:
        UserError: as `import_tokenizer`.
    """
    if tok.path is None:
        return None
    return hashlib.sha256(import_tokenizer(tok.path, tok.lowercase, data.holds_pairs)).hexdigest()
