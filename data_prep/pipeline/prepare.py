"""`prepare` runs the stages from a recipe's sources to a data set with its manifest.

    hash             identify the input files; end if the data set exists and is whole     a group of files
    read             read, clean, filter and hash documents; set bad ones aside            a split
    sort … cut       drop copies, near duplicates, evaluation texts: select_documents.py
    sample … tokenizer, unknown tokens     make the tokenizers: train_tokenizer.py
    encode           sentences and tokens                                                  a split
    shards           batches of encoded splits, in order                                   a shard
    count            count each token                                                      a shard
    commit           move the files into place, then write the manifest                    once

`work` holds the stages' outputs. It may be deleted once the data set is prepared: that costs time, not data.
"""

import hashlib
import os
import shutil
import unicodedata
from collections.abc import Iterable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from multihop.common.files import make_folder, remove_temporaries, sync, write_atomically
from multihop.data_prep.config import DataConfig, TokenizerConfig
from multihop.data_prep.dataset.manifest import (
    MANIFEST,
    TOKEN_COUNTS,
    Manifest,
    SetAside,
    TokenCounts,
    data_fingerprint,
    encode_manifest,
    read_data_manifest,
    write_manifest,
)
from multihop.data_prep.dataset.shards import token_dtype
from multihop.data_prep.dataset.verify import read_if_intact, record_verified
from multihop.data_prep.pipeline.encode import encode_splits
from multihop.data_prep.pipeline.identity import (
    ResolvedInputs,
    dataset_settings,
    make_work_folder,
    resolve_inputs,
    rule_dependencies,
)
from multihop.data_prep.pipeline.outcomes import count_outcomes, mark_broken_files
from multihop.data_prep.pipeline.select_documents import Counts, select_documents
from multihop.data_prep.pipeline.shards import AssembledShards, assemble_shards, count_train_tokens
from multihop.data_prep.pipeline.train_tokenizer import PreparedTokenizers, find_all_candidates, make_tokenizers
from multihop.data_prep.reading.sources import FileRange, InputFile, group_into_splits, list_files, range_key
from multihop.data_prep.stages.documents import ReadSplit, read_split
from multihop.data_prep.stages.object_store import ObjectStoreStages
from multihop.data_prep.stages.outputs import Output, file_on_shared_disk, stage_key
from multihop.data_prep.stages.runner import (
    MapItems,
    ReportProgress,
    StageRunner,
    map_in_process,
    no_report,
    with_progress,
)

_STAGING = ".beside"
"""Folder in the data set's directory with the shards that wait for the commit."""


def prepare(
    data: DataConfig,
    tok: TokenizerConfig,
    out_dir: Path,
    map_items: MapItems = map_in_process,
    report: ReportProgress = no_report,
    work: Path | None = None,
    resolved: ResolvedInputs | None = None,
    object_store: ObjectStoreStages | None = None,
) -> Manifest:
    """Prepare the data set in `out_dir`, or what is not done of it; only one caller at a time may.

    With the same input and settings the files are the same bytes, whatever `map_items` does and however often it
    was interrupted. `out_dir`, `work` and the input must have the same paths wherever `map_items` runs.
    Others may read the data set meanwhile: damaged files are rebuilt under their manifest, and a different data set in
    `out_dir` is kept until this one is made, and is gone only during the renames.

    Args:
        work: the directory of the stages' outputs, for all data sets of the same sources; None: `out_dir`/work.
        resolved: the input, if the caller has resolved it in `work`; None: it is listed and resolved here.
        object_store: keeps the stages' outputs if they run on nodes without a disk in common; None: they are in `work`.

    Raises:
        UserError: a source is missing, too many files or documents are bad, the corpus is empty, it has no held-out
            document although `heldout_fraction` is positive, or the vocabulary is too large for the text.
    """
    out_dir = out_dir.absolute()
    work = out_dir / "work" if work is None else work.absolute()
    make_work_folder(work)
    if resolved is None:
        resolved = resolve_inputs(data, tok, list_files(data.sources), work, map_items, report)
    staging = _make_folders(out_dir)
    existing = read_if_intact(out_dir, resolved.identity, map_items, report)
    if existing is not None:
        _remove_folder(staging)
        return existing

    if object_store is None:
        runner = StageRunner(with_progress(map_items, report), file_on_shared_disk)
    else:
        runner = StageRunner(with_progress(object_store.map_items, report), object_store.local_file)
    read = _read_documents(work, resolved.files, data, runner)
    selections, selecting, selection_counts = select_documents(work, read.outputs, data, runner)
    counts = {**read.counts, **selection_counts}
    candidates = find_all_candidates(selections, counts, data, tok, runner)
    tokenizers = make_tokenizers(work, selections, candidates, data, tok, runner)
    encoded = encode_splits(work, selections, tokenizers, data, runner)
    shards = assemble_shards(work, out_dir, staging, encoded, bool(data.heldout_fraction), runner)
    token_counts = _npy(count_train_tokens(shards, tokenizers.target.vocab_size, data.holds_pairs, runner))

    without_tokens = sum(output.metadata["no tokens"] for output in encoded)
    counts["encode"] = {"kept": candidates.kept - without_tokens, "no tokens": without_tokens}
    manifest = _build_manifest(data, tok, resolved, tokenizers, shards, token_counts, counts, read.set_aside)
    files = {info.file: content for info, content in zip(tokenizers.infos, tokenizers.contents, strict=True)}
    _commit(out_dir, manifest, shards, {**files, TOKEN_COUNTS: token_counts}, runner)
    outputs = (*read.outputs, *selecting, *tokenizers.samples, *tokenizers.outputs, *encoded, *shards.outputs)
    _sweep(out_dir, work, manifest, {output.key for output in outputs}, object_store)
    return manifest


