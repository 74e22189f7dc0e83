"""The checkpoint format: named slices in safetensors, and a manifest that is the commit.

    checkpoints/step-00001000/  rank-0000.safetensors  rank-0000.done  …  manifest.json

A tensor is called KIND/NAME@START: the fp32 elements from START on of the flattened parameter NAME, or of one of its
optimizer moments. Any number of ranks reads what it needs of them, whoever wrote them. A folder without a valid
manifest does not exist for anybody. Where checkpoints stand is a string: a folder's path or s3://BUCKET/PREFIX.
"""

import errno
import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Lock
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from data_prep.files import canonical_json, sha256_json
from pretrain.storage import Folder, Source, open_folder
from pretrain.tensor_file import ITEM_BYTES, Extent, read_header

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})")
_THREADS = 8


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointFile(_Part):
    """One rank's file."""

    file: str = Field(pattern=r"^\w[\w.-]*$")
    bytes: int
    sha256: str


class CheckpointManifest(_Part):
    """What was saved, and the proof that it is whole."""

    format_version: Literal[2] = 2
    step: int
    """Optimizer steps done."""
    tokens: int
    """Real pieces seen so far, over all ranks."""
    updates: int
    """How many updates the optimizer's moments went through."""
    skipped: int = 0
    """Steps so far that were passed over because a loss or a gradient was not finite."""
    skipped_in_a_row: int = 0
    """So many of them are the last ones."""
    counters: dict[str, float] = {}
    """Small numbers of the engine's, such as the loss scale."""
    world_size: int
    zero_stage: int
    parameters: dict[str, list[int]]
    """Name and shape of each parameter, by name."""
    files: list[CheckpointFile] = []
    recipe: dict[str, Any] | None = None
    """The resolved training recipe; None where the first format version kept only its hash."""
    data_fingerprint: str
    tokenizer_sha256: str | None = None
    """Of the tokenizer whose pieces the weights know; None in the first format version."""
    parent: str | None = None
    """The content hash of the checkpoint whose weights the run began with."""
    mlflow_run_id: str | None = None
    sha256: str = ""
    """Of this manifest's canonical JSON without this field."""

    def own_hash(self) -> str:
        """What `sha256` must be."""
        return sha256_json(self.model_dump(exclude={"sha256"}))

    def content_hash(self) -> str:
        """Tells these weights and moments from any others, whatever else stands in the manifest."""
        return sha256_json([entry.sha256 for entry in self.files])


def folder_of_step(checkpoints: str, step: int) -> str:
    """Where the checkpoint of a step stands."""
    return f"{checkpoints}/step-{step:08d}"


def commit(location: str, manifest: CheckpointManifest) -> None:
    """Make the checkpoint at `location` exist; its files are written and synced."""
    whole = manifest.model_copy(update={"sha256": manifest.own_hash()})
    open_folder(location).write_atomically(MANIFEST, canonical_json(whole.model_dump()))


def read_manifest(location: str) -> CheckpointManifest:
    """The manifest of a committed checkpoint, as the newest format version has it.

    Raises:
        ValueError: there is none, it is of an unknown format version, or it is damaged.
    """
    path = f"{location}/{MANIFEST}"
    try:
        data = open_folder(location).read_bytes(MANIFEST)
    except FileNotFoundError:
        raise ValueError(f"{location} was never committed: it has no {MANIFEST}") from None
    try:
        content = json.loads(data)
        version = content["format_version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{path} is damaged: it is not the JSON of a manifest") from None
    if version not in (1, 2):
        raise ValueError(
            f"{path} is of format version {version}, known are 1 and 2; read it with the multihop that wrote it"
        )
    # The spelling too: 1e-06 and 1E-06 are one number, and a byte's difference.
    written_hash = content.pop("sha256", None)
    if written_hash != sha256_json(content) or data != canonical_json({**content, "sha256": written_hash}):
        raise ValueError(f"{path} is damaged: its own hash does not match")
    try:
        manifest = CheckpointManifest.model_validate(_migrated(content) if version == 1 else content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} is no manifest of format version {version} ({where}: {first['msg']})") from None
    return manifest.model_copy(update={"sha256": manifest.own_hash()})


def _migrated(first_version: dict[str, Any]) -> dict[str, Any]:
    """Version 1 kept the recipe's hash in place of the recipe, and knew no steps that were passed over."""
    kept = {key: value for key, value in first_version.items() if key != "recipe_fingerprint"}
    return {**kept, "format_version": 2}


def verify(location: str) -> CheckpointManifest:
    """The manifest, after every file was read and compared with its hash.

    Raises:
        ValueError: with the name of the first file that is missing or damaged.
    """
    manifest = read_manifest(location)
    for damage in damages(location, manifest):
        raise ValueError(damage)
    return manifest


def damages(location: str, manifest: CheckpointManifest) -> list[str]:
    """A sentence for each file of a checkpoint that is missing or not as it was written; all of them are read."""
    folder = open_folder(location)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:  # hashing lets other threads run
        found = threads.map(lambda entry: _damage(folder, entry), manifest.files)
        return [damage for damage in found if damage is not None]


