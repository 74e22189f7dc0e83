"""Checks the files of a data set against its manifest: hashes them once, then trusts them by size and time.

`verified.json`, beside the manifest, lists the files that were hashed and are good, each with the size and the
modification time that it had then. It is a cache, not a part of the data set: it may be missing, damaged or of
another manifest, and then the files are hashed again.
"""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

from multihop.common.files import canonical_json, open_regular, read_json_object, sha256_file, write_atomically
from multihop.data_prep.dataset.manifest import MANIFEST, MAX_BYTES, Manifest, manifest_sha256, read_data_manifest
from multihop.data_prep.stages.runner import MapItems, ReportProgress, map_in_process, no_report, with_progress
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.data_prep.tokenizers.tokenizer import describe

VERIFIED = "verified.json"

FileStamp = list[int]
"""Size in bytes and modification time in ns, as JSON has them."""

log = logging.getLogger(__name__)


def verify_dataset(folder: str | Path) -> list[str]:
    """Hash every file of the data set in `folder`: one sentence for each that is bad, none if all are good."""
    folder = Path(folder)
    try:
        manifest = read_data_manifest(folder)
    except ValueError as error:
        return [str(error)]
    return verify_files(folder, manifest, full=True)


def verify_files(
    folder: Path, manifest: Manifest, map_items: MapItems = map_in_process, full: bool = False
) -> list[str]:
    """Hash the files of the data set in `folder` that changed since they were last hashed, and record the good ones.

    A file whose size and modification time are those in `verified.json` is trusted without being read. If
    `verified.json` cannot be written, a warning is logged and the next call hashes again.

    Args:
        map_items: hashes the files, in this process or elsewhere under the same paths.
        full: trust nothing, hash every file.

    Returns:
        One sentence for each bad file, in the manifest's order; empty if the data set is whole.
    """
    files = dataset_files(manifest)
    known = _read_verified(folder, manifest)
    # Taken before the files are read: one that changes meanwhile is hashed again the next time.
    stamps = {name: _stamp(folder / name) for name in files}
    to_hash = [name for name in files if full or not _is_known(known, name, stamps[name])]
    if not to_hash:
        return []
    hashed = dict(map_items(_hash, [(str(folder / name), files[name]) for name in to_hash]))
    errors = {name: hashed[str(folder / name)] for name in to_hash}
    for tokenizer in manifest.tokenizers:
        if errors.get(tokenizer.file) is None:
            errors[tokenizer.file] = _tokenizer_error(folder, tokenizer, manifest.pairs)
    good = {name: stamp for name, stamp in stamps.items() if stamp is not None and errors.get(name) is None}
    if good != known:
        record_verified(folder, manifest, good)
    return [sentence for name in files if (sentence := errors.get(name)) is not None]


def read_if_verified(folder: Path, identity: str) -> Manifest | None:
    """Read the manifest in `folder`, if it is of `identity` and all its files were hashed before and did not change
    since.

    Reads the manifest and `verified.json`, and the size and modification time of each file: nothing is hashed or
    written. None also means: call `read_if_intact`, which hashes.

    Args:
        identity: `ResolvedInputs.identity`, of the settings and the input.
    """
    manifest = _manifest_of_inputs(folder, identity)
    return manifest if manifest is not None and is_verified(folder, manifest) else None


def read_if_intact(
    folder: Path,
    identity: str,
    map_items: MapItems = map_in_process,
    report: ReportProgress = no_report,
    full: bool = False,
) -> Manifest | None:
    """Read the manifest in `folder`, if it is of `identity` and all its files have their hashes.

    Files that changed since they were last hashed are hashed by `map_items` as the stage "verify", and recorded. Any
    number of callers may do so at once, also while one prepares.

    Args:
        identity: the identity, as for `read_if_verified`.
        full: hash every file.
    """
    manifest = _manifest_of_inputs(folder, identity)
    if manifest is None:
        return None
    return (
        None if verify_files(folder, manifest, partial(with_progress(map_items, report), "verify"), full) else manifest
    )


def is_verified(folder: Path, manifest: Manifest) -> bool:
    """Return whether every file of the data set was hashed before and is unchanged by size and time; reads none."""
    known = _read_verified(folder, manifest)
    return all(_is_known(known, name, _stamp(folder / name)) for name in dataset_files(manifest))


def record_verified(folder: Path, manifest: Manifest, good: dict[str, FileStamp] | None = None) -> None:
    """Write `verified.json`. If that fails, for instance on a read-only disk, a warning is logged.

    Args:
        good: the files that have their hashes; None: all, as they are now.
    """
    if good is None:
        stamps = {name: _stamp(folder / name) for name in dataset_files(manifest)}
        good = {name: stamp for name, stamp in stamps.items() if stamp is not None}
    content = {"manifest": manifest_sha256(manifest), "files": good}
    try:
        write_atomically(folder / VERIFIED, canonical_json(content))
    except OSError as error:
        log.warning("%s cannot be written (%s); the next start hashes again", folder / VERIFIED, error.strerror)


def dataset_files(manifest: Manifest) -> dict[str, str]:
    """Return the SHA-256 of every file that the manifest names, by name."""
    shards = {shard.file: shard.sha256 for shard in manifest.shards}
    tokenizers = {tokenizer.file: tokenizer.sha256 for tokenizer in manifest.tokenizers}
    return {**shards, **tokenizers, manifest.token_counts.file: manifest.token_counts.sha256}


def _manifest_of_inputs(folder: Path, identity: str) -> Manifest | None:
    try:
        manifest = read_data_manifest(folder)
    except ValueError:
        return None
    return manifest if manifest.inputs == identity else None


def _read_verified(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read `files` of `verified.json`, if it is of this manifest."""
    try:
        verified = read_json_object(folder / VERIFIED, max_bytes=MAX_BYTES)
    except (OSError, ValueError):
        return {}
    files = verified.get("files")
    return files if verified.get("manifest") == manifest_sha256(manifest) and isinstance(files, dict) else {}


def _stamp(path: Path) -> FileStamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def _is_known(known: dict[str, Any], name: str, stamp: FileStamp | None) -> bool:
    return stamp is not None and known.get(name) == stamp


def _hash(file: tuple[str, str]) -> tuple[str, str | None]:
    """Check a file, (path, SHA-256): return the path, and a sentence if it is missing or has other bytes."""
    path, sha256 = file
    try:
        actual = sha256_file(path)
    except OSError as error:
        return path, f"{path} cannot be read ({error.strerror}); run `multihop prep` again to rebuild it"
    if actual == sha256:
        return path, None
    return path, f"{path} is damaged (SHA-256 {actual[:12]}, expected {sha256[:12]}); run `multihop prep` to rebuild it"


def _tokenizer_error(folder: Path, tokenizer: TokenizerInfo, pairs: bool) -> str | None:
    """Return a sentence if the manifest does not describe the tokenizer in the tokenizer's file, which has its hash.

    The fingerprint has the file's hash in it, and so covers special ids, word starts and the vocabulary's size.
    """
    path = folder / tokenizer.file
    with open_regular(path) as file:
        described = describe(file.read(), tokenizer.sha256, pairs)
    if described.model_copy(update={"file": tokenizer.file, "added": tokenizer.added}) == tokenizer:
        return None
    return f"{folder / MANIFEST} does not describe the tokenizer in {path}; run `multihop prep` again"
