"""Whether the files of a data set are what its manifest says: hashed once, then trusted by size and time.

`verified.json`, beside the manifest, lists the files that were hashed and found good, each with the size and the
modification time that it had then. It is a memory, not a part of the data set: it may be missing, damaged or of
another manifest, and then the files are hashed again.
"""

import logging
import os
from pathlib import Path
from typing import Any

from multihop.common.files import canonical_json, open_regular, read_json_object, sha256_file, write_atomically
from multihop.common.mapping import MapItems, map_in_process
from multihop.data_prep.dataset.manifest import MANIFEST, MOST_BYTES, Manifest, manifest_sha256, read_data_manifest
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.data_prep.tokenizers.tokenizer import describe

VERIFIED = "verified.json"

Stamp = list[int]
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
    """Hash the files of the data set in `folder` that changed since they were last hashed, and remember the good ones.

    A file whose size and modification time are those in `verified.json` is trusted without being read. Where
    `verified.json` cannot be written, a warning is logged and the next call hashes again.

    Args:
        map_items: hashes the files, in this process or elsewhere under the same paths.
        full: trust nothing, hash every file.

    Returns:
        One sentence for each bad file, in the manifest's order; empty if the data set is whole.
    """
    files = dataset_files(manifest)
    remembered = _remembered(folder, manifest)
    # Taken before the files are read: one that changes meanwhile is hashed again the next time.
    stamps = {name: _stamp(folder / name) for name in files}
    to_hash = [name for name in files if full or not _is_known(remembered, name, stamps[name])]
    if not to_hash:
        return []
    hashed = dict(map_items(_hash, [(str(folder / name), files[name]) for name in to_hash]))
    complaints = {name: hashed[str(folder / name)] for name in to_hash}
    for tokenizer in manifest.tokenizers:
        if complaints.get(tokenizer.file) is None:
            complaints[tokenizer.file] = _tokenizer_complaint(folder, tokenizer, manifest.pairs)
    good = {name: stamp for name, stamp in stamps.items() if stamp is not None and complaints.get(name) is None}
    if good != remembered:
        remember(folder, manifest, good)
    return [sentence for name in files if (sentence := complaints.get(name)) is not None]


def is_verified(folder: Path, manifest: Manifest) -> bool:
    """Whether every file of the data set was hashed before and is unchanged by size and time; reads none of them."""
    remembered = _remembered(folder, manifest)
    return all(_is_known(remembered, name, _stamp(folder / name)) for name in dataset_files(manifest))


def remember(folder: Path, manifest: Manifest, good: dict[str, Stamp] | None = None) -> None:
    """Write `verified.json`. Where that fails, for instance on a read-only disk, a warning is logged.

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
    """SHA-256 of every file that the manifest names, by name."""
    shards = {shard.file: shard.sha256 for shard in manifest.shards}
    tokenizers = {tokenizer.file: tokenizer.sha256 for tokenizer in manifest.tokenizers}
    return {**shards, **tokenizers, manifest.token_counts.file: manifest.token_counts.sha256}


def _remembered(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """`files` of `verified.json`, if it is of this manifest."""
    try:
        found = read_json_object(folder / VERIFIED, most_bytes=MOST_BYTES)
    except (OSError, ValueError):
        return {}
    files = found.get("files")
    return files if found.get("manifest") == manifest_sha256(manifest) and isinstance(files, dict) else {}


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _is_known(remembered: dict[str, Any], name: str, stamp: Stamp | None) -> bool:
    return stamp is not None and remembered.get(name) == stamp


def _hash(file: tuple[str, str]) -> tuple[str, str | None]:
    """The path, and a sentence if the file of (path, SHA-256) is missing or has other bytes."""
    path, sha256 = file
    try:
        found = sha256_file(path)
    except OSError as error:
        return path, f"{path} cannot be read ({error.strerror}); run `multihop prep` again to rebuild it"
    if found == sha256:
        return path, None
    return path, f"{path} is damaged (SHA-256 {found[:12]}, expected {sha256[:12]}); run `multihop prep` to rebuild it"


def _tokenizer_complaint(folder: Path, tokenizer: TokenizerInfo, pairs: bool) -> str | None:
    """A sentence if the manifest describes a tokenizer otherwise than the tokenizer's file, which is good, does.

    The fingerprint has the file's hash in it, and so covers special ids, word starts and the vocabulary's size.
    """
    path = folder / tokenizer.file
    with open_regular(path) as file:
        found = describe(file.read(), tokenizer.sha256, pairs)
    if found.model_copy(update={"file": tokenizer.file}) == tokenizer:
        return None
    return f"{folder / MANIFEST} does not describe the tokenizer in {path}; run `multihop prep` again"