def _damage(folder: Folder, entry: CheckpointFile) -> str | None:
    path = f"{folder.location}/{entry.file}"
    try:
        with folder.open(entry.file) as file:
            if file.size != entry.bytes:
                return f"{path} is damaged: it has {file.size} bytes, the manifest says {entry.bytes}"
            digest = hashlib.sha256()
            for chunk in file.chunks():
                digest.update(chunk)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        if error.errno != errno.EIO:  # nobody may take a network that is down for a damaged file
            raise
        return f"{path} is damaged: the disk cannot read it ({error})"
    return None if digest.hexdigest() == entry.sha256 else f"{path} is damaged: its SHA-256 is not the manifest's"


def list_steps(checkpoints: str) -> list[int]:
    """Steps that have a folder, committed or not, oldest first."""
    names = open_folder(checkpoints).names()
    return sorted(int(match[1]) for name in names if (match := _FOLDER.fullmatch(name)))


def newest_step(checkpoints: str) -> int | None:
    """The newest step whose manifest is valid; its files are not read."""
    for step in reversed(list_steps(checkpoints)):
        try:
            read_manifest(folder_of_step(checkpoints, step))
        except ValueError:
            continue
        return step
    return None


def newest_good(checkpoints: str) -> tuple[CheckpointManifest | None, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over."""
    passed_over: list[str] = []
    for step in reversed(list_steps(checkpoints)):
        try:
            return verify(folder_of_step(checkpoints, step)), passed_over
        except ValueError as error:
            passed_over.append(str(error))
    return None, passed_over


class CheckpointReader:
    """Reads any slice of a committed checkpoint, from any thread. A context manager: its files are open meanwhile."""

    def __init__(self, location: str) -> None:
        self.manifest = read_manifest(location)
        self.bytes_read = 0
        """From the ranks' files so far: their headers and the slices asked for."""
        self._location = location
        self._stack = ExitStack()
        self._lock = Lock()
        self._parts: dict[tuple[str, str], list[tuple[int, Extent, Source]]] = {}

    def __enter__(self) -> "CheckpointReader":
        folder = open_folder(self._location)
        with ExitStack() as stack:
            for entry in self.manifest.files:
                path = f"{self._location}/{entry.file}"
                try:
                    file = stack.enter_context(folder.open(entry.file))
                    extents, header_bytes = read_header(file)
                    for key, extent in extents.items():
                        kind, name, start = parse_key(key)
                        self._parts.setdefault((kind, name), []).append((start, extent, file))
                except FileNotFoundError:
                    raise ValueError(f"{path} is missing") from None
                except ValueError as error:
                    raise ValueError(f"{path} cannot be read: {error}") from None
                self.bytes_read += header_bytes
            self._stack = stack.pop_all()
        for parts in self._parts.values():
            parts.sort(key=lambda part: part[0])
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """float32 (numel,) from `start` on; only those bytes are read.

        Raises:
            ValueError: the checkpoint does not hold all of it.
        """
        out = np.empty(numel, np.dtype("<f4"))
        filled = 0
        for first, extent, file in self._parts.get((kind, name), []):
            skip = start + filled - first  # elements of this part before the first one that is still wanted
            count = min(numel - filled, extent.numel - skip)
            if skip < 0:
                break
            if count > 0:
                out[filled : filled + count] = self._floats(file, extent.offset + skip * ITEM_BYTES, count)
                filled += count
        if filled != numel:
            raise ValueError(f"{self._location} holds {filled} of {numel} elements of {kind}/{name} from {start} on")
        return torch.from_numpy(out)

    def _floats(self, file: Source, offset: int, count: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
        data = file.read_at(offset, count * ITEM_BYTES)
        if len(data) != count * ITEM_BYTES:
            raise ValueError(f"a file of {self._location} became shorter while it was read")
        with self._lock:
            self.bytes_read += len(data)
        return np.frombuffer(data, np.dtype("<f4"))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, by name."""

        def whole(parameter: tuple[str, list[int]]) -> tuple[str, Tensor]:
            name, shape = parameter
            return name, self.read("weight", name, 0, torch.Size(shape).numel()).view(shape)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="read") as threads:  # a bucket answers slowly, but many
            yield from threads.map(whole, self.manifest.parameters.items())


def parse_key(key: str) -> tuple[str, str, int]:
    """KIND/NAME@START in its three parts.

    Raises:
        ValueError: it is not so made.
    """
    kind, slash, rest = key.partition("/")
    name, at, start = rest.rpartition("@")
    if not (kind and slash and name and at and start.isdecimal()):
        raise ValueError(f"tensor {key!r} is not called KIND/NAME@START")
    return kind, name, int(start)


def load_weights(checkpoint: str) -> dict[str, Tensor]:
    """The fp32 weights of a committed checkpoint, whole, by parameter name.

    Raises:
        ValueError: it is not committed or cannot be read.
    """
    with CheckpointReader(checkpoint) as reader:
        return dict(reader.weights())