@dataclass(frozen=True)
class _ReadDocuments:
    outputs: list[Output]
    counts: Counts
    set_aside: list[SetAside]


def _read_documents(work: Path, files: Sequence[InputFile], data: DataConfig, runner: StageRunner) -> _ReadDocuments:
    """Run the stage "read", a second time if a file in several splits turned out to be broken."""

    def read(splits: list[list[FileRange]]) -> list[Output]:
        return runner.outputs("read", read_split, [read_item(work, ranges, data) for ranges in splits])

    splits = group_into_splits(files)
    outputs = read(splits)
    if (marked := mark_broken_files(splits, outputs)) != splits:
        splits, outputs = marked, read(marked)
    counts, set_aside = count_outcomes(splits, outputs, data.max_bad_fraction)
    return _ReadDocuments(outputs, counts, set_aside)


def read_item(work: Path, ranges: list[FileRange], data: DataConfig) -> ReadSplit:
    """Return the item of stage "read" for the file ranges of a split, whose files are identified."""
    settings = [data.clean.model_dump(), data.filters.model_dump()]
    key = stage_key(
        "read", [], unicodedata.unidata_version, [range_key(each) for each in ranges], settings, rule_dependencies(data)
    )
    filters = data.filters
    if filters.c4 is not None and filters.c4.bad_words is not None:  # the task may run in another directory
        c4 = filters.c4.model_copy(update={"bad_words": os.path.abspath(filters.c4.bad_words)})
        filters = filters.model_copy(update={"c4": c4})
    return ReadSplit(key, str(work / "read"), ranges, data.clean, filters)


def _build_manifest(
    data: DataConfig,
    tok: TokenizerConfig,
    resolved: ResolvedInputs,
    tokenizers: PreparedTokenizers,
    shards: AssembledShards,
    token_counts: bytes,
    counts: Counts,
    set_aside: list[SetAside],
) -> Manifest:
    source, target = tokenizers.source, tokenizers.target
    dtype = token_dtype(max(source.vocab_size, target.vocab_size))
    separate = target if len(tokenizers.infos) > 1 else None
    target_sha256 = None if separate is None else separate.sha256
    return Manifest(
        fingerprint=data_fingerprint(source.sha256, dtype, shards.entries, data.holds_pairs, target_sha256),
        inputs=resolved.identity,
        tokenizer=source,
        token_dtype=dtype,
        shards=shards.entries,
        token_counts=TokenCounts(sha256=hashlib.sha256(token_counts).hexdigest()),
        totals=shards.totals,
        settings=dataset_settings(data, tok),
        counts=counts,
        set_aside=set_aside,
        sources=[each.path for each in data.sources],
        pairs=data.holds_pairs,
        target_tokenizer=separate,
    )


def _npy(array: np.ndarray) -> bytes:
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _make_folders(out_dir: Path) -> Path:
    """Make the data set's directory without temporaries of killed processes; returns the staging folder in it."""
    make_folder(out_dir)
    staging = out_dir / _STAGING
    for folder in (out_dir, staging):
        remove_temporaries(folder)
    return staging


def _commit(
    out_dir: Path, manifest: Manifest, shards: AssembledShards, contents: dict[str, bytes], runner: StageRunner
) -> None:
    """Make `manifest` and its files the data set in `out_dir`; replaces files of the same names.

    Args:
        contents: the bytes of all files but the shards, by name.
    """
    with ExitStack() as stack:
        paths = {
            item.target: stack.enter_context(runner.local_file(output))
            for item, output in zip(shards.items, shards.outputs, strict=True)
        }
        encode_manifest(manifest)  # before anything is replaced
        # No reader may see a manifest with files of another. A repair only replaces damaged files by equal good ones.
        if _fingerprint_of(out_dir) != manifest.fingerprint:
            (out_dir / MANIFEST).unlink(missing_ok=True)
            sync(out_dir)
        for target, path in paths.items():
            if str(path) != target:
                os.replace(path, target)
        for name, content in contents.items():
            write_atomically(out_dir / name, content)
        record_verified(out_dir, manifest)  # the stages hashed all of it
        write_manifest(out_dir, manifest)


def _fingerprint_of(out_dir: Path) -> str | None:
    try:
        return read_data_manifest(out_dir).fingerprint
    except ValueError:
        return None


def _sweep(
    out_dir: Path, work: Path, manifest: Manifest, keys: Set[str], object_store: ObjectStoreStages | None
) -> None:
    """Remove the files of earlier inputs, other settings and killed processes; keeps the outputs with these keys."""
    _remove_folder(out_dir / _STAGING)
    remove_temporaries(out_dir)
    current = {shard.file for shard in manifest.shards}
    _unlink(
        path
        for pattern in ("train-*.arrow", "heldout-*.arrow")
        for path in out_dir.glob(pattern)
        if path.name not in current
    )
    _unlink(path for path in work.glob("*/*") if path.stem not in keys)
    if object_store is not None:
        object_store.sweep(keys)


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


def _remove_folder(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
